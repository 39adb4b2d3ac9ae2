"""A disk that is full, limited, or cannot be used: it is said, and nothing else is lost."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpointed_node import CHUNKS, LAYOUT, PLENTY, RUN, WHOLE, Node, run, sealed

from atoll.comm.ids import Round
from atoll.comm.incidents import IncidentKind
from atoll.node.checkpoint import policy, snapshots
from atoll.node.checkpoint.checkpoint_files import CheckpointLocation
from atoll.node.checkpoint.checkpointer import Checkpointer
from atoll.node.checkpoint.sealed_log import SealedLog
from atoll.node.checkpoint.snapshots import TornSnapshot


def test_a_full_disk_is_said_and_costs_nothing_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> None:
        have = [PLENTY]
        node = Node(tmp_path, every=100, room=lambda _: have[0])
        await node.initialise()
        await node.commit(1)
        have[0] = 100
        await node.commit(2, 3, 4)
        assert node.disk.incidents == (IncidentKind.DISK_FULL,)
        assert "MB for it" in node.disk.trouble and caplog.text.count("not kept on disk") == 1
        assert len(node.queued) <= policy.QUEUED_ROUNDS_LIMIT and node.disk.durable_round == 1
        node.disk.release_buffers()
        assert not node.queued and len(node.free_buffers) == 4 * CHUNKS.count
        have[0] = PLENTY
        await node.commit(5)
        assert not node.disk.incidents
        assert not node.disk.trouble and node.disk.durable_round == 5, "a snapshot closes the gap"
        again = Node(tmp_path)
        assert again.disk.restore() == 5 and again.state() == node.state()

    run(body())


def test_a_node_without_a_disk_keeps_the_last_round_until_the_next_reduce(tmp_path: Path) -> None:
    async def body() -> None:
        node = Node(tmp_path)
        node.disk = Checkpointer(node.outer, node.free_buffers.append, None)
        await node.initialise()
        await node.commit(1, 2)
        assert await node.disk.sealed(Round(1), 0) is None
        assert await node.disk.sealed(Round(2), 0) is not None
        await node.disk.wait_durable(2)  # at once: nothing is being written
        node.disk.release_buffers()
        assert len(node.free_buffers) == 2 * CHUNKS.count and node.disk.restore() == -1

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
        node.disk = Checkpointer(node.outer, node.free_buffers.append, CheckpointLocation(folder, RUN, LAYOUT, 3))
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


def torn(c: int) -> Any:
    if c:
        raise TornSnapshot("the node stops")
    return 1, np.zeros(2 * CHUNKS.size(c), np.float32), bytes(16)
