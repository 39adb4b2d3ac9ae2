"""A method file says all that makes the method, whatever the run's own config says."""

from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

from atoll.comm.config.load import load_run
from atoll.comm.config.methods import undefended
from atoll.comm.config.run import RunConfig
from atoll.configs import DEMO, METHODS

KEYS = (
    *("inner.optimizer", "outer.lr", "outer.momentum", "outer.weights", "outer.merge"),
    *(
        "outer.feedback",
        "outer.left_out",
        "fragments.count",
        "overlap.delay",
        "overlap.take",
        "overlap.alpha",
        "reduce.codec",
    ),
)
# In the order of KEYS; then what only this method says. The inner steps and the outer learning rate of `sparse`
# are ours: its file says why.
DECISIVE: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "diloco": (("adamw", 0.7, 0.9, "tokens", "mean", 0.0, "mix", 1, 0, "rebase", 0.0, "fp32"), {}),
    "local-sgd": (("adamw", 1.0, 0.0, "tokens", "mean", 0.0, "mix", 1, 0, "rebase", 0.0, "fp32"), {}),
    "intellect-1": (
        ("adamw", 0.7, 0.9, "tokens", "mean", 0.0, "mix", 1, 0, "rebase", 0.0, "int8"),
        {"rounds.inner_steps": 100},
    ),
    "muloco": (
        ("muon", 0.8, 0.9, "tokens", "mean", 0.9, "mix", 1, 0, "rebase", 0.0, "int4"),
        {"rounds.inner_steps": 30},
    ),
    "overlapped": (
        ("muon", 0.9, 0.5, "tokens", "mean", 0.0, "mix", 1, 1, "rebase", 0.0, "int8"),
        {"rounds.inner_steps": 50},
    ),
    "sparse": (
        ("adamw", 4.0, 0.0, "equal", "mean", 0.95, "mix", 1, 0, "rebase", 0.0, "sparse"),
        {"rounds.inner_steps": 10, "outer.clip": True},
    ),
    "streaming": (
        ("adamw", 0.4, 0.9, "tokens", "mean", 0.0, "mix", 4, 5, "mix", 0.5, "int4"),
        {"rounds.inner_steps": 100, "fragments.pattern": "strided", "fragments.stagger": True},
    ),
    "decoupled": (
        ("adamw", 0.7, 0.9, "quality", "radial", 0.0, "mix", 24, 2, "mix", 0.0, "int4"),
        {"rounds.inner_steps": 24, "fragments.pattern": "balanced", "fragments.stagger": True}
        | {"rounds.quorum": 0.0001, "rounds.grace": 0.5},
    ),
}


def decisive(method: str) -> dict[str, Any]:
    common, own = DECISIVE[method]
    return dict(zip(KEYS, common, strict=True)) | own


def settings(run: RunConfig, method: str) -> dict[str, Any]:
    found = {}
    for key in decisive(method):
        section, _, name = key.partition(".")
        found[key] = getattr(getattr(run, section), name)
    return found


def file(method: str) -> Path:
    return METHODS / f"{method}.yaml"


def test_the_table_has_every_shipped_method() -> None:
    assert sorted(DECISIVE) == sorted(path.stem for path in METHODS.glob("*.yaml"))


@pytest.mark.parametrize("method", DECISIVE)
def test_a_method_over_the_defaults_is_what_its_paper_says(method: str) -> None:
    assert settings(load_run(file(method)), method) == decisive(method)


@pytest.mark.long
def test_a_method_over_any_other_is_what_it_is_over_the_defaults() -> None:
    for other, method in permutations(DECISIVE, 2):
        assert settings(load_run(file(other), (), file(method)), method) == decisive(method), other


@pytest.mark.parametrize("method", DECISIVE)
def test_what_defends_a_run_is_the_runs_own_to_switch_off(method: str) -> None:
    named = load_run(DEMO, (), file(method))
    assert named.outer.clip and named.security == load_run(DEMO).security


@pytest.mark.parametrize(
    ("overrides", "off"),
    [
        ((), ""),
        (
            ("outer.clip=false", "security.weight_bound=0"),
            "outer.clip=false, security.weight_bound=0: invite only",
        ),
        (
            ("security.outliers=false", "security.audit=0"),
            "security.outliers=false, security.audit=0: invite only",
        ),
    ],
)
def test_what_a_run_does_without_that_defends_it_is_said(overrides: tuple[str, ...], off: str) -> None:
    said = undefended(load_run(DEMO, overrides))
    assert said.startswith(off) and bool(said) is bool(off)


@pytest.mark.parametrize("method", DECISIVE)
def test_a_method_over_a_run_that_has_all_otherwise(method: str, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(
        "inner: {optimizer: sgd}\n"
        "outer: {lr: 0.3, momentum: 0.2, weights: quality, merge: radial, clip: true, feedback: 0.9}\n"
        "rounds: {inner_steps: 60, quorum: 0.9, grace: 0.1}\n"
        "fragments: {count: 3, pattern: strided, stagger: false}\n"
        "overlap: {delay: 4, take: mix, alpha: 0.25}\n"
        "reduce: {codec: bf16}\n"
    )
    assert settings(load_run(tmp_path / "run.yaml", (), file(method)), method) == decisive(method)
