"""What happens to the state while a snapshot of it is being taken: later rounds, fetched states, doubts."""

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from checkpointed_node import CHUNKS, Node, run
from numpy.typing import NDArray


def test_a_snapshot_during_which_the_next_round_is_applied_is_brought_forward_by_the_log(tmp_path: Path) -> None:
    async def body() -> None:
        node = Node(tmp_path)
        copy, seen = node.outer.copy_chunk, list[int]()

        def copying(c: int) -> Any:
            if c == 2 and seen.count(2) == 0:
                node.apply(1)  # between two chunks
            seen.append(c)
            return copy(c)

        node.outer.vectors.anchor[:] = 1.0
        node.outer.initialise()
        loop = asyncio.get_running_loop()
        node.outer.copy_chunk = lambda c: asyncio.run_coroutine_threadsafe(in_loop(copying, c), loop).result()  # type: ignore[method-assign]
        node.disk.finalized(0, 0)
        await node.disk.wait_idle()
        await node.disk.wait_idle()
        assert {node.snapshots[0].first, node.snapshots[0].last} == {0, 1}
        again = Node(tmp_path)
        assert again.disk.restore() == 1 and again.state() == node.state()

    run(body())


async def in_loop(work: Callable[[int], Any], c: int) -> Any:
    return work(c)


def test_a_state_that_was_not_the_runs_goes_when_a_better_one_is_there(tmp_path: Path) -> None:
    async def body() -> None:
        node = Node(tmp_path)
        await node.initialise()
        await node.commit(1)
        node.disk.distrust()
        assert node.snapshots
        await node.commit(2)
        assert [s.first for s in node.snapshots] == [2]

    run(body())


def test_a_doubt_that_comes_while_a_better_state_is_written_is_kept(tmp_path: Path) -> None:
    async def body() -> None:
        node = Node(tmp_path)
        await node.initialise()
        begun, may_end, copy = threading.Event(), threading.Event(), node.outer.copy_chunk

        def slowly(c: int) -> Any:
            begun.set()
            assert may_end.wait(60)
            return copy(c)

        node.outer.copy_chunk = slowly  # type: ignore[method-assign]
        node.disk.distrust()
        node.disk.finalized(0, 0)
        await asyncio.to_thread(begun.wait, 20)
        node.disk.distrust()
        may_end.set()
        for taken in (True, False):
            await node.disk.wait_idle()
            node.disk.finalized(0, 0)
            assert (node.taking is not None) == taken

    run(body())


def test_a_snapshot_is_given_up_when_the_node_stops(tmp_path: Path) -> None:
    async def body() -> None:
        node = Node(tmp_path)
        node.begin()
        await node.disk.close()
        assert not list(node.folder.glob("*.new"))

    run(body())


def test_a_state_that_nobody_else_has_follows_the_snapshot_that_is_being_taken(tmp_path: Path) -> None:
    async def body() -> None:
        node = Node(tmp_path)
        copied, go, copy = threading.Event(), threading.Event(), node.outer.copy_chunk

        def slowly(c: int) -> tuple[int, NDArray[np.float32], bytes]:
            if c == 1:
                copied.set()
                assert go.wait(30)
            return copy(c)

        node.outer.copy_chunk = slowly  # type: ignore[method-assign]
        node.begin()
        assert await asyncio.to_thread(copied.wait, 30)
        node.outer.renumber(5)
        node.outer.finalize()
        node.disk.finalized(5, 10, sole_copy=True)
        assert node.disk.is_pending(5)
        go.set()
        await node.disk.wait_idle()
        again = Node(tmp_path)
        assert again.disk.restore() == 5 and again.state() == node.state()

    run(body())


def test_a_state_that_was_fetched_while_a_snapshot_was_being_taken_follows_it(tmp_path: Path) -> None:
    async def body() -> None:
        (tmp_path / "other").mkdir()
        node, other = Node(tmp_path), Node(tmp_path / "other", every=100)
        await node.initialise()
        await other.initialise()
        await other.commit(*range(1, 9))
        await node.commit(1, 2)
        copied, go, copy = threading.Event(), threading.Event(), node.outer.copy_chunk

        def slowly(c: int) -> tuple[int, NDArray[np.float32], bytes]:
            if c == 1:
                copied.set()
                assert go.wait(30)
            return copy(c)

        node.outer.copy_chunk = slowly  # type: ignore[method-assign]
        node.apply(3)
        assert (writing := node.writing) is not None
        node.outer.finalize()
        node.disk.finalized(3, 30)
        assert await asyncio.to_thread(copied.wait, 30)
        await writing
        for c in range(CHUNKS.count):
            node.outer.replace_chunk(c, 8, other.outer.copy_chunk(c)[1].tobytes())
        node.outer.finalize()
        node.disk.finalized(8, 80)
        assert node.disk.is_pending(8), "a contribution to the next round waits for it"
        go.set()
        await node.disk.wait_idle()
        again = Node(tmp_path)
        assert again.disk.restore() == 8 and again.state() == other.state()
        assert again.snapshots[0].tokens == 80

    run(body())


def test_what_takes_the_place_of_a_wrong_state_follows_the_snapshot_of_that(tmp_path: Path) -> None:
    async def body() -> None:
        node = Node(tmp_path)
        await node.initialise()
        right = node.outer.copy_chunk(0)[1].tobytes()
        copied, go, copy = threading.Event(), threading.Event(), node.outer.copy_chunk

        def slowly(c: int) -> tuple[int, NDArray[np.float32], bytes]:
            if c == 1:
                copied.set()
                assert go.wait(30)
            return copy(c)

        node.outer.replace_chunk(0, 0, bytes(len(right)))  # which the run's digests tell
        node.outer.copy_chunk = slowly  # type: ignore[method-assign]
        node.disk.finalized(0, 0, sole_copy=True)
        assert await asyncio.to_thread(copied.wait, 30)
        node.disk.distrust()
        node.outer.replace_chunk(0, 0, right)
        node.outer.finalize()
        node.disk.finalized(0, 0)
        go.set()
        await node.disk.wait_idle()
        again = Node(tmp_path)
        assert again.disk.restore() == 0 and again.state() == node.state()

    run(body())
