"""The transcripts in transcripts/ are what the telemetry says of a run. ATOLL_REWRITE=1 rewrites them: read the
diff."""

import os
from pathlib import Path

import pytest
import scenario
from observed_run import ObservedRun

FILES = sorted((Path(__file__).parent / "transcripts").glob("*.txt"))


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_time_and_failures_are_told_as_the_transcript_says(path: Path) -> None:
    run = ObservedRun()
    said = scenario.play(path.read_text(), run)
    if os.environ.get("ATOLL_REWRITE"):
        path.write_text(said)
    assert path.read_text() == said
    seconds = run.telemetry.meter.seconds(run.now)
    assert sum(seconds.values()) == pytest.approx(run.now * len(run.telemetry.meter.accounts))
