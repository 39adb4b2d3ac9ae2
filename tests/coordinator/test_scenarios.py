"""The transcripts in scenarios/ are what the machine says. ATOLL_REWRITE=1 rewrites them: read the diff."""

import os
from pathlib import Path

import pytest
import scenario

HERE = Path(__file__).parent


@pytest.mark.parametrize("path", sorted(HERE.glob("scenarios/*.txt")), ids=lambda p: p.stem)
def test_the_machine_says_what_the_transcript_says(path: Path) -> None:
    said = scenario.play(path.read_text())
    if os.environ.get("ATOLL_REWRITE"):
        path.write_text(said)
    assert path.read_text() == said
