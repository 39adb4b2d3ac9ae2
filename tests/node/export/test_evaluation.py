"""`atoll eval` says what is missing before anything is loaded, and asks the harness for what the user asked for.

The harness itself is tried in tests/harness, in an environment of its own.
"""

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from tokenized import END_OF_TEXT

from atoll.comm.errors import AtollError, ConfigError, ResourceError
from atoll.node.export.command import eval_command
from atoll.node.export.evaluation import EvaluationFailed


def call(model: Path, *arguments: str) -> Result:
    return CliRunner().invoke(eval_command, [str(model), *arguments])


def refusal(model: Path, *arguments: str) -> AtollError:
    said = call(model, *arguments).exception
    assert isinstance(said, AtollError)
    return said


@pytest.fixture
def model(tmp_path: Path) -> Path:
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_text("{}")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": END_OF_TEXT}))
    return tmp_path


class Harness:
    """A stand-in for the harness: it knows one task, and notes what it was asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: dict[str, Any] = {}
        self.included: str | None = None
        self.error: Exception | None = None
        lm_eval, tasks = ModuleType("lm_eval"), ModuleType("lm_eval.tasks")
        lm_eval.simple_evaluate = self.simple_evaluate  # type: ignore[attr-defined]
        tasks.TaskManager = self.task_manager  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "lm_eval", lm_eval)
        monkeypatch.setitem(sys.modules, "lm_eval.tasks", tasks)
        monkeypatch.setattr("atoll.node.export.evaluation.demand", lambda what, package: None)

    def task_manager(self, include_path: str | None) -> "Harness":
        self.included = include_path
        return self

    def match_tasks(self, names: list[str]) -> list[str]:
        return [name for name in names if name == "riddles"]

    def simple_evaluate(self, **asked: Any) -> dict[str, Any]:
        self.asked = asked
        print("the harness says much")
        if self.error is not None:
            raise self.error
        figures = {"alias": "riddles", "acc,none": 0.25, "acc_stderr,none": "N/A", "acc_norm,strict": 0.5}
        counts = {"riddles": {"original": 9, "effective": 4}}
        return {"results": {"riddles": figures}, "n-samples": counts, "lm_eval_version": "0.4.99"}


def test_the_harness_is_asked_for_what_was_given_and_never_runs_a_models_code(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = Harness(monkeypatch)
    arguments = ["--tasks", "riddles", "--include", "/tasks", "--limit", "4", "--few-shot", "2", "--json"]
    said = call(model, *arguments)
    assert json.loads(said.stdout) == {
        "model": str(model),
        "tasks": {"riddles": {"acc": 0.25, "acc_norm,strict": 0.5}},
        "samples": {"riddles": 4},
        "harness": "lm_eval 0.4.99",
    }
    assert harness.included == "/tasks" and harness.asked["model_args"]["trust_remote_code"] is False
    assert (harness.asked["limit"], harness.asked["num_fewshot"], harness.asked["device"]) == (
        4,
        2,
        "cuda" if torch.cuda.is_available() else "cpu",
    )
    assert "riddles  acc 0.2500, acc_norm,strict 0.5000" in call(model, "--tasks", "riddles").stdout


def test_what_the_harness_cannot_do_is_a_sentence(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    harness = Harness(monkeypatch)
    assert "has no task songs" in str(refusal(model, "--tasks", "riddles,songs"))
    harness.error = ConnectionError("no route to the Hub")
    assert isinstance(said := refusal(model, "--tasks", "riddles"), ResourceError) and "no route" in str(said)
    harness.error = KeyError("question")
    assert isinstance(refusal(model, "--tasks", "riddles"), EvaluationFailed)


def test_what_is_missing_is_said_before_the_harness_is_loaded(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    said = refusal(model)
    assert isinstance(said, ResourceError) and 'needs lm_eval, not installed here: pip install ".[eval]"' in str(
        said
    )
    (model / "tokenizer_config.json").write_text("{}")
    assert "names no token that begins or ends a text" in str(refusal(model))
    (model / "tokenizer.json").unlink()
    assert "export it again with --tokenizer" in str(refusal(model))
    (model / "config.json").unlink()
    assert "has no config.json" in str(refusal(model))
    assert isinstance(refusal(model / "model.safetensors"), ConfigError)


def test_adapters_are_told_how_they_are_evaluated(model: Path) -> None:
    (model / "config.json").rename(model / "adapter_config.json")
    assert f"pretrained=BASE,peft={model}" in str(refusal(model))
