"""What goes on beside training, and what that costs it: one real node, rounds with and without it in turns.

    python -m bench.beside recovery     a joiner fetches the state from the node over and over, two of four rounds
    python -m bench.beside checkpoint   in every second round outer state and moments are written

The trainer has one thread, the node both cores of the machine; coordinator, joiner and this process are confined
to the last core, so a joiner takes nothing from the trainer but what serving it takes. A ratio is of the medians
of one run's rounds with and without, so that what else the machine does hits both. A round lasts seconds here, and
minutes in training: what is written once a round weighs more here than there.
"""

import json
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from statistics import median, stdev
from typing import Any

import click
import psutil
from e2e.harness import Run, until

MODEL = (
    *("model.dim=512", "model.layers=3", "model.heads=8", "model.kv_heads=8", "model.ffn_dim=1536"),
    *("model.seq_len=64", "inner.batch_size=1", "inner.warmup_tokens=0", "data.eval_every=1000000"),
    *("members.start=1", "members.minimum=1", "members.stall=600", "members.lease=60", "reduce.chunk=524288"),
)
WARM = 3  # rounds before the first that counts
PATIENCE = 120.0  # seconds for a round
LOOK = 0.02  # seconds
DRAWS = 1000
Record = Mapping[str, Any]
VALUES: dict[str, Callable[[Record], float]] = {  # seconds
    "inner_step": lambda r: r["seconds"]["inner"] / r["steps"],
    "round": lambda r: sum(r["seconds"].values()) / r["steps"] * r["usual"],
    "reduce": lambda r: r["seconds"]["reduce"],
}


@click.command()
@click.argument("what", type=click.Choice(["recovery", "checkpoint"]))
@click.option("--rounds", default=16, show_default=True, help="Rounds that count.")
@click.option("--steps", default=30, show_default=True, help="Inner steps of a round.")
@click.option("--cap", default=100.0, show_default=True, help="Mbit/s that the node sends at most.")
def main(what: str, rounds: int, steps: int, cap: float) -> None:
    """Print, as JSON, what rounds and their inner steps take with and without it."""
    with tempfile.TemporaryDirectory(prefix="atoll-beside-") as folder:
        run = Run(Path(folder))
        try:
            begin(run, steps, cap, every=2 if what == "checkpoint" else 1_000_000)
            marked, more = (recovering if what == "recovery" else writing)(run, rounds)
            result = summary(run, marked, steps)
        finally:
            run.stop()
    print(json.dumps({"what": what, "steps": steps, **result, **more}))


def begin(run: Run, steps: int, cap: float, every: int) -> None:
    run.start(*MODEL, f"rounds.inner_steps={steps}", f"checkpoint.every={every}")
    run.join(run.invite(1), "one", f"upload={cap:g}")
    this = psutil.Process()
    last = this.cpu_affinity()[-1:]
    for process in (this, psutil.Process(run.coordinator.pid)):
        process.cpu_affinity(last)
    until("the first rounds", lambda: run.committed() >= WARM, PATIENCE)


def recovering(run: Run, rounds: int) -> tuple[dict[int, bool], dict[str, Any]]:
    """Rounds, and whether a joiner was fetching in them: two with, two without."""
    found = re.search(r"is up: ([\d,]+) param", run.log("one"))
    assert found is not None
    numel = int(found[1].replace(",", ""))
    with joiner(run, numel) as say:
        began, marked, fetched, busy = run.committed() + 1, dict[int, bool](), 0, 0.0
        before, since = say("off"), time.monotonic()
        while (committed := next_commit(run, began)) < began + rounds:
            on = (committed - began) % 4 < 2
            bytes_, now = say("on" if on else "off"), time.monotonic()
            if marked.get(committed):
                fetched, busy = fetched + bytes_ - before, busy + now - since
            before, since = bytes_, now
            marked[committed + 1] = on
            began = min(began, committed)
            run.commit_after(committed)
    marked.pop(max(marked))
    return marked, {"numel": numel, "fetched_mbit_s": 8e-6 * fetched / busy}


def next_commit(run: Run, least: int) -> int:
    until("a commit", lambda: run.committed() >= least, PATIENCE)
    return run.committed()


@contextmanager
def joiner(run: Run, numel: int) -> Iterator[Callable[[str], int]]:
    """Call it with on or off; it says how many bytes it has had so far."""
    command = [sys.executable, "-P", "-m", "bench.fetcher", run.invite(1), str(numel), str(run.folder / "joiner")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        stdin, stdout = process.stdin, process.stdout

        def say(word: str) -> int:
            stdin.write(word + "\n")
            stdin.flush()
            return int(stdout.readline())

        try:
            yield say
        finally:
            process.kill()


def writing(run: Run, rounds: int) -> tuple[dict[int, bool], dict[str, Any]]:
    """Rounds, and whether something was written in them. A checkpoint of round k is written during round k + 1."""
    began, written = run.committed(), set[int]()
    while run.committed() <= began + rounds:
        written |= {int(p.name.split("-")[1].split(".")[0]) for p in run.folder.glob("one/outer/*/snapshot-*")}
        time.sleep(LOOK)
    return {k: k - 1 in written for k in range(began + 2, began + rounds + 1)}, {}


def summary(run: Run, marked: Mapping[int, bool], steps: int) -> dict[str, Any]:
    until("the last record", lambda: len(run.rounds()) >= max(marked), PATIENCE)
    records = run.rounds()
    tokens = [0, *(r["tokens"] for r in records)]
    chosen = [
        r | {"steps": (after - before) / 64, "usual": steps}
        for r, before, after in zip(records, tokens, tokens[1:], strict=False)
        if r["round"] in marked
    ]
    with_, without = ([r for r in chosen if marked[r["round"]] is kind] for kind in (True, False))
    result: dict[str, Any] = {"rounds_with": len(with_), "rounds_without": len(without)}
    for name, value in VALUES.items():
        a, b = median(map(value, with_)), median(map(value, without))
        result |= {f"{name}_s_with": a, f"{name}_s_without": b, f"{name}_ratio": a / b}
        result[f"{name}_ratio_error"] = error(*(list(map(value, kind)) for kind in (with_, without)))
    return result


def error(a: list[float], b: list[float]) -> float:
    """The standard error of the ratio of their medians: the spread of it when rounds are drawn anew."""
    rng = random.Random(0)
    return stdev(median(rng.choices(a, k=len(a))) / median(rng.choices(b, k=len(b))) for _ in range(DRAWS))


if __name__ == "__main__":
    main()
