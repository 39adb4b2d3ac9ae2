"""A reducer hears the coordinator while its kernels are made, and takes part when they are."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from atoll.comm.config.run import RunConfig
from atoll.comm.proto import atoll_pb2 as pb
from atoll.node.config import NodeConfig
from atoll.node.daemon import reducer as module
from atoll.node.daemon.reducer import Reducer
from atoll.node.daemon.state_dir import JoinOptions

DEADLINE = 60.0  # seconds; nothing here takes longer than a moment on an idle machine


def alone(maintain: Any) -> Reducer:
    """A reducer whose session with the coordinator is `maintain`."""
    node = Reducer(cast(Any, None), NodeConfig(), JoinOptions(Path(), "", "", "ada", 0.0))
    node._member = cast(Any, SimpleNamespace(run=RunConfig(), maintain=maintain))
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
