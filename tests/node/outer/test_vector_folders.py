"""What dead daemons leave in shared memory: it waits for theirs, and is nobody else's to remove."""

import fcntl
import os
import shutil
import time
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from atoll.node.outer.shared_vectors import SharedVectors
from atoll.node.outer.vector_folders import (
    KEPT_SECONDS,
    VectorFolder,
    bytes_in_memory,
    clear_others,
    clear_own,
    clear_stale,
    for_room,
    stale,
)

NOW = 1e9
RUN = "this run"


@dataclass(frozen=True)
class Machine:
    """Nodes of one machine, each with a state directory, and the memory that they share."""

    folder: Path

    @property
    def shm(self) -> Path:
        return self.folder / "shm"

    def state_dir(self, name: str) -> Path:
        """Of a node that has joined."""
        (folder := self.folder / name).mkdir(exist_ok=True)
        (folder / "session").touch()
        return folder

    def starts(self, name: str, numel: int = 10) -> SharedVectors:
        """What a daemon does with its state directory, up to its trainer's first hello."""
        clear_stale(self.state_dir(name), self.shm)
        return SharedVectors.create(numel, self.state_dir(name), self.shm, RUN)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def die(vectors: SharedVectors, seconds_ago: float = 0.0) -> None:
    """As a process that is killed, whose lock the kernel takes back."""
    os.utime(vectors.lock, (time.time() - seconds_ago,) * 2)
    os.close(vectors.lock)


def test_of_two_nodes_that_are_killed_together_each_finds_its_state_again(machine: Machine) -> None:
    ada, bo = machine.starts("ada"), machine.starts("bo")
    ada.momentum[:], bo.momentum[:] = 3.0, 4.0
    die(ada)
    die(bo)
    first, second = machine.starts("ada"), machine.starts("bo")
    assert (first.folder, second.folder) == (ada.folder, bo.folder)
    assert first.momentum[0] == 3.0 and second.momentum[0] == 4.0
    first.close()
    second.close()
    assert not list(machine.shm.iterdir())


def test_what_nobody_will_take_over_goes(machine: Machine) -> None:
    left, late = machine.starts("ada"), machine.starts("bo")
    die(left)
    die(late, KEPT_SECONDS + 60)
    (machine.state_dir("ada") / "session").unlink()
    third = machine.starts("eve")
    assert list(machine.shm.iterdir()) == [third.folder]
    third.close()


def test_vectors_are_as_old_as_the_latest_work_on_them(machine: Machine) -> None:
    ada = machine.starts("ada")
    os.utime(ada.lock, (0.0, 0.0))
    ada.say_at_work()
    os.close(ada.lock)
    bo = machine.starts("bo")
    assert ada.folder.exists()
    bo.close()
    assert clear_own(machine.state_dir("ada"), machine.shm)


def folder(name: str, **changes: Any) -> VectorFolder:
    return replace(VectorFolder(Path(name), Path("/ada"), NOW - 60, True, 100), **changes)


def test_of_one_state_directory_the_newest_waits() -> None:
    old, new, other = folder("old"), folder("new", at_work=NOW - 30), folder("other", state_dir=Path("/bo"))
    assert stale([old, new, other], NOW) == [old]


@pytest.mark.parametrize("gone", [{"state_dir": None}, {"has_session": False}])
def test_what_is_nobodys_waits_for_nobody(gone: dict[str, Any]) -> None:
    assert stale([found := folder("a", **gone)], NOW) == [found]


@pytest.mark.parametrize("at_work", [NOW - KEPT_SECONDS, NOW + KEPT_SECONDS])
def test_nothing_waits_for_longer_than_a_week_whatever_the_clock_was(at_work: float) -> None:
    assert stale([found := folder("a", at_work=at_work)], NOW) == [found]
    assert stale([folder("a", at_work=at_work + (1 if at_work < NOW else -1))], NOW) == []


def test_for_want_of_room_those_go_that_have_waited_longest_and_no_more_of_them() -> None:
    old, middle, new = (folder(str(age), at_work=NOW - age) for age in (30, 20, 10))
    assert for_room([new, old, middle], 100) == [old]
    assert for_room([new, old, middle], 101) == [old, middle]
    assert for_room([new, old, middle], 301) == [], "it would not help"
    assert for_room([new], 0) == []


def test_room_in_memory_is_made_for_the_living(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=30_000 - used(Path(path))))
    ada, bo = machine.starts("ada", 1000), machine.starts("bo", 1000)
    die(ada, 60)
    die(bo)
    large = machine.starts("eve", 2000)  # 24,000 bytes
    assert large.in_memory and list(machine.shm.iterdir()) == [large.folder]
    small = machine.starts("dan", 1000)
    assert not small.in_memory and large.folder.exists(), "that one lives"
    large.close()
    small.close()


def used(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*.f32"))


def test_all_that_is_in_memory_of_the_dead_can_be_had(machine: Machine) -> None:
    ada, bo, eve = machine.starts("ada"), machine.starts("bo"), machine.starts("eve")
    die(ada)
    die(bo)
    assert bytes_in_memory(machine.state_dir("ada"), machine.shm) >= 120
    assert clear_others(machine.state_dir("ada"), machine.shm) >= 120
    assert {path for path in machine.shm.iterdir()} == {ada.folder, eve.folder}
    eve.close()


def test_folders_that_others_put_into_shared_memory_are_left_alone(machine: Machine) -> None:
    theirs = machine.shm / "atoll-theirs"
    theirs.mkdir(parents=True)
    (theirs / "owner").write_bytes(b"\xff\xfe")
    with open(theirs / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        made = machine.starts("ada")
    assert theirs.exists()
    made.close()


@pytest.mark.parametrize("content", ["notes.txt", "momentum.f32.bak", "more/of/it"])
def test_what_no_daemon_makes_is_another_programs(content: str, machine: Machine) -> None:
    theirs = machine.shm / "atoll-theirs"
    (theirs / content).parent.mkdir(parents=True)
    (theirs / content).touch()
    (theirs / "lock").touch()
    made = machine.starts("ada")
    clear_others(machine.state_dir("ada"), machine.shm)
    assert (theirs / content).exists()
    made.close()


def test_what_another_user_has_is_neither_removed_nor_taken_over(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = machine.starts("ada")
    die(theirs, 2 * KEPT_SECONDS)
    me = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: me + 1)
    made = machine.starts("ada")
    assert made.folder != theirs.folder and theirs.folder.exists()
    assert clear_others(machine.state_dir("bo"), machine.shm) == 0
    made.close()
    assert theirs.folder.exists()


def test_a_link_to_anywhere_is_no_daemons(machine: Machine) -> None:
    (elsewhere := machine.folder / "elsewhere").mkdir()
    (elsewhere / "lock").touch()
    machine.shm.mkdir()
    (machine.shm / "atoll-link").symlink_to(elsewhere)
    made = machine.starts("ada")
    assert (elsewhere / "lock").exists() and (machine.shm / "atoll-link").is_symlink()
    made.close()


def test_only_what_a_dead_daemon_left_is_cleared(tmp_path: Path) -> None:
    living = SharedVectors.create(10, tmp_path / "state", tmp_path / "shm")
    dead = tmp_path / "shm" / "atoll-dead"
    dead.mkdir()
    (dead / "lock").touch()
    clear_stale(tmp_path / "state", tmp_path / "shm")
    assert living.folder.exists() and not dead.exists()
    living.close()
