"""`atoll node uninstall`: nothing of a node is left on its machine but the program itself.

What is removed belongs to one state directory: the service, what a node writes into the folder
(`atoll.node.state_files`), its cache where it is elsewhere, vectors in /dev/shm, a trainer's socket. What else is
in the folder stays, and the folder with it. One that is no node's is refused before anything is done.
"""

import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from atoll.comm.cores import core_share
from atoll.comm.errors import AtollError, ConfigError, ResourceError, Unreachable
from atoll.comm.exit_codes import ExitCode
from atoll.comm.files import size_of
from atoll.comm.invite import parse
from atoll.node.daemon import control_socket
from atoll.node.daemon.state_dir import exclusive
from atoll.node.outer.vector_folders import clear_own, own_folders
from atoll.node.service.installer import Manager, service_name
from atoll.node.service.join_command import URL_FILE
from atoll.node.state_files import LOCK, SESSION, SETTINGS, Contents, contents, folders_of

JOURNAL = "journal.sqlite"  # of a coordinator's state directory
LEAVE_SECONDS = 100.0  # that a daemon has to end; a script of the volunteer's own may take 60
LOOK_SECONDS = 0.2  # between two looks at whether it has
BEGINNING = {"tls.pem", "trainer.json"}  # of which a node, or a worker, writes one at first
NAMED = 3  # things that are not a node's, at most, by their names


class NotConfirmed(AtollError):
    """The question whether to remove everything was not answered with yes."""

    exit_code = ExitCode.INTERRUPTED


@dataclass(frozen=True, slots=True)
class Installed:
    """What there is of one node."""

    state_dir: Path
    manager: Manager = Manager()

    @property
    def folders(self) -> dict[Path, Contents]:
        """The state directory, and the cache where it is elsewhere, with what is in them; those that are there."""
        # Of a link, what it leads to: there its node has written.
        return {folder: contents(folder.resolve(), files) for folder, files in folders_of(self.state_dir).items()}

    @property
    def service(self) -> str:
        """The service's name; empty: there is none."""
        name = service_name(self.state_dir)
        return name if self.manager.file(name).exists() else ""

    def lines(self) -> Iterator[str]:
        """What would be removed, in words."""
        if self.service:
            yield f"the service {self.service} ({self.manager.file(self.service)})"
        for folder, found in self.folders.items():
            but = f", but for {_names(found)}, not a node's" if found.others else ""
            own = f", with your own {SETTINGS}" if found.folder / SETTINGS in found.files else ""
            yield f"{folder} ({size_in(found) / 1e6:,.1f} MB){own}{but}"
        for folder in own_folders(self.state_dir):
            if not folder.is_relative_to(self.state_dir):
                yield f"{folder} ({size_of(folder) / 1e6:,.1f} MB, in memory)"


def check_removable(found: Installed) -> None:
    """Raise `ConfigError` for a folder that is not a node's state directory, and where there is nothing."""
    state_dir, folders = found.state_dir, found.folders
    if state_dir not in folders:
        if found.service or folders:
            return
        raise ConfigError(f"there is no node in {state_dir}, and no service of one: is --state-dir right?")
    if (state_dir / JOURNAL).exists():
        raise ConfigError(f"{state_dir} is a coordinator's: `atoll node uninstall` removes nodes")
    if not _is_a_nodes(state_dir) and not _has_begun(state_dir, folders[state_dir]):
        raise ConfigError(f"{state_dir} is no node's state directory: nothing is removed")


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
    with ExitStack() as stack:
        if found.state_dir.exists():
            _wait_for_lock(stack, found.state_dir, LEAVE_SECONDS if asked or name else 0.0)
            if asked:
                yield "the daemon has left its run"
            if size := clear_own(found.state_dir):
                yield f"removed {size / 1e6:,.1f} MB of vectors"
        for folder, content in found.folders.items():
            yield _removed(folder, content)
    core_share()  # which removes what killed nodes left in shared memory to be counted by


def size_in(found: Contents) -> int:
    """Bytes of what is a node's."""
    size = sum(map(size_of, found.whole))
    for file in found.files:
        with suppress(OSError):  # it goes meanwhile
            size += file.lstat().st_size
    return size


def _names(found: Contents) -> str:
    """What is not a node's, by name, as far as that is short."""
    names = ", ".join(str(path.relative_to(found.folder)) for path in found.others[:NAMED])
    more = len(found.others) - NAMED
    return f"{names} and {more} more" if more > 0 else names


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


def _has_begun(state_dir: Path, found: Contents) -> bool:
    """Whether there is nothing but what a node writes that has not joined, or a worker."""
    names = {path.name for path in found.files}
    return not found.others and LOCK in names and SESSION not in names and bool(names & BEGINNING)


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


def _removed(folder: Path, content: Contents) -> str:
    """Remove what is a node's in a folder, and say so; the folder as well, where nothing else is in it, and those
    above that are Atoll's and empty then."""
    size, place = size_in(content), folder.resolve()
    try:
        content.remove()
        if any(place.iterdir()):
            return f"removed {size / 1e6:,.1f} MB from {folder}, which stays: {_names(content)} in it is no node's"
        place.rmdir()
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
    return f"removed {folder} ({size / 1e6:,.1f} MB)"
