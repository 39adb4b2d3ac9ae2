"""The shared flat vectors: where they are put, and who takes them over."""

import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from disks import full_disk

from atoll.comm.errors import ResourceError
from atoll.node.outer.shared_vectors import SharedVectors
from atoll.node.outer.vector_folders import clear_stale


def test_they_are_zeroed_files_of_the_right_size_and_go_when_closed(tmp_path: Path) -> None:
    made = SharedVectors.create(1000, tmp_path / "state", tmp_path / "shm")
    assert made.folder.parent == tmp_path / "shm"
    assert os.path.getsize(made.path("anchor")) == 4000
    assert not np.any(made.momentum)
    made.close()
    assert not made.folder.exists()


def test_the_state_directory_takes_them_where_shared_memory_is_too_small(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = shutil.disk_usage
    small = SimpleNamespace(free=1 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda p: small if Path(p).name == "shm" else real(p))
    made = SharedVectors.create(1_000_000, tmp_path / "state", tmp_path / "shm")
    assert made.folder.parent == tmp_path / "state" / "vectors" and made.copies() == ""
    made.close()


def test_what_a_trainer_keeps_in_memory_is_taken_over_or_goes_with_the_vectors(tmp_path: Path) -> None:
    state, shm = tmp_path / "state", tmp_path / "shm"
    killed = SharedVectors.create(1000, state, shm, "this run")
    copy = Path(killed.copies(), "round-000000000001")
    copy.mkdir()
    assert copy.is_relative_to(shm)
    os.close(killed.lock)  # as the kernel does
    second = SharedVectors.create(1000, state, shm, "this run")
    assert Path(second.copies()) == copy.parent and copy.is_dir()
    os.close(second.lock)
    other = SharedVectors.create(1000, state, shm, "another run")
    assert not copy.exists() and list(shm.iterdir()) == [other.folder]
    Path(other.copies(), "round-000000000001").mkdir()
    other.close()
    assert not list(shm.iterdir())


def test_what_an_orphan_still_writes_is_removed_by_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, shm = tmp_path / "state", tmp_path / "shm"
    ended = SharedVectors.create(1000, state, shm, "this run")
    copies, real = Path(ended.copies()), shutil.rmtree

    def writing(folder: Path, ignore_errors: bool) -> None:
        real(folder, ignore_errors)
        if not (copies / "late").exists():
            copies.mkdir(parents=True)
            (copies / "late").write_bytes(b"of the orphan")

    monkeypatch.setattr(shutil, "rmtree", writing)
    ended.close()
    assert (copies / "late").exists()
    monkeypatch.undo()
    second = SharedVectors.create(1000, state, shm, "this run")
    assert list(shm.iterdir()) == [second.folder]
    second.close()


def test_no_room_anywhere_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ResourceError, match="free some space"):
        SharedVectors.create(1 << 50, tmp_path / "state", tmp_path / "shm")


def test_what_turns_out_to_have_no_room_leaves_nothing_behind(tmp_path: Path) -> None:
    before = os.listdir("/proc/self/fd")
    with full_disk(), pytest.raises(ResourceError, match="free some space"):
        SharedVectors.create(1000, tmp_path / "state", tmp_path / "shm")
    assert not list((tmp_path / "shm").iterdir()) and not list((tmp_path / "state" / "vectors").iterdir())
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_what_a_killed_daemon_left_is_taken_over_by_the_next_one_of_the_same_run_and_model(tmp_path: Path) -> None:
    places = tmp_path / "state", tmp_path / "shm"
    dead = SharedVectors.create(10, *places, "this run")
    dead.momentum[3], dead.counters("rounds", 2)[1] = 7.0, 5
    os.close(dead.lock)
    clear_stale(*places)
    taken = SharedVectors.create(10, *places, "this run")
    assert taken.folder == dead.folder and taken.momentum[3] == 7.0 and list(taken.counters("rounds", 2)) == [0, 5]
    second = SharedVectors.create(10, *places, "this run")
    assert second.folder != taken.folder, "those are in use"
    for vectors in (taken, second):
        os.close(vectors.lock)
    other = SharedVectors.create(10, *places, "another run")
    assert [folder for folder in (tmp_path / "shm").iterdir()] == [other.folder] and not other.momentum.any()
    other.close()
