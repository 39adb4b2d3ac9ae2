"""`atoll eval EXPORT`: an exported folder through lm-evaluation-harness, where that is installed (extra `eval`).

The harness loads the model by transformers, and never runs code that comes with one. Its own tasks fetch their
data from the Hugging Face Hub; a task in a folder of the user's (`include`), with its data beside it, needs no
network.
"""

import math
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atoll.comm.errors import AtollError, ConfigError, ResourceError
from atoll.comm.extras import demand
from atoll.node.checkpoint.hf_adapters import CONFIG as ADAPTER_CONFIG
from atoll.node.data.manifest import TOKENIZER
from atoll.node.export.tokenizer import special_tokens
from atoll.node.export.weights import SUFFIX, read_facts

TASKS = ("hellaswag", "arc_easy", "piqa", "lambada_openai")  # what small models are commonly compared by
FACTS = ("run", "run_id", "round", "state_digest")


class EvaluationFailed(AtollError):
    """The harness could not run a task."""


@dataclass(frozen=True, slots=True)
class EvaluationOptions:
    """The user's choices for an evaluation."""

    tasks: Sequence[str] = TASKS
    include: Path | None = None  # folder with more tasks
    few_shot: int | None = None  # examples before each question; None: as each task says
    limit: int | None = None  # samples of each task at most
    batch_size: int = 8
    device: str = ""  # empty: cuda if there is one


def evaluate(export: Path, options: EvaluationOptions) -> dict[str, Any]:
    """The figures of each task by name: `{"model", "run", "round", ..., "tasks": {task: {metric: value}},
    "samples": {task: count}, "harness"}`. Standard output stays empty. Raises `ConfigError`, `ResourceError`,
    `EvaluationFailed`."""
    _check(export)
    demand("atoll eval", "lm_eval")
    with redirect_stdout(sys.stderr):  # the harness and its tasks say much
        results = _run(export, options)
    weights = sorted(export.glob(f"model*{SUFFIX}"))
    facts = read_facts(weights[0]) if weights else {}
    return {
        "model": str(export),
        **{name: int(facts[name]) if name == "round" else facts[name] for name in FACTS if name in facts},
        "tasks": {task: _figures(found) for task, found in results["results"].items()},
        "samples": {task: count["effective"] for task, count in results.get("n-samples", {}).items()},
        "harness": f"lm_eval {results.get('lm_eval_version', '')}".strip(),
    }


def _check(export: Path) -> None:
    if not export.is_dir():
        raise ConfigError(
            f"{export} is not a folder: give what `atoll export STATE_DIR --out FOLDER` wrote, or any folder of a "
            "Hugging Face model"
        )
    if (export / ADAPTER_CONFIG).is_file() and not (export / "config.json").is_file():
        raise ConfigError(
            f"{export} has adapters ({ADAPTER_CONFIG}), and no model to evaluate: merge them into their base by "
            f"peft's merge_and_unload, or run lm_eval --model hf --model_args pretrained=BASE,peft={export}"
        )
    if not (export / "config.json").is_file():
        raise ConfigError(f"{export} has no config.json: it is not a folder of a Hugging Face model")
    if not (export / TOKENIZER).is_file():
        raise ConfigError(
            f"{export} has no {TOKENIZER}, and the tasks are text: export it again with --tokenizer, or from a "
            "run whose data set has one"
        )
    if not special_tokens(export) & {"bos", "eos"}:
        raise ConfigError(
            f"{export}'s tokenizer names no token that begins or ends a text, and the harness puts one before "
            "each question: export again with --tokenizer FOLDER, whose tokenizer_config.json has an eos_token"
        )


def _run(export: Path, options: EvaluationOptions) -> dict[str, Any]:
    import lm_eval
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(options.include) if options.include is not None else None)
    if unknown := sorted(set(options.tasks) - set(manager.match_tasks(list(options.tasks)))):
        raise ConfigError(
            f"lm-evaluation-harness has no task {', '.join(unknown)}: `lm-eval ls tasks` lists its own; give the "
            "folder of another with --include"
        )
    try:
        found = lm_eval.simple_evaluate(
            model="hf",
            model_args={"pretrained": str(export), "dtype": "auto", "trust_remote_code": False},
            tasks=list(options.tasks),
            task_manager=manager,
            num_fewshot=options.few_shot,
            limit=options.limit,
            batch_size=options.batch_size,
            device=options.device or _device(),
            log_samples=False,
            bootstrap_iters=1000,
        )
    except OSError as error:  # no network for a task's data; a file of the model that lacks
        raise ResourceError(f"the tasks could not be run: {error}") from None
    except Exception as error:  # tasks, datasets and transformers raise what they like
        raise EvaluationFailed(f"the tasks could not be run: {type(error).__name__}: {error}") from error
    return dict(found)


def _device() -> str:
    """The device where the user names none: the harness's own default is a GPU, whether there is one or not."""
    from transformers.utils import is_torch_cuda_available

    return "cuda" if is_torch_cuda_available() else "cpu"


def _figures(found: dict[str, Any]) -> dict[str, float]:
    """The numbers of a task, such as acc and acc_stderr, without the harness's filter in the name."""
    named = {name.removesuffix(",none").replace(",none", ""): value for name, value in found.items()}
    return {
        name: float(value)
        for name, value in named.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if name != "sample_len"  # which "samples" has
    }
