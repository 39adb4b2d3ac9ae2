"""Read a `.wandb` file back: a LevelDB log (7 bytes of header, then 32 KiB blocks) of protobuf records."""

import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from wandb.proto import wandb_internal_pb2

Row = dict[str, Any]
BLOCK = 32 * 1024
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


def rows(directory: Path) -> list[list[Row]]:
    """What was logged, row by row, in each run under `directory`, the oldest run first."""
    return [[_row(r) for r in records(file) if r.HasField("history")] for file in files(directory)]


def files(directory: Path) -> list[Path]:
    return sorted(directory.glob("offline-run-*/run-*.wandb"), key=lambda file: file.stat().st_mtime_ns)


def records(file: Path) -> Iterator[Any]:
    data = file.read_bytes()
    assert data[:4] == b":W&B", f"{file} is no wandb log"
    at, whole = 7, b""
    while at + 7 <= len(data):
        if (left := BLOCK - at % BLOCK) < 7:  # no header fits: the rest of the block is padding
            at += left
            continue
        check, length, kind = struct.unpack_from("<IHB", data, at)
        part = data[at + 7 : at + 7 + length]
        assert zlib.crc32(part, zlib.crc32(bytes([kind]))) == check, f"{file}: bad checksum at {at}"
        whole = part if kind in (FULL, FIRST) else whole + part
        at += 7 + length
        if kind in (FULL, LAST):
            yield wandb_internal_pb2.Record.FromString(whole)


def _row(record: Any) -> Row:
    items = record.history.item
    return {item.key or "/".join(item.nested_key): msgspec.json.decode(item.value_json) for item in items}
