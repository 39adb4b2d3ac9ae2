"""The options, the state directory and the signals of a node's process, whatever its role."""

import asyncio
import contextlib
import fcntl
import logging
import os
import signal
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from atoll.comm.errors import ResourceError, atoll_error
from atoll.comm.files import atomic_write, make_folder, write_all
from atoll.comm.invite import Invite
from atoll.node.daemon import control_socket
from atoll.node.outer.vector_folders import clear_stale
from atoll.node.state_files import ENDING, LOCK

log = logging.getLogger("atoll.node")
TRAINER_SPEC = "trainer.json"  # in the state directory: what a trainer needs to start
CHANNEL_PREFIX, CHANNEL = "atoll-", "trainer.sock"  # of a folder of temporary files, and in it

# Seconds for which a node that is told to end while it joins waits for the answer, to say good-bye then.
ENTER_SECONDS = 3.0


@dataclass(frozen=True, slots=True)
class JoinOptions:
    """The options with which one node joins a run."""

    state_dir: Path
    listen: str  # data plane, host:port
    advertise: str  # data plane as peers dial it; empty: as it listens, host seen by the coordinator
    name: str
    patience: float  # seconds to wait for a coordinator that does not answer at first
    leaf: bool = False  # nobody can dial this node
    command: tuple[str, ...] = ()  # the volunteer's own trainer; empty: the built-in one
    role: str = ""  # of a node that has a trainer: "verifier" replays others' rounds; empty: it contributes
    checks: bool = False  # say what is found of this machine, the run and the way there
    metrics: str = ""  # where Prometheus may scrape it, PORT or HOST:PORT; empty: nowhere


@contextlib.contextmanager
def exclusive(state_dir: Path) -> Iterator[None]:
    """Be the only daemon in this state directory while the context lasts; clear what a dead one left, and save the
    error that this one ends with. Raises `ResourceError`."""
    try:
        make_folder(state_dir)
        lock = os.open(state_dir / LOCK, os.O_CREAT | os.O_RDWR, 0o600)
    except OSError as error:
        raise ResourceError(f"cannot use the state directory {state_dir}: {error.strerror}") from None
    try:
        control_socket.refuse_second(state_dir)
        try:  # the socket is there only once the daemon has joined
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ResourceError(
                f"another process uses the state directory {state_dir}, of a node that joins or ends just now, or "
                "a worker: wait for it, or give another --state-dir"
            ) from None
        except OSError:
            pass  # a file system without locks
        clear_stale(state_dir)
        clear_channel(state_dir)
        with contextlib.suppress(OSError):
            (state_dir / ENDING).unlink()
        try:
            yield
        except BaseException as error:
            if (known := atoll_error(error)) is not None:
                save_ending(state_dir, f"the node ended: {known}")
            raise
    finally:
        os.close(lock)


def save_ending(state_dir: Path, sentence: str) -> None:
    """Keep how the node has ended, for who asks when it is gone; its log has it, too, wherever this cannot be
    kept."""
    with contextlib.suppress(OSError), atomic_write(state_dir / ENDING, None) as out:
        write_all(out, [memoryview(sentence.encode())], 0)


def clear_channel(state_dir: Path) -> None:
    """Remove the socket, and its folder, that a daemon which was killed had for its trainer."""
    try:
        channel = Path(msgspec.json.decode((state_dir / TRAINER_SPEC).read_bytes(), type=_Channel).channel)
        ours = channel.parent.name.startswith(CHANNEL_PREFIX) and channel.parent.lstat().st_uid == os.getuid()
        if channel.name == CHANNEL and ours:
            channel.unlink(missing_ok=True)
            channel.parent.rmdir()
    except (OSError, msgspec.DecodeError):
        pass  # there is none, or somebody else's things are in it


class _Channel(msgspec.Struct):
    """What of a trainer's settings is looked at here."""

    channel: str = ""


def save_session(file: Path, invite: Invite, session: str, name: str) -> None:
    """Write the session and the node's name to `file`, so that a daemon started again comes back as the same node,
    without another token. Raises `ResourceError`; then what was there still is."""
    if _load(file, invite) == (session, name):
        return
    data = f"{invite.whose}\n{session}\n{name}\n".encode()
    try:
        with atomic_write(file, None) as out:
            write_all(out, [memoryview(data)], 0)
    except OSError as error:
        raise ResourceError(f"cannot write {file}: {error.strerror or error}") from None


def save_next_session(file: Path, invite: Invite, session: str, name: str) -> None:
    """Write the session of a node's next life to `file`; a failure is logged: the session that is there brings it
    back, too."""
    try:
        save_session(file, invite, session, name)
    except ResourceError as error:
        log.warning(str(error))


def load_session(file: Path, invite: Invite) -> str:
    """The session of an earlier life in this run; empty if there was none."""
    return _load(file, invite)[0]


def load_name(file: Path, invite: Invite) -> str:
    """The name that the node had in an earlier life in this run; empty if there was none."""
    return _load(file, invite)[1]


def _load(file: Path, invite: Invite) -> tuple[str, str]:
    try:
        whose, session, name = file.read_text().split("\n")[:3]
    except (OSError, ValueError):
        return "", ""
    # Until sessions were kept by the pin they were kept by the address.
    return (session, name) if whose in (invite.whose, f"{invite.address} {invite.run}") else ("", "")


async def ends_before(over: asyncio.Event, work: Coroutine[Any, Any, None], grace: float) -> bool:
    """Whether `work` has ended before `over` was set. If not it has `grace` seconds more, then it is cancelled.
    Raises what it raises."""
    working, told = asyncio.create_task(work), asyncio.create_task(over.wait())
    try:
        await asyncio.wait((working, told), return_when=asyncio.FIRST_COMPLETED)
        if over.is_set():
            await asyncio.wait((working,), timeout=grace)
        if working.done():
            working.result()
        return not over.is_set()
    finally:
        working.cancel()
        told.cancel()
        await asyncio.gather(working, told, return_exceptions=True)


@contextlib.contextmanager
def on_signals(stop: Callable[[], None]) -> Iterator[None]:
    """Call `stop` in this event loop when the process is told to end."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    try:
        yield
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
