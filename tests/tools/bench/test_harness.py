"""What the harness concludes from what it measured, and from what failed. No network and no root is needed."""

import json
import os
import sys
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from bench import gloo, overlap_page, picture, report
from bench.__main__ import main
from bench.cases import AUDITS, CASES, Failed, Measured, Outcome, Row, Verdict, bytes_over, outcome, rows, spread
from bench.command import ask
from bench.measure import QUICK, Bench, Size, codec_figures, plan_rows
from bench.overlap import Found
from bench.report import this_machine
from bench.wan import parse_stat, shape_words
from click.testing import CliRunner
from rich.console import Console

TOLD: dict[str, Any] = {
    "seconds": [3.1, 3.0],
    "rel_err": 0.008,
    "digests_equal": True,
    "tx_bytes": [150, 150, 150, 150],
    "rx_bytes": [153, 153, 153, 153],
    "committed": [True, True],
    "killed": [],
    "payload_mb": 1e-4,
}
BY_KEY = {case.key: case for case in CASES}
STAND_IN = """
import json, sys
told = {told}
peers = int(sys.argv[sys.argv.index("--peers") + 1])
print(json.dumps(told | {{"tx_bytes": [150] * peers, "rx_bytes": [150] * peers}}))
sys.exit({code})
"""


def measured(key: str, *seconds: float, gloo: tuple[float, ...] = ()) -> Measured:
    found = Outcome(seconds, 0.008, (150,) * 4, (150,) * 4, 100.0)
    return Measured(BY_KEY[key], (found,), (gloo,) if gloo else (), "atoll bench allreduce")


def stand_in(folder: Path, code: int = 0, **told: Any) -> str:
    """A command that prints what a measurement would."""
    script = folder / "stand_in.py"
    script.write_text(STAND_IN.format(told=repr(TOLD | told), code=code))
    return f"{sys.executable} -P {script}"


def test_bars_are_upper_bounds_on_the_median() -> None:
    row = Row("c", "case", "s", (3.0, 9.0, 3.2), must=3.3, aim=3.1)
    assert (row.measured, row.verdict) == (3.2, Verdict.MUST)
    assert Row("c", "case", "s", (3.1,), must=3.3, aim=3.1).verdict is Verdict.AIM
    assert Row("c", "case", "s", (3.4,), must=3.3, aim=3.1).verdict is Verdict.MISSED
    assert Row("c", "case", "s", (3.0,), must=3.3, failure="digests").verdict is Verdict.FAILED
    assert Row("c", "case", "s", left_out="no root").verdict is Verdict.LEFT_OUT
    assert Row("c", "case", "s", (3.0,)).verdict is Verdict.TOLD


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"committed": [True, False]}, "not committed: iteration 2"),
        ({"digests_equal": False}, "digests differ"),
        ({"killed": [4]}, "killed"),
        ({"killed_late": True}, "too late"),
        ({"seconds": [None]}, "JSON"),
        ({"tx_bytes": None}, "JSON"),
    ],
)
def test_what_went_wrong_is_the_reason_of_the_failure(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(Failed, match=reason):
        outcome(TOLD | change)


def test_a_killed_peer_must_have_been_killed() -> None:
    assert outcome(TOLD | {"killed": [4]}, killed=4).seconds == (3.1, 3.0)
    with pytest.raises(Failed, match="killed"):
        outcome(TOLD, killed=4)


def test_traffic_is_compared_with_the_formula() -> None:
    assert bytes_over(outcome(TOLD)) == pytest.approx(1.0)  # 4 peers: 1.5 payloads of 100 bytes each way


def test_memory_is_what_a_peer_has_beside_its_vectors_in_payloads() -> None:
    told = outcome(TOLD | {"beyond_mb": [0.0002, 0.00026]})
    bars = {}
    for share in (1.0, 0.1):
        case = BY_KEY["a"].scaled(share)
        row = next(row for row in rows([Measured(case, (told,), ((1.0,),))], bars=True) if row.key == "m")
        assert row.values == pytest.approx((2.6,)) and row.unit == "payloads"
        bars[share] = row.must
    assert bars == {1.0: 2.5, 0.1: None}, "of a small vector it says little"


@pytest.mark.parametrize("told", [{"reduce_s": [9.0, 2.0, 3.0, 2.0], "commit_s": [9.0, 1.0, 1.0, 1.0]}, {}])
def test_what_audits_cost_is_from_plan_to_commit_without_the_warm_up(told: dict[str, Any], tmp_path: Path) -> None:
    bench = Bench(QUICK, (sys.executable, *stand_in(tmp_path, **told).split()[1:]))
    if told:
        assert bench._to_commit(AUDITS, bench._words(AUDITS)) == 3.0
        return
    with pytest.raises(Failed, match="not as documented"):
        bench._to_commit(AUDITS, bench._words(AUDITS))


def test_a_ratio_is_the_median_of_the_turns_ratios() -> None:
    turns = tuple(Outcome((s,), 0.008, (150,) * 4, (150,) * 4, 100.0) for s in (1.0, 2.0, 6.0))
    row, *_ = rows([Measured(BY_KEY["a"], turns, ((1.0,), (1.0,), (6.0,)))], bars=True)
    assert (row.unit, row.values, row.measured) == ("x gloo", (1.0, 2.0, 1.0), 1.0)


def test_the_bars_of_a_death_follow_what_the_case_without_it_took() -> None:
    plain, death = measured("c", 3.0, 3.0, 5.0), measured("g", 4.0)
    row = next(row for row in rows([plain, death], bars=True) if row.key == "g")
    assert row.must == pytest.approx(5.05) and row.aim == pytest.approx(3.96)
    assert rows([death], bars=True)[0].must is None


def test_without_bars_none_is_missed() -> None:
    assert {row.verdict for row in rows([measured("c", 99.0)], bars=False)} == {Verdict.TOLD}


def test_page_and_picture_show_every_row(tmp_path: Path) -> None:
    found = [measured("a", 0.3, 0.4, gloo=(0.3, 0.3)), measured("c", 3.0, 3.3), measured("g", 4.0)]
    shown = [*rows(found, bars=True), Row("e", "slow", "s", failure="exit code 1: no | way")]
    plan = plan_rows({"rows": [{"n": n, "flat_s": n / 2, "two_level_s": None, "chosen": "flat"} for n in (4, 8)]})
    text = report.page(report.this_machine(), shown, plan, "performance.png")
    for row in shown:
        assert f"| {row.key} | {row.title} |" in text
    assert "no \\| way" in text and "| 8 | 4.0 | - | flat |" in text
    console = Console(width=200, record=True, file=StringIO())
    console.print(report.table(shown))
    assert "failed" in console.export_text()
    picture.draw(found, plan, tmp_path / "p.png")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_what_other_commands_print_is_checked() -> None:
    errors = {"rel_err_normal_4": 0.0085, "rel_err_normal_16": 0.0084, "rel_err_t3": 0.02}
    told = {"codecs": {"int8": {"encode_ns": 0.3, "decode_accumulate_ns": 0.2} | errors}}
    figures = {"encode": 0.3, "accumulate": 0.2, "normal_4": 0.85, "normal_16": 0.84, "t3": 2.0}
    assert codec_figures(told, "int8") == pytest.approx(figures)
    with pytest.raises(Failed, match="int4"):
        codec_figures(told, "int4")
    with pytest.raises(Failed, match="documented"):
        plan_rows({"rows": [{"n": 4}]})


FIGURES = {"members": 1000, "control_ms_p99": 190.0, "cpu_share": 0.25, "rss_mb": 140.0}


def test_a_coordinator_with_a_thousand_members_has_bars(tmp_path: Path) -> None:
    def fleet(size: Size, **told: Any) -> list[Row]:
        script = tmp_path / "fleet.py"
        script.write_text(f"print({json.dumps(told)!r})")
        return Bench(size, [sys.executable, "-P", str(script)]).fleet(lambda _: None)

    rows = fleet(Size(), **FIGURES)
    shown = [(row.measured, row.unit, row.verdict) for row in rows]
    assert shown == [(190.0, "ms", Verdict.MUST), (25.0, "%", Verdict.MUST), (140.0, "MB", Verdict.MISSED)]
    assert {row.verdict for row in fleet(QUICK, **FIGURES)} == {Verdict.TOLD}, "a few members have no bars"
    assert [row.verdict for row in fleet(Size(), members=1000)] == [Verdict.FAILED]


def test_the_trainer_is_measured_beside_a_bare_loop_that_learns_the_same(tmp_path: Path) -> None:
    def rows_of(**ours: Any) -> list[Row]:
        builtin = {"turns": [100.0, 50.0, 99.0], "loss": 2.0, "beyond_bytes": 400e6} | ours
        told = {"engines": {"builtin": builtin, "bare": {"turns": [101.0, 51.0, 99.0], "loss": 2.001}}}
        script = tmp_path / "trainer.py"
        script.write_text(f"print({json.dumps(told)!r})")
        return Bench(QUICK, [sys.executable, "-P", str(script)]).trainer(lambda _: None)

    time, memory = rows_of()
    assert time.values == pytest.approx((1.0, 2.0, 0.0)) and time.verdict is Verdict.MUST
    assert (memory.measured, memory.verdict) == (400, Verdict.MUST)
    assert [row.verdict for row in rows_of(turns=[90.0, 45.0, 99.0])][0] is Verdict.MISSED
    assert [row.verdict for row in rows_of(beyond_bytes=501e6)][1] is Verdict.MISSED
    for wrong in ({"loss": 3.0}, {"turns": [1.0]}, {"beyond_bytes": None}):
        assert [row.verdict for row in rows_of(**wrong)] == [Verdict.FAILED]


def test_the_emulators_words_are_understood() -> None:
    assert shape_words({"up": 100, "rtt": 50, "loss": 0.05}) == ["up=100", "delay=25", "loss=0.05"]
    assert shape_words({"region": 1, "far": 80, "between": 100}) == ["region=1", "far=40", "between=100"]
    node = {"tx": 1, "rx": 2, "lost": 3, "dropped": 4, "severed": 5}
    told = parse_stat(json.dumps({"cpu_s": 0.5, "late_max_ms": 2, "late_mean_ms": 0.1, "nodes": [node, node]}))
    assert told.cpu_s == 0.5 and [n.lost for n in told.nodes] == [3, 3]


def test_a_spread_is_a_median_and_its_range() -> None:
    assert (spread([]), spread([2.0]), spread([3.0, 1.0, 2.0])) == ("", "2", "2 (1 to 3)")


@pytest.mark.e2e
@pytest.mark.long
def test_gloo_is_measured_in_real_processes() -> None:
    assert len(seconds := gloo.measure(2, 1000, iters=2)) == 2 and min(seconds) > 0


@pytest.mark.e2e
@pytest.mark.long
def test_a_command_that_hangs_is_ended_with_what_it_started(tmp_path: Path) -> None:
    script = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(600)'])"
    with pytest.raises(Failed, match="not done after 1 s"):
        ask([], 1, [sys.executable, "-P", "-c", script])


@pytest.mark.parametrize(
    ("code", "told", "word"),
    [(0, {}, "x gloo"), (1, {}, "exit code 1"), (0, {"digests_equal": False}, "digests differ")],
)
def test_only_a_failed_case_fails_the_harness(
    tmp_path: Path, code: int, told: dict[str, Any], word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(gloo, "measure", lambda *_, **__: [3.0])
    command = ["--cases", "a", "--quick", "--out", str(tmp_path), "--atoll", stand_in(tmp_path, code, **told)]
    done = CliRunner().invoke(main, command)
    failed = code != 0 or bool(told)
    assert done.exit_code == failed, done.output
    assert word in (tmp_path / "performance.md").read_text()


def test_without_root_the_emulated_links_are_left_out_and_said_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    done = CliRunner().invoke(
        main, ["--cases", "c,g,k,wan", "--out", str(tmp_path), "--atoll", stand_in(tmp_path)]
    )
    assert done.exit_code == 0, done.output
    page = (tmp_path / "performance.md").read_text()
    assert page.count("not run") == page.count("needs root") == 5


def test_an_unknown_case_is_refused() -> None:
    done = CliRunner().invoke(main, ["--cases", "a,zebra"])
    assert done.exit_code == 2 and "zebra" in done.output


def test_what_nodes_wait_for_is_exposed_and_the_page_says_whether_it_is_too_much(tmp_path: Path) -> None:
    moments = [(0.5, "inner", 1.0), (1.0, "reducing", 0.5), (1.5, "inner", 1.0)]

    def found(way: str, sync: float) -> Found:
        meter = {"inner": 100.0 - sync, "sync": 0.75 * sync, "waiting": 0.25 * sync}
        return Found(way, 0.8, 4, 2.5, 50, 0.1, 4.0, meter, 0.98, moments)

    missed, met = found("streaming", 3.0), found("overlapped", 1.0)
    assert missed.share == pytest.approx(0.8) and missed.exposed == pytest.approx(0.03)
    overlap_page.write(tmp_path, this_machine(), [found("blocking", 44.0), met, missed])
    rows = [line for line in (tmp_path / "overlap.md").read_text().splitlines() if line.startswith("| `")]
    assert [row.split(" | ")[-1] for row in rows] == [" |", "met |", "missed |"]
    assert "44.4 %" in rows[0], "the formula"
    assert (tmp_path / "overlap.png").read_bytes().startswith(b"\x89PNG")
