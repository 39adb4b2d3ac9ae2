"""What was measured, as a picture: loss over tokens, and the last loss over the bytes it took."""

from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import matplotlib
from quality.claims import ADAMW, BEST, CLAIMED, FP32, MUON, PIECEWISE, SPARSE, Figures
from quality.report import Length

matplotlib.use("Agg")
from matplotlib import pyplot  # noqa: E402

CURVES = {
    ADAMW: "#9aa5b1",
    MUON: "#222222",
    BEST: "#1f6fb4",
    FP32: "#7fb3d8",
    PIECEWISE: "#e08a3c",
    SPARSE: "#b06a9e",
}


def draw(length: Length, path: Path) -> None:
    figure, (curves, costs) = pyplot.subplots(1, 2, figsize=(11, 4.4), layout="constrained")
    for case, colour in CURVES.items():
        if found := list(length.of(case).values()):
            _curve(curves, found, colour, case.title)
    for case in CLAIMED:
        if not case.steps and (found := list(length.of(case).values())):
            _cost(costs, found, CURVES.get(case, "#c9b458"), case.key)
    curves.set_xlabel("bytes of text, millions")
    costs.set_xlabel("MB that a node sent")
    costs.set_xscale("log")
    for axis in (curves, costs):
        axis.set_ylabel("validation loss, nats a byte")
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.3)
    curves.set_title(length.title, fontsize=10)
    costs.set_title("At the end", fontsize=10)
    if curves.lines:
        curves.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _curve(axis: Any, found: Sequence[Figures], colour: str, label: str) -> None:
    """The mean over seeds, and their range; the first values are left out, which would hide the others."""
    points = list(zip(*(f["curve"] for f in found), strict=False))
    points = [at for at in points if at[0][0] >= points[-1][0][0] * 0.1]
    tokens = [at[0][0] / 1e6 for at in points]
    losses = [[seed[2] for seed in at] for at in points]
    axis.plot(tokens, [mean(at) for at in losses], color=colour, label=label, linewidth=1.5)
    axis.fill_between(tokens, [min(at) for at in losses], [max(at) for at in losses], color=colour, alpha=0.2)


def _cost(axis: Any, found: Sequence[Figures], colour: str, label: str) -> None:
    x, losses = mean(f["bytes_per_node"] for f in found) / 1e6, [f["val_loss"] for f in found]
    middle = mean(losses)
    axis.errorbar(x, middle, [[middle - min(losses)], [max(losses) - middle]], fmt="o", color=colour, markersize=5)
    axis.annotate(label, (x, middle), xytext=(4, 4), textcoords="offset points", fontsize=7)
