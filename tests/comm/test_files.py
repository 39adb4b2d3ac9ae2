"""A file is under its name whole and on the disk, or it is not there."""

import errno
import fcntl
import os
import subprocess
import sys
from contextlib import ExitStack
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


def test_two_that_write_the_same_path_each_publish_a_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "manifest"
    with atomic_write(path, None) as first:
        write_all(first, [memoryview(b"first")], 0)
        with ExitStack() as later:
            second = later.enter_context(atomic_write(path, None))
            write_all(second, [memoryview(b"sec")], 0)
            third = later.enter_context(atomic_write(path, None))
            write_all(third, [memoryview(b"third")], 0)
            later.pop_all().close()
            assert path.read_bytes() == b"sec"
    assert path.read_bytes() == b"first" and [p.name for p in tmp_path.iterdir()] == ["manifest"]


@pytest.mark.parametrize("name", ["key", "key[1]"])
def test_what_a_killed_process_left_is_removed_by_the_next_that_writes_the_path(tmp_path: Path, name: str) -> None:
    script = (
        "import os, sys; from pathlib import Path; from atoll.comm.files import atomic_write, write_all\n"
        "with atomic_write(Path(sys.argv[1]), None, mode=0o644) as file:\n"
        "    write_all(file, [memoryview(b'half, and longer than the whole')], 0); os._exit(0)"
    )
    path, other = tmp_path / name, tmp_path / f"{name}.json"
    for written in (path, path, other):
        subprocess.run([sys.executable, "-P", "-c", script, written], check=True)
    write(path, b"whole", None)
    assert path.read_bytes() == b"whole" and path.stat().st_mode & 0o777 == 0o600
    (left,) = {p.name for p in tmp_path.iterdir()} - {name}
    assert left.startswith(other.name)


def test_a_file_whose_name_looks_alike_is_its_owners(tmp_path: Path) -> None:
    (left := tmp_path / "key.0123abcd.new").touch()
    (mine := tmp_path / "key.original.new").touch()
    write(tmp_path / "key", b"whole", None)
    assert mine.exists() and not left.exists()


def test_a_writer_whose_file_another_took_for_a_dead_ones_begins_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    removed, lock = list[Path](), fcntl.flock

    def too_late(file: int, how: int) -> None:
        if not removed:
            removed.extend(tmp_path.iterdir())
            removed[0].unlink()
        lock(file, how)

    monkeypatch.setattr(fcntl, "flock", too_late)
    write(path := tmp_path / "key", b"whole", None)
    assert path.read_bytes() == b"whole" and len(removed) == 1
    assert [p.name for p in tmp_path.iterdir()] == ["key"]


def test_a_writer_whose_file_another_is_about_to_remove_begins_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other has locked it for that, and removes it only while this one writes."""
    taken, lock = list[tuple[Path, int]](), fcntl.flock

    def too_late(file: int, how: int) -> None:
        if not taken:
            (new,) = tmp_path.iterdir()
            taken.append((new, os.open(new, os.O_RDWR)))
            lock(taken[0][1], fcntl.LOCK_EX)
        lock(file, how)

    monkeypatch.setattr(fcntl, "flock", too_late)
    with atomic_write(path := tmp_path / "key", None) as file:
        taken[0][0].unlink()
        write_all(file, [memoryview(b"whole")], 0)
    os.close(taken[0][1])
    assert path.read_bytes() == b"whole" and [p.name for p in tmp_path.iterdir()] == ["key"]


def test_on_a_share_that_locks_no_files_they_are_written_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: int) -> None:
        raise OSError(errno.ENOLCK, "no locks here")

    monkeypatch.setattr(fcntl, "flock", fails)
    (left := tmp_path / "key.01234567.new").write_bytes(b"half")
    write(path := tmp_path / "key", b"whole", None)
    assert path.read_bytes() == b"whole"
    assert left.exists(), "somebody may be writing it"


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
