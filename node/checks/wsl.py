"""The Windows Subsystem for Linux, by its kernel's name, and what is different in it for a node.

docs/wsl2.md tells more. No such machine was there to try it: what WSL says of itself is from its documentation.
"""

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from atoll.node.checks.check import Check

KERNEL_FILES = (Path("/proc/sys/kernel/osrelease"), Path("/proc/version"))
MOUNTS = Path("/proc/self/mounts")
WINDOWS_FILE_SYSTEMS = ("9p", "drvfs", "v9fs")  # of a drive of Windows'
SHM = Path("/dev/shm")
MIN_SHM = 1 << 30  # bytes, below which a node's vectors are soon on the disk
TOOL_SECONDS = 5.0  # that WSL's own tool has to answer
PAGE = "docs/wsl2.md"


def wsl_version(kernel_files: tuple[Path, ...] = KERNEL_FILES) -> int:
    """1 or 2 inside of WSL; 0: elsewhere. WSL 1 imitates a kernel and calls it Microsoft; WSL 2 has one, called
    microsoft-standard-WSL2 (before 2020 without the last part)."""
    for file in kernel_files:
        try:
            name = file.read_text()
        except (OSError, UnicodeDecodeError):
            continue
        if re.search(r"WSL2|microsoft-standard", name):
            return 2
        if "microsoft" in name.lower():
            return 1
    return 0


def networking_mode() -> str:
    """How the machine of WSL is on the network: nat, mirrored, virtioproxy or none; nat where no tool says."""
    if (tool := shutil.which("wslinfo")) is None:
        return "nat"
    try:
        command = [tool, "--networking-mode"]
        said = subprocess.run(command, capture_output=True, text=True, timeout=TOOL_SECONDS, check=True).stdout
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return "nat"
    return said.strip().lower() or "nat"


def is_on_windows_drive(folder: Path, mounts: Path = MOUNTS) -> bool:
    """Whether a folder, or where it is to be made, is on one of Windows' drives, such as /mnt/c."""
    try:
        lines = mounts.read_text().splitlines()
    except OSError:
        return False
    here, found = folder.resolve(), list[tuple[int, str]]()
    for line in lines:
        _, point, kind, *_ = line.split(" ")
        place = Path(point.replace("\\040", " "))
        if here.is_relative_to(place):
            found.append((len(place.parts), kind))
    return max(found, default=(0, ""))[1] in WINDOWS_FILE_SYSTEMS


def wsl_checks(
    state_dir: Path, leaf: bool, version: int | None = None, mounts: Path = MOUNTS, shm: Path = SHM
) -> Iterator[Check]:
    """What is different for a node in WSL; nothing elsewhere. `leaf`: nobody is to dial it. `version`: WSL's, if
    it is known."""
    version = wsl_version() if version is None else version
    if version == 0:
        return
    yield _network(version, leaf)
    if is_on_windows_drive(state_dir, mounts):
        found = f"{state_dir} is on a drive of Windows', where no socket can be made and all is slow"
        yield Check("wsl disk", False, found, "give a --state-dir in WSL's own file system, below your home")
    if (size := shutil.disk_usage(shm).total if shm.is_dir() else 0) < MIN_SHM:
        found = f"{shm} has {size / 1e9:.1f} GB, and a node keeps 12 bytes a parameter there, or else on the disk"
        yield Check("wsl memory", True, found, f"give WSL more memory: memory= in .wslconfig ({PAGE})")


def _network(version: int, leaf: bool) -> Check:
    if version == 1:
        remedy = "convert it: `wsl --set-version DISTRIBUTION 2` in PowerShell"
        return Check("wsl", False, "WSL 1, which has no Linux kernel: a node does not run there", remedy)
    mode = networking_mode()
    words = f"WSL 2, on the network by {mode}: it stops with its last window, and has half of the memory ({PAGE})"
    if mode == "mirrored":
        return Check("wsl", True, words, "" if leaf else "let the port through Windows' firewall as well")
    return Check("wsl", True, words, "" if leaf else "give --leaf: nobody can dial this machine through that")
