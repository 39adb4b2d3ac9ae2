"""What the harness keeps, compares and says of missing runs; no training but that of a model of nothing."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from quality import picture
from quality.__main__ import main
from quality.cases import EIGHTH, Case, Trial, trial, varied
from quality.claims import BEST, CLAIMED, CLAIMS, COMPARED, MUON, SMALL, SPARSER, TRIED, Claim, Verdict, loss
from quality.real import rounds as rounds_of
from quality.report import Length, page, spread
from quality.runs import Kept, missing, play

from atoll.comm.config.run import RunConfig
from atoll.node.config import NodeConfig

NOTHING = Case(
    "nothing", "a model of nothing", (*SMALL, "rounds.inner_steps=4", "data.val_batches=1"), together=0.0
)


def figures(val_loss: float) -> dict[str, Any]:
    told = {"val_loss": val_loss, "bytes_per_node": 2e6, "fp32_allreduce_bytes": 8e8, "inner_steps_lost": 0}
    curve = [[4096.0, 0.0, 5.0], [40960.0, 1e6, val_loss]]
    shares = {"goodput": 0.99, "utilisation": 0.5}
    return {**told, **shares, "cpu_seconds": 3600.0, "hardware": "a machine", "day": "2026-01-02", "curve": curve}


@pytest.mark.long
def test_every_case_is_a_run_that_its_config_allows() -> None:
    every = (*TRIED, *SPARSER, *COMPARED, *CLAIMED)
    trials = [trial(case, 100, 1) for case in every]
    assert len({t.case.key for t in trials}) == len({case.key for case in every})
    assert {claim.of.key for claim in CLAIMS} | {claim.against.key for claim in CLAIMS} <= {c.key for c in CLAIMED}
    assert trial(BEST, 100, 1).run.inner.decay_tokens == 100 * 32 * 128
    assert trial(BEST, 100, 1).run.rounds.data_parallel == 10


@pytest.mark.long
def test_nothing_is_called_default_that_a_run_does_not_ship_with() -> None:
    shipped = RunConfig()
    for case in (*TRIED, *SPARSER, *COMPARED, *CLAIMED):
        run = trial(case, 1000, 1).run
        same = (run.rounds, run.reduce, run.outer, run.overlap) == (
            *(shipped.rounds, shipped.reduce, shipped.outer, shipped.overlap),
        )
        assert same or "default" not in case.title, case.title
    assert not [claim.text for claim in CLAIMS if "default" in claim.text]
    text = page(Length(100, (1,), Kept(Path("nothing"))), [], "x.png")
    assert f"H={shipped.rounds.inner_steps}" in text and "what a run has by default" in text


@pytest.mark.long
def test_real_processes_take_as_many_rounds_as_the_simulation_of_the_same_steps(tmp_path: Path) -> None:
    for together, steps in ((0.0, 8), (0.5, 16)):
        t = trial(replace(NOTHING, together=together), steps, 1)
        assert rounds_of(t) == play(t, NodeConfig(), tmp_path, "here", lambda record: None)["rounds"]


def test_a_finished_run_is_kept_and_a_line_that_was_cut_off_is_not(tmp_path: Path) -> None:
    path, first, second = tmp_path / "kept.jsonl", trial(BEST, 100, 1), trial(BEST, 100, 2)
    Kept(path).add(first, figures(2.0))
    with path.open("a") as file:
        file.write('{"case": "defau')
    kept = Kept(path)
    assert missing([first, second, second], kept) == [second]
    kept.add(second, figures(3.0))
    found = [Kept(path).get(t) for t in (first, second)]
    assert [f and f["val_loss"] for f in found] == [2.0, 3.0]


def told(t: Trial) -> dict[str, Any]:
    """As it comes back from a file."""
    found: dict[str, Any] = json.loads(json.dumps(t.decides))
    return found


def test_figures_are_those_of_all_that_decides_them_and_of_nothing_else() -> None:
    t = trial(BEST, 100, 1)
    assert trial(replace(BEST, key="other", title="other"), 100, 1).is_told_by(told(t))
    changes = (varied(BEST, "", "", "outer.lr=0.1"), varied(BEST, "", "", drop=0.1))
    for case in (*changes, replace(BEST, parallel=True), replace(BEST, real=True)):
        assert not trial(case, 100, 1).is_told_by(told(t))
    assert not trial(BEST, 101, 1).is_told_by(told(t))
    assert not trial(BEST, 100, 2).is_told_by(told(t))
    assert trial(varied(MUON, "", "", "outer.lr=0.1"), 100, 1).is_told_by(told(trial(MUON, 100, 1)))


def test_a_setting_that_is_newer_than_the_figures_must_have_its_default() -> None:
    default, other = trial(BEST, 100, 1), trial(varied(BEST, "", "", "outer.damping=true"), 100, 1)
    older = told(default)
    del older["run"]["outer"]["damping"]
    assert default.is_told_by(older)
    assert not other.is_told_by(older)
    del older["real"]
    assert default.is_told_by(older)
    older["run"]["outer"]["gone"] = 1
    assert not default.is_told_by(older)
    assert not RunConfig().outer.damping


def test_bars_are_bounds_of_the_mean() -> None:
    claim = Claim("text", BEST, MUON, loss, "%", 8.0, 3.0)
    assert claim.verdict([]) is Verdict.LEFT_OUT
    assert [claim.verdict([v, v + 2.0]) for v in (1.0, 6.0, 8.0)] == [Verdict.AIM, Verdict.MET, Verdict.MISSED]
    more = replace(claim, bar=400.0, aim=4000.0, more=True)
    assert [more.verdict([v]) for v in (399.0, 400.0, 4000.0)] == [Verdict.MISSED, Verdict.MET, Verdict.AIM]
    assert loss(figures(1.05), figures(1.0)) == pytest.approx(5.0)
    assert spread([1.0, 3.0], ".1f", " s") == "2.0 s (1.0 to 3.0)"
    assert spread([1.0], ".1f") == "1.0"


@pytest.mark.long
def test_the_page_tells_what_was_measured_and_what_was_not(tmp_path: Path) -> None:
    kept = Kept(tmp_path / "kept.jsonl")
    for seed, value in ((1, 1.2), (2, 1.3)):
        kept.add(trial(BEST, 100, seed), figures(value))
    kept.add(trial(MUON, 100, 1), figures(1.0))
    kept.add(trial(MUON, 50, 1, EIGHTH), figures(1.5))
    kept.add(trial(BEST, 50, 1, EIGHTH), figures(1.8))
    length, smaller = Length(100, (1, 2), kept), Length(50, (1, 2), kept, EIGHTH)
    text = page(length, [smaller, length, Length(50, (1, 2), kept)], "x.png")
    start = "| Muon, int8, H=30 after a data-parallel start, against data-parallel"
    assert f"{start} Muon | +8 % | +3 % | +20.00 % | 1 | **missed** |" in text
    assert f"{start} AdamW | -12 % |  |  |  | not run |" in text
    assert f"| {BEST.title} | 1.250 (1.200 to 1.300) | 2.0 | 400x |  | 2 | 3600 |" in text
    assert "5 runs, 5.0 CPU hours, 2026-01-02.\nHardware: a machine." in text
    assert "| loss of | against | 0.12M, 50 steps | 0.82M, 100 steps |" in text
    title = f"{BEST.title} | data-parallel Muon"
    assert f"| {title} | +20.00 %, 1 seed | +20.00 %, 1 seed |" in text
    picture.draw(length, tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_from_its_case_to_its_figures(tmp_path: Path) -> None:
    t, rounds = trial(NOTHING, 12, 1), list[int]()
    found = play(t, NodeConfig(), tmp_path, "here", lambda record: rounds.append(record.round))
    assert rounds == [0, 1, 2, 3]
    assert found["tokens"] == 12 * 4 * 8 * 16
    assert found["curve"][-1][0] == found["tokens"]
    assert found["curve"][-1][2] == pytest.approx(found["val_loss"], abs=1e-4)
    assert json.loads(json.dumps(found))["hardware"] == "here"


@pytest.mark.long
def test_the_command_says_what_is_missing_and_refuses_unknown_cases(tmp_path: Path) -> None:
    words = ["--report", "--seeds", "1", "--steps", "300", "--out", str(tmp_path)]
    done = CliRunner().invoke(main, words, catch_exceptions=False)
    assert f"{len(CLAIMED)} of {len(CLAIMED)} runs are missing" in done.output
    assert (tmp_path / "quality.md").read_text().startswith("# Training quality")
    assert "there is no case nine" in CliRunner().invoke(main, ["--cases", "nine"]).output
