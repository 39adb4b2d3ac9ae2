"""What was measured, as a picture: loopback against gloo, emulated links against their limit and others."""

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib
from bench.cases import Measured
from bench.report import Plan

matplotlib.use("Agg")
from matplotlib import pyplot  # noqa: E402

OURS, GLOO, LIMIT = "#1f6fb4", "#9aa5b1", "#222222"
OTHERS = {"PRIME": "#e08a3c", "PCCL": "#c9b458", "hivemind fp16": "#b06a9e"}


def draw(measured: Sequence[Measured], plan: Plan, path: Path) -> None:
    """Only what is there is drawn: loopback and predictions above, the emulated links below."""
    near = [m for m in measured if m.case.link is None and m.outcomes and m.gloo]
    far = [m for m in measured if m.case.link is not None and m.outcomes]
    above = ["loopback"] * bool(near) + ["predicted"] * bool(plan)
    below = ["links"] * max(len(above), 1) if far else []
    layout: list[Any] = [row for row in (above, below) if row]
    if not layout:
        return
    figure, axes = pyplot.subplot_mosaic(layout, figsize=(11, 4.2 * len(layout)), layout="constrained")
    if near:
        _loopback(axes["loopback"], near)
    if plan:
        _predicted(axes["predicted"], plan)
    if far:
        _links(axes["links"], far)
    for axis in axes.values():
        axis.set_ylabel("seconds")
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _loopback(axis: Any, measured: Sequence[Measured]) -> None:
    for k, m in enumerate(measured):
        _bar(axis, k - 0.2, m.baseline, GLOO, "gloo fp32", 0.36)
        _bar(axis, k + 0.2, m.ours, OURS, "atoll int8", 0.36)
    axis.set_xticks(range(len(measured)), [f"{m.case.peers} peers" for m in measured])
    axis.set_title("Loopback", fontsize=10)
    _labels_once(axis)


def _links(axis: Any, measured: Sequence[Measured]) -> None:
    for k, m in enumerate(measured):
        width = 0.8 / (1 + len(m.case.others))
        left = k - 0.4 + width / 2
        _bar(axis, left, m.ours, OURS, "atoll int8", 0.9 * width)
        for j, (name, seconds) in enumerate(m.case.others, 1):
            _bar(axis, left + j * width, (seconds,), OTHERS[name], f"{name}, published", 0.9 * width)
        if m.case.limit:
            axis.hlines(m.case.limit, k - 0.42, k + 0.42, LIMIT, "dashed", label="limit of the links", zorder=3)
    axis.set_xticks(range(len(measured)), [m.case.full_title.replace(", ", "\n") for m in measured], fontsize=8)
    axis.set_title("Emulated links, int8, 4 peers", fontsize=10)
    _labels_once(axis)


def _predicted(axis: Any, plan: Plan) -> None:
    for (scenario, rows), colour in zip(plan.items(), (OURS, *OTHERS.values()), strict=False):
        for field, style, name in (("flat_s", "-", "flat"), ("two_level_s", "--", "two levels")):
            points = [(row["n"], row[field]) for row in rows if row[field] is not None]
            if points:
                axis.plot(*zip(*points, strict=True), style, color=colour, label=f"{scenario} {name}".strip())
    axis.set_xscale("log")
    sizes = sorted({row["n"] for rows in plan.values() for row in rows})
    axis.set_xticks(sizes, [str(n) for n in sizes])
    axis.minorticks_off()
    axis.set_yscale("log")
    axis.set_xlabel("members")
    axis.set_title("Predicted (not measured)", fontsize=10)


def _bar(axis: Any, x: float, values: Sequence[float], colour: str, label: str, width: float) -> None:
    middle = median(values)
    reach = [[middle - min(values)], [max(values) - middle]] if len(values) > 1 else None
    axis.bar(x, middle, width, color=colour, label=label, yerr=reach, error_kw={"lw": 0.8})
    axis.annotate(f"{middle:.3g}", (x, max(values)), ha="center", va="bottom", fontsize=8)


def _labels_once(axis: Any) -> None:
    """One legend entry a label, whatever the number of bars with it."""
    seen = set()
    for artist in (*axis.containers, *axis.collections):
        if (label := artist.get_label()) in seen:
            artist.set_label("_")
        seen.add(label)
