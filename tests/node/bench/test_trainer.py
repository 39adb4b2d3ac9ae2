"""The trainer's benchmark: real engines that learn the same, and what it refuses."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from atoll.comm.errors import AtollError, BenchFailed, ConfigError
from atoll.node.bench import trainer as bench
from atoll.node.bench.trainer import trainer

SMALL = ("--node", "device=cpu", "--node", "threads=1", "model.layers=2")


def run(*words: str) -> Result:
    return CliRunner().invoke(trainer, [*words, *SMALL], catch_exceptions=False)


@pytest.mark.e2e
@pytest.mark.long
@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.chaos), 2])
def test_the_trainer_and_a_bare_loop_take_the_same_steps(ranks: int) -> None:
    words = ("--engines", "builtin,bare", "--steps", "100", "--turns", "2", "--node", f"ranks={ranks}", "--json")
    done = run(*words)
    assert done.exit_code == 0, done.output
    builtin, bare = (json.loads(done.stdout)["engines"][name] for name in ("builtin", "bare"))
    assert builtin["loss"] == pytest.approx(bare["loss"], rel=0.02) and 1 < bare["loss"] < 5
    for figures in (builtin, bare):
        assert len(figures["turns"]) == 2 and min(figures["turns"]) > 0
        assert min(figures["turns"]) <= figures["tokens_per_s"] <= max(figures["turns"])
        assert figures["mfu"] is None and ranks * 100e6 < figures["peak_bytes"] < 8e9
        assert 0 < figures["beyond_bytes"] < figures["peak_bytes"]
    assert bare["overhead_percent"] == 0 and builtin["overhead_percent"] > -90


@pytest.mark.long
@pytest.mark.e2e
def test_an_engine_that_does_not_come_up_is_a_sentence() -> None:
    with pytest.raises(BenchFailed, match=r"builtin.*: ranks=2 but|builtin.*inner.batch_size=3 cannot be divided"):
        run("--engines", "builtin", "--node", "ranks=2", "inner.batch_size=3")


def test_torchtitan_is_measured_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "find_spec", lambda name: None)
    done = run("--engines", "torchtitan")
    assert done.exit_code == 0 and "torchtitan is not installed: pip install '.[titan]'" in done.output
    told = json.loads(run("--engines", "torchtitan", "--json").stdout)["engines"]["torchtitan"]
    assert told["tokens_per_s"] is told["mfu"] is told["peak_bytes"] is told["loss"] is None


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--engines", "builtin,jax"), "there is no engine jax: choose of builtin,torchtitan,bare"),
        (("--model", "reef"), "reef"),
        (("--node", "ranks=-1"), "ranks is -1"),
        (("model.heads=3",), "model.dim 128 is not a multiple of model.heads 3"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_starts(
    words: tuple[str, ...], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "measure", None)
    with pytest.raises(ConfigError, match=sentence) as refused:
        run(*words)
    assert isinstance(refused.value, AtollError)


def test_the_last_line_of_a_log_is_what_an_engine_ended_with(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("")
    assert bench.last_line(log) == "it said nothing"
    log.write_text("loading\nno room\n\n")
    assert bench.last_line(log) == "no room"
