"""`make bench`: measures the all-reduce and the trainer against their bars, and writes docs/performance.md.

    python -m bench [--cases a,c] [--quick] [--out FOLDER]

Exits 1 if a case failed. A bar that is missed is shown in the table, no more.
"""

import shlex
import signal
import sys
from pathlib import Path

import click
from bench import cases, picture, report
from bench.command import ATOLL
from bench.measure import QUICK, Bench, Size
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

DOCS = Path(__file__).resolve().parents[3] / "docs"
PAGE, PICTURE = "performance.md", "performance.png"


@click.command()
@click.option("--cases", "chosen", default=",".join(cases.KEYS), show_default=True, help="Which ones.")
@click.option("--quick", is_flag=True, help="Small vectors and few iterations, without bars: to try the harness.")
@click.option(
    "--out", type=click.Path(path_type=Path), help="Folder for page and picture, for a choice of cases too."
)
@click.option("--atoll", default=shlex.join(ATOLL), help="The command to measure.")
@click.argument("settings", nargs=-1)
def main(chosen: str, quick: bool, out: Path | None, atoll: str, settings: tuple[str, ...]) -> None:
    """Measure; SETTINGS are key=value settings of the measured run."""
    keys = [key.strip() for key in chosen.split(",")]
    if unknown := set(keys) - set(cases.KEYS):
        raise click.UsageError(f"there is no case {', '.join(sorted(unknown))}: choose of {','.join(cases.KEYS)}")
    bench = Bench(QUICK if quick else Size(), shlex.split(atoll), settings)
    rows, measured, plan = _measure(bench, keys, bars=not quick)
    terminal = Console()
    (terminal if terminal.is_terminal else Console(width=160)).print(report.table(rows))
    if out is None and set(keys) == set(cases.KEYS) and not quick:
        out = DOCS
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        picture.draw(measured, plan, out / PICTURE)
        (out / PAGE).write_text(report.page(report.this_machine(), rows, plan, PICTURE))
        click.echo(f"written: {out / PAGE}")
    sys.exit(any(row.failure for row in rows))


def _measure(
    bench: Bench, keys: list[str], bars: bool
) -> tuple[list[cases.Row], list[cases.Measured], report.Plan]:
    """Everything that was chosen, in the order of the table."""
    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}")
    with Progress(*columns, TimeElapsedColumn(), console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=len(keys))

        def say(what: str) -> None:
            bar.update(task, description=what)
            if not console.is_terminal:
                console.print(what, highlight=False)

        measured = []
        for case in cases.CASES:
            if case.key in keys:
                measured.append(bench.case(case, say))
                bar.advance(task)
        rows = cases.rows(measured, bars)
        if cases.REGIONS.key in keys:
            rows += bench.regions(say)
            bar.advance(task)
        if cases.AUDITS.key in keys:
            rows += bench.audits(say)
            bar.advance(task)
        if cases.CODEC in keys:
            rows += bench.codec(say)
            bar.advance(task)
        if cases.FLEET in keys:
            rows += bench.fleet(say)
            bar.advance(task)
        if cases.TRAINER in keys:
            rows += bench.trainer(say)
            bar.advance(task)
        rows.sort(key=lambda row: row.key)
        plan: report.Plan = {}
        if cases.PLAN in keys:
            failed, plan = bench.plan(say)
            rows += failed
            bar.advance(task)
        if cases.WAN in keys:
            rows += bench.emulator(say)
            bar.advance(task)
    return rows, measured, plan


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # which ends what was started
    main()
