"""Checkpoint files as an earlier version of Atoll wrote them."""

import json
import struct
from pathlib import Path

RENAMED_FIELDS = {
    "run": "run_id",
    "chunk": "chunk_elements",
    "chunks": "chunk_table",
    "digest": "chunk_table_digest",
}


def to_snapshot_1(path: Path) -> None:
    """Give a snapshot the header of format 1."""
    data = path.read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + length])
    metadata = {old: header["__metadata__"][new] for old, new in RENAMED_FIELDS.items()}
    metadata["tokens"] = header["__metadata__"]["tokens"]
    header["__metadata__"] = {"format": "atoll snapshot 1", **metadata}
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


def to_checkpoint_1(manifest: Path) -> None:
    """Give a remote checkpoint's manifest the fields of format 1."""
    said = json.loads(manifest.read_text())
    said["format"] = "atoll checkpoint 1"
    said["chunk"], said["fragments"] = said.pop("chunk_elements"), said.pop("fragment_elements", [])
    manifest.write_text(json.dumps(said))
