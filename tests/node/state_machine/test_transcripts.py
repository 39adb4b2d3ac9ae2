"""The transcripts are what the node's machine does. ATOLL_REWRITE=1 rewrites them: read the diff."""

import os
from pathlib import Path

import node_scenario
import pytest
import scenario

HERE = Path(__file__).parent / "transcripts"
FILES = sorted(HERE.glob("*/*.txt"))


@pytest.mark.parametrize("path", FILES, ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_the_machine_does_what_the_transcript_says(path: Path) -> None:
    said = scenario.play(path.read_text(), node_scenario.Run())
    if os.environ.get("ATOLL_REWRITE"):
        path.write_text(said)
    assert path.read_text() == said


def test_every_transcript_says_first_what_it_shows() -> None:
    assert FILES and not list(HERE.glob("*.txt")), "transcripts belong into the folder of what they are about"
    assert [p.name for p in FILES if not p.read_text().startswith("# ")] == []
