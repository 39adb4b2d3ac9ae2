"""Invites: what a token is good for, and how it ends."""

import asyncio
import math
from contextlib import closing
from pathlib import Path

import pytest
from control_nodes import Code, coordinator, refused
from journal_contents import sample

from atoll.comm.config.run import RunConfig, to_json
from atoll.comm.config.security import SecurityConfig
from atoll.comm.errors import ConfigError, Refused
from atoll.comm.replace import replace
from atoll.coordinator.server import invite_url
from atoll.coordinator.service.invites import InviteRecord, checked_roles
from atoll.coordinator.service.journal import Journal
from atoll.coordinator.state_machine import events as ev
from atoll.coordinator.state_machine.conduct import Consequence
from atoll.coordinator.state_machine.members import REDUCER

OPEN = InviteRecord(1, "ada", (), 2, 2, 100.0)


@pytest.mark.parametrize(
    "invite, sentence",
    [
        (replace(OPEN, left=0), "used up"),
        (replace(OPEN, expires=10.0), "expired"),
        (replace(OPEN, revoked="by the operator"), "was revoked (by the operator)"),
    ],
)
def test_an_invite_that_has_ended_is_refused_and_says_why(invite: InviteRecord, sentence: str) -> None:
    OPEN.check(50.0)
    with pytest.raises(Refused) as refusal:
        invite.check(50.0)
    assert sentence in str(refusal.value)
    assert OPEN.state(50.0) == "open" and invite.state(50.0) != "open"


def test_an_invite_is_for_its_roles() -> None:
    for role in ("", REDUCER):
        OPEN.check_role(role)
    replace(OPEN, roles=("trainer",)).check_role("")
    replace(OPEN, roles=("reducer",)).check_role(REDUCER)
    with pytest.raises(Refused, match="for a trainer, not a reducer"):
        replace(OPEN, roles=("trainer",)).check_role(REDUCER)
    with pytest.raises(Refused, match="for a reducer, not a trainer: give --role reducer, or ask"):
        replace(OPEN, roles=("reducer",)).check_role("")
    assert checked_roles(["reducer", "trainer", "reducer"]) == ("trainer", "reducer")
    with pytest.raises(ConfigError, match="--role is 'boss'"):
        checked_roles(["boss"])


def test_invites_are_listed_and_revoked(tmp_path: Path) -> None:
    with closing(Journal(tmp_path)) as journal:
        tokens = [journal.issue_token(name, 3, 100.0, ("trainer",)) for name in ("ada", "bo", "ada")]
        journal.redeem_token(tokens[0], 50.0)
        assert [(i.number, i.name, i.nodes, i.left) for i in journal.invites()] == [
            (1, "ada", 3, 2),
            (2, "bo", 3, 3),
            (3, "ada", 3, 3),
        ]
        journal.revoke_invites([1, 3], "by the operator")
        journal.revoke_invites([1], "a second time")
        assert [i.revoked for i in journal.invites()] == ["by the operator", "", "by the operator"]
        assert journal.check_token(tokens[1], 50.0) == journal.invite(2)
        with pytest.raises(Refused, match="revoked"):
            journal.redeem_token(tokens[2], 50.0)


def test_a_ban_revokes_what_is_left_of_the_invite_with_it(tmp_path: Path) -> None:
    with closing(Journal(tmp_path)) as journal:
        for name in ("ada", "bo"):
            journal.issue_token(name, 3, 100.0)
        decision = replace(sample(ev.Decision), number=1, invite=1, name="eve", round=7)
        journal.append([], [], [], [(1.0, replace(decision, consequence=Consequence.NO_CONTRIBUTOR))])
        assert not any(i.revoked for i in journal.invites())
        journal.append([], [], [], [(2.0, replace(decision, number=2, consequence=Consequence.BANNED))])
        assert [i.revoked for i in journal.invites()] == ["eve came with it and was banned in round 7", ""]


def test_a_node_joins_in_the_role_of_its_invite_and_comes_back_in_no_other(tmp_path: Path) -> None:
    async def story() -> None:
        async with coordinator(tmp_path) as c:
            c.token = c.journal.issue_token("reducers", 5, math.inf, ("reducer",))
            assert "for a reducer, not a trainer" in await refused(c.node().join(), Code.PERMISSION_DENIED)
            dan = c.node()
            reply = await dan.join(role=REDUCER)
            member = c.event_loop.state.members.here
            (node,) = member
            assert reply.node_id == node and member[node].invite == c.journal.invites()[-1].number
            session = reply.session.partition(".")[0]
            assert "not a trainer" in await refused(dan.join(session), Code.PERMISSION_DENIED)
            await dan.join(session, role=REDUCER)
            assert c.journal.invites()[-1].left == 4, "it is one node, however often it joins"

    asyncio.run(story())


@pytest.mark.parametrize("replay", [0.0, 0.1])
def test_an_invite_for_verifiers_is_for_a_run_that_replays(tmp_path: Path, replay: float) -> None:
    config = RunConfig(security=SecurityConfig(replay=replay))
    with closing(Journal(tmp_path)) as journal:
        for key, value in (("address", "127.0.0.1:1"), ("run", "run"), ("config", to_json(config).decode())):
            journal.set_meta(key, value)
    if replay:
        assert invite_url(tmp_path, "me", 1, 1.0, ["verifier"]).token
    else:
        with pytest.raises(ConfigError, match=r"this run replays nothing \(security.replay is 0\)"):
            invite_url(tmp_path, "me", 1, 1.0, ["verifier"])
    assert invite_url(tmp_path, "me", 1, 1.0, ["trainer"]).token
