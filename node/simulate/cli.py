"""`atoll simulate`: compare methods in one process."""

import json
import os
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click

from atoll.comm.config.data import DataKind
from atoll.comm.config.engine import Engine
from atoll.comm.config.load import load_run
from atoll.comm.config.shipped import method_file, run_file
from atoll.comm.errors import ConfigError
from atoll.comm.extras import demand, installed, lacking
from atoll.comm.terminal import show_table
from atoll.node.simulate.conditions import Conditions


@click.command()
@click.argument("run_yaml", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1)
@click.option("--nodes", required=True, type=int, help="Nodes of the run.")
@click.option("--out", required=True, type=click.Path(path_type=Path, file_okay=False), help="Folder for results.")
@click.option(
    "--method",
    "methods",
    multiple=True,
    help="A method's settings over RUN_YAML, by name or .yaml file; may be given several times.",
)
@click.option("--steps", default=0, help="Inner steps of a node on average; 0: those of rounds.total.")
@click.option(
    "--baseline/--no-baseline", default=True, show_default=True, help="Data parallelism, to compare with."
)
@click.option("--speeds", default="", help="Of each node, such as 1,1,0.8,0.5.")
@click.option("--step-seconds", default=1.0, show_default=True, help="Virtual seconds of a step at speed 1.")
@click.option("--bandwidth", default=0.0, help="Mbit/s of each node, each way; 0: as much as is needed.")
@click.option("--latency", default=0.0, help="Virtual seconds that every exchange takes besides.")
@click.option("--drop", default=0.0, help="Probability that a contribution does not count.")
@click.option("--churn", default=0, help="Kill a node every so many rounds, and let one join halfway between.")
@click.option("--liars", default=0, help="Nodes that lie: the last ones.")
@click.option(
    "--liar",
    default="",
    help="What they do: flip:10, noise:1e4, zeros, replay, copy, nan, weight:8 or seal:0.125 (docs/strangers.md).",
)
@click.option(
    "--defence",
    default="on",
    show_default=True,
    type=click.Choice(["on", "off"]),
    help="off: deltas are not clipped, nor weights bounded, nothing is audited, and nobody is out.",
)
@click.option("--data", default="", help="Folder of text files, or of the run's data set: the node's data=.")
@click.option("--model", default="", help="package.module:function that builds your own model.")
@click.option(
    "--compile", is_flag=True, help="torch.compile the model's blocks: a minute first, then faster steps."
)
@click.option("--bf16", is_flag=True, help="Compute in bf16, with parameters in fp32.")
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON.")
def simulate(
    run_yaml: Path,
    overrides: tuple[str, ...],
    nodes: int,
    out: Path,
    methods: tuple[str, ...],
    steps: int,
    baseline: bool,
    speeds: str,
    step_seconds: float,
    bandwidth: float,
    latency: float,
    drop: float,
    churn: int,
    liars: int,
    liar: str,
    defence: str,
    data: str,
    model: str,
    compile: bool,
    bf16: bool,
    as_json: bool,
) -> None:
    """Run RUN_YAML with key=value OVERRIDES on many nodes in this one process, on a virtual clock.

    RUN_YAML is a file, or the name of a run that comes with Atoll, such as demo.
    The same algorithms, codecs, model and data as a run of real nodes, and data parallelism at equal tokens and
    batch to compare with. DIR gets curves.csv, a .jsonl for each run, summary.json and comparison.png. The same
    seed gives the same numbers on the same machine.
    """
    run_yaml = run_file(run_yaml)
    base = load_run(run_yaml, overrides)
    named = {Path(m).stem: load_run(run_yaml, overrides, method_file(m, run_yaml)) for m in methods}
    runs = named or {base.name: base}
    if others := sorted({run.engine for run in runs.values()} - {Engine.BUILTIN}):
        raise ConfigError(
            f"engine is {others[0]}, and atoll simulate trains the built-in model: set engine=builtin"
        )
    steps = steps or int(base.rounds.total * base.round_steps)
    if not steps:
        raise ConfigError("rounds.total is 0, the run would not end: give --steps or rounds.total")
    conditions = Conditions(nodes, steps, _numbers(speeds), step_seconds, bandwidth, latency, drop, churn)
    conditions = replace(conditions, liars=liars, lie=liar, defence=defence == "on")
    conditions.check()
    demand("atoll simulate", "torch", "numba")
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # torch reads it when it is imported
    if no_picture := lacking("comparison.png", "matplotlib"):
        click.echo(f"atoll: {no_picture}", err=True)
    from atoll.node.config import NodeConfig, check
    from atoll.node.data.source import open_source
    from atoll.node.simulate import report
    from atoll.node.simulate.memory import check_simulation
    from atoll.node.simulate.simulation import RunOutcome, data_parallel, local_updates

    node = NodeConfig(data=data, model=model, compile=compile, bf16=bf16)
    check(node)
    if base.data.kind is DataKind.SCRIPT:
        raise ConfigError("a simulation trains on text, and data.kind=script has none: set data.kind=stdlib")
    if base.data.kind is DataKind.BYTES and not data:
        raise ConfigError(
            f"this run trains on your own text, data.kind={base.data.kind}: give its folder, --data FOLDER"
        )
    for run in runs.values():
        if run.decoder and not model:
            check_simulation(run, nodes)
    report.prepare(out)
    outcomes, baseline_of = list[RunOutcome](), dict[str, str]()
    settings = {"conditions": asdict(conditions), "runs": {label: asdict(run) for label, run in runs.items()}}

    def add(outcome: RunOutcome) -> None:
        """Write all outcomes so far: an interrupted comparison leaves the runs that were finished."""
        outcomes.append(outcome)
        report.write(out, outcomes, report.summary(outcomes, baseline_of), settings)

    with _progress(conditions, as_json) as follow:
        source = open_source(base, node, out / "cache")
        for label, run in runs.items():
            optimizer = f"data-parallel-{run.inner.optimizer}"
            if baseline and optimizer not in {outcome.label for outcome in outcomes}:
                same = replace(run, rounds=base.rounds)
                add(data_parallel(optimizer, same, node, conditions, source, follow(optimizer, run)))
            baseline_of[label] = optimizer
            add(local_updates(label, run, node, conditions, source, follow(label, run)))
    rows = report.summary(outcomes, baseline_of)
    if as_json:
        click.echo(json.dumps({"runs": rows}))
    else:
        _print(rows, out)
        for outcome in outcomes:
            _print_decisions(outcome)


def _numbers(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(",")) if text else ()
    except ValueError:
        raise ConfigError(f"--speeds is {text!r}: write numbers with commas, such as 1,1,0.8,0.5") from None


def percent(share: float) -> str:
    """A share for people, to the nearest whole; nearly all of it is not said to be all."""
    return ">99 %" if 0.995 <= share < 1 else f"{100 * share:.0f} %"


class _progress:
    """Bars on stderr, one a run: tokens, and the last validation loss; where that is no terminal, a line for every
    tenth of a run."""

    def __init__(self, conditions: Conditions, quiet: bool) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description:>22}"), BarColumn(), TextColumn("{task.fields[loss]}"))
        console = Console(stderr=True)
        self._bars = Progress(*columns, TimeRemainingColumn(), console=console, disable=quiet)
        self._lines = not quiet and not console.is_terminal
        self._conditions = conditions

    def __enter__(self) -> Callable[[str, Any], Callable[[Any], None]]:
        self._bars.start()
        return self._follow

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def _follow(self, label: str, run: Any) -> Callable[[Any], None]:
        total = self._conditions.steps * self._conditions.nodes * run.inner.batch_size * run.model.seq_len
        task = self._bars.add_task(label, total=total, loss="")
        tenths = 0

        def show(record: Any) -> None:
            nonlocal tenths
            self._bars.update(task, completed=record.tokens)
            done = record.tokens / total
            if self._lines and (reached := round(100 * done) // 10) > tenths:
                tenths = reached
                click.echo(f"{label}: round {record.round}, {percent(done)}", err=True)
            if record.val_loss is not None:
                self._bars.update(task, loss=f"round {record.round}: {record.val_loss:.3f}")

        return show


def _print(rows: list[dict[str, Any]], out: Path) -> None:
    from rich.table import Table

    table = Table()
    table.add_column("run", no_wrap=True)
    for title in ("loss", "to DP", "rounds", "MB sent", "less", "training", "goodput"):
        table.add_column(title, justify="right", no_wrap=True)
    for row in rows:
        against, less = row["against_baseline"], row["reduction"]
        table.add_row(
            row["label"],
            f"{row['val_loss']:.4f}",
            "" if against is None else f"{100 * against:+.1f} %",
            f"{row['rounds']}",
            f"{row['bytes_per_node'] / 1e6:.2f}",
            "" if less is None else f"{less:.0f}x",
            percent(row["utilisation"]),
            percent(row["goodput"]),
        )
    show_table(table)
    click.echo("less: bytes, than data parallelism in fp32; training: share of the nodes' time")
    picture = " and comparison.png" if installed("matplotlib") else ""
    click.echo(f"curves, summary.json{picture} are in {out}")


def _print_decisions(outcome: Any) -> None:
    """What was held against members, a line for each change of what follows from it."""
    if outcome.refused:
        click.echo(f"{outcome.label}: {outcome.refused} contributions were refused for their bytes")
    last = dict[int, str]()
    for decision in outcome.decisions:
        if last.get(decision.node) != decision.consequence:
            last[decision.node] = decision.consequence
            who = f"{outcome.label}: round {decision.round}, node {decision.node}"
            click.echo(f"{who}: {decision.sentence}: {decision.consequence}")
