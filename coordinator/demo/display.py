"""Shows a demo while it runs, as a live view in a terminal or as plain lines anywhere else, and prints its last
words."""

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from rich.box import ROUNDED
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from atoll.comm.phases import phase_word
from atoll.coordinator.demo.report import DemoReport, DemoStory, MarkKind, summarize
from atoll.coordinator.monitor.terminal import members_table, size

MAX_EVENTS = 8  # in the live view
BLOCKS = "▁▂▃▄▅▆▇█"


class LineKind(StrEnum):
    """The source of a line: the coordinator, a commit, or the demo itself."""

    NOTE = "note"  # the coordinator's
    COMMIT = "commit"
    ACT = "act"  # the demo's own


@dataclass(frozen=True, slots=True)
class DisplayLine:
    """One line of a demo's log."""

    at: float  # seconds since 1970
    kind: LineKind
    sentence: str
    name: str = ""  # of the node that it is about


class Display(Protocol):
    """A view of a running demo, on standard output."""

    def show(self, story: DemoStory, new: Sequence[DisplayLine]) -> None:
        """Show the story as it is now, and the lines `new` since the last call; called a few times a second."""


@contextmanager
def open_view(page: str) -> Iterator[Display]:
    """The view that fits standard output."""
    if not sys.stdout.isatty():
        yield PlainDisplay()
        return
    with Live(console=Console(), auto_refresh=False) as live:
        yield TerminalDisplay(live, page)


class PlainDisplay:
    """One line for each commit and event."""

    def show(self, story: DemoStory, new: Sequence[DisplayLine]) -> None:
        for line in new:
            print(f"{clock(line.at)} {line.sentence}", flush=True)


class TerminalDisplay:
    """A panel that is drawn again and again."""

    def __init__(self, live: Live, page: str) -> None:
        self._live, self._page = live, page
        self._lines: list[DisplayLine] = []

    def show(self, story: DemoStory, new: Sequence[DisplayLine]) -> None:
        self._lines = [*self._lines, *(line for line in new if line.kind is not LineKind.COMMIT)][-MAX_EVENTS:]
        self._live.update(panel(story, self._lines, self._page), refresh=True)


def panel(story: DemoStory, lines: Sequence[DisplayLine], page: str) -> Panel:
    """The live view: the run's figures, its members, and the log's latest `lines`."""
    run = story.run
    body: list[RenderableType] = [headline(story), progress(story), losses(story), traffic(story), Text()]
    if run:
        body += [members_table(run), Text()]
    body += [event(line, story) for line in lines]
    title = f"[bold]atoll demo[/] · {story.n_params / 1e6:.2f}M parameters · {page}"
    return Panel(Group(*body), title=title, title_align="left", box=ROUNDED, border_style="cyan", padding=(1, 2))


def headline(story: DemoStory) -> Text:
    """One line that tells round, phase, the phase's reason, and committed tokens."""
    run = story.run
    if not run:
        return Text("the coordinator is starting")
    return Text.assemble(
        (f"round {run['round']} of {max(story.rounds, run['round'])}", "bold cyan"),
        (f"  {phase_word(run['phase'])}", "bold"),
        (f"  {run['phase_reason']}", "dim"),
        f"  ·  {run['tokens']:,} tokens",
    )


def progress(story: DemoStory) -> Table:
    """A bar of the rounds done, the slowest active member's inner steps included, with the time elapsed and
    left."""
    run = story.run
    steps = [m["inner_step"] for m in run.get("members", ()) if m["state"] == "active"]
    part = min(steps, default=0) / story.inner_steps
    done = min(run.get("committed", 0) + part, story.rounds)
    left = remaining(story)
    grid = Table.grid(padding=(0, 2))
    grid.add_row(
        ProgressBar(story.rounds, done, width=48),
        f"{span(story.elapsed)} elapsed" + ("" if left is None else f", about {span(left)} left"),
    )
    return grid


def losses(story: DemoStory) -> Text:
    """One line with the first and the last validation loss, nats a token, a sparkline between them, and the
    goodput."""
    run = story.run
    values = [run["val_loss_first"]] if run and run["val_loss_first"] is not None else []
    values += [record.val_loss for record in story.records if record.val_loss is not None]
    if not values:
        return Text("validation loss: not measured yet", "dim")
    return Text.assemble(
        "validation loss ",
        f"{values[0]:.3f} ",
        (sparkline(values), "cyan"),
        (f" {values[-1]:.3f}", "bold"),
        f"  ·  goodput {run['goodput']['inner']:.0%}",
    )


def traffic(story: DemoStory) -> Text:
    return Text(f"traffic {saving(story)}" if story.records else "traffic: no round committed yet", "dim")


def event(line: DisplayLine, story: DemoStory) -> Text:
    """One line of the log; what happens to the killed and to the late node stands out."""
    style = "dim"
    if line.name in story.names(MarkKind.KILLED):
        style = "red"
    elif line.name in story.names(MarkKind.JOINED):
        style = "green"
    if line.kind is LineKind.ACT:
        style += " bold" if style != "dim" else ""
    return Text(f"{clock(line.at)}  {line.sentence}", style, no_wrap=True, overflow="ellipsis")


def summary(story: DemoStory, report: DemoReport, out: Path) -> Table:
    """The table of the demo's figures that is printed at its end."""
    table = Table(box=ROUNDED, show_header=False, border_style="cyan", title="atoll demo", title_style="bold")
    loss = " → ".join("?" if v is None else f"{v:.3f}" for v in (report.val_loss_first, report.val_loss_last))
    spent = ", ".join(
        f"{phase_word(bucket)} {share:.0%}" for bucket, share in report.goodput_buckets.items() if share >= 0.005
    )
    killed = ", ".join(sorted(story.names(MarkKind.KILLED))) or "none"
    recovered = ", ".join(sorted(story.recovered)) or "none"
    rows = {
        "rounds": f"{report.rounds_committed} of {max(story.rounds, report.rounds_committed)}",
        "tokens": f"{report.tokens:,}",
        "validation loss": loss,
        "states equal": "in every round" if report.digests_equal else "NO",
        "goodput": f"{report.goodput:.0%}  ({spent})",
        "compute utilisation": f"{report.compute_utilisation:.0%}  (inner steps over inner steps and exchange)",
        "traffic": saving(story),
        "killed": killed,
        "joined, recovered": recovered,
        "wall time": f"{span(report.wall_s)}, first commit after {span(report.first_commit_s or 0.0)}",
        "files": f"{out}/: report.json, loss.png, rounds.jsonl, wandb/, *.log",
    }
    for name, value in rows.items():
        table.add_row(f"[bold]{name}[/]", value)
    return table


def saving(story: DemoStory) -> str:
    """A sentence on the traffic of a node and round, against a data-parallel run that all-reduces fp32 gradients
    each step."""
    report = summarize(story)
    sent, instead = report.bytes_per_node_per_round, report.fp32_allreduce_bytes_per_step_equivalent
    less = f", {instead / sent:,.0f}x less than fp32 all-reduce each step" if sent else ""
    return f"{size(sent)} sent a node and round{less}"


def remaining(story: DemoStory) -> float | None:
    """Seconds until the last commit, by the last few rounds."""
    if not (recent := story.records[-3:]):
        return None
    return round_seconds(story) * max(story.rounds - recent[-1].round, 0)


def round_seconds(story: DemoStory) -> float:
    """The mean length of the last few rounds."""
    recent = story.records[-3:]
    return sum(sum(record.seconds.values()) for record in recent) / max(len(recent), 1)


def sparkline(values: Sequence[float]) -> str:
    low, high = min(values), max(values)
    step = (high - low) / (len(BLOCKS) - 1) or 1.0
    return "".join(BLOCKS[round((value - low) / step)] for value in values)


def span(seconds: float) -> str:
    """`1:05` for 65 seconds."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d}"


def clock(at: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(at))
