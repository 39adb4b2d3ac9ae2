"""Whether trainers wait for the network: real nodes behind capped links, so slow that an exchange takes half of a
round's inner time, and four fifths of it.

    python -m bench.overlap [--only "blocking;streaming"] [--shares 0.5,0.86] [--out FOLDER]

Two daemons with a trainer each, over loopback. A trainer's inner step is mostly a pause (a fault that holds each
step up), as if an accelerator of its own worked meanwhile: the trainers share this machine's cores, and what
is asked here is what the exchange takes from them. Where their time went is what the nodes' own meter says
(`/api/run`).
"""

import json
import signal
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import click
from bench import overlap_page
from bench.report import this_machine
from e2e.harness import ROOT, Run, until

from atoll.comm.config.load import load_run
from atoll.comm.config.run import RunConfig
from atoll.comm.config.shipped import method_file

Moment = tuple[float, str, float]  # seconds; what the run does; what share of the nodes' time since was training
NODES = 2
PAUSE = 0.08  # seconds of each inner step
STEP = 0.107  # seconds of an inner step on two cores, about: it sets the cap, no more
WARM = 1  # rounds (of short ones as many as count for one) before the first that counts, and the rest of the next
PATIENCE = 300.0  # seconds for a round, and before it for the state, which goes under the same cap
LOOK = 0.05  # seconds
MODEL = (
    *("model.dim=128", "model.layers=4", "model.heads=4", "model.kv_heads=4", "model.ffn_dim=344"),
    *("model.seq_len=16", "inner.batch_size=1", "inner.warmup_tokens=0", "inner.lr=1e-3", "inner.min_lr=1e-4"),
    *(f"members.start={NODES}", "members.stall=600", "members.lease=60", "reduce.chunk=65536"),
    *("data.eval_every=1000000", "reduce.zstd=false"),
)


@dataclass(frozen=True)
class Way:
    """A method under which the same is measured."""

    name: str
    method: str
    settings: tuple[str, ...] = ()
    times: int = 1  # rounds that count, for each that is asked for: some have short ones

    @property
    def words(self) -> tuple[str, ...]:
        return ("--method", self.method, *MODEL, *self.settings)


WAYS = (
    Way("blocking", "overlapped", ("rounds.inner_steps=50", "overlap.delay=0")),
    Way("overlapped", "overlapped", ("rounds.inner_steps=50",)),
    Way("overlapped, 10 fragments", "overlapped", ("rounds.inner_steps=50", "fragments.count=10"), 10),
    Way("streaming", "streaming", ("rounds.inner_steps=100",)),
)


@dataclass(frozen=True)
class Found:
    """What one run came to, over the rounds that count."""

    way: str
    asked: float  # share of a round's inner time for its exchange
    rounds: int
    cap: float  # Mbit/s that a node sends at most
    steps: float  # inner steps of a round
    step: float  # seconds of one, undisturbed
    exchange: float  # seconds of a round's, from when it closes until it is committed; median
    meter: dict[str, float]  # node-seconds by bucket
    trained: float  # inner steps that were committed, times `step`, over the nodes' time
    moments: list[Moment]

    @property
    def share(self) -> float:
        """Of a round's inner time that its exchange takes."""
        return self.exchange / (self.steps * self.step)

    @property
    def exposed(self) -> float:
        """Share of the nodes' time in which they wait for the network, or for one another."""
        return 1.0 - (self.meter["inner"] + self.meter.get("open", 0.0)) / sum(self.meter.values())


@click.command()
@click.option("--only", default=";".join(way.name for way in WAYS), show_default=True, help="Which methods.")
@click.option("--shares", default="0.5,0.86", show_default=True, help="Of a round's inner time, for its exchange.")
@click.option("--rounds", default=6, show_default=True, help="Rounds that count.")
@click.option(
    "--figures", type=click.Path(path_type=Path), help="File that keeps them: what it has is not run again."
)
@click.option("--out", type=click.Path(path_type=Path), help="Folder for the page and its picture.")
def main(only: str, shares: str, rounds: int, figures: Path | None, out: Path | None) -> None:
    """Measure, and print the figures as JSON, one run a line."""
    names = [way.name for way in WAYS]
    if unknown := set(only.split(";")) - set(names):
        raise click.UsageError(f"there is no method {', '.join(sorted(unknown))}: choose of {'; '.join(names)}")
    lines = figures.read_text().splitlines() if figures is not None and figures.exists() else []
    found = [Found(**json.loads(line)) for line in lines]
    for share in (float(word) for word in shares.split(",")):
        for way in (way for way in WAYS if way.name in only.split(";")):
            if any((one.way, one.asked) == (way.name, share) for one in found):
                continue
            found.append(measure(way, share, rounds * way.times))
            line = json.dumps(asdict(found[-1]))
            click.echo(line)
            if figures is not None:
                with figures.open("a") as file:
                    file.write(line + "\n")
    found.sort(key=lambda one: (one.asked, names.index(one.way)))
    if out is not None:
        overlap_page.write(out, this_machine(), found)


def measure(way: Way, share: float, rounds: int) -> Found:
    """A run whose exchanges take about this share of a round."""
    config = load_run(ROOT / "configs/demo.yaml", MODEL + way.settings, method_file(way.method, ROOT))
    with tempfile.TemporaryDirectory(prefix="atoll-overlap-") as folder:
        run = Run(Path(folder))
        try:
            cap = capped(config, share)
            run.start(*way.words)
            url = run.invite(NODES)
            for name in ("one", "two"):
                run.join(url, name, f"upload={cap:g}", "durable=false", faults=f"trainer.step=stall:{PAUSE}")
            return observed(run, way, share, config, cap, rounds)
        finally:
            run.stop()


def capped(config: RunConfig, share: float) -> float:
    """Mbit/s with which an exchange takes this share of a round: of each element a node sends 2 (n - 1) / n."""
    elements = config.model.n_params / (config.fragments.count if config.fragments.stagger else 1)
    bytes_ = elements * config.reduce.bytes_per_element * 2 * (NODES - 1) / NODES
    return 8e-6 * bytes_ / (share * config.round_steps * STEP)


def observed(run: Run, way: Way, asked: float, config: RunConfig, cap: float, rounds: int) -> Found:
    """Watch the run while the rounds that count are committed."""
    until("the first rounds", lambda: run.committed() >= WARM * way.times, PATIENCE)
    first = run.commit_after(run.committed())
    begin = last = run.run()
    moments, paces = list[Moment](), list[float]()
    while last["committed"] < begin["committed"] + rounds:
        assert time.monotonic() < first + PATIENCE * rounds, "the run stands still"
        time.sleep(LOOK)
        if not (seen := run.run()) or seen["goodput_seconds"] == last["goodput_seconds"]:
            continue  # the page is made a few times a second
        spent = spent_since(last, seen)
        moments.append(
            (
                time.monotonic() - first,
                seen["phase"],
                (spent["inner"] + spent.get("open", 0.0)) / sum(spent.values()),
            )
        )
        paces += [member["tokens_per_s"] for member in seen["members"] if member["tokens_per_s"]]
        last = seen
    counted = range(begin["committed"] + 1, begin["committed"] + rounds + 1)
    until("the last record", lambda: len(run.rounds()) >= counted[-1], PATIENCE)
    records = [record for record in run.rounds() if record["round"] in counted]
    step_tokens = config.inner.batch_size * config.model.seq_len
    step, steps = step_tokens / median(paces), records[-1]["tokens"] - run.rounds()[counted[0] - 2]["tokens"]
    wall = sum(sum(record["seconds"].values()) for record in records)
    return Found(
        way.name,
        asked,
        rounds,
        cap,
        config.round_steps,
        step,
        median(sum(r["seconds"][part] for part in ("collect", "reduce", "commit")) for r in records),
        spent_since(begin, last),
        steps / step_tokens * step / (NODES * wall),
        moments,
    )


def spent_since(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, float]:
    """Node-seconds by bucket, between two looks at the run."""
    return {bucket: s - before["goodput_seconds"][bucket] for bucket, s in now["goodput_seconds"].items()}


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # which ends what was started
    main()
