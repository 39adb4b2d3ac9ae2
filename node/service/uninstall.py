"""`atoll node uninstall`: nothing of a node is left on its machine but the program itself.

What is removed belongs to one state directory: the service, the folder, the cache where it is elsewhere, vectors
in /dev/shm, a trainer's socket. A folder that is no node's is refused before anything is done.
"""

import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from atoll.comm.cores import core_share
from atoll.comm.errors import ConfigError, ResourceError, Unreachable
from atoll.comm.invite import parse
from atoll.comm.xdg import cache_dir
from atoll.node.daemon import control_socket
from atoll.node.daemon.state_dir import exclusive
from atoll.node.outer.vector_folders import clear_own, own_folders
from atoll.node.service.installer import Manager, service_name
from atoll.node.service.join_command import URL_FILE

JOURNAL, SESSION = "journal.sqlite", "session"  # of a coordinator's state directory, and of a node's
LEAVE_SECONDS = 100.0  # that a daemon has to end; a script of the volunteer's own may take 60
LOOK_SECONDS = 0.2  # between two looks at whether it has


@dataclass(frozen=True, slots=True)
class Installed:
    """What there is of one node."""

    state_dir: Path
    manager: Manager = Manager()

    @property
    def folders(self) -> list[Path]:
        """The state directory, and the cache where it is elsewhere; those that are there."""
        cache = cache_dir(self.state_dir)
        apart = [] if cache.is_relative_to(self.state_dir) else [cache]
        return [folder for folder in (self.state_dir, *apart) if folder.exists()]

    @property
    def service(self) -> str:
        """The service's name; empty: there is none."""
        name = service_name(self.state_dir)
        return name if self.manager.file(name).exists() else ""

    def lines(self) -> Iterator[str]:
        """What would be removed, in words."""
        if self.service:
            yield f"the service {self.service} ({self.manager.file(self.service)})"
        for folder in self.folders:
            yield f"{folder} ({size_of(folder) / 1e6:,.1f} MB)"
        for folder in own_folders(self.state_dir):
            if not folder.is_relative_to(self.state_dir):
                yield f"{folder} ({size_of(folder) / 1e6:,.1f} MB, in memory)"


def check_removable(found: Installed) -> None:
    """Raise `ConfigError` for a folder that is not a node's state directory, and where there is nothing."""
    state_dir = found.state_dir
    if not state_dir.exists():
        if found.service or found.folders:
            return
        raise ConfigError(f"there is no node in {state_dir}, and no service of one: is --state-dir right?")
    if (state_dir / JOURNAL).exists():
        raise ConfigError(f"{state_dir} is a coordinator's: `atoll node uninstall` removes nodes")
    if not _is_a_nodes(state_dir):
        raise ConfigError(f"{state_dir} is no node's state directory: nothing is removed")
    here = state_dir.resolve()
    if any(place.resolve().is_relative_to(here) for place in (Path.home(), Path(__file__), Path.cwd())):
        raise ConfigError(
            f"{state_dir} holds your home, this program or the folder that you are in: it is not removed"
        )
    for mark in (JOURNAL, SESSION, URL_FILE):
        for file in state_dir.rglob(mark):
            if file.parent != state_dir:
                raise ConfigError(
                    f"{file.parent}, in {state_dir}, is another node's or a coordinator's: move it elsewhere first"
                )


def uninstall(found: Installed) -> Iterator[str]:
    """Stop the daemon and remove everything; yield what was done, line by line. Raises `ResourceError`, and what
    was not removed by then is there still."""
    if name := found.service:
        for line in found.manager.remove(name):
            yield f"removed {line}" if line.startswith("the service") else line
    asked = False
    with suppress(Unreachable):
        control_socket.ask(found.state_dir, "leave")
        asked = True
    if found.state_dir.exists():
        with ExitStack() as stack:
            _wait_for_lock(stack, found.state_dir, LEAVE_SECONDS if asked or name else 0.0)
            if asked:
                yield "the daemon has left its run"
            if size := clear_own(found.state_dir):
                yield f"removed {size / 1e6:,.1f} MB of vectors"
            for folder in found.folders:
                size = size_of(folder)
                _remove(folder)
                yield f"removed {folder} ({size / 1e6:,.1f} MB)"
    else:
        for folder in found.folders:
            _remove(folder)
            yield f"removed {folder}"
    core_share()  # which removes what killed nodes left in shared memory to be counted by


def size_of(folder: Path) -> int:
    """Bytes of the files in a folder."""
    size = 0
    for file in folder.rglob("*"):
        with suppress(OSError):
            size += file.lstat().st_size if not file.is_dir() else 0
    return size


def _is_a_nodes(state_dir: Path) -> bool:
    """Whether a node wrote here: its session, or the join URL that `install-service` keeps."""
    with suppress(OSError, ValueError):
        whose, session, name = (state_dir / SESSION).read_text().split("\n")[:3]
        if len(whose.split(" ")) == 2 and session:
            return True
    with suppress(OSError, UnicodeDecodeError, ConfigError):
        parse((state_dir / URL_FILE).read_text().strip())
        return True
    return False


def _wait_for_lock(stack: ExitStack, state_dir: Path, seconds: float) -> None:
    """Be alone in the state directory: its daemon has gone. Raises `ResourceError`."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            stack.enter_context(exclusive(state_dir))
            return
        except ResourceError:
            if time.monotonic() >= deadline:
                raise
            time.sleep(LOOK_SECONDS)


def _remove(folder: Path) -> None:
    """Remove a folder, and those above it that are Atoll's and empty then. Of a link that is no node's folder only
    the link: what else is where it leads is not known."""
    try:
        if not folder.is_symlink() or _is_a_nodes(folder):
            shutil.rmtree(folder.resolve())
        if folder.is_symlink():
            folder.unlink()
    except OSError as error:
        raise ResourceError(f"cannot remove {folder}: {error.strerror or error}") from None
    for above in folder.parents:
        if above.name not in ("atoll", ".atoll"):
            break
        try:
            above.rmdir()
        except OSError:  # another node's, or a coordinator's, is there
            break
