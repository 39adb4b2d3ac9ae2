"""Writes the files that a demo leaves behind: the numbers of `report.json` and the picture `loss.png`.

Pure but for the files it writes: everything comes from the commit records and the run's last snapshot.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec

from atoll.coordinator.service.goodput import compute_utilisation
from atoll.coordinator.state_machine.events import CommitRecord

FP32 = 4  # bytes


class MarkKind(StrEnum):
    """The kinds of faults that a demo brings about: a node is killed, a node joins late."""

    KILLED = "killed"
    JOINED = "joined"


@dataclass(frozen=True, slots=True)
class Mark:
    """Something that the demo did to the run, during round `round`."""

    kind: MarkKind
    name: str
    round: int


@dataclass
class DemoStory:
    """The state of a demo's run so far; the display and the report read it."""

    rounds: int  # that the run shall have
    inner_steps: float  # of a round
    n_params: int
    started: int = 0  # daemons, the one that joined later included
    run: dict[str, Any] = field(default_factory=dict)  # what GET /api/run answered last
    records: list[CommitRecord] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    elapsed: float = 0.0  # seconds
    first_commit: float | None = None  # seconds

    def names(self, kind: MarkKind) -> set[str]:
        return {mark.name for mark in self.marks if mark.kind is kind}

    @property
    def recovered(self) -> set[str]:
        """Nodes that joined after round 1 was committed, became active, and contributed to a commit."""
        late = {mark.name for mark in self.marks if mark.kind is MarkKind.JOINED and mark.round > 1}
        name = {m["node_id"]: m["name"] for m in self.run.get("members", ())}
        return late & {name.get(node) for record in self.records for node in record.contributors}


@dataclass(frozen=True, slots=True)
class DemoReport:
    """The fields of `report.json`."""

    rounds_committed: int
    nodes_started: int
    nodes_killed: int
    nodes_recovered: int
    val_loss_first: float | None  # of the initial state
    val_loss_last: float | None
    tokens: int
    digests_equal: bool  # in every round
    goodput: float  # share of all node-seconds that went into inner steps which a commit used, 0 to 1
    goodput_buckets: dict[str, float]  # shares, they add up to 1
    compute_utilisation: float  # inner steps over inner steps and exchange: what others call utilisation
    bytes_per_node_per_round: float  # sent; mean over records and contributors
    fp32_allreduce_bytes_per_step_equivalent: float
    first_commit_s: float | None
    wall_s: float


def summarize(story: DemoStory) -> DemoReport:
    """The numbers of a run that ended."""
    records, run = story.records, story.run
    contributors = mean(len(record.contributors) for record in records)
    losses = [record.val_loss for record in records if record.val_loss is not None]
    return DemoReport(
        rounds_committed=len(records),
        nodes_started=story.started,
        nodes_killed=len(story.names(MarkKind.KILLED)),
        nodes_recovered=len(story.recovered),
        val_loss_first=run["val_loss_first"],
        val_loss_last=losses[-1] if losses else None,
        tokens=records[-1].tokens if records else 0,
        digests_equal=bool(records) and all(r.digests_equal or r.void for r in records),
        goodput=run["goodput"]["inner"],
        goodput_buckets=run["goodput"],
        compute_utilisation=compute_utilisation(run["goodput"]),
        bytes_per_node_per_round=mean(r.bytes_up.get(node, 0) for r in records for node in r.contributors),
        fp32_allreduce_bytes_per_step_equivalent=allreduce_bytes(contributors, story.n_params, story.inner_steps),
        first_commit_s=story.first_commit,
        wall_s=story.elapsed,
    )


def allreduce_bytes(nodes: float, n_params: int, inner_steps: float) -> float:
    """Bytes a node would send in one round's inner steps, were every step's fp32 gradient all-reduced.

    A ring or butterfly all-reduce sends 2 (N-1)/N of the vector from each of N nodes; one a step:
    `2 (N-1)/N * 4 bytes * n_params * inner_steps`. N is the mean number of contributors.
    """
    return 2 * (nodes - 1) / nodes * FP32 * n_params * inner_steps if nodes else 0.0


def mean(values: Iterable[float]) -> float:
    numbers = list(values)
    return sum(numbers) / len(numbers) if numbers else 0.0


def write(out: Path, report: DemoReport, records: Sequence[CommitRecord]) -> None:
    """Write `report.json` and `rounds.jsonl`."""
    encoder = msgspec.json.Encoder()
    (out / "rounds.jsonl").write_bytes(b"".join(encoder.encode(record) + b"\n" for record in records))
    (out / "report.json").write_bytes(msgspec.json.format(encoder.encode(report), indent=2) + b"\n")


# The picture

INK, FAINT, PAPER = "#22303c", "#9aa5b1", "#ffffff"
TRAIN, VALIDATION = "#8fb8c9", "#0a7ea4"
COLOR = {MarkKind.KILLED: "#d73027", MarkKind.JOINED: "#1a9850"}
SIDE = {MarkKind.KILLED: "right", MarkKind.JOINED: "left"}  # so that two labels never overlap
LABEL = {MarkKind.KILLED: "{} killed", MarkKind.JOINED: "{} joins"}


def draw(file: Path, story: DemoStory) -> None:
    """Loss by round, what happened to the nodes, and under it each node's tokens in every round."""
    run, records, marks = story.run, story.records, story.marks
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    rows = contributions(run, records)
    style: Any = {
        "font.size": 10,
        "axes.edgecolor": FAINT,
        "axes.labelcolor": INK,
        "text.color": INK,
        "xtick.color": INK,
        "ytick.color": INK,
    }
    with plt.rc_context(style):
        heights = (4.2, 0.3 * len(rows) + 0.1)
        figure, (loss, strip) = plt.subplots(
            2,
            1,
            sharex=True,
            figsize=(9, sum(heights) + 1.2),
            gridspec_kw={"height_ratios": heights, "hspace": 0.06},
            layout="constrained",
        )
        _draw_loss(loss, run, records, marks)
        _draw_members(strip, rows, records, marks)
        figure.savefig(file, dpi=144, facecolor=PAPER)
        plt.close(figure)


def contributions(run: dict[str, Any], records: Sequence[CommitRecord]) -> dict[str, list[float]]:
    """Tokens of each node in each round, by name, in the order in which they joined."""
    members = sorted(run["members"], key=lambda m: int(m["node_id"][1:]))
    return {m["name"]: [r.contributors.get(m["node_id"], 0.0) for r in records] for m in members}


def _draw_loss(ax: Any, run: dict[str, Any], records: Sequence[CommitRecord], marks: Sequence[Mark]) -> None:
    start = [] if run["val_loss_first"] is None else [(0.0, run["val_loss_first"])]
    validation = start + [(float(r.round), r.val_loss) for r in records if r.val_loss is not None]
    train = [
        (r.round - 0.5, r.train_loss) for r in records if not r.void
    ]  # a mean over the round: drawn at its middle
    ax.plot(*_xy(train), color=TRAIN, lw=1.6, label="train, mean of the round")
    ax.plot(*_xy(validation), color=VALIDATION, lw=2.2, marker="o", ms=4, label="validation")
    for x, y in validation[:1] + validation[-1:]:
        ax.annotate(f"{y:.2f}", (x, y), (0, 8), textcoords="offset points", ha="center", color=VALIDATION)
    top = ax.get_xaxis_transform()
    for mark in marks:
        ax.axvline(mark.round - 0.5, color=COLOR[mark.kind], lw=1.2, ls=(0, (4, 3)), zorder=0)
        where, side = (mark.round - 0.5, 1.01), SIDE[mark.kind]
        label = LABEL[mark.kind].format(mark.name)
        ax.annotate(label, where, xycoords=top, ha=side, va="bottom", color=COLOR[mark.kind], weight="bold")
    tokens = records[-1].tokens if records else 0
    title = f"{run['run_id']}: {len(records)} rounds, {tokens:,} tokens, {len(run['members'])} nodes"
    ax.set_title(title, loc="left", weight="bold", pad=24)
    ax.set_ylabel("loss (nats a token)")
    ax.grid(axis="y", color=FAINT, alpha=0.3, lw=0.6)
    ax.spines[["top", "right"]].set_visible(False)
    ax.tick_params(length=0)
    ax.margins(y=0.12)
    ax.legend(frameon=False, loc="upper right")


def _draw_members(
    ax: Any, rows: dict[str, list[float]], records: Sequence[CommitRecord], marks: Sequence[Mark]
) -> None:
    """One bar a node and round, the stronger the more of the round's tokens it brought."""
    most = max((tokens for row in rows.values() for tokens in row), default=0.0) or 1.0
    for y, (_, row) in enumerate(rows.items()):
        for record, tokens in zip(records, row, strict=True):
            alpha = 0.25 + 0.75 * tokens / most if tokens else 0.0
            edge = {} if tokens else {"edgecolor": FAINT, "fill": False, "alpha": 0.25, "lw": 0.6}
            ax.barh(y, 0.92, 0.72, record.round - 0.96, **({"color": VALIDATION, "alpha": alpha} | edge))
    names = list(rows)
    for mark in marks:
        if mark.name in names:
            symbol = "X" if mark.kind is MarkKind.KILLED else ">"
            ax.plot(mark.round - 0.5, names.index(mark.name), symbol, color=COLOR[mark.kind], ms=8, clip_on=False)
    from matplotlib.ticker import MaxNLocator

    ax.set_yticks(range(len(names)), names)
    ax.set_ylim(len(names) - 0.4, -0.6)
    ax.set_xlim(-0.4, (records[-1].round if records else 1) + 0.4)
    ax.set_xlabel("round (one outer step);  a bar is a node's share in the round that ends there")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.spines[:].set_visible(False)
    ax.tick_params(length=0)


def _xy(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]
