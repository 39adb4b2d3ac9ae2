"""What a coordinator leaves in its state directory for a gateway beside it: which run it serves, and where."""

from pathlib import Path

import msgspec

from atoll.comm.errors import ConfigError, ResourceError
from atoll.comm.files import atomic_write, write_all

FILE = "gateway.json"
MAX_BYTES = 4096


class GatewayNote(msgspec.Struct, frozen=True):
    """The place of a coordinator in one of its incarnations."""

    run: str
    address: str  # host:port as nodes dial it
    local: str  # host:port as this machine dials it
    incarnation: int


def write_note(state_dir: Path, note: GatewayNote) -> None:
    """Leave the note. Raises `ResourceError`."""
    try:
        with atomic_write(state_dir / FILE, None) as file:
            write_all(file, [memoryview(msgspec.json.encode(note))], 0)
    except OSError as error:
        raise ResourceError(f"cannot write {state_dir / FILE}: {error.strerror or error}") from None


def read_note(state_dir: Path) -> GatewayNote | None:
    """The note of the coordinator in this directory; None: it has left none. Raises `ConfigError`."""
    try:
        with open(state_dir / FILE, "rb") as file:
            return msgspec.json.decode(file.read(MAX_BYTES), type=GatewayNote)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"{state_dir / FILE} is no coordinator's ({error}): start it again") from None
