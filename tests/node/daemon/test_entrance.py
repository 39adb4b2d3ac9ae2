"""A node looks before it joins: one that cannot take part leaves no trace in the run."""

import asyncio
import math
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from control_nodes import Coordinator, coordinator

from atoll.comm.config.data import DataConfig, DataKind
from atoll.comm.config.model import ModelConfig
from atoll.comm.config.run import RunConfig
from atoll.comm.errors import AtollError, ConfigError, Refused, RefusedForNow, ResourceError, Unreachable
from atoll.comm.ids import NO_PIN
from atoll.comm.invite import Invite
from atoll.comm.rate_limits import RateLimit
from atoll.comm.transport.certificates import Certificate
from atoll.coordinator.service import checkup
from atoll.node.config import Device, NodeConfig
from atoll.node.control import client
from atoll.node.daemon import entrance
from atoll.node.daemon.daemon import Daemon
from atoll.node.daemon.entrance import check_room, enter
from atoll.node.daemon.reducer import NothingToFetch
from atoll.node.daemon.session import CoordinatorSession
from atoll.node.daemon.state_dir import JoinOptions
from atoll.node.outer.shared_vectors import SharedVectors
from atoll.node.outer.vector_folders import clear_others

RUN = RunConfig(name="reef")
LARGE = RunConfig(name="reef", model=ModelConfig(dim=1 << 13, layers=64, ffn_dim=1 << 15))


@asynccontextmanager
async def at_the_door(
    c: Coordinator, folder: Path, checks: bool = True, pin: Certificate | None = None, **options: Any
) -> AsyncIterator[CoordinatorSession]:
    """A node that may join with the only place of an invite."""
    c.token = c.journal.issue_token("one", 1, math.inf)
    invite = Invite(c.address, "reef", c.token, pin.pin if pin else NO_PIN)
    chosen = JoinOptions(folder / "node", "127.0.0.1:0", "", "ada", 1.0, checks=checks, **options)
    async with CoordinatorSession.opened(invite, NodeConfig(), chosen, NothingToFetch()) as member:
        yield member


def beside(folder: Path, story: Callable[[Coordinator], Awaitable[None]], run: RunConfig = RUN) -> None:
    (folder / "node").mkdir()

    async def told() -> None:
        async with coordinator(folder, run) as c:
            await story(c)

    asyncio.run(told())


def left(c: Coordinator) -> tuple[int, int]:
    """Places of the latest invite, and nodes that ever joined."""
    return c.journal.invites()[-1].left, c.event_loop.state.members.next_id - 1


NEEDS: list[tuple[RunConfig, NodeConfig, type[AtollError], str]] = [
    (LARGE, NodeConfig(), ResourceError, "needs about .* GB of memory"),
    (RunConfig(name="reef", data=DataConfig(kind=DataKind.BYTES)), NodeConfig(), ConfigError, "data="),
    (RUN, NodeConfig(congestion="warp"), ConfigError, "this machine's kernel offers"),
]


@pytest.mark.parametrize(("run", "config", "kind", "sentence"), NEEDS, ids=["memory", "data", "settings"])
def test_what_this_machine_lacks_uses_up_no_invite_and_makes_no_member(
    run: RunConfig, config: NodeConfig, kind: type[AtollError], sentence: str, tmp_path: Path
) -> None:
    async def story(c: Coordinator) -> None:
        async with at_the_door(c, tmp_path) as member:
            with pytest.raises(kind, match=sentence):
                await enter(member, config)
        assert left(c) == (1, 0)
        async with at_the_door(c, tmp_path, checks=False) as member:  # as its owner wants it
            with pytest.raises(kind, match=sentence):
                await enter(member, config)
        assert left(c) == (0, 1)

    beside(tmp_path, story, run)


def test_it_says_what_it_will_do_and_then_joins(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "atoll.node")

    async def story(c: Coordinator) -> None:
        async with at_the_door(c, tmp_path) as member:
            reply, config = await enter(member, NodeConfig(device=Device.CPU))
            assert reply.node_id == "n1" and config.ranks == 1 and left(c) == (0, 1)

    beside(tmp_path, story)
    told = [record.getMessage() for record in caplog.records if record.name == "atoll.node"]
    first = [message.partition(" ")[0] for message in told]
    assert first[-6:] == ["model:", "state:", "reads:", "writes:", "talks", "joined"]


def test_a_node_that_comes_back_shows_its_session_and_no_token(tmp_path: Path) -> None:
    async def story(c: Coordinator) -> None:
        async with at_the_door(c, tmp_path) as member:
            await enter(member, NodeConfig())
        token, issue = c.token, c.journal.issue_token
        c.journal.issue_token = lambda *_: token  # type: ignore[method-assign]
        async with at_the_door(c, tmp_path) as again:
            assert await again.look() is not None
            assert (await enter(again, NodeConfig()))[0].node_id == "n1"
        c.journal.issue_token = issue  # type: ignore[method-assign]

    beside(tmp_path, story)


async def nothing(*_: object) -> None:
    await asyncio.Event().wait()


async def unknown(self: object, request: object, context: Any) -> None:
    await context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")


@pytest.mark.parametrize("answer", [nothing, unknown], ids=["silent", "older"])
def test_a_coordinator_that_tells_nothing_before_a_join_keeps_nobody_from_it(
    answer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "atoll.node")
    monkeypatch.setattr(checkup.CheckupService, "Look", answer)
    monkeypatch.setattr(client, "LOOK_SECONDS", 0.2)

    async def story(c: Coordinator) -> None:
        async with at_the_door(c, tmp_path) as member:
            await enter(member, NodeConfig())
            assert left(c) == (0, 1)

    beside(tmp_path, story)
    assert "the run is not known before the join" in caplog.text and "model: " in caplog.text


def test_who_may_not_look_so_often_may_join(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkup, "LOOKS", RateLimit(1e-9, 0))

    async def story(c: Coordinator) -> None:
        async with at_the_door(c, tmp_path) as member:
            await enter(member, NodeConfig())
            assert left(c) == (0, 1)

    beside(tmp_path, story)


def test_where_nobody_answers_the_patience_is_the_joins(tmp_path: Path) -> None:
    async def story() -> None:
        options = JoinOptions(tmp_path, "127.0.0.1:0", "", "ada", 0.1, checks=True)
        invite = Invite("127.0.0.1:1", "reef", "token")
        async with CoordinatorSession.opened(invite, NodeConfig(), options, NothingToFetch()) as member:
            with pytest.raises(Unreachable, match="no coordinator at 127.0.0.1:1 for 0.1 s"):
                await enter(member, NodeConfig())

    asyncio.run(story())


def test_a_token_that_is_used_up_is_the_joins_to_refuse(tmp_path: Path) -> None:
    async def story(c: Coordinator) -> None:
        async with at_the_door(c, tmp_path) as member:
            c.journal.redeem_token(c.token, 0.0)
            with pytest.raises(Refused, match="used up") as refused:
                await enter(member, NodeConfig())
            assert not isinstance(refused.value, RefusedForNow)

    beside(tmp_path, story)


def test_a_no_that_passes_is_told_from_one_that_stays(tmp_path: Path) -> None:
    (tmp_path / "copy" / "node").mkdir(parents=True)

    async def story(c: Coordinator) -> None:
        async with at_the_door(c, tmp_path) as member, at_the_door(c, tmp_path / "copy") as copy:
            copy.key = member.key  # as of a state directory that was copied without its session
            await enter(member, NodeConfig())
            views = member.views()
            await anext(views)  # it is connected
            with pytest.raises(RefusedForNow, match="one key is one node: stop that one first"):
                await enter(copy, NodeConfig())

    beside(tmp_path, story)


def test_what_dead_nodes_left_in_memory_goes_before_a_machine_is_too_small(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bo").mkdir()
    (tmp_path / "bo" / "session").touch()
    shm = tmp_path / "shm"
    theirs = SharedVectors.create(1000, tmp_path / "bo", shm, "a run")
    monkeypatch.setattr(entrance, "clear_others", partial(clear_others, shm=shm))
    monkeypatch.setattr("atoll.node.preflight.available", lambda: 1 << (20 if theirs.folder.exists() else 50))
    check = NodeConfig(device=Device.CPU)
    with pytest.raises(ResourceError, match="needs about"):
        check_room(RUN, check, tmp_path / "ada")
    os.close(theirs.lock)  # as the kernel does for a dead one
    check_room(RUN, check, tmp_path / "ada")
    assert not theirs.folder.exists()


def test_one_that_is_told_to_end_while_it_joins_does_and_says_good_bye(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(c: Coordinator) -> None:
        c.token = c.journal.issue_token("one", 1, math.inf)
        options = JoinOptions(tmp_path / "node", "127.0.0.1:0", "", "ada", 60.0)
        daemon = Daemon(Invite(c.address, "reef", c.token), NodeConfig(), options)

        async def joined(member: CoordinatorSession, config: NodeConfig) -> Any:
            reply = await member.join()
            daemon._interrupt()
            return reply, config

        monkeypatch.setattr("atoll.node.daemon.daemon.enter", joined)
        async with asyncio.timeout(60):
            await daemon._story()
        assert left(c) == (0, 1) and not c.event_loop.state.members.here
        [gone] = c.event_loop.state.members.departed.values()
        assert gone.reason == "stopped by its owner"

    beside(tmp_path, story)


def test_one_that_is_told_to_end_while_nobody_answers_does_not_wait_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("atoll.node.daemon.daemon.ENTER_SECONDS", 0.1)

    async def story() -> None:
        options = JoinOptions(tmp_path, "127.0.0.1:0", "", "ada", 1e9, checks=True)
        daemon = Daemon(Invite("127.0.0.1:1", "reef", "token"), NodeConfig(), options)
        asyncio.get_running_loop().call_later(0.1, daemon._interrupt)
        async with asyncio.timeout(60):
            await daemon._story()

    asyncio.run(story())
