"""The shared flat vectors: where they are put, and that dead daemons' are cleared."""

import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from atoll.comm.errors import ResourceError
from atoll.node.vectors import Vectors, clear_stale


def test_they_are_zeroed_files_of_the_right_size_and_go_when_closed(tmp_path: Path) -> None:
    made = Vectors.create(1000, tmp_path / "state", tmp_path / "shm")
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
    made = Vectors.create(1_000_000, tmp_path / "state", tmp_path / "shm")
    assert made.folder.parent == tmp_path / "state" / "vectors"
    made.close()


def test_no_room_anywhere_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ResourceError, match="free some space"):
        Vectors.create(1 << 50, tmp_path / "state", tmp_path / "shm")


def test_only_what_a_dead_daemon_left_is_cleared(tmp_path: Path) -> None:
    living = Vectors.create(10, tmp_path / "state", tmp_path / "shm")
    dead = tmp_path / "shm" / "atoll-dead"
    dead.mkdir()
    (dead / "lock").touch()
    clear_stale(tmp_path / "state", tmp_path / "shm")
    assert living.folder.exists() and not dead.exists()
    living.close()
