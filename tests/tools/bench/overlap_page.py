"""What was measured of overlap, as a page and a picture of the rounds."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib
from bench.report import Machine

matplotlib.use("Agg")
from matplotlib import pyplot  # noqa: E402

if TYPE_CHECKING:
    from bench.overlap import Found

BAR = 2.0  # percent of the time
EXCHANGE, TRAINS = "#e08a3c", "#1f6fb4"
PICTURE, PAGE = "overlap.png", "overlap.md"


def write(folder: Path, machine: Machine, found: Sequence["Found"]) -> None:
    """Make both."""
    folder.mkdir(parents=True, exist_ok=True)
    draw(found, folder / PICTURE)
    (folder / PAGE).write_text(page(machine, found))


def page(machine: Machine, found: Sequence["Found"]) -> str:
    """As Markdown."""
    rows = "\n".join(map(_row, found))
    return f"""\
# Overlap

Made by `PYTHONPATH=tests/tools python -m bench.overlap --out docs`; do not edit.

Machine: {machine}. All nodes and the coordinator shared it.

Two real nodes over loopback, each of which may send so many Mbit/s (`upload=`) that the exchange of a round
takes about half, and about four fifths, of its inner steps' time; of a fragment's exchange the cap lets a part
through at once, so that it takes less. Inner steps are mostly pauses, as if each
trainer had an accelerator of its own; the rest of each is a real step of a small model.

| method | a round | Mbit/s | exchange | of the round | exposed | by the formula | trained | |
|---|---|---|---|---|---|---|---|---|
{rows}

- *exchange*: from when a round closes until it is committed, by the commit records; median.
- *exposed*: the share of the nodes' time that their own meter does not book as training: they waited for the
  network, for the coordinator, or for others. With overlap it is to be below {BAR:g} %.
- *by the formula*: exchange / (inner steps + exchange), what nodes that stand still lose.
- *trained*: inner steps that were committed, times the seconds of an undisturbed one, over the nodes' time. It is
  counted, not told by a meter, and has in it what handing over and taking cost a trainer.

![What the run and the trainers do]({PICTURE})

Above in each, when a round's exchange was under way; below, what share of the nodes trained.
"""


def _row(one: "Found") -> str:
    cells = (
        f"`{one.way}`",
        f"{one.steps:g} steps, {one.steps * one.step:.2f} s",
        f"{one.cap:.2f}",
        f"{one.exchange:.2f} s",
        f"{one.share:.0%}",
        f"{100 * one.exposed:.2f} %",
        f"{100 * one.share / (1 + one.share):.1f} %" if one.way == "blocking" else "-",
        f"{one.trained:.1%}",
        "" if one.way == "blocking" else "met" if 100 * one.exposed < BAR else "missed",
    )
    return f"| {' | '.join(cells)} |"


def draw(found: Sequence["Found"], path: Path) -> None:
    """Of each run, the first seconds: the exchange, and how many nodes train."""
    figure, axes = pyplot.subplots(
        len(found), 1, figsize=(9, 1.1 * len(found) + 0.6), sharex=True, squeeze=False, layout="constrained"
    )
    until = min(one.moments[-1][0] for one in found)
    for (axis,), one in zip(axes, found, strict=True):
        _draw(axis, one)
        axis.set_xlim(0, until)
    axes[-1][0].set_xlabel("seconds")
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _draw(axis: Any, one: "Found") -> None:
    at = [0.0, *(moment[0] for moment in one.moments)]
    for left, right, (_, phase, trains) in zip(at, at[1:], one.moments, strict=False):
        if phase in ("collecting", "reducing"):
            axis.broken_barh([(left, right - left)], (1.1, 0.5), color=EXCHANGE, linewidth=0)
        axis.broken_barh([(left, right - left)], (0, min(trains, 1.0)), color=TRAINS, linewidth=0)
    axis.set_ylim(0, 1.7)
    axis.set_yticks([0.5, 1.35], ["nodes train", "exchange"], fontsize=8)
    axis.set_title(
        f"{one.way}: an exchange takes {one.share:.0%} of a round's inner steps", fontsize=9, loc="left"
    )
    axis.spines[["top", "right"]].set_visible(False)
