"""WSL is recognised by what it says of itself, and what follows from it is said. No such machine was there: the
files are as it is known to have them."""

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from atoll.node.checks import wsl
from atoll.node.checks.check import Check
from atoll.node.checks.wsl import is_on_windows_drive, networking_mode, wsl_checks, wsl_version
from atoll.node.config import NodeConfig
from atoll.node.daemon.join_checks import log_machine
from atoll.node.doctor import doctor

MOUNTS = """\
/dev/sdc / ext4 rw,relatime,discard,errors=remount-ro,data=ordered 0 0
none /mnt/wsl tmpfs rw,relatime 0 0
drivers /usr/lib/wsl/drivers 9p ro,nosuid,nodev,noatime,aname=drivers,cache=5,trans=fd,rfd=7,wfd=7 0 0
C:\\134 /mnt/c 9p rw,noatime,aname=drvfs;path=C:\\;uid=1000;gid=1000;symlinkroot=/mnt/,cache=5,trans=fd 0 0
tmpfs /mnt/c/in\\040memory tmpfs rw 0 0
"""


@pytest.mark.parametrize(
    ("name", "version"),
    [
        ("5.15.153.1-microsoft-standard-WSL2\n", 2),
        ("6.6.87.2-microsoft-standard-WSL2+\n", 2),
        ("4.19.84-microsoft-standard\n", 2),
        ("4.4.0-19041-Microsoft\n", 1),
        ("Linux version 4.4.0-19041-Microsoft (Microsoft@Microsoft.com) (gcc version 5.4.0 (GCC) ) #488\n", 1),
        ("6.8.0-45-generic\n", 0),
        ("6.5.0-1025-azure\n", 0),
    ],
)
def test_it_is_recognised_by_its_kernels_name(name: str, version: int, tmp_path: Path) -> None:
    (tmp_path / "osrelease").write_text(name)
    assert wsl_version((tmp_path / "osrelease",)) == version
    assert wsl_version((tmp_path / "none", tmp_path / "osrelease")) == version, "the second file says it, too"


def test_this_machine_is_none(tmp_path: Path) -> None:
    assert wsl_version() == 0 and list(wsl_checks(tmp_path, leaf=False)) == []


@pytest.mark.parametrize(
    ("folder", "there"),
    [
        *(("/mnt/c/Users/ada/node", True), ("/mnt/c", True), ("/home/ada/.local/state/atoll/node", False)),
        *(("/mnt/c/in memory/node", False), ("/mnt/cd/node", False), ("/mnt/wsl/node", False)),
    ],
)
def test_a_drive_of_windows_is_known_by_its_mount(folder: str, there: bool, tmp_path: Path) -> None:
    (tmp_path / "mounts").write_text(MOUNTS)
    assert is_on_windows_drive(Path(folder), tmp_path / "mounts") is there
    assert not is_on_windows_drive(Path(folder), tmp_path / "no such file")


@pytest.fixture
def mode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tool of WSL's that says how it is on the network: the file that it prints."""
    tool, said = tmp_path / "wslinfo", tmp_path / "mode"
    tool.write_text(f'#!/bin/sh\n[ "$1" = --networking-mode ] && /bin/cat {said}\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    return said


def test_the_network_is_as_its_tool_says(mode: Path) -> None:
    mode.write_text("Mirrored\n")
    assert networking_mode() == "mirrored"
    mode.unlink()
    assert networking_mode() == "nat", "the tool fails"


def in_wsl(tmp_path: Path, leaf: bool = False, version: int = 2, state_dir: str = "/home/ada") -> dict[str, Check]:
    (tmp_path / "mounts").write_text(MOUNTS)
    shm = tmp_path if version == 2 else tmp_path / "none"
    found = wsl_checks(Path(state_dir), leaf, version, tmp_path / "mounts", shm)
    return {check.name: check for check in found}


def test_behind_its_nat_a_node_is_to_be_a_leaf(mode: Path, tmp_path: Path) -> None:
    mode.write_text("nat\n")
    found = in_wsl(tmp_path)
    assert list(found) == ["wsl"] and found["wsl"].ok and "on the network by nat" in found["wsl"].found
    assert "give --leaf" in found["wsl"].remedy and in_wsl(tmp_path, leaf=True)["wsl"].remedy == ""
    mode.write_text("mirrored\n")
    assert "Windows' firewall" in in_wsl(tmp_path)["wsl"].remedy


def test_version_1_and_a_drive_of_windows_are_refused(tmp_path: Path) -> None:
    first = in_wsl(tmp_path, version=1)
    assert not first["wsl"].ok and "wsl --set-version" in first["wsl"].remedy
    found = in_wsl(tmp_path, state_dir="/mnt/c/node")["wsl disk"]
    assert not found.ok and found.exit_code == 3 and "--state-dir" in found.remedy
    assert "memory= in .wslconfig" in first["wsl memory"].remedy, "there is no shared memory"


def test_doctor_and_join_say_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "atoll.node")
    (tmp_path / "osrelease").write_text("5.15.153.1-microsoft-standard-WSL2\n")
    monkeypatch.setattr(wsl.wsl_version, "__defaults__", ((tmp_path / "osrelease",),))
    done = CliRunner().invoke(doctor, ["--state-dir", str(tmp_path / "node")])
    assert re.search(r"ok  wsl +WSL 2, on the network by nat.*\n +give --leaf", done.output), done.output
    log_machine(NodeConfig(), tmp_path)
    assert any(message.startswith("wsl: WSL 2") for message in caplog.messages)
