"""What a coordinator and the gateways beside it leave for each other in the coordinator's state directory.

    gateway.json     the coordinator's: which run it serves, where a gateway comes in, which relays there are
    gateways/NAME    a gateway's, each its own: the multiaddrs of the gateways by which the run can be reached

A gateway comes in at a Unix socket in the coordinator's private folder, and names each connection for where it
comes from: it binds it to a path beside that socket, `NUMBER,HOST,PORT`. HOST is an IP address, or, where a relay
passed the connection on, the relay's with `.relayed` behind it: nobody can tell where it began, and nothing is
dialled there.
"""

import re
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from atoll.comm.errors import ConfigError, ResourceError
from atoll.comm.files import atomic_write, make_folder, write_all
from atoll.comm.peer_names import peer_of_multiaddr

FILE, FOLDER = "gateway.json", "gateways"
MAX_BYTES = 4096
MAX_GATEWAYS = 8  # of one note, and of all together
RELAYED = ".relayed"
MAX_AGE_SECONDS = 300.0  # of a gateway's note: it writes it again every minute
_NAME = re.compile("[a-z2-7]{1,80}")


class GatewayNote(msgspec.Struct, frozen=True):
    """The place of a coordinator in one of its incarnations."""

    run: str
    address: str  # host:port as nodes dial it
    entrance: str  # path of the Unix socket at which a gateway of this machine comes in
    incarnation: int
    relays: tuple[str, ...] = ()  # multiaddrs of members that pass on what others send each other


def write_note(state_dir: Path, note: GatewayNote) -> None:
    """Leave the coordinator's note. Raises `ResourceError`."""
    _write(state_dir / FILE, msgspec.json.encode(note))


def read_note(state_dir: Path) -> GatewayNote | None:
    """The note of the coordinator in this directory; None: it has left none. Raises `ConfigError`."""
    try:
        with open(state_dir / FILE, "rb") as file:
            return msgspec.json.decode(file.read(MAX_BYTES), type=GatewayNote)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"{state_dir / FILE} is no coordinator's ({error}): start it again") from None


def write_gateways(state_dir: Path, name: str, multiaddrs: Sequence[str]) -> None:
    """Leave a gateway's note: by which ones the run can be reached, the best first. `name`: of the gateway,
    letters and digits. Raises `ResourceError`."""
    try:
        make_folder(state_dir / FOLDER)
    except OSError as error:
        raise ResourceError(f"cannot use {state_dir / FOLDER}: {error.strerror or error}") from None
    _write(state_dir / FOLDER / name, msgspec.json.encode(list(multiaddrs[:MAX_GATEWAYS])))


def read_gateways(state_dir: Path) -> tuple[str, ...]:
    """The multiaddrs in the notes of all gateways that are there, each once. What cannot be read is left out."""
    found = dict[str, None]()
    try:
        notes = sorted(path for path in (state_dir / FOLDER).iterdir() if _NAME.fullmatch(path.name))
    except OSError:
        return ()
    for path in notes:
        try:
            if time.time() - path.stat().st_mtime > MAX_AGE_SECONDS:
                continue
            with open(path, "rb") as file:
                said = msgspec.json.decode(file.read(MAX_BYTES), type=list[str])
            for multiaddr in said:
                peer_of_multiaddr(multiaddr)
                found[multiaddr] = None
        except (OSError, ValueError):  # msgspec's are some of them
            continue
    return tuple(found)[:MAX_GATEWAYS]


def gateways_among(multiaddrs: Iterable[str]) -> tuple[str, ...]:
    """The first MAX_GATEWAYS of what somebody told that are multiaddrs of gateways, each once."""
    found = dict[str, None]()
    for multiaddr in multiaddrs:
        with suppress(ValueError):
            peer_of_multiaddr(multiaddr)
            found[multiaddr] = None
    return tuple(found)[:MAX_GATEWAYS]


def relayed(host: str) -> str:
    """The host in the name of a connection that a relay at `host` passed on."""
    return host + RELAYED


def is_relayed(host: str) -> bool:
    """Whether a connection with this host was passed on by a relay."""
    return host.endswith(RELAYED)


def _write(path: Path, data: bytes) -> None:
    try:
        with atomic_write(path, None) as file:
            write_all(file, [memoryview(data)], 0)
    except OSError as error:
        raise ResourceError(f"cannot write {path}: {error.strerror or error}") from None
