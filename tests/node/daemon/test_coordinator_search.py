"""A coordinator that is silent is looked for elsewhere, and a node that joined by its address goes on there."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from math import inf
from pathlib import Path

import pytest
from control_nodes import coordinator, until
from disks import full_disk

from atoll.comm import extras
from atoll.comm.config.run import RunConfig
from atoll.comm.errors import Refused
from atoll.comm.gateway_note import write_gateways
from atoll.comm.ids import NO_PIN
from atoll.comm.invite import Invite
from atoll.comm.proto import atoll_pb2 as pb
from atoll.comm.transport.certificates import load_or_make, pin_of
from atoll.node.config import NodeConfig
from atoll.node.daemon import coordinator_search
from atoll.node.daemon.coordinator_search import (
    FIRST_PAUSE_SECONDS,
    LONGEST_PAUSE_SECONDS,
    SEARCH_SECONDS,
    SILENT_SECONDS,
    Act,
    Answers,
    State,
    step,
)
from atoll.node.daemon.node_gateway import NodeGateway
from atoll.node.daemon.reducer import NothingToFetch
from atoll.node.daemon.session import CoordinatorSession
from atoll.node.daemon.state_dir import JoinOptions
from atoll.node.daemon.whereabouts import Whereabouts
from atoll.node.state_files import WHEREABOUTS

RUN = RunConfig(name="reef")
PLACE = "/ip4/203.0.113.7/tcp/4701/p2p/12D3KooWAhYiUJLCTg3PuwTMd1Vv7TRrQGMrFLXcvYXRShTqnDAC"


def acts(seconds: int, can_search: bool, answers: tuple[int, ...] = ()) -> list[tuple[int, Act]]:
    """What is done in so many seconds of silence, broken in those of `answers`: when, and what."""
    state: State = Answers()
    silent, found = 0, list[tuple[int, Act]]()
    for now in range(seconds):
        silent = 0 if now in answers else silent + 1
        state, act = step(state, silent, can_search, now)
        if act is not Act.NOTHING:
            found.append((now, act))
    return found


def test_a_coordinator_that_was_silent_for_a_while_is_looked_for_at_growing_intervals() -> None:
    assert acts(int(SILENT_SECONDS) - 1, can_search=True) == [], "it is started again in its place"
    found = acts(100_000, can_search=True)
    assert found[0] == (SILENT_SECONDS - 1, Act.SEARCH)
    assert {act for _, act in found[::2]} == {Act.SEARCH} and {act for _, act in found[1::2]} == {Act.STOP}
    times = [when for when, _ in found]
    assert {after - before for before, after in zip(times[::2], times[1::2], strict=False)} == {SEARCH_SECONDS}
    pauses = [after - before for before, after in zip(times[1::2], times[2::2], strict=False)]
    assert pauses[:3] == [FIRST_PAUSE_SECONDS, 2 * FIRST_PAUSE_SECONDS, 4 * FIRST_PAUSE_SECONDS]
    assert max(pauses) == pauses[-1] == LONGEST_PAUSE_SECONDS


def test_a_search_ends_when_the_coordinator_answers_and_the_next_silence_begins_anew() -> None:
    begun, answered = int(SILENT_SECONDS) - 1, int(SILENT_SECONDS) + 5
    assert acts(answered + int(SILENT_SECONDS) + 1, True, (answered,)) == [
        (begun, Act.SEARCH),
        (answered, Act.STOP),
        (answered + SILENT_SECONDS, Act.SEARCH),
    ]
    assert acts(2000, True, (1000,))[-1][1] is not Act.ADVISE


def test_a_node_that_cannot_search_says_once_in_each_silence_what_would_help() -> None:
    assert acts(10_000, can_search=False) == [(SILENT_SECONDS - 1, Act.ADVISE)]
    assert [act for _, act in acts(10_000, False, (5000,))] == [Act.ADVISE, Act.ADVISE]
    state, _ = step(Answers(), SILENT_SECONDS, False, 0.0)
    assert step(state, inf, True, 1e9) == (state, Act.NOTHING), "what it lacks comes with its next start"


class Gateway:
    """One that has found a record."""

    def __init__(self, found: str, leads: str) -> None:
        self.found, self.leads, self.asked = found, leads, 0

    async def lead_to_coordinator(self, invite: Invite, patience: float) -> Invite:
        self.asked += 1
        return replace(invite, address=self.leads)


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator_search, "SILENT_SECONDS", 0.05)
    monkeypatch.setattr(coordinator_search, "DECISION_INTERVAL", 0.02)
    monkeypatch.setattr(coordinator_search, "LOOK_INTERVAL", 0.02)


def have(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    @asynccontextmanager
    async def for_search(node: NodeGateway) -> AsyncIterator[Gateway]:
        yield gateway

    monkeypatch.setattr(NodeGateway, "for_search", for_search)
    monkeypatch.setattr(extras, "installed", lambda package: True)


@asynccontextmanager
async def member(invite: Invite, folder: Path) -> AsyncIterator[CoordinatorSession]:
    folder.mkdir(exist_ok=True)
    options = JoinOptions(folder, "127.0.0.1:0", "", "ada", 1.0)
    async with CoordinatorSession.opened(invite, NodeConfig(), options, NothingToFetch()) as opened:
        yield opened


@pytest.mark.long
@pytest.mark.parametrize("dialled", [True, False])
def test_a_node_goes_on_where_the_certificate_of_its_url_is_shown_and_nowhere_else(
    dialled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: None
) -> None:
    (tmp_path / "other").mkdir()
    own, anothers = load_or_make(tmp_path), load_or_make(tmp_path / "other")

    async def story() -> None:
        async with AsyncExitStack() as life:
            async with coordinator(tmp_path, RUN, own) as first:
                write_gateways(tmp_path, "one", [PLACE])
                await until(lambda: first.plane.gateways.told)
                url = Invite(first.address, "reef", first.token, own.pin)
                ada = await life.enter_async_context(member(url, tmp_path / "node"))
                await ada.join()
            async with (
                coordinator(tmp_path / "other", RUN, anothers) as liar,
                coordinator(tmp_path, RUN, own) as second,
            ):
                have(gateway := Gateway(liar.address, liar.address), monkeypatch)
                assert not await ada.control.heartbeat(pb.HeartbeatRequest())
                await until(lambda: gateway.asked > 2)
                assert ada.control.invite == url
                if dialled:
                    gateway.found = second.address
                else:
                    gateway.found, gateway.leads = "", second.address
                await until(lambda: ada.control.invite == replace(url, address=second.address))
                assert await ada.control.heartbeat(pb.HeartbeatRequest()), "in the same session"
                me = ada.me
                await life.aclose()
                if dialled:
                    await _next_lives(url, second.address, liar.address, me, tmp_path / "node")
            if dialled:
                async with member(replace(url, address=liar.address), tmp_path / "node") as alone:
                    assert alone.control.invite.address == second.address, "it may be back, where it was last"

    asyncio.run(story())


async def _next_lives(url: Invite, moved_to: str, liar: str, me: str, folder: Path) -> None:
    async with member(url, folder) as again:
        assert again.control.invite.address == moved_to
        await again.join()
        assert again.me == me
    anew = replace(url, address=liar)
    async with member(anew, folder) as told:
        assert told.control.invite == anew, "who gives a new URL knows where it is"
        await told.look()  # and this one does not: another coordinator is there
        assert told.control.invite.address == moved_to, "it is found by the gateways of before"
    async with member(anew, folder.with_name("stranger")) as stranger:
        with pytest.raises(Refused, match="another certificate"):  # this node knows none
            await stranger.look()


@pytest.mark.long
@pytest.mark.parametrize(
    ("pin", "gateways", "says"),
    [
        (True, (PLACE,), r'a gateway needs hivemind, not installed here: pip install "\.\[p2p\]"'),
        (True, (), "told of no gateway that knows where that is: then join by a new URL, best one with dht"),
        (False, (PLACE,), "no certificate by which it would be known there: then join by a new URL"),
    ],
    ids=["no extra", "no gateway", "no certificate"],
)
def test_what_a_node_lacks_to_find_its_coordinator_again_is_said_once_and_in_its_status(
    pin: bool,
    gateways: tuple[str, ...],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    at_once: None,
) -> None:
    monkeypatch.setattr(extras, "installed", lambda package: package != "hivemind")
    own = load_or_make(tmp_path) if pin else None

    async def story() -> None:
        async with AsyncExitStack() as life:
            async with coordinator(tmp_path, RUN, own) as first:
                if gateways:
                    write_gateways(tmp_path, "one", gateways)
                    await until(lambda: first.plane.gateways.told)
                url = Invite(first.address, "reef", first.token, own.pin if own else NO_PIN)
                ada = await life.enter_async_context(member(url, tmp_path / "node"))
                await ada.join()
                assert ada.search.words == ""
            assert not await ada.control.heartbeat(pb.HeartbeatRequest())
            await until(lambda: ada.search.words)
            assert re.search(says, ada.search.words)
            await asyncio.sleep(0.1)  # some decisions more

    asyncio.run(story())
    assert len([message for message in caplog.messages if re.search(says, message)]) == 1


def test_nothing_of_that_is_said_to_a_node_that_never_joined(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, at_once: None
) -> None:
    """Its URL may be wrong, which `join` says."""

    async def story() -> None:
        async with coordinator(tmp_path, RUN, None) as first:
            url = Invite(first.address, "reef", first.token, NO_PIN)
        async with member(url, tmp_path / "node") as ada:
            joining = asyncio.create_task(ada.join())
            await until(lambda: ada.search.words)
            await asyncio.sleep(0.1)  # some decisions more
            joining.cancel()

    asyncio.run(story())
    assert not [message for message in caplog.messages if "still silent" in message]


def test_gateways_and_the_new_address_are_kept_for_the_run_and_what_is_damaged_is_none(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, url = tmp_path / WHEREABOUTS, Invite("a:1", "reef", "token", pin_of(b"a certificate"))
    kept = Whereabouts(path, url)
    assert (kept.gateways, kept.moved_to) == ((), "")
    kept.learn((PLACE,))
    kept.found_at("b:2")
    again = Whereabouts(path, replace(url, token="another"))
    assert (again.gateways, again.moved_to) == ((PLACE,), "b:2")
    new = Whereabouts(path, replace(url, address="c:3"))
    assert (new.gateways, new.moved_to) == ((PLACE,), "")
    for other in (replace(url, pin=pin_of(b"another")), replace(url, run="atoll")):
        assert Whereabouts(path, other).gateways == ()
    kept.found_at("a:1")
    assert Whereabouts(path, url).moved_to == "", "it is back"
    with full_disk():
        kept.learn(())
    assert "cannot write" in caplog.text and Whereabouts(path, url).gateways == (PLACE,)
    path.write_bytes(path.read_bytes().replace(b"/p2p/", b"/p3p/"))
    assert Whereabouts(path, url).gateways == (), "no gateway is started with what is no multiaddr"
    for damage in (b"", b"[1]", b"\xff", b"[" * 8000, b'{"whose": 1}'):
        path.write_bytes(damage)
        assert Whereabouts(path, url).gateways == ()
