"""The files that are made from the code: what each is to be."""

from collections.abc import Callable
from pathlib import Path

import rooms
from reference import commands, config, exit_codes, metrics, run_schema, wire

ROOT = Path(__file__).resolve().parents[3]
MADE: dict[str, Callable[[], str]] = {
    "configs/run.schema.json": run_schema.draw,
    "docs/config.md": config.draw,
    "docs/exit-codes.md": exit_codes.draw,
    "docs/reference/commands.md": commands.draw,
    "docs/reference/metrics.md": metrics.draw,
    "docs/reference/settings.md": config.draw_settings,
    "docs/reference/wire.md": wire.draw,
    "docs/rooms.svg": rooms.draw,
}


def outdated(name: str) -> bool:
    """Whether the file is not there, or is not what the code says."""
    path = ROOT / name
    return not path.exists() or path.read_text() != MADE[name]()
