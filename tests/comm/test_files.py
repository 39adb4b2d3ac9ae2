"""A file is under its name whole and on the disk, or it is not there."""

import errno
import os
from pathlib import Path

import pytest

from atoll.comm.files import DiskFull, atomic_write, publish, write_all


def write(path: Path, data: bytes, size: int | None, **options: int) -> None:
    with atomic_write(path, size, lambda _: 1000, **options) as file:
        write_all(file, [memoryview(data)], 0)


@pytest.mark.parametrize("size", [5, None])
def test_a_file_has_what_was_written_and_its_owners_mode(tmp_path: Path, size: int | None) -> None:
    write(path := tmp_path / "file", b"first", size)
    write(path, b"again", size)
    assert path.read_bytes() == b"again" and path.stat().st_mode & 0o777 == 0o600
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("size", [5, None])
def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path, size: int | None) -> None:
    write(path := tmp_path / "file", b"first", size)
    with pytest.raises(KeyError), atomic_write(path, size) as file:
        write_all(file, [memoryview(b"ag")], 0)
        raise KeyError
    assert path.read_bytes() == b"first" and [p.name for p in tmp_path.iterdir()] == ["file"]


def test_what_a_killed_process_left_is_replaced_with_its_mode(tmp_path: Path) -> None:
    (left := tmp_path / "key.new").write_bytes(b"half, and longer than the whole")
    left.chmod(0o666)
    write(path := tmp_path / "key", b"whole", None)
    assert path.read_bytes() == b"whole" and path.stat().st_mode & 0o777 == 0o600


def test_more_than_there_is_room_for_is_refused_before_it_is_written(tmp_path: Path) -> None:
    with pytest.raises(DiskFull, match="MB for it"):
        write(tmp_path / "file", b"", 1001)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("number", "told"), [(errno.EINVAL, False), (errno.EIO, True)])
def test_a_share_that_syncs_no_folder_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, told: bool
) -> None:
    def fails(_: int) -> None:
        raise OSError(number, "it is said")

    (new := tmp_path / "file.new").write_bytes(b"whole")
    monkeypatch.setattr(os, "fsync", fails)
    if told:
        with pytest.raises(OSError, match="it is said"):
            publish(new, tmp_path / "file")
    else:
        publish(new, tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == b"whole"
