"""The file that a wandb run of this machine is kept in (`run-ID.wandb`): what it has, and where it is torn.

It is a log as LevelDB has it: 7 bytes, then blocks of 32 KiB, each filled with parts of records. A part is its CRC
(4 bytes, little-endian), its length (2), its kind (whole, first, middle or last part of a record), and its bytes;
what is left of a block that has no room for a part's head is padding. A record is a protobuf of wandb's own.

wandb writes to a file only from one process, so a run that goes on offline has several. `wandb sync` sends them
one after the other, and stops at one that ends in the middle of a record, as it does when its process is killed:
so that is cut off (`tidy`) before the next file is begun.
"""

import struct
import zlib
from collections.abc import Iterator
from contextlib import suppress
from glob import escape
from pathlib import Path
from typing import Any

MAGIC, HEADER = b":W&B", 7  # bytes
BLOCK = 32 * 1024
HEAD = struct.Struct("<IHB")
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


def files_of(folder: Path, run_id: str) -> list[Path]:
    """The files of a run under wandb's folder, online ones too, in the order in which they were begun."""
    return sorted(
        folder.glob(f"*run-*-{escape(run_id)}/run-{escape(run_id)}.wandb"),
        key=lambda file: file.parent.name.partition("run-")[2],
    )


def records(file: Path) -> Iterator[Any]:
    """The records of a file, as protobufs, up to where it is torn or is being written. Raises ValueError for
    another file."""
    for record, _ in _records(file):
        yield record


def last_step(file: Path) -> int:
    """The last step that a file has a row of; 0: it has none."""
    return max((record.history.step.num for record in records(file) if record.HasField("history")), default=0)


def tidy(file: Path) -> None:
    """Make `wandb sync` get past a file that no process writes any more: cut off what is behind its last whole
    record; one that does not even say which run it is of counts as sent."""
    end, of_a_run = HEADER, False
    with suppress(ValueError):
        for record, at in _records(file):
            end, of_a_run = at, of_a_run or record.HasField("run")
    if not of_a_run:
        mark_synced(file)
    elif file.stat().st_size > end:
        with open(file, "r+b") as log:
            log.truncate(end)


def mark_synced(file: Path) -> None:
    """Have `wandb sync` leave a file out."""
    file.with_name(f"{file.name}.synced").touch()


def _records(file: Path) -> Iterator[tuple[Any, int]]:
    from wandb.proto.wandb_internal_pb2 import Record

    for body, end in _bodies(file):
        yield Record.FromString(body), end


def _bodies(file: Path) -> Iterator[tuple[bytes, int]]:
    """The bytes of each whole record, and where it ends."""
    data = file.read_bytes()
    # Of one that is only begun not even that is there, or zeros are, where the power was cut.
    if not MAGIC.startswith(data[: len(MAGIC)].rstrip(b"\0")):
        raise ValueError(f"{file} is no file of wandb's")
    at, whole = HEADER, b""
    while at + HEAD.size <= len(data):
        if (left := BLOCK - at % BLOCK) < HEAD.size:
            at += left
            continue
        check, length, kind = HEAD.unpack_from(data, at)
        part = data[at + HEAD.size : at + HEAD.size + length]
        if len(part) < length or not FULL <= kind <= LAST or zlib.crc32(part, zlib.crc32(bytes([kind]))) != check:
            return
        whole = part if kind in (FULL, FIRST) else whole + part
        at += HEAD.size + length
        if kind in (FULL, LAST):
            yield whole, at
