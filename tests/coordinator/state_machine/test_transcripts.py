"""The transcripts in transcripts/ are what the machines say. ATOLL_REWRITE=1 rewrites them: read the diff."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import scenario

HERE = Path(__file__).parent / "transcripts"
RUNNERS: dict[str, Callable[[], scenario.Runner]] = {
    "membership": scenario.Run,
    "rounds": scenario.Run,
    "ledger": scenario.Run,
    "leases": scenario.Desk,
}
FILES = sorted(HERE.glob("*/*.txt"))


@pytest.mark.parametrize("path", FILES, ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_the_machine_says_what_the_transcript_says(path: Path) -> None:
    said = scenario.play(path.read_text(), RUNNERS[path.parent.name]())
    if os.environ.get("ATOLL_REWRITE"):
        path.write_text(said)
    assert path.read_text() == said


def test_every_transcript_says_first_what_it_shows() -> None:
    assert FILES and not list(HERE.glob("*.txt")), "transcripts belong into the folder of their runner"
    assert [p.name for p in FILES if not p.read_text().startswith("# ")] == []
