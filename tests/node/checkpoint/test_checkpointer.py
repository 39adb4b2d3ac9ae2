"""What a node has on its disk brings its state back, bit for bit, whatever happened while it was written."""

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from formats import to_snapshot_1
from numpy.typing import NDArray

from atoll.comm.allreduce.sealing import mean_of
from atoll.comm.byte_view import U8
from atoll.comm.chunks import Chunks
from atoll.comm.codecs.factory import make_codec
from atoll.comm.config.run import CodecName
from atoll.comm.digest import digest
from atoll.comm.ids import Round
from atoll.node.checkpoint import checkpoint_files, snapshots
from atoll.node.checkpoint.checkpoint_files import CheckpointLocation
from atoll.node.checkpoint.checkpointer import Checkpointer
from atoll.node.checkpoint.policy import QUEUED_ROUNDS_LIMIT
from atoll.node.checkpoint.sealed_log import SealedLog
from atoll.node.checkpoint.snapshots import Snapshot, TornSnapshot
from atoll.node.outer.repair import ChunkCondition, repair_chunk
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
WHOLE = snapshots.snapshot_size(RUN, LAYOUT, CHUNKS)


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

    @property
    def snapshots(self) -> list[Snapshot]:
        files = self.disk._files
        return [] if files is None else files.snapshots.newest_first

    @property
    def logged(self) -> tuple[int, ...]:
        return self.disk._log_writer.logged

    @property
    def queued(self) -> tuple[int, ...]:
        return self.disk._log_writer.queued

    @property
    def writing(self) -> "asyncio.Task[None] | None":
        return self.disk._log_writer.task

    @property
    def taking(self) -> "asyncio.Task[None] | None":
        return self.disk._snapshot_writer.task if self.disk._snapshot_writer is not None else None

    def begin(self) -> None:
        self.outer.vectors.anchor[:] = np.random.default_rng(0).standard_normal(NUMEL, dtype=np.float32)
        self.outer.initialise()
        self.disk.finalized(0, 0, sole_copy=True)

    async def initialise(self) -> None:
        self.begin()
        await self.disk.wait_idle()

    def apply(self, round_: int) -> None:
        for c, payload in enumerate(sealed(round_)[0]):
            self.outer.apply(c, payload)
        self.disk.record_round(round_, *sealed(round_))

    async def commit(self, *rounds: int) -> None:
        for round_ in rounds:
            self.apply(round_)
            self.outer.finalize()
            self.disk.finalized(round_, 10 * round_)
            await self.disk.wait_idle()

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
        assert again.disk.durable_round == 5 and again.disk.restore() == 5
        assert again.state() == node.state() and again.outer.finalize() == node.outer.finalize()
        assert [s.first for s in again.snapshots] == [3, 0], "one every three rounds, the last two survive"
        assert again.snapshots[0].tokens == 30

    run(body())


def test_buffers_are_given_back_when_the_file_is_there_and_peers_are_served_from_it(tmp_path: Path) -> None:
    async def body() -> None:
        node = Node(tmp_path)
        await node.initialise()
        node.apply(1)
        payloads = sealed(1)[0]
        assert not node.given
        assert bytes(await node.disk.sealed(Round(1), 2) or b"") == payloads[2].tobytes()
        await node.disk.wait_idle()
        assert len(node.given) == CHUNKS.count and not node.queued
        assert bytes(await node.disk.sealed(Round(1), 2) or b"") == payloads[2].tobytes()
        assert await node.disk.sealed(Round(2), 2) is None
        assert await node.disk.sealed(Round(1), CHUNKS.count) is None

    run(body())


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
            return node.outer.copy_chunk(c)

        torn_ = snapshots.write(node.folder, RUN, LAYOUT, CHUNKS, 20, copying, lambda _: PLENTY)
        assert (torn_.first, torn_.last) == (2, 3)
        again = Node(tmp_path)
        assert again.disk.durable_round == 2
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
        flip(damaged := node.snapshots[0].path, place)
        again = Node(tmp_path)
        assert again.disk.restore() == 4 and again.state() == node.state()
        assert again.disk.newly_damaged() == [damaged.name] and not again.disk.newly_damaged()
        again.disk.finalized(4, 0)  # before it is due
        await again.disk.wait_idle()
        third = Node(tmp_path)
        assert len(third.snapshots) == 2 and third.disk.restore() == 4 and not third.disk.newly_damaged()

    run(body())


def test_a_snapshot_of_another_format_is_not_damaged_but_says_which_version_to_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def body() -> None:
        node = Node(tmp_path)
        await node.initialise()
        to_snapshot_1(node.snapshots[0].path)
        again = Node(tmp_path)
        assert again.disk.restore() == -1 and not again.disk.newly_damaged()

    run(body())
    (said,) = [r.getMessage() for r in caplog.records if "snapshot-" in r.getMessage()]
    assert "changed on the disk" not in said
    assert "'atoll snapshot 1'" in said and f"{snapshots.FORMAT!r}" in said
    assert "start the version of atoll that wrote it" in said


def test_a_damaged_round_ends_the_tail_there(tmp_path: Path) -> None:
    async def body() -> None:
        node = Node(tmp_path, every=100)
        await node.initialise()
        await node.commit(1, 2)
        before = node.state()
        await node.commit(3)
        flip(node.folder / "sealed-000000000003", -1)
        again = Node(tmp_path)
        assert again.disk.durable_round == 3
        assert again.disk.restore() == 2 and again.state() == before
        assert again.disk.newly_damaged() == ["sealed-000000000003"] and again.disk.durable_round == 2
        flip(node.folder / "sealed-000000000001", 60)
        third = Node(tmp_path)
        assert third.disk.restore() == 0, "its table is damaged: the file is none"
        assert third.disk.newly_damaged() == ["sealed-000000000001"]

    run(body())


def test_a_sound_snapshot_outlives_a_damaged_one_where_there_is_no_room_for_both(tmp_path: Path) -> None:
    async def body() -> None:
        node = Node(tmp_path)
        await node.initialise()
        await node.commit(*range(1, 5))
        flip(node.snapshots[0].path, -3)
        again = Node(tmp_path, limit=2.9 * WHOLE)
        assert again.disk.restore() == 4 and again.disk.newly_damaged()

        def power_fails(c: int) -> Any:
            raise TornSnapshot("as if in the middle of it")

        again.outer.copy_chunk = power_fails  # type: ignore[method-assign]
        again.disk.finalized(4, 0)
        await again.disk.wait_idle()
        third = Node(tmp_path)
        assert third.disk.restore() == 4 and third.state() == node.state()

    run(body())


def test_a_snapshot_of_which_the_header_is_damaged_makes_room_for_the_next(tmp_path: Path) -> None:
    async def body() -> None:
        node = Node(tmp_path)
        await node.initialise()
        await node.commit(*range(1, 5))
        flip(node.snapshots[0].path, 40)
        size = sum(path.stat().st_size for path in node.folder.iterdir())

        def room(folder: Path) -> int:
            return size + WHOLE // 2 - sum(path.stat().st_size for path in folder.iterdir())

        again = Node(tmp_path, room=room)
        assert again.disk.restore() == 4
        again.disk.finalized(4, 0)
        await again.disk.wait_idle()
        assert not again.disk.trouble and [s.first for s in again.snapshots] == [4, 0]

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
        assert not other.snapshots and not list(node.folder.glob("*.new"))
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
        assert not again.disk.newly_damaged() and not list(node.folder.glob("*.new"))

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
        assert again.disk.durable_round == 2

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
        assert again.disk.trouble.startswith(checkpoint_files.CANNOT_REMOVE) and again.disk.durable_round == 1
        again.disk.drop_rounds_after(1)
        assert again.logged == (1,)

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
        assert len(node.queued) <= QUEUED_ROUNDS_LIMIT and node.disk.durable_round == 1
        node.disk.release_buffers()
        assert not node.queued and len(node.given) == 4 * CHUNKS.count
        have[0] = PLENTY
        await node.commit(5)
        assert not node.disk.trouble and node.disk.durable_round == 5, "a snapshot closes the gap"
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
        await node.disk.wait_durable(2)  # at once: nothing is being written
        node.disk.release_buffers()
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
            assert node.disk.disk_bytes <= 2.6 * WHOLE
            assert sum(p.stat().st_size for p in node.folder.iterdir()) == node.disk.disk_bytes
            assert node.disk.durable_round == round_
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
        assert node.disk.disk_bytes < 3.2 * WHOLE
        assert len(node.logged) >= 7

    run(body())


def test_a_node_that_does_not_keep_copies_takes_no_snapshot(tmp_path: Path) -> None:
    async def body() -> None:
        node = Node(tmp_path)
        node.disk.take_snapshots(False)
        await node.initialise()
        await node.commit(1, 2)
        await node.disk.wait_durable(2)
        assert not node.snapshots
        assert await node.disk.sealed(Round(1), 0) is not None

    run(body())


def test_a_contribution_waits_for_the_disk_to_have_the_last_round(tmp_path: Path) -> None:
    async def body() -> None:
        node = Node(tmp_path, every=100)
        node.begin()
        await node.disk.wait_durable(0)
        assert node.disk.durable_round == 0
        node.apply(1)
        await node.disk.wait_durable(1)
        assert node.disk.durable_round == 1

    run(body())


def test_a_contribution_waits_for_the_disk_to_have_a_state_that_was_fetched(tmp_path: Path) -> None:
    async def body() -> None:
        (tmp_path / "other").mkdir()
        node, other = Node(tmp_path, every=100), Node(tmp_path / "other", every=100)
        await node.initialise()
        await other.initialise()
        await other.commit(1, 2)
        for c in range(CHUNKS.count):
            node.outer.replace_chunk(c, 2, other.outer.copy_chunk(c)[1].tobytes())
        node.outer.finalize()
        node.disk.finalized(2, 20)
        await node.disk.wait_durable(2)
        assert node.disk.durable_round == 2
        again = Node(tmp_path)
        assert again.disk.restore() == 2 and again.state() == other.state()
        await other.disk.wait_idle()

    run(body())


def test_rounds_whose_sealed_bytes_were_fetched_need_no_snapshot(tmp_path: Path) -> None:
    async def body() -> None:
        node = Node(tmp_path, every=100)
        await node.initialise()
        payloads, digests = sealed(1)
        fetched = [np.frombuffer(payload.tobytes(), np.uint8) for payload in payloads]
        for c, payload in enumerate(payloads):
            node.outer.apply(c, payload)
        node.disk.record_round(1, fetched, digests)
        node.outer.finalize()
        node.disk.finalized(1, 10)
        await node.disk.wait_durable(1)
        assert node.disk.durable_round == 1 and [s.first for s in node.snapshots] == [0]
        assert not node.given, "what is nobody's buffer is not used for another chunk"

    run(body())


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


def test_after_void_rounds_the_same_state_has_another_number(tmp_path: Path) -> None:
    async def body() -> None:
        node = Node(tmp_path)
        await node.initialise()
        await node.commit(1)
        node.outer.renumber(4)
        node.disk.drop_rounds_after(1)
        node.outer.finalize()
        node.disk.finalized(4, 10, sole_copy=True)
        await node.disk.wait_durable(4)
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
        node.outer.finalize()
        right = node.state()
        getattr(node.outer.vectors, vector).view(np.uint32)[1500] ^= 1 << 30
        assert [repair_chunk(node.outer, node.disk, c) for c in range(CHUNKS.count)].count(
            ChunkCondition.REPAIRED
        ) == 1
        assert node.state() == right and node.outer.round == 3
        assert node.outer.final_digests(Round(3)) is not None, "peers are served again"
        assert repair_chunk(node.outer, node.disk, 1) is ChunkCondition.INTACT
        await node.disk.wait_idle()

    run(body())


def test_what_the_disk_cannot_mend_is_left_for_the_runs_digests_to_find(tmp_path: Path) -> None:
    async def body() -> None:
        node = Node(tmp_path)
        await node.initialise()
        await node.commit(1)
        flip(node.snapshots[0].path, -4 * NUMEL)
        right = node.outer.finalize()
        damaged = [c for c in range(CHUNKS.count) if node.disk.chunk_history(c, 1) is None]
        node.outer.vectors.anchor[CHUNKS.span(damaged[0])] += 1
        assert repair_chunk(node.outer, node.disk, damaged[0]) is ChunkCondition.DAMAGED
        assert node.outer.round == 1 and node.outer.finalize() != right

    run(body())


def test_sealed_bytes_that_changed_in_memory_mend_nothing(tmp_path: Path) -> None:
    async def body() -> None:
        node = Node(tmp_path)
        await node.initialise()
        payloads, sums = sealed(1)
        for c, payload in enumerate(payloads):
            node.outer.apply(c, payload)
        node.disk.record_round(1, payloads, sums)  # they wait for the disk
        node.outer.finalize()
        payloads[1][:64] = 0xFF
        node.outer.vectors.anchor[CHUNKS.span(1)] += 1
        assert repair_chunk(node.outer, node.disk, 1) is ChunkCondition.DAMAGED and node.outer.round == 1
        await node.disk.wait_idle()

    run(body())


def test_a_flipped_bit_in_memory_is_not_written(tmp_path: Path) -> None:
    async def body() -> None:
        node = Node(tmp_path)
        await node.initialise()
        await node.commit(1)
        node.outer.vectors.anchor[1500] += 1
        node.disk.distrust()
        node.disk.finalized(1, 0)
        await node.disk.wait_idle()
        assert "chunk 1" in node.disk.trouble and len(node.snapshots) == 1

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


def test_a_machine_without_memory_for_a_snapshot_says_so_and_takes_it_later(tmp_path: Path) -> None:
    async def body() -> None:
        node = Node(tmp_path)
        await node.initialise()
        copy = node.outer.copy_chunk

        def fails(c: int) -> Any:
            raise MemoryError("Unable to allocate 16 MiB")

        node.outer.copy_chunk = fails  # type: ignore[method-assign]
        node.disk.distrust()
        node.disk.finalized(0, 0)
        await node.disk.wait_idle()
        assert "Unable to allocate" in node.disk.trouble
        node.outer.copy_chunk = copy  # type: ignore[method-assign]
        node.disk.finalized(0, 7)
        await node.disk.wait_idle()
        assert not node.disk.trouble and [s.tokens for s in node.snapshots] == [7]

    run(body())


def test_a_snapshot_loads_with_safetensors_alone(tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    async def body() -> None:
        node = Node(tmp_path)
        await node.initialise()
        await node.commit(1, 2, 3)
        loaded = load_file(node.snapshots[0].path)
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
            node.outer.replace_chunk(c, 5, donor.outer.copy_chunk(c)[1].tobytes())
        again = Node(tmp_path / "node", node.outer.vectors)
        assert again.disk.restore(keep_newer=True) == -1
        assert again.outer.chunk_rounds[:2] == [5, 5] and set(again.outer.chunk_rounds[2:]) == {2}
        for c in range(2, CHUNKS.count):
            again.outer.replace_chunk(c, 5, donor.outer.copy_chunk(c)[1].tobytes())
        assert again.outer.round == 5 and again.state() == donor.state()
        third = Node(tmp_path / "node", node.outer.vectors)
        assert third.disk.restore(keep_newer=True) == 5 and third.state() == donor.state()
        assert third.disk.restore() == 2 and third.state() == old, "nobody has the newer one any more"

    run(body())


def torn(c: int) -> Any:
    if c:
        raise TornSnapshot("the node stops")
    return 1, np.zeros(2 * CHUNKS.size(c), np.float32), bytes(16)
