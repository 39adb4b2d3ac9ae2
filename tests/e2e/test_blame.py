"""Things go wrong in a run of real processes, on networks of its own, and the round's verdict names who or what it
was. All kinds, counted and timed: `make blame`. Needs root for network namespaces."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from blame.cases import harmed
from blame.fleet import Fleet, unavailable
from blame.trial import is_right
from e2e.harness import ATOLL, until

from atoll.coordinator.causes.explanation import Kind

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.root, pytest.mark.chaos]
QUICK = [Kind.SLOW_DATA_STORE, Kind.ONE_WAY_PARTITION, Kind.OUT_OF_MEMORY]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    assert not (why := unavailable()), why
    with Fleet.opened(tmp_path_factory.mktemp("fleet"), "blametest", "10.79.0") as fleet:
        yield fleet


@pytest.mark.parametrize("kind", [QUICK[0], *(pytest.param(kind, marks=pytest.mark.chaos) for kind in QUICK[1:])])
def test_what_went_wrong_is_named_in_a_note_on_the_record_and_by_the_command(fleet: Fleet, kind: Kind) -> None:
    fleet.settle()
    known = fleet.committed()
    with harmed(fleet, kind, 0) as culprit:

        def named() -> int:
            return next(
                (v.round for v in fleet.noted() if v.round > known and is_right(v.verdict, kind, culprit)), 0
            )

        round_ = until(f"a verdict that says {kind} of {culprit.name}", named)
    until("its record", lambda: any(r.round == round_ for r in fleet.records(known)))
    record = next(r for r in fleet.records(known) if r.round == round_)
    assert record.verdict is not None and is_right(record.verdict, kind, culprit)
    assert record.verdict.sentence in said(fleet.folder, round_)


def said(folder: Path, round_: int) -> str:
    """What the command says of the round."""
    command = [*ATOLL, "blame", str(round_), "--state-dir", str(folder / "c")]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
