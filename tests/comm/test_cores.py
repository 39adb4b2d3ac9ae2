"""A node takes its share of the cores that it may use, and knows which other nodes live."""

import errno
import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from atoll.comm import cores
from atoll.comm.cores import CoreShare, core_share, take_part, usable_cores


def machine(monkeypatch: pytest.MonkeyPatch, root: Path, affinity: int, cgroup: str, **files: str) -> None:
    """A machine of so many cores, whose cgroup files are these."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(affinity)))
    (root / "cgroup").write_text(cgroup)
    for name, text in files.items():
        file = root / "fs" / name.replace("__", "/").replace("_max", ".max").replace("cfs_", "cpu.cfs_")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    monkeypatch.setattr(cores, "PROC", root / "cgroup")
    monkeypatch.setattr(cores, "CGROUPS", root / "fs")


@pytest.mark.parametrize(
    ("cgroup", "files", "expected"),
    [
        ("0::/\n", {}, 16),
        ("0::/\n", {"cpu_max": "400000 100000\n"}, 4),
        ("0::/\n", {"cpu_max": "max 100000\n"}, 16),
        ("0::/a/b\n", {"a__cpu_max": "250000 100000\n", "a__b__cpu_max": "max 100000\n"}, 2),
        ("0::/not/here\n", {"cpu_max": "50000 100000\n"}, 1),
        ("0::/\n", {"cpu_max": "6400000 100000\n"}, 16),
        ("4:memory:/a\n2:cpu,cpuacct:/a\n0::/\n", {"cpu,cpuacct__a__cfs_quota_us": "-1\n"}, 16),
        (
            "2:cpu,cpuacct:/a\n0::/\n",
            {"cpu,cpuacct__a__cfs_quota_us": "300000\n", "cpu,cpuacct__a__cfs_period_us": "100000\n"},
            3,
        ),
        ("2:cpu:/\n", {"cpu__cfs_quota_us": "150000\n", "cpu__cfs_period_us": "100000\n"}, 1),
        ("nonsense\n", {}, 16),
    ],
)
def test_what_a_cgroup_does_not_allow_is_not_taken(
    cgroup: str, files: dict[str, str], expected: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    machine(monkeypatch, tmp_path, 16, cgroup, **files)
    assert usable_cores() == expected


def test_nodes_share_the_cores_and_their_ranks_a_node_s() -> None:
    assert [CoreShare(8, nodes).threads() for nodes in (1, 2, 3, 8, 9)] == [8, 4, 2, 1, 1]
    assert [CoreShare(8, 2).threads(ranks) for ranks in (1, 2, 3, 8)] == [4, 2, 1, 1]
    assert str(CoreShare(1, 1)) == "1 core that this process may use"
    assert str(CoreShare(2, 3)) == "2 cores that this process may use, 3 nodes on this machine"


NODE = """
import sys; from pathlib import Path
from atoll.comm.cores import take_part
with take_part(Path(sys.argv[1])):
    print("here", flush=True)
    sys.stdin.read()
"""


def test_a_node_counts_while_it_lives_and_not_when_it_was_killed(tmp_path: Path) -> None:
    def started() -> subprocess.Popen[bytes]:
        command = [sys.executable, "-P", "-c", NODE, str(tmp_path)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert process.stdout is not None and process.stdout.readline() == b"here\n"
        return process

    def counted() -> int:
        return core_share(tmp_path).nodes

    assert counted() == 1  # whoever asks
    with take_part(tmp_path):
        assert counted() == 1
        first, second = started(), started()
        assert counted() == 3
        first.send_signal(signal.SIGKILL)
        first.communicate()
        assert counted() == 2
        assert len(list(tmp_path.iterdir())) == 2  # what the killed one left is gone
        second.communicate()
        assert counted() == 1
    assert list(tmp_path.iterdir()) == []


def test_where_no_file_can_be_had_a_node_works_all_the_same(tmp_path: Path) -> None:
    with take_part(tmp_path / "no such folder"):
        assert core_share(tmp_path / "no such folder").nodes == 1


def test_a_node_runs_uncounted_where_files_cannot_be_locked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with take_part(tmp_path):
        pass
    assert not list(tmp_path.iterdir())
