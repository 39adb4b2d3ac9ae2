"""A reducer hears the coordinator while its kernels are made, and takes part when they are."""

import asyncio
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from atoll.comm.config.run import RunConfig
from atoll.comm.errors import ConfigError
from atoll.comm.pause_reasons import PauseReason
from atoll.comm.proto import atoll_pb2 as pb
from atoll.node.config import NodeConfig
from atoll.node.daemon import reducer as module
from atoll.node.daemon.manners import Manners
from atoll.node.daemon.reducer import Reducer
from atoll.node.daemon.state_dir import JoinOptions

DEADLINE = 60.0  # seconds; nothing here takes longer than a moment on an idle machine


def alone(maintain: Any) -> Reducer:
    """A reducer whose session with the coordinator is `maintain`."""
    node = Reducer(cast(Any, None), NodeConfig(), JoinOptions(Path(), "", "", "ada", 0.0))
    plane = SimpleNamespace(
        bytes_up=0, bytes_down=0, limit=lambda *_: None, budget=lambda _: None, hush=lambda: None
    )
    node._member = cast(Any, SimpleNamespace(run=RunConfig(), maintain=maintain, plane=plane))
    return node


async def forever(*_: object) -> None:
    await asyncio.Event().wait()


def test_a_reducer_that_cannot_make_its_kernels_ends_with_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fails(*_: object) -> None:
        raise RuntimeError("no compiler here")

    monkeypatch.setattr(module, "warm_up_in_thread", fails)

    async def story() -> None:
        async with asyncio.timeout(DEADLINE):
            await alone(forever)._live()

    with pytest.raises(RuntimeError, match="no compiler here"):
        asyncio.run(story())


def test_a_plan_that_came_before_the_kernels_is_followed_when_they_are_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, followed = asyncio.Event(), list[int]()
    monkeypatch.setattr(module, "warm_up_in_thread", lambda *_: made.wait())

    async def views() -> Any:
        yield pb.View(plan=pb.Plan(round=7, numel=40))
        assert not followed
        made.set()
        await forever()

    async def story() -> None:
        node: Reducer = alone(lambda *_: node._watch())
        node._member.views = views  # type: ignore[method-assign]
        node._member.reports = cast(Any, None)

        def follow(plan: Any, numel: int) -> None:
            followed.append(plan.round)
            node._over.set()

        monkeypatch.setattr(node, "_follow", follow)
        async with asyncio.timeout(DEADLINE):
            await node._live()

    asyncio.run(story())
    assert followed == [7]


class Story:
    """A reducer that is told views and what its owner wants, and the plans that it followed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path, **limits: Any) -> None:
        self.node, self.followed = alone(forever), list[tuple[int, int]]()
        self.node._manners = Manners(replace(NodeConfig(), **limits), folder)
        plane = self.node._member.plane
        self.node._manners.attach(lambda: plane.bytes_up + plane.bytes_down, self.node._pause, self.node._obey)
        self.node._compiled = True
        self.audits = cast(Any, SimpleNamespace(follow=lambda view: None, stop=lambda: None))
        self.node._audits = self.audits
        monkeypatch.setattr(self.node, "_follow", self._follow)

    def _follow(self, plan: Any, numel: int) -> None:
        self.followed.append((plan.round, plan.attempt))
        self.node._reduction = cast(Any, SimpleNamespace(round=plan.round, plan=plan))

    def see(self, committed: int, attempt: int = 0, saves_bytes: bool = False) -> None:
        view = pb.View(committed=committed, saves_bytes=saves_bytes)
        if attempt:
            view.plan.round, view.plan.attempt, view.plan.numel = committed + 1, attempt, 40
        self.node._see(view, self.audits)

    def ask(self, verb: str, *arguments: str) -> None:
        self.node._manners.verbs[verb](arguments)


def test_a_reducer_whose_bytes_are_gone_leaves_the_reduce_and_takes_part_again_once_that_is_known(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    story = Story(monkeypatch, tmp_path, daily=1e-6)
    node = story.node
    story.see(3, attempt=1)
    assert story.followed == [(4, 1)] and node._phase == "sync" and not node._exchanges_nothing
    cast(Any, node._member.plane).bytes_up = 1000
    assert node._manners.room() == 0
    assert node._exchanges_nothing and node._reduction is None and node._phase == "paused"
    story.see(3, attempt=2)
    story.ask("limits", "daily=1")
    assert node._exchanges_nothing, "the coordinator still plans with what it has dropped"
    story.see(3, attempt=3)
    assert story.followed == [(4, 1)]
    story.see(3, saves_bytes=True)
    story.see(3, attempt=4)
    assert story.followed == [(4, 1), (4, 4)] and not node._exchanges_nothing


def test_a_paused_reducer_finishes_the_reduce_at_hand_and_leaves_between_two(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    story = Story(monkeypatch, tmp_path)
    node = story.node
    story.see(3, attempt=1)
    story.ask("pause")
    assert node._phase == "sync" and not node._exchanges_nothing
    story.see(3, attempt=2)
    assert story.followed == [(4, 1), (4, 2)]
    story.see(4)
    assert node._phase == "paused"
    story.ask("resume")
    story.see(4, attempt=1)
    node._finish(())
    assert not node._over.is_set() and node._manners.reason is PauseReason.LEAVING
    story.see(5)
    assert node._over.is_set()


def test_a_reducer_is_refused_with_limits_that_it_could_not_obey() -> None:
    with pytest.raises(ConfigError, match="memory=4 is a limit on a trainer, and a reducer has none"):
        Reducer(cast(Any, None), NodeConfig(memory=4.0), JoinOptions(Path(), "", "", "ada", 0.0))
