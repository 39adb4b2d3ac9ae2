"""What goes on beside training, and what that costs it: real nodes, rounds with and without it in turns.

    python -m bench.beside recovery     a joiner fetches the state from one node over and over, two of four rounds
    python -m bench.beside checkpoint   in every second round two nodes write outer state and moments

Trainers have one thread. For recovery the node has both cores of the machine; coordinator, joiner and this process
are confined to the last core, so a joiner takes nothing from the trainer but what serving it takes. For checkpoints
each of two nodes has a core for daemon and trainer, so that whatever is written takes its time from training. A
ratio is of rounds of one run, so that what else the machine does hits both: of medians; and, paired, of each round
with it and its neighbour without, the mean over the middle half of these. A round lasts a second here, and minutes
in training: what is written once a round weighs more here than there.
"""

import json
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import exp, log
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

import click
import psutil
from e2e.harness import Run, until

MODEL = (
    *("model.dim=512", "model.layers=3", "model.heads=8", "model.kv_heads=8", "model.ffn_dim=1536"),
    *("model.seq_len=64", "inner.batch_size=1", "inner.warmup_tokens=0", "data.eval_every=1000000"),
    *("members.start=1", "members.minimum=1", "members.stall=600", "members.lease=60", "reduce.chunk=524288"),
)
SMALL = (
    *("model.dim=192", "model.layers=2", "model.heads=4", "model.kv_heads=4", "model.ffn_dim=512"),
    *("model.seq_len=64", "inner.batch_size=4", "members.start=2", "members.minimum=2"),
)
TWO_STEPS = 2 * 4 * 64  # tokens of an inner step of both
WARM = 3  # rounds before the first that counts
PATIENCE = 120.0  # seconds for a round
LOOK = 0.2  # seconds
DRAWS = 1000
Record = Mapping[str, Any]
VALUES: dict[str, Callable[[Record], float]] = {  # seconds
    "inner_step": lambda r: r["seconds"]["inner"] / r["steps"],
    "round": lambda r: sum(r["seconds"].values()) / r["steps"] * r["usual"],
    "reduce": lambda r: r["seconds"]["reduce"],
    "whole": lambda r: sum(r["seconds"].values()),
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
            if what == "recovery":
                begin(run, steps, cap)
                marked, more = recovering(run, rounds)
            else:
                begin_two(run, steps)
                marked, more = writing(run, rounds)
            result = summary(run, marked, steps, 64 if what == "recovery" else TWO_STEPS)
        finally:
            run.stop()
    print(json.dumps({"what": what, "steps": steps, **result, **more}))


def begin_two(run: Run, steps: int) -> None:
    """Two nodes with a core each, that write something in every second round."""
    run.start(*MODEL, *SMALL, f"rounds.inner_steps={steps}", "checkpoint.every=2")
    cores, this = psutil.Process().cpu_affinity(), psutil.Process()
    url = run.invite(2)
    for name, core in zip(("one", "two"), (cores[0], cores[-1]), strict=True):
        this.cpu_affinity([core])  # which it inherits
        run.join(url, name)
    psutil.Process(run.coordinator.pid).cpu_affinity([cores[-1]])
    until("the first rounds", lambda: run.committed() >= WARM, PATIENCE)


def begin(run: Run, steps: int, cap: float) -> None:
    run.start(*MODEL, f"rounds.inner_steps={steps}")
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
    began, written, size = run.committed(), set[int](), 0
    while run.committed() <= began + rounds:
        found = list(run.folder.glob("one/outer/*/snapshot-*"))
        written |= {int(path.name.split("-")[1].split(".")[0]) for path in found}
        time.sleep(LOOK)
    for path in (*found, *run.folder.glob("one/inner/*/moments-*/*")):
        size = max(size, path.stat().st_size)
    return {k: k - 1 in written for k in range(began + 2, began + rounds + 1)}, {"largest_file": size}


def summary(run: Run, marked: Mapping[int, bool], steps: int, tokens_of_one: int) -> dict[str, Any]:
    until("the last record", lambda: len(run.rounds()) >= max(marked), PATIENCE)
    records = run.rounds()
    tokens = [0, *(r["tokens"] for r in records)]
    chosen = [
        r | {"steps": (after - before) / tokens_of_one, "usual": steps}
        for r, before, after in zip(records, tokens, tokens[1:], strict=False)
        if r["round"] in marked
    ]
    with_, without = ([r for r in chosen if marked[r["round"]] is kind] for kind in (True, False))
    result: dict[str, Any] = {"rounds_with": len(with_), "rounds_without": len(without)}
    for name, value in VALUES.items():
        a, b = median(map(value, with_)), median(map(value, without))
        result |= {f"{name}_s_with": a, f"{name}_s_without": b, f"{name}_ratio": a / b}
        result[f"{name}_ratio_error"] = error(*(list(map(value, kind)) for kind in (with_, without)))
        rng, logs = random.Random(0), [log(value(a) / value(b)) for a, b in pairs(chosen, marked)]
        result[f"{name}_paired_ratio"] = exp(middle(logs)) if logs else None
        spread = [exp(middle(rng.choices(logs, k=len(logs)))) for _ in range(DRAWS)] if logs else []
        result[f"{name}_paired_ratio_error"] = stdev(spread) if spread else None
    return result


def pairs(records: Sequence[Record], marked: Mapping[int, bool]) -> Iterator[tuple[Record, Record]]:
    """Each round with it and the one after it, where that is one without."""
    by_number = {r["round"]: r for r in records}
    for k, on in marked.items():
        if on and marked.get(k + 1) is False and k in by_number and k + 1 in by_number:
            yield by_number[k], by_number[k + 1]


def middle(values: Sequence[float]) -> float:
    """The mean of the middle half."""
    quarter = len(values) // 4
    return mean(sorted(values)[quarter : len(values) - quarter])


def error(a: list[float], b: list[float]) -> float:
    """The standard error of the ratio of their medians: the spread of it when rounds are drawn anew."""
    rng = random.Random(0)
    return stdev(median(rng.choices(a, k=len(a))) / median(rng.choices(b, k=len(b))) for _ in range(DRAWS))


if __name__ == "__main__":
    main()
