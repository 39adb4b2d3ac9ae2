"""The transcripts in transcripts/ are the verdicts on rounds. ATOLL_REWRITE=1 rewrites them: read the diff."""

import os
from pathlib import Path

import cause_scenario
import pytest
import scenario

from atoll.coordinator.causes.explanation import Kind

FILES = sorted((Path(__file__).parent / "transcripts").glob("*.txt"))


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_the_verdict_is_what_the_transcript_says(path: Path) -> None:
    said = scenario.play(path.read_text(), cause_scenario.Run())
    if os.environ.get("ATOLL_REWRITE"):
        path.write_text(said)
    assert path.read_text() == said


def test_every_transcript_says_first_what_it_shows_and_every_kind_has_one() -> None:
    texts = [path.read_text() for path in FILES]
    assert [path.name for path, text in zip(FILES, texts, strict=True) if not text.startswith("# ")] == []
    shown = {kind for kind in Kind for text in texts if f"=> {kind}:" in text}
    assert set(Kind) - shown == set()
