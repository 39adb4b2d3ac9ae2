"""Whoever serves closes the door and waits for nobody: from Python 3.12.1 on a server that is left as a context
waits until every connection is gone, also one that a stranger holds. `with closing(server)` is what is meant."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("comm", "coordinator", "node", "tests")
WAITS = re.compile(r"^\s*async with (await asyncio\.start_(unix_)?server\(|(self\.)?_?server\b)", re.MULTILINE)


def test_no_server_waits_for_its_connections() -> None:
    files = [file for room in ROOMS for file in sorted((ROOT / room).rglob("*.py"))]
    assert WAITS.search("    async with server, other:") and WAITS.search(
        "async with await asyncio.start_server(meet):"
    )
    found = [str(file.relative_to(ROOT)) for file in files if WAITS.search(file.read_text())]
    assert len(files) > 500 and not found, found
