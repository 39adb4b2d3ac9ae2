"""What was logged to wandb on this machine, read back from the runs' files."""

from pathlib import Path
from typing import Any

import msgspec

from atoll.coordinator.tracking import wandb_file

Row = dict[str, Any]


def rows(directory: Path) -> list[list[Row]]:
    """What was logged, row by row, in each offline file under wandb's `directory`, the oldest file first."""
    return [rows_of(file) for file in files(directory)]


def files(directory: Path) -> list[Path]:
    return sorted(directory.glob("offline-run-*/run-*.wandb"))


def rows_of(file: Path) -> list[Row]:
    return [_row(r) for r in wandb_file.records(file) if r.HasField("history")]


def _row(record: Any) -> Row:
    items = record.history.item
    return {item.key or "/".join(item.nested_key): msgspec.json.decode(item.value_json) for item in items}
