"""A folder is under its name whole and on the disk, or it is not there, or it is what it was."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from atoll.comm import folders
from atoll.comm.files import DiskFull
from atoll.comm.folders import atomic_folder, remove_folder


def write(path: Path, **files: str) -> None:
    with atomic_folder(path, 0) as new:
        for name, text in files.items():
            assert not (path / name).exists() or (path / name).read_text() != text
            (new / name).write_text(text)


def contents(path: Path) -> dict[str, str]:
    return {file.name: file.read_text() for file in path.iterdir()}


@pytest.mark.parametrize("exchange", [True, False])
def test_a_folder_appears_when_it_is_whole_and_takes_the_place_of_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchange: bool
) -> None:
    if not exchange:
        monkeypatch.setattr(folders, "_exchange", lambda one, other: False)
    (path := tmp_path / "model").mkdir()  # empty
    write(path, a="1", b="2")
    write(path, a="3")
    assert contents(path) == {"a": "3"} and os.listdir(tmp_path) == ["model"]


def test_this_system_lets_two_folders_change_places_at_once(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / "is").write_text(name)
    assert folders._exchange(tmp_path / "a", tmp_path / "b")
    assert contents(tmp_path / "a") == {"is": "b"} and contents(tmp_path / "b") == {"is": "a"}


def test_one_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    write(path := tmp_path / "model", a="1")
    with pytest.raises(KeyError), atomic_folder(path, 0) as new:
        (new / "a").write_text("half")
        raise KeyError
    with pytest.raises(DiskFull, match="model takes 2.0 MB, the disk has 1.0 MB"):
        with atomic_folder(path, 2_000_000, lambda _: 1_000_000):
            raise AssertionError("it does not fit")
    assert contents(path) == {"a": "1"} and os.listdir(tmp_path) == ["model"]


def test_what_a_killed_process_left_is_removed_and_what_another_writes_is_not(tmp_path: Path) -> None:
    path = tmp_path / "model"
    script = (
        "import os, sys; from pathlib import Path; from atoll.comm.folders import atomic_folder\n"
        "with atomic_folder(Path(sys.argv[1]), 0) as new:\n"
        "    (new / 'a').write_text('half'); os._exit(0)"
    )
    subprocess.run([sys.executable, "-P", "-c", script, path], check=True, timeout=60)
    [left] = tmp_path.iterdir()
    with atomic_folder(path, 0) as one:
        assert not left.exists()
        with atomic_folder(path, 0) as other:
            assert one.is_dir() and other != one
            (other / "a").write_text("other")
        (one / "a").write_text("one")
    assert contents(path) == {"a": "one"} and os.listdir(tmp_path) == ["model"]


def test_a_removed_folder_is_gone_with_all_that_is_in_it(tmp_path: Path) -> None:
    write(path := tmp_path / "model", a="1")
    remove_folder(path)
    assert not list(tmp_path.iterdir())
