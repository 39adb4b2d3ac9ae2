"""A trial in real processes: coordinator, daemons and trainers over loopback, as `atoll demo` starts them."""

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

from bench.command import ask
from quality.cases import NODES, Trial

from atoll.comm.config.run import RunConfig

PATIENCE = 3600.0  # seconds
SECTIONS = ("model", "data", "inner", "outer", "fragments", "overlap", "rounds", "reduce")


def play(trial: Trial) -> dict[str, object]:
    """Its figures; `bench.cases.Failed` if it did not come to its end."""
    with tempfile.TemporaryDirectory() as folder:
        words = ("demo", "--json", "--no-chaos", "--nodes", str(NODES), "--out", folder)
        length = ("--rounds", str(rounds(trial)))
        told = ask((*words, *length, *settings(trial.run)), PATIENCE)
        records = [json.loads(line) for line in (Path(folder) / "rounds.jsonl").read_text().splitlines()]
    turns = trial.steps / trial.run.round_steps
    return {
        "val_loss": told["val_loss_last"],
        "tokens": told["tokens"],
        "rounds": told["rounds_committed"],
        "goodput": told["goodput"],
        "utilisation": told["goodput"],
        "bytes_per_node": told["bytes_per_node_per_round"] * told["rounds_committed"],
        "fp32_allreduce_bytes": told["fp32_allreduce_bytes_per_step_equivalent"] * turns,
        "inner_steps_lost": 0,
        "wall_seconds": told["wall_s"],
        "curve": [(r["tokens"], 0.0, r["val_loss"]) for r in records if r["val_loss"] is not None],
    }


def rounds(trial: Trial) -> int:
    """That its inner steps make: of the first ones, which are data-parallel, each is a round."""
    together = trial.run.rounds.data_parallel
    return together + int((trial.steps - together) / trial.run.round_steps)


def settings(run: RunConfig) -> Iterator[str]:
    """The run as overrides of another; what that other run is called, and what it logs, is its own."""
    yield f"seed={run.seed}"
    for section in SECTIONS:
        for key, value in vars(getattr(run, section)).items():
            if value != "" and (section, key) != ("rounds", "total"):
                yield f"{section}.{key}={str(value).lower() if isinstance(value, bool) else value}"
