"""Rulings of the operator, who writes them beside a running coordinator, and bans at the door."""

import asyncio
import math
from contextlib import closing
from pathlib import Path

import pytest
from control_nodes import SOON, Code, coordinator, digest, refused

from atoll.comm.config.run import MembersConfig, RunConfig, to_json
from atoll.comm.errors import ConfigError
from atoll.comm.exit_codes import ExitCode
from atoll.comm.ids import NodeId
from atoll.comm.invite import Invite
from atoll.comm.proto import atoll_pb2 as pb
from atoll.coordinator.server import ban_node, pardon_node
from atoll.coordinator.service.event_loop import EventLoop
from atoll.coordinator.service.journal import Journal
from atoll.coordinator.state_machine import conduct
from atoll.coordinator.state_machine import events as ev
from atoll.coordinator.state_machine import step as machine
from atoll.coordinator.state_machine.conduct import Consequence, Evidence, Offence
from atoll.coordinator.state_machine.state import Phase, State
from atoll.node.checks.reach import invite_check
from atoll.node.control.checkup import CheckupClient

PROOF = Evidence(1, Offence.FORGED_SEAL, "it sealed what is not the mean")
LIES = tuple(Evidence(round_, Offence.FALSE_CLAIM, "it claims what it has not trained") for round_ in (1, 2, 3))


async def convict(loop: EventLoop, node: NodeId, *evidence: Evidence) -> None:
    """What an audit does: here with the next event of the node's."""
    take = machine._take

    def taken(state: State, event: ev.Event, now: float, out: list[ev.Effect]) -> State:
        state = take(state, event, now, out)
        for each in evidence:
            state = conduct.charge(state, node, each, out)
        return state

    machine._take = taken
    try:
        await loop.submit(ev.Suspected(node, 1, "to be judged"))
    finally:
        machine._take = take


def test_a_banned_node_is_refused_until_the_operator_pardons_it(tmp_path: Path) -> None:
    async def story() -> None:
        async with coordinator(tmp_path) as c:
            eve, bo = c.node(), c.node()
            reply = await eve.join()
            await bo.join(name="bo")
            await convict(c.event_loop, NodeId(reply.node_id), PROOF)
            secret = reply.session.partition(".")[0]
            assert "was revoked (ada came with it" in await refused(c.node().join(), Code.PERMISSION_DENIED)
            eve.token = c.journal.issue_token("another", 1, math.inf)
            for session in (secret, ""):  # with its key alone, too
                sentence = await refused(eve.join(session), Code.PERMISSION_DENIED)
                assert "banned from the run: in round 1 it sealed what is not the mean" in sentence
            with closing(Journal(tmp_path, lock=False)) as beside:
                beside.leave_ruling(ev.Pardoned(NodeId(reply.node_id), "its memory was broken"))
            async with asyncio.timeout(SOON):
                await c.event_loop.wait_until(lambda state: not state.conduct.strikes)
            assert (await eve.join(secret)).node_id == reply.node_id
            async with asyncio.timeout(SOON):
                while await asyncio.to_thread(c.journal.rulings):  # it is entered at the next look
                    await asyncio.sleep(0)
            found = [(d.number, d.consequence) for _, d in c.journal.decisions()]
            assert found == [(1, Consequence.BANNED), (2, Consequence.PARDONED)]

    asyncio.run(story())


def keep_config(journal: Journal, state: State) -> None:
    """What the coordinator's process does at its start."""
    journal.set_meta("config", to_json(state.config).decode())


def test_whom_the_operator_bans_is_out_with_its_key_and_its_invite_until_it_is_pardoned(tmp_path: Path) -> None:
    async def story() -> None:
        async with coordinator(tmp_path, RunConfig(name="reef")) as c:
            keep_config(c.journal, c.event_loop.state)
            eve = c.node()
            reply = await eve.join(name="eve")
            secret = reply.session.partition(".")[0]
            assert await asyncio.to_thread(ban_node, tmp_path, "eve", "it is a copy") == reply.node_id
            async with asyncio.timeout(SOON):
                await c.event_loop.wait_until(lambda state: reply.node_id not in state.members.here)
            assert "was revoked" in await refused(c.node().join(), Code.PERMISSION_DENIED)
            eve.token = c.journal.issue_token("another", 1, math.inf)
            for session in (secret, ""):  # with its key alone, too
                sentence = await refused(eve.join(session), Code.PERMISSION_DENIED)
                assert "banned from the run: in round 1 the operator put it out: it is a copy" in sentence
            assert await asyncio.to_thread(pardon_node, tmp_path, "eve", "") == reply.node_id
            async with asyncio.timeout(SOON):
                await c.event_loop.wait_until(lambda state: not state.conduct.strikes)
            assert (await eve.join(secret)).node_id == reply.node_id

    asyncio.run(story())


def test_the_operator_names_one_node_by_its_id_name_or_key_and_never_several(tmp_path: Path) -> None:
    async def story() -> None:
        async with coordinator(tmp_path, RunConfig(name="reef")) as c:
            keep_config(c.journal, c.event_loop.state)
            liar, other, odd = (c.node() for _ in range(3))
            ids = [
                (await node.join(name=name)).node_id
                for node, name in ((liar, "ada"), (other, "ada"), (odd, "n2"))  # as another one's id
            ]
        known = c.event_loop.state.members.departed | c.event_loop.state.members.here
        first, second, third = (known[NodeId(i)].key.hex() for i in ids)
        for name, meant in (("n1", ids[0]), (second[:8].upper(), ids[1])):
            assert ban_node(tmp_path, name, "") == meant
        for name, sentence in (
            ("ada", rf"'ada' may be each of n1 \(ada, key {first[:12]}\), n2 \(ada, key {second[:12]}\)"),
            ("n2", rf"'n2' may be each of n2 \(ada, key {second[:12]}\), n3 \(n2, key {third[:12]}\)"),
            ("bo", "knows no node 'bo'"),
        ):
            with pytest.raises(ConfigError, match=sentence):
                ban_node(tmp_path, name, "")
        with closing(Journal(tmp_path)) as journal:
            assert journal.rulings() == [(1, ev.Banned(NodeId(ids[0]))), (2, ev.Banned(NodeId(ids[1])))]
        async with coordinator(tmp_path, RunConfig(name="reef")) as c:
            async with asyncio.timeout(SOON):
                await c.event_loop.wait_until(lambda state: len(state.conduct.strikes) == 2)
        with pytest.raises(ConfigError, match="give so much of the key of one"):
            pardon_node(tmp_path, "ada", "")

    asyncio.run(story())


def test_who_is_out_for_a_while_is_told_so_by_the_status_alone(tmp_path: Path) -> None:
    async def story() -> None:
        async with coordinator(tmp_path, RunConfig(name="reef", members=MembersConfig(minimum=1))) as c:
            eve = c.node()
            reply = await eve.join()
            await c.node().join(name="bo")  # without whom it would be let in again at once
            secret = reply.session.partition(".")[0]
            await convict(c.event_loop, NodeId(reply.node_id), *LIES)
            for session in (secret, ""):  # with its key alone, too
                assert "again when more rounds are committed" in await refused(eve.join(session), Code.ABORTED)
            async with CheckupClient.opened(Invite(c.address, "reef", c.token), secret) as asks:
                sight = await asks.look()
            found = invite_check(sight)
            assert (
                sight.penalty_passes and found.exit_code is ExitCode.NOT_NOW and found.remedy == "try again later"
            )

    asyncio.run(story())


def test_who_has_heard_of_a_later_coordinator_is_to_join_again(tmp_path: Path) -> None:
    async def story() -> None:
        async with coordinator(tmp_path) as c:
            ada = c.node()
            reply = await ada.join()
            later = pb.Fence(incarnation=c.event_loop.state.incarnation + 1)
            report = ada.report(later, state_reported=pb.StateReported(round=9))
            assert "put back to an earlier state" in await refused(report, Code.ABORTED)
            assert (await ada.join(reply.session)).node_id == reply.node_id

    asyncio.run(story())


async def lie(loop: EventLoop) -> NodeId:
    """Two nodes begin a run, and one of them claims samples that it does not have."""
    for number in (1, 2):
        node = NodeId(f"n{number}")
        await loop.submit(ev.Joined(node, 1, str(node), ":1", f"{number}" * 32))
        await loop.submit(ev.Connected(node, 1))
        await loop.submit(ev.LayoutReported(node, 1, 40, digest("layout")))
        await loop.submit(ev.StateReported(node, 1, 0, digest("state 0")))
    assert loop.state.round.phase is Phase.INNER
    front = loop.state.leases.by_node[node][0][0]
    await loop.submit(ev.ContributionReady(node, 1, 1, ev.Contribution(10_000, 10, 2.0, 1.0, front)))
    return node


def test_decisions_are_in_the_journal_once_however_often_the_coordinator_starts(tmp_path: Path) -> None:
    async def story(first: bool) -> list[ev.Decision]:
        async with coordinator(tmp_path) as c:
            if first:
                await lie(c.event_loop)
            assert c.event_loop.state.conduct.decisions == 1
            return [d for _, d in c.journal.decisions()]

    found = asyncio.run(story(True))
    assert [(d.number, d.node, d.evidence.offence) for d in found] == [(1, "n2", Offence.FALSE_CLAIM)]
    for _ in range(2):
        assert asyncio.run(story(False)) == found


def test_a_pardon_that_was_asked_for_while_the_coordinator_was_away_is_taken(tmp_path: Path) -> None:
    async def story() -> None:
        async with coordinator(tmp_path) as c:
            node = await lie(c.event_loop)
            assert not conduct.may_own(c.event_loop.state, node)
        with closing(Journal(tmp_path, lock=False)) as beside:
            beside.leave_ruling(ev.Pardoned(node, "it was the disk"))
        async with coordinator(tmp_path) as c:
            async with asyncio.timeout(SOON):
                await c.event_loop.wait_until(lambda state: conduct.may_own(state, node))
            assert c.journal.decisions()[-1][1].evidence.sentence == "the operator pardons it: it was the disk"

    asyncio.run(story())
