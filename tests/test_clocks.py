"""A machine's wall clock may be wrong, and may jump: it has no part in what members say of each other, nor in what
the run decides about them."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
WALL_CLOCK = re.compile(
    r"\btime\.time(_ns)?\(|\bfrom time import|\bdatetime\.(now|today|utcnow)\(|\bdate\.today\("
)
# `atoll doctor`, and a verdict on a round, say whether the clock is right; how old a file is that clock says.
ALLOWED = {"checkup.py", "clock_offset.py", "gateway_note.py"}
ROOMS = (
    *("comm", "coordinator/state_machine", "coordinator/placement"),
    *("node/state_machine", "node/control", "node/recovery"),
)


@pytest.mark.parametrize("room", ROOMS)
def test_no_wall_clock_is_read_where_members_are_judged(room: str) -> None:
    files = sorted((ROOT / room).rglob("*.py"))
    assert files
    files = [file for file in files if file.name not in ALLOWED]
    found = [str(file.relative_to(ROOT)) for file in files if WALL_CLOCK.search(file.read_text())]
    assert not found, f"they read the wall clock: {found}"
