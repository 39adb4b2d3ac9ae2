"""`RUN.json`, beside the folder of a run's snapshots: what they are of, for who reads them without the run."""

from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from atoll.comm.config.run import RunConfig
from atoll.comm.decode_errors import DECODE_ERRORS
from atoll.comm.files import Room, atomic_write, room, write_all


@dataclass
class RunManifest:
    """The run's config and the model that the snapshots in a folder are of."""

    run: RunConfig = field(default_factory=RunConfig)
    # "package.module:function" that builds the volunteer's own model, or a script's command; empty: the run's own
    model: str = ""


def path_of(folder: Path) -> Path:
    """The manifest of the run whose snapshots are in `folder`."""
    return folder.with_name(folder.name + ".json")


def write(folder: Path, manifest: RunManifest, room: Room = room) -> None:
    """Write the manifest, unless it is there already. Raises `OSError`; then what was there is still there."""
    data = msgspec.json.format(msgspec.json.encode(manifest)) + b"\n"
    path = path_of(folder)
    if path.exists() and path.read_bytes() == data:
        return
    with atomic_write(path, len(data), room) as file:
        write_all(file, [memoryview(data)], 0)


def read(folder: Path) -> RunManifest | None:
    """The manifest of the run in `folder`; None: there is none, or it is damaged."""
    try:
        return msgspec.json.decode(path_of(folder).read_bytes(), type=RunManifest)
    except (OSError, *DECODE_ERRORS):
        return None
