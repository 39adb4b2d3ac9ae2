"""`make quality`: trains every case with every seed, and writes docs/quality.md and its picture.

    python -m quality [--steps 300] [--size eighth] [--seeds 1,2,3] [--cases fp32,int4] [--minutes 5] [--report]

What docs/quality.jsonl has already is not run again: it can be killed at any time, and started again. With
--minutes no run is begun after that time. A bar that is missed is shown in the table, no more.
"""

import time
from collections.abc import Callable
from pathlib import Path

import click
from quality import picture
from quality.cases import DEMO, EIGHTH, SIZES, Case, Trial, trial
from quality.claims import CLAIMED, COMPARED, SPARSER, TRIED
from quality.report import Length, hardware, page
from quality.runs import Kept, missing, play
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from atoll.node.config import NodeConfig
from atoll.node.simulate.state import RoundRecord

DOCS = Path(__file__).resolve().parents[3] / "docs"
CACHE = Path.home() / ".cache" / "atoll"
STEPS, SEEDS = 1000, (1, 2, 3)
TREND = tuple((EIGHTH, steps) for steps in (300, 1000, 3000))


@click.command()
@click.option("--steps", default=STEPS, show_default=True, help="Inner steps of a node.")
@click.option("--size", default=DEMO.key, show_default=True, type=click.Choice(list(SIZES)), help="Of the model.")
@click.option("--seeds", default=",".join(map(str, SEEDS)), show_default=True, help="Which ones.")
@click.option(
    "--cases", default="", help="Keys of the cases; empty: the claims', or, of a smaller model, the trend's."
)
@click.option("--minutes", default=float("inf"), help="Begin no run after so many.")
@click.option("--report", "only_report", is_flag=True, help="Run nothing, write the page from what there is.")
@click.option("--out", default=DOCS, type=click.Path(path_type=Path), help="Folder of page, picture and figures.")
@click.option("--threads", default=0, help="Of torch; 0: all cores.")
def main(
    steps: int, size: str, seeds: str, cases: str, minutes: float, only_report: bool, out: Path, threads: int
) -> None:
    kept = Kept(out / "quality.jsonl")
    trials = [
        trial(case, steps, int(seed), SIZES[size]) for seed in seeds.split(",") for case in _chosen(cases, size)
    ]
    if not only_report:
        _run(missing(trials, kept), kept, 60 * minutes, threads)
    claimed = Length(STEPS, SEEDS, kept)
    others = dict.fromkeys((*TREND, (DEMO, STEPS), (SIZES[size], steps)))
    out.mkdir(parents=True, exist_ok=True)
    picture.draw(claimed, out / "quality.png")
    lengths = [Length(n, SEEDS, kept, model) for model, n in others]
    (out / "quality.md").write_text(page(claimed, lengths, "quality.png"))
    click.echo(f"written: {out / 'quality.md'}; {len(missing(trials, kept))} of {len(trials)} runs are missing")


def _chosen(keys: str, size: str) -> list[Case]:
    all_ = {case.key: case for case in (*TRIED, *SPARSER, *COMPARED, *CLAIMED)}
    if not keys:
        return list(CLAIMED if size == DEMO.key else COMPARED)
    if unknown := set(keys.split(",")) - set(all_):
        raise click.UsageError(f"there is no case {', '.join(sorted(unknown))}: choose of {', '.join(all_)}")
    return [all_[key] for key in keys.split(",")]


def _run(trials: list[Trial], kept: Kept, seconds: float, threads: int) -> None:
    """All of them, in order."""
    import torch

    if threads:
        torch.set_num_threads(threads)
    console, began = Console(stderr=True), time.monotonic()
    text = TextColumn("{task.description:>32}"), BarColumn(), TextColumn("{task.fields[loss]:>8}")
    times = TimeElapsedColumn(), TimeRemainingColumn()
    with Progress(*text, *times, console=console, disable=not console.is_terminal) as bars:
        whole = bars.add_task("all runs", total=len(trials), loss="")
        for t in trials:
            if time.monotonic() - began > seconds:
                break
            figures = play(
                t, NodeConfig(compile=True, bf16=t.case.bf16), CACHE, hardware(), _follow(bars, console, t)
            )
            kept.add(t, figures)
            bars.advance(whole)
            said = f"{t.case.key}, {t.steps} steps, seed {t.seed}: loss {figures['val_loss']:.4f}"
            console.print(f"{said}, {figures['cpu_seconds']:.0f} CPU s", highlight=False)


def _follow(bars: Progress, console: Console, t: Trial) -> Callable[[RoundRecord], None]:
    """A bar of one run; without a terminal, a line for each evaluation."""
    total = t.conditions.steps * t.conditions.nodes * t.run.inner.batch_size * t.run.model.seq_len
    task = bars.add_task(f"{t.case.key}, seed {t.seed}", total=total, loss="")

    def tell(record: RoundRecord) -> None:
        bars.update(task, completed=record.tokens)
        if record.val_loss is not None:
            bars.update(task, loss=f"{record.val_loss:.3f}")
            if not console.is_terminal:
                done = f"{100 * record.tokens / total:.0f} %"
                console.print(f"{t.case.key}, seed {t.seed}: {done}, loss {record.val_loss:.3f}", highlight=False)

    return tell


if __name__ == "__main__":
    main()
