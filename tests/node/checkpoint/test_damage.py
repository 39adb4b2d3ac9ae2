"""Damaged, torn and unfinished files, and flipped bits in memory: found, made up for from what is sound, said."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpointed_node import CHUNKS, LAYOUT, NUMEL, PLENTY, RUN, WHOLE, Node, flip, run, sealed
from formats import to_snapshot_1

from atoll.comm.ids import Round
from atoll.node.checkpoint import checkpoint_files, snapshots
from atoll.node.checkpoint.snapshots import TornSnapshot
from atoll.node.outer.repair import ChunkCondition, repair_chunk


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
