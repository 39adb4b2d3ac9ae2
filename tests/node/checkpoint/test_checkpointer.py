"""What a node has on its disk brings its state back, bit for bit, whatever happened while it was written."""

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from atoll.comm.allreduce.sealing import mean_of
from atoll.comm.byte_view import U8
from atoll.comm.chunks import Chunks
from atoll.comm.codecs.factory import make_codec
from atoll.comm.config.run import CodecName
from atoll.comm.digest import digest
from atoll.comm.ids import Round
from atoll.node.checkpoint import checkpointer, snapshots
from atoll.node.checkpoint.checkpointer import Checkpointer, CheckpointLocation
from atoll.node.checkpoint.sealed_log import SealedLog
from atoll.node.checkpoint.snapshots import TornSnapshot
from atoll.node.outer.repair import mend
from atoll.node.outer.shared_vectors import SharedVectors
from atoll.node.outer.state import OuterState
from atoll.outer_opt.nesterov import Nesterov
from atoll.outer_opt.schedule import Ramp

NUMEL, CHUNKS = 5000, Chunks(5000, 1024)
LAYOUT = (("a", (50, 60)), ("b", (2000,)))
CODEC = make_codec(CodecName.INT8, 256)
RUN = b"r" * 16
PLENTY = 1 << 40
RULE = Ramp(Nesterov(0.7, 0.9), warmup=4)  # what comes back must take each round's own step
WHOLE = snapshots.size_of(RUN, LAYOUT, CHUNKS)


def sealed(round_: int) -> tuple[list[U8], list[bytes]]:
    """The same bytes for everybody that commits the round, and their digests."""
    delta = np.random.default_rng(round_).standard_normal(NUMEL, dtype=np.float32)
    payloads = [np.empty(CODEC.size(CHUNKS.size(c)), np.uint8) for c in range(CHUNKS.count)]
    for c, payload in enumerate(payloads):
        CODEC.encode(delta[CHUNKS.span(c)], payload)
    return payloads, [digest(payload) for payload in payloads]


class Node:
    """One life of a node's state, on a disk that outlives it."""

    def __init__(self, folder: Path, left: SharedVectors | None = None, **place: Any) -> None:
        """`left`: by an earlier life, in memory."""
        vectors = left or SharedVectors.create(NUMEL, folder, folder / "shm")
        self.outer = OuterState(vectors, CHUNKS, mean_of(CODEC), RULE)
        self.given: list[U8] = []
        self.folder = folder / "disk"
        given: dict[str, Any] = {"every": 3, "layout": LAYOUT, "run": RUN, "room": lambda _: PLENTY} | place
        self.disk = Checkpointer(self.outer, self.given.append, CheckpointLocation(self.folder, **given))

    def begin(self) -> None:
        self.outer.vectors.anchor[:] = np.random.default_rng(0).standard_normal(NUMEL, dtype=np.float32)
        self.outer.initialised()
        self.disk.settled(0, 0, alone=True)

    async def initialise(self) -> None:
        self.begin()
        await self.disk.quiet()

    def apply(self, round_: int) -> None:
        for c, payload in enumerate(sealed(round_)[0]):
            self.outer.apply(c, payload)
        self.disk.committed(round_, *sealed(round_))

    async def commit(self, *rounds: int) -> None:
        for round_ in rounds:
            self.apply(round_)
            self.outer.settle()
            self.disk.settled(round_, 10 * round_)
            await self.disk.quiet()

    def state(self) -> bytes:
        return self.outer.vectors.anchor.tobytes() + self.outer.vectors.momentum.tobytes()


def run(body: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(60):
            await body

    asyncio.run(bounded())


def test_a_state_comes_back_from_snapshot_and_log_bit_for_bit(tmp_path: Path) -> None:
    async def body() -> None:
        node = Node(tmp_path)
        await node.initialise()
        await node.commit(*range(1, 6))
        again = Node(tmp_path)
        assert again.disk.proven == 5 and again.disk.restore() == 5
        assert again.state() == node.state() and again.outer.settle() == node.outer.settle()
        assert [s.first for s in again.disk._snapshots] == [3, 0], "one every three rounds, the last two survive"
        assert again.disk._snapshots[0].tokens == 30

    run(body())


def test_buffers_are_given_back_when_the_file_is_there_and_peers_are_served_from_it(tmp_path: Path) -> None:
    async def body() -> None:
        node = Node(tmp_path)
        await node.initialise()
        node.apply(1)
        payloads = sealed(1)[0]
        assert not node.given
        assert bytes(await node.disk.sealed(Round(1), 2) or b"") == payloads[2].tobytes()
        await node.disk.quiet()
        assert len(node.given) == CHUNKS.count and not node.disk._memory
        assert bytes(await node.disk.sealed(Round(1), 2) or b"") == payloads[2].tobytes()
        assert await node.disk.sealed(Round(2), 2) is None
        assert await node.disk.sealed(Round(1), CHUNKS.count) is None

    run(body())


def test_a_snapshot_during_which_the_next_round_is_applied_is_brought_forward_by_the_log(tmp_path: Path) -> None:
    async def body() -> None:
        node = Node(tmp_path)
        copy, seen = node.outer.copy, list[int]()

        def copying(c: int) -> Any:
            if c == 2 and seen.count(2) == 0:
                node.apply(1)  # between two chunks
            seen.append(c)
            return copy(c)

        node.outer.vectors.anchor[:] = 1.0
        node.outer.initialised()
        loop = asyncio.get_running_loop()
        node.outer.copy = lambda c: asyncio.run_coroutine_threadsafe(in_loop(copying, c), loop).result()  # type: ignore[method-assign]
        node.disk.settled(0, 0)
        await node.disk.quiet()
        await node.disk.quiet()
        assert {node.disk._snapshots[0].first, node.disk._snapshots[0].last} == {0, 1}
        again = Node(tmp_path)
        assert again.disk.restore() == 1 and again.state() == node.state()

    run(body())


def test_a_snapshot_whose_last_round_did_not_reach_the_disk_hides_no_state_before_it(tmp_path: Path) -> None:
    """As after a power cut between the end of the snapshot's write and that of the round's."""

    async def body() -> None:
        node = Node(tmp_path, every=100)
        await node.initialise()
        await node.commit(1, 2)
        before = node.state()

        def copying(c: int) -> Any:
            if c == 2:
                for i, payload in enumerate(sealed(3)[0]):
                    node.outer.apply(i, payload)
            return node.outer.copy(c)

        torn_ = snapshots.write(node.folder, RUN, LAYOUT, CHUNKS, 20, copying, lambda _: PLENTY)
        assert (torn_.first, torn_.last) == (2, 3)
        again = Node(tmp_path)
        assert again.disk.proven == 2
        assert again.disk.restore() == 2 and again.state() == before

    run(body())


async def in_loop(work: Callable[[int], Any], c: int) -> Any:
    return work(c)


@pytest.mark.parametrize("place", [-3, -NUMEL * 4 - 3, 40], ids=["momentum", "anchor", "header"])
def test_a_damaged_snapshot_is_made_up_for_by_the_one_before(tmp_path: Path, place: int) -> None:
    async def body() -> None:
        node = Node(tmp_path)
        await node.initialise()
        await node.commit(*range(1, 5))
        flip(damaged := node.disk._snapshots[0].path, place)
        again = Node(tmp_path)
        assert again.disk.restore() == 4 and again.state() == node.state()
        assert again.disk.spoiled() == [damaged.name] and not again.disk.spoiled()
        again.disk.settled(4, 0)  # before it is due
        await again.disk.quiet()
        third = Node(tmp_path)
        assert len(third.disk._snapshots) == 2 and third.disk.restore() == 4 and not third.disk.spoiled()

    run(body())


def test_a_damaged_round_ends_the_tail_there(tmp_path: Path) -> None:
    async def body() -> None:
        node = Node(tmp_path, every=100)
        await node.initialise()
        await node.commit(1, 2)
        before = node.state()
        await node.commit(3)
        flip(node.folder / "sealed-000000000003", -1)
        again = Node(tmp_path)
        assert again.disk.proven == 3
        assert again.disk.restore() == 2 and again.state() == before
        assert again.disk.spoiled() == ["sealed-000000000003"] and again.disk.proven == 2
        flip(node.folder / "sealed-000000000001", 60)
        third = Node(tmp_path)
        assert third.disk.restore() == 0, "its table is damaged: the file is none"
        assert third.disk.spoiled() == ["sealed-000000000001"]

    run(body())


def test_a_sound_snapshot_outlives_a_damaged_one_where_there_is_no_room_for_both(tmp_path: Path) -> None:
    async def body() -> None:
        node = Node(tmp_path)
        await node.initialise()
        await node.commit(*range(1, 5))
        flip(node.disk._snapshots[0].path, -3)
        again = Node(tmp_path, limit=2.9 * WHOLE)
        assert again.disk.restore() == 4 and again.disk.spoiled()

        def power_fails(c: int) -> Any:
            raise TornSnapshot("as if in the middle of it")

        again.outer.copy = power_fails  # type: ignore[method-assign]
        again.disk.settled(4, 0)
        await again.disk.quiet()
        third = Node(tmp_path)
        assert third.disk.restore() == 4 and third.state() == node.state()

    run(body())


def test_a_snapshot_of_which_the_header_is_damaged_makes_room_for_the_next(tmp_path: Path) -> None:
    async def body() -> None:
        node = Node(tmp_path)
        await node.initialise()
        await node.commit(*range(1, 5))
        flip(node.disk._snapshots[0].path, 40)
        size = sum(path.stat().st_size for path in node.folder.iterdir())

        def room(folder: Path) -> int:
            return size + WHOLE // 2 - sum(path.stat().st_size for path in folder.iterdir())

        again = Node(tmp_path, room=room)
        assert again.disk.restore() == 4
        again.disk.settled(4, 0)
        await again.disk.quiet()
        assert not again.disk.trouble and [s.first for s in again.disk._snapshots] == [4, 0]

    run(body())


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


def test_files_of_another_run_or_model_and_unfinished_ones_are_not_taken(tmp_path: Path) -> None:
    async def body() -> None:
        node = Node(tmp_path)
        await node.initialise()
        await node.commit(1)
        (node.folder / "snapshot-000000000007.safetensors.new").write_bytes(b"half")
        other = Node(tmp_path, layout=(("a", (60, 50)), ("b", (2000,))))
        assert not other.disk._snapshots and not list(node.folder.glob("*.new"))
        assert Node(tmp_path, run=b"s" * 16).disk.restore() == -1

    run(body())


def test_a_round_that_was_being_written_again_when_the_node_was_killed_is_still_there(tmp_path: Path) -> None:
    async def body() -> None:
        node = Node(tmp_path, every=100)
        await node.initialise()
        await node.commit(1, 2)
        whole = (node.folder / "sealed-000000000002").read_bytes()
        unfinished = node.folder / "sealed-000000000002.new"
        unfinished.write_bytes(whole[:-100].ljust(len(whole), b"\0"))  # its room is taken before it is filled
        (node.folder / "sealed-000000000003.new").write_bytes(unfinished.read_bytes())
        again = Node(tmp_path)
        assert again.disk.restore() == 2 and again.state() == node.state()
        assert not again.disk.spoiled() and not list(node.folder.glob("*.new"))

    run(body())


@pytest.mark.parametrize("name", ["sealed-000000000009", "snapshot-000000000007.safetensors.new"])
def test_what_cannot_be_removed_does_not_hide_the_state_beside_it(tmp_path: Path, name: str) -> None:
    """As on a disk that has failed, and can only be read since."""

    async def body() -> None:
        node = Node(tmp_path)
        await node.initialise()
        await node.commit(1)
        (node.folder / name).mkdir()  # even root unlinks no folder
        again = Node(tmp_path)
        assert again.disk.restore() == 1 and again.state() == node.state()
        assert name in again.disk.trouble
        await again.commit(2)
        assert again.disk.proven == 2

    run(body())


def test_a_round_that_is_of_no_use_and_cannot_be_removed_is_said(tmp_path: Path) -> None:
    async def body() -> None:
        node = Node(tmp_path, every=100)
        await node.initialise()
        await node.commit(1)
        before = node.state()
        await node.commit(2, 3)
        again = Node(tmp_path)
        for round_ in (2, 3):
            (path := again.folder / f"sealed-{round_:012d}").unlink()
            path.mkdir()  # it cannot be read, and even root unlinks no folder
        assert again.disk.restore() == 1 and again.state() == before
        assert again.disk.trouble.startswith(checkpointer.OF_NO_USE) and again.disk.proven == 1
        again.disk.renumbered(1)
        assert again.disk._log is not None and again.disk._log.rounds == (1,)

    run(body())


def test_a_full_disk_is_said_and_costs_nothing_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> None:
        have = [PLENTY]
        node = Node(tmp_path, every=100, room=lambda _: have[0])
        await node.initialise()
        await node.commit(1)
        have[0] = 100
        await node.commit(2, 3, 4)
        assert "MB for it" in node.disk.trouble and caplog.text.count("not kept on disk") == 1
        assert len(node.disk._memory) <= checkpointer.WAITING and node.disk.proven == 1
        node.disk.make_room()
        assert not node.disk._memory and len(node.given) == 4 * CHUNKS.count
        have[0] = PLENTY
        await node.commit(5)
        assert not node.disk.trouble and node.disk.proven == 5, "a snapshot closes the gap"
        again = Node(tmp_path)
        assert again.disk.restore() == 5 and again.state() == node.state()

    run(body())


def test_a_node_without_a_disk_keeps_the_last_round_until_the_next_reduce(tmp_path: Path) -> None:
    async def body() -> None:
        node = Node(tmp_path)
        node.disk = Checkpointer(node.outer, node.given.append, None)
        await node.initialise()
        await node.commit(1, 2)
        assert await node.disk.sealed(Round(1), 0) is None
        assert await node.disk.sealed(Round(2), 0) is not None
        await node.disk.caught_up(2)  # at once: nothing is being written
        node.disk.make_room()
        assert len(node.given) == 2 * CHUNKS.count and node.disk.restore() == -1

    run(body())


def test_a_folder_that_cannot_be_used_is_said(tmp_path: Path) -> None:
    async def body() -> None:
        (tmp_path / "disk").write_text("a file")
        node = Node(tmp_path)
        assert "cannot be used" in node.disk.trouble
        await node.initialise()
        await node.commit(1)

    run(body())


def test_a_folder_that_is_new_is_on_the_disk_as_what_is_in_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced, sync = set[str](), os.fsync

    def syncing(file: int) -> None:
        synced.add(os.readlink(f"/proc/self/fd/{file}"))
        sync(file)

    async def body() -> None:
        node = Node(tmp_path / "node")
        monkeypatch.setattr(os, "fsync", syncing)
        folder = tmp_path / "state" / "outer" / "run"
        node.disk = Checkpointer(node.outer, node.given.append, CheckpointLocation(folder, RUN, LAYOUT, 3))
        await node.initialise()
        assert synced >= {str(path) for path in (folder, *folder.parents[:3])}

    run(body())


def test_the_files_stay_within_the_limit(tmp_path: Path) -> None:
    async def body() -> None:
        node = Node(tmp_path, limit=2.6 * WHOLE)
        await node.initialise()
        for round_ in range(1, 30):
            await node.commit(round_)
            assert node.disk.size <= 2.6 * WHOLE
            assert sum(p.stat().st_size for p in node.folder.iterdir()) == node.disk.size
            assert node.disk.proven == round_
        again = Node(tmp_path)
        assert again.disk.restore() == 29 and again.state() == node.state()

    run(body())


@pytest.mark.parametrize("snapshots_of_room", [0.01, 0.3, 1.0, 1.5])
def test_a_limit_that_is_too_small_is_said_and_kept(tmp_path: Path, snapshots_of_room: float) -> None:
    async def body() -> None:
        node = Node(tmp_path, limit=snapshots_of_room * WHOLE)
        await node.initialise()
        for round_ in range(1, 9):
            await node.commit(round_)
            assert sum(p.stat().st_size for p in node.folder.iterdir()) <= 1.02 * snapshots_of_room * WHOLE
        assert "is too little" in node.disk.trouble or "no room" in node.disk.trouble

    run(body())


def test_without_a_limit_the_log_is_no_larger_than_a_snapshot_and_what_snapshots_need(tmp_path: Path) -> None:
    async def body() -> None:
        node = Node(tmp_path)
        await node.initialise()
        await node.commit(*range(1, 40))
        assert node.disk.size < 3.2 * WHOLE
        assert node.disk._log is not None and len(node.disk._log.rounds) >= 7

    run(body())


def test_a_node_that_does_not_keep_copies_takes_no_snapshot(tmp_path: Path) -> None:
    async def body() -> None:
        node = Node(tmp_path)
        node.disk.keeps = False
        await node.initialise()
        await node.commit(1, 2)
        await node.disk.caught_up(2)
        assert not node.disk._snapshots
        assert await node.disk.sealed(Round(1), 0) is not None

    run(body())


def test_a_contribution_waits_for_the_disk_to_have_the_last_round(tmp_path: Path) -> None:
    async def body() -> None:
        node = Node(tmp_path, every=100)
        node.begin()
        await node.disk.caught_up(0)
        assert node.disk.proven == 0
        node.apply(1)
        await node.disk.caught_up(1)
        assert node.disk.proven == 1

    run(body())


def test_a_contribution_waits_for_the_disk_to_have_a_state_that_was_fetched(tmp_path: Path) -> None:
    async def body() -> None:
        (tmp_path / "other").mkdir()
        node, other = Node(tmp_path, every=100), Node(tmp_path / "other", every=100)
        await node.initialise()
        await other.initialise()
        await other.commit(1, 2)
        for c in range(CHUNKS.count):
            node.outer.put(c, 2, other.outer.copy(c)[1].tobytes())
        node.outer.settle()
        node.disk.settled(2, 20)
        await node.disk.caught_up(2)
        assert node.disk.proven == 2
        again = Node(tmp_path)
        assert again.disk.restore() == 2 and again.state() == other.state()
        await other.disk.quiet()

    run(body())


def test_rounds_whose_sealed_bytes_were_fetched_need_no_snapshot(tmp_path: Path) -> None:
    async def body() -> None:
        node = Node(tmp_path, every=100)
        await node.initialise()
        payloads, digests = sealed(1)
        fetched = [np.frombuffer(payload.tobytes(), np.uint8) for payload in payloads]
        for c, payload in enumerate(payloads):
            node.outer.apply(c, payload)
        node.disk.committed(1, fetched, digests)
        node.outer.settle()
        node.disk.settled(1, 10)
        await node.disk.caught_up(1)
        assert node.disk.proven == 1 and [s.first for s in node.disk._snapshots] == [0]
        assert not node.given, "what is nobody's buffer is not used for another chunk"

    run(body())


def test_a_state_that_was_not_the_runs_goes_when_a_better_one_is_there(tmp_path: Path) -> None:
    async def body() -> None:
        node = Node(tmp_path)
        await node.initialise()
        await node.commit(1)
        node.disk.doubt()
        assert node.disk._snapshots
        await node.commit(2)
        assert [s.first for s in node.disk._snapshots] == [2]

    run(body())


def test_a_doubt_that_comes_while_a_better_state_is_written_is_kept(tmp_path: Path) -> None:
    async def body() -> None:
        node = Node(tmp_path)
        await node.initialise()
        begun, may_end, copy = threading.Event(), threading.Event(), node.outer.copy

        def slowly(c: int) -> Any:
            begun.set()
            assert may_end.wait(20)
            return copy(c)

        node.outer.copy = slowly  # type: ignore[method-assign]
        node.disk.doubt()
        node.disk.settled(0, 0)
        await asyncio.to_thread(begun.wait, 20)
        node.disk.doubt()
        may_end.set()
        for taken in (True, False):
            await node.disk.quiet()
            node.disk.settled(0, 0)
            assert (node.disk._snapping is not None) == taken

    run(body())


def test_after_void_rounds_the_same_state_has_another_number(tmp_path: Path) -> None:
    async def body() -> None:
        node = Node(tmp_path)
        await node.initialise()
        await node.commit(1)
        node.outer.renumber(4)
        node.disk.renumbered(1)
        node.outer.settle()
        node.disk.settled(4, 10, alone=True)
        await node.disk.caught_up(4)
        await node.commit(5)
        again = Node(tmp_path)
        assert again.disk.restore() == 5 and again.state() == node.state()

    run(body())


@pytest.mark.parametrize("vector", ["anchor", "momentum"])
def test_a_flipped_bit_in_memory_is_mended_from_snapshot_and_log(tmp_path: Path, vector: str) -> None:
    async def body() -> None:
        node = Node(tmp_path)
        await node.initialise()
        await node.commit(1, 2)
        node.apply(3)  # its bytes wait for the disk
        node.outer.settle()
        right = node.state()
        getattr(node.outer.vectors, vector).view(np.uint32)[1500] ^= 1 << 30
        assert [mend(node.outer, node.disk, c) for c in range(CHUNKS.count)].count(True) == 1
        assert node.state() == right and node.outer.round == 3
        assert node.outer.digests(Round(3)) is not None, "peers are served again"
        assert mend(node.outer, node.disk, 1) is None
        await node.disk.quiet()

    run(body())


def test_what_the_disk_cannot_mend_is_left_for_the_runs_digests_to_find(tmp_path: Path) -> None:
    async def body() -> None:
        node = Node(tmp_path)
        await node.initialise()
        await node.commit(1)
        flip(node.disk._snapshots[0].path, -4 * NUMEL)
        right = node.outer.settle()
        damaged = [c for c in range(CHUNKS.count) if node.disk.chunk(c, 1) is None]
        node.outer.vectors.anchor[CHUNKS.span(damaged[0])] += 1
        assert mend(node.outer, node.disk, damaged[0]) is False
        assert node.outer.round == 1 and node.outer.settle() != right

    run(body())


def test_sealed_bytes_that_changed_in_memory_mend_nothing(tmp_path: Path) -> None:
    async def body() -> None:
        node = Node(tmp_path)
        await node.initialise()
        payloads, sums = sealed(1)
        for c, payload in enumerate(payloads):
            node.outer.apply(c, payload)
        node.disk.committed(1, payloads, sums)  # they wait for the disk
        node.outer.settle()
        payloads[1][:64] = 0xFF
        node.outer.vectors.anchor[CHUNKS.span(1)] += 1
        assert mend(node.outer, node.disk, 1) is False and node.outer.round == 1
        await node.disk.quiet()

    run(body())


def test_a_flipped_bit_in_memory_is_not_written(tmp_path: Path) -> None:
    async def body() -> None:
        node = Node(tmp_path)
        await node.initialise()
        await node.commit(1)
        node.outer.vectors.anchor[1500] += 1
        node.disk.doubt()
        node.disk.settled(1, 0)
        await node.disk.quiet()
        assert "chunk 1" in node.disk.trouble and len(node.disk._snapshots) == 1

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
        copied, go, copy = threading.Event(), threading.Event(), node.outer.copy

        def slowly(c: int) -> tuple[int, NDArray[np.float32], bytes]:
            if c == 1:
                copied.set()
                assert go.wait(30)
            return copy(c)

        node.outer.copy = slowly  # type: ignore[method-assign]
        node.begin()
        assert await asyncio.to_thread(copied.wait, 30)
        node.outer.renumber(5)
        node.outer.settle()
        node.disk.settled(5, 10, alone=True)
        assert node.disk.behind(5)
        go.set()
        await node.disk.quiet()
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
        copied, go, copy = threading.Event(), threading.Event(), node.outer.copy

        def slowly(c: int) -> tuple[int, NDArray[np.float32], bytes]:
            if c == 1:
                copied.set()
                assert go.wait(30)
            return copy(c)

        node.outer.copy = slowly  # type: ignore[method-assign]
        node.apply(3)
        assert (writing := node.disk._writing) is not None
        node.outer.settle()
        node.disk.settled(3, 30)
        assert await asyncio.to_thread(copied.wait, 30)
        await writing
        for c in range(CHUNKS.count):
            node.outer.put(c, 8, other.outer.copy(c)[1].tobytes())
        node.outer.settle()
        node.disk.settled(8, 80)
        assert node.disk.behind(8), "a contribution to the next round waits for it"
        go.set()
        await node.disk.quiet()
        again = Node(tmp_path)
        assert again.disk.restore() == 8 and again.state() == other.state()
        assert again.disk._snapshots[0].tokens == 80

    run(body())


def test_what_takes_the_place_of_a_wrong_state_follows_the_snapshot_of_that(tmp_path: Path) -> None:
    async def body() -> None:
        node = Node(tmp_path)
        await node.initialise()
        right = node.outer.copy(0)[1].tobytes()
        copied, go, copy = threading.Event(), threading.Event(), node.outer.copy

        def slowly(c: int) -> tuple[int, NDArray[np.float32], bytes]:
            if c == 1:
                copied.set()
                assert go.wait(30)
            return copy(c)

        node.outer.put(0, 0, bytes(len(right)))  # which the run's digests tell
        node.outer.copy = slowly  # type: ignore[method-assign]
        node.disk.settled(0, 0, alone=True)
        assert await asyncio.to_thread(copied.wait, 30)
        node.disk.doubt()
        node.outer.put(0, 0, right)
        node.outer.settle()
        node.disk.settled(0, 0)
        go.set()
        await node.disk.quiet()
        again = Node(tmp_path)
        assert again.disk.restore() == 0 and again.state() == node.state()

    run(body())


def test_a_machine_without_memory_for_a_snapshot_says_so_and_takes_it_later(tmp_path: Path) -> None:
    async def body() -> None:
        node = Node(tmp_path)
        await node.initialise()
        copy = node.outer.copy

        def fails(c: int) -> Any:
            raise MemoryError("Unable to allocate 16 MiB")

        node.outer.copy = fails  # type: ignore[method-assign]
        node.disk.doubt()
        node.disk.settled(0, 0)
        await node.disk.quiet()
        assert "Unable to allocate" in node.disk.trouble
        node.outer.copy = copy  # type: ignore[method-assign]
        node.disk.settled(0, 7)
        await node.disk.quiet()
        assert not node.disk.trouble and [s.tokens for s in node.disk._snapshots] == [7]

    run(body())


def test_a_snapshot_loads_with_safetensors_alone(tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    async def body() -> None:
        node = Node(tmp_path)
        await node.initialise()
        await node.commit(1, 2, 3)
        loaded = load_file(node.disk._snapshots[0].path)
        vectors = node.outer.vectors
        assert np.array_equal(loaded["anchor.a"], vectors.anchor[:3000].reshape(50, 60))
        assert np.array_equal(loaded["momentum.b"], vectors.momentum[3000:])
        assert loaded.keys() == {"anchor.a", "anchor.b", "momentum.a", "momentum.b"}

    run(body())


def test_a_write_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = SealedLog(tmp_path, RUN, CHUNKS, lambda _: PLENTY)

    def fails(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(OSError, match="No space"):
        log.write(1, *sealed(1))
    assert not list(tmp_path.iterdir()) and 1 not in log
    with pytest.raises(TornSnapshot):
        snapshots.write(tmp_path, RUN, LAYOUT, CHUNKS, 0, torn, lambda _: PLENTY)
    assert not list(tmp_path.iterdir())


def test_who_is_killed_while_it_fetches_a_newer_state_keeps_what_has_come_or_goes_back(tmp_path: Path) -> None:
    async def body() -> None:
        donor, node = Node(tmp_path / "donor"), Node(tmp_path / "node")
        await donor.initialise()
        await donor.commit(*range(1, 6))
        await node.initialise()
        await node.commit(1, 2)
        old = node.state()
        for c in range(2):
            node.outer.put(c, 5, donor.outer.copy(c)[1].tobytes())
        again = Node(tmp_path / "node", node.outer.vectors)
        assert again.disk.restore(whole=False) == -1
        assert again.outer.at[:2] == [5, 5] and set(again.outer.at[2:]) == {2}
        for c in range(2, CHUNKS.count):
            again.outer.put(c, 5, donor.outer.copy(c)[1].tobytes())
        assert again.outer.round == 5 and again.state() == donor.state()
        third = Node(tmp_path / "node", node.outer.vectors)
        assert third.disk.restore(whole=False) == 5 and third.state() == donor.state()
        assert third.disk.restore() == 2 and third.state() == old, "nobody has the newer one any more"

    run(body())


def torn(c: int) -> Any:
    if c:
        raise TornSnapshot("the node stops")
    return 1, np.zeros(2 * CHUNKS.size(c), np.float32), bytes(16)
