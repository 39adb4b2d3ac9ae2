"""The page on what liars cost says what was measured, and what was not; no training."""

from pathlib import Path
from typing import Any

import pytest
from audit_runs import Caught
from quality.runs import Kept, missing
from quality.strangers import (
    ALL,
    HONEST,
    LIES,
    MERGED,
    MERGED_LIES,
    MERGES,
    Audited,
    Stranger,
    audited,
    first,
    honest_struck,
    page,
)

from atoll.comm.config.run import check

AUDITS = Audited(Caught(9, (2, 4, 19)), Caught(8, (1,)), 1000, 0)


def figures(loss: float | None, *decisions: tuple[int, int, str], refused: int = 0) -> dict[str, Any]:
    found = [{"round": r, "node": node, "consequence": then} for r, node, then in decisions]
    about = {"cpu_seconds": 60.0, "hardware": "a machine", "day": "2026-01-02"}
    return {"val_loss": loss, "decisions": found, "refused": refused, **about}


@pytest.mark.long
def test_every_lie_is_told_by_one_and_two_with_the_defence_and_without() -> None:
    trials = [stranger.trial(seed) for stranger in ALL for seed in (1, 2)]
    assert len(missing(trials, Kept(Path("nothing")))) == len(trials) == 2 * (2 + 3 * len(LIES))
    for t in trials:
        check(t.run)
        t.conditions.check()
        assert (t.conditions.nodes, t.run.outer.clip) == (8, True)


@pytest.mark.long
def test_other_merges_meet_lies_with_the_defence_and_without() -> None:
    trials = [stranger.trial(1) for stranger in MERGED]
    assert len(missing(trials, Kept(Path("nothing")))) == len(MERGES) * (1 + 4 * len(MERGED_LIES)) == len(trials)
    assert {str(t.run.outer.merge) for t in trials} == {*MERGES}
    for t in trials:
        check(t.run)
        t.conditions.check()


@pytest.mark.long
def test_the_page_tells_losses_rounds_and_missed_bars(tmp_path: Path) -> None:
    kept = Kept(tmp_path / "kept.jsonl")
    assert "not run" in page(kept, [1], AUDITS)
    kept.add(HONEST.trial(1), figures(2.0))
    kept.add(Stranger(defence=False).trial(1), figures(1.99))
    kept.add(Stranger("flip:10", 1, defence=False).trial(1), figures(None))
    kept.add(Stranger("flip:10", 1).trial(1), figures(2.02, (2, 7, "struck"), (7, 7, "no contributor")))
    kept.add(Stranger("flip:10", 2).trial(1), figures(2.2, (3, 1, "struck"), (3, 7, "struck")))
    kept.add(Stranger("nan", 1).trial(1), figures(2.0, refused=40))
    kept.add(Stranger("flip:10", 1, False, "trimmed").trial(1), figures(2.01))
    kept.add(Stranger("flip:10", 1, True, "trimmed").trial(1), figures(2.05))
    kept.add(Stranger("flip:10", 2, True, "trimmed").trial(1), figures(2.05))
    kept.add(Stranger(merge="trimmed").trial(1), figures(2.004))
    text = page(kept, [1], AUDITS)
    row = next(line for line in text.splitlines() if line.startswith("| `flip:10`"))
    cells = "| diverged | +1.00 % | +10.00 % | struck in 2; out in 7 | **missed** by 5.00 % with 2 |"
    assert row.endswith(cells)
    assert "| refused, in each round |" in text
    merged = "| `trimmed` | `flip:10` | +0.50 % | not run | +2.50 % | +2.50 % | **missed** by 0.50 % with 1 |"
    assert merged in text and "by: `centered` not run, `trimmed` +0.20 %." in text
    assert "matters to it where liars send `flip:10`;" in text
    assert "the defence costs +0.50 % of loss: **missed** by 0.20 %" in text
    assert "Decisions against honest members, over all runs: 1." in text


@pytest.mark.long
def test_the_page_tells_how_soon_audits_find_a_forged_seal() -> None:
    text = page(Kept(Path("nothing")), [1], AUDITS)
    assert "| 3 of 9, the median in round 4, the last in round 19 |" in text
    few = audited(runs=2, honest=3)
    assert (few.alone.runs, few.honest, few.convicted) == (2, 3, 0)


def test_the_round_in_which_a_liar_is_out_is_that_of_its_consequence() -> None:
    found = figures(2.0, (1, 3, "banned"), (2, 7, "struck"), (5, 7, "banned"))
    assert first(found, 1, ()) == 2
    assert first(found, 1, ("banned", "evicted")) == 5
    assert first(found, 0, ()) is None
    assert honest_struck({**found, "decided": {"conditions": {"liars": 1}}}) == 1


@pytest.mark.parametrize("lie", LIES)
def test_each_lie_is_one_that_the_simulation_knows(lie: str) -> None:
    Stranger(lie, 1).trial(1).conditions.check()
