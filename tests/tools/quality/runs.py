"""Runs trials one after another, and keeps what came out: one JSON object a line, appended when a run is done."""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

from quality import real
from quality.cases import Trial

from atoll.node.config import NodeConfig
from atoll.node.simulate.state import RoundRecord

Figures = dict[str, Any]


class Kept:
    """The figures of finished runs, with what decided them. A line that a kill cut off is passed over."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lines = list(lines(path))

    def get(self, trial: Trial) -> Figures | None:
        """The newest."""
        return next((line for line in reversed(self._lines) if trial.is_told_by(line["decided"])), None)

    def add(self, trial: Trial, figures: Figures) -> None:
        line = {"case": trial.case.key, "steps": trial.steps, "seed": trial.seed, **figures}
        line["decided"] = trial.decides
        self._path.parent.mkdir(parents=True, exist_ok=True)
        cut_off = self._path.exists() and not self._path.read_bytes().endswith(b"\n")
        with self._path.open("a") as file:
            file.write("\n" * cut_off + json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self._lines.append(line)


def lines(path: Path) -> Iterator[Figures]:
    for text in path.read_text().splitlines() if path.exists() else ():
        try:
            yield json.loads(text)
        except ValueError:
            continue


def missing(trials: Sequence[Trial], kept: Kept) -> list[Trial]:
    """Those without figures, each once."""
    found: list[Trial] = []
    for trial in trials:
        if kept.get(trial) is None and not any(trial.is_told_by(other.decides) for other in found):
            found.append(trial)
    return found


def play(
    trial: Trial, node: NodeConfig, cache: Path, hardware: str, tell: Callable[[RoundRecord], None]
) -> Figures:
    """One trial from its start to its figures."""
    began = _cpu_seconds()
    figures = real.play(trial) if trial.case.real else _simulated(trial, node, cache, tell)
    about = {
        "cpu_seconds": round(_cpu_seconds() - began, 1),
        "hardware": hardware,
        "day": date.today().isoformat(),
    }
    return figures | about


def _simulated(trial: Trial, node: NodeConfig, cache: Path, tell: Callable[[RoundRecord], None]) -> Figures:
    from atoll.node.data.source import open_source
    from atoll.node.simulate.simulation import data_parallel, local_updates

    source = open_source(trial.run, node, cache)
    run = data_parallel if trial.case.parallel else local_updates
    outcome = run(trial.case.key, trial.run, node, trial.conditions, source, tell)
    figures = {name: value for name, value in asdict(outcome).items() if name not in ("records", "label")}
    curve = [(r.tokens, r.bytes_sent, round(r.val_loss, 5)) for r in outcome.records if r.val_loss is not None]
    return figures | {"curve": curve}


def _cpu_seconds() -> float:
    """Of this process and of those that it started and that have ended."""
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system
