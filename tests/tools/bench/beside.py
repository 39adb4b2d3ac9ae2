"""What goes on beside training, and what that costs it: real nodes, rounds with and without it in turns.

    python -m bench.beside recovery     a joiner fetches the state from a node over and over, two of four rounds
    python -m bench.beside checkpoint   two nodes write outer state and moments in one of four rounds

Trainers have one thread. For recovery the node has both cores of the machine; coordinator, joiner and this process
are confined to the last core, so a joiner takes nothing from the trainer but what serving it takes; a ratio is of
the medians of one run's rounds with and without, so that what else the machine does hits both.

For checkpoints each of two nodes has one core for daemon and trainer, so that all that writing takes is taken
from training; with --spare there is one node, and a core beside the trainer's. Of four rounds outer state and
moments are written in the first; what the moments' thread has not done by its end is done in the second; the two
others have nothing of it. Ratios are of the first, and of the second, to the mean of the last two, four by four:
their mean over the middle half, and its standard error. A round lasts seconds here and minutes in training: what
is written once weighs more here than there.
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
WARM = 3  # rounds before the first that counts
PATIENCE = 120.0  # seconds for a round
LOOK = 0.2  # seconds
DRAWS = 1000
EVERY = 4  # rounds from one checkpoint to the next
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
@click.option("--spare", is_flag=True, help="Checkpoints with a core to spare.")
@click.option("--cap", default=100.0, show_default=True, help="Mbit/s that the node sends at most.")
def main(what: str, rounds: int, steps: int, spare: bool, cap: float) -> None:
    """Print, as JSON, what rounds and their inner steps take with and without it."""
    with tempfile.TemporaryDirectory(prefix="atoll-beside-") as folder:
        run = Run(Path(folder))
        try:
            if what == "recovery":
                begin(run, steps, cap)
                marked, more = recovering(run, rounds)
                result = summary(run, marked, steps) | more
            else:
                begin_pinned(run, steps, spare)
                result = writing(run, rounds)
        finally:
            run.stop()
    print(json.dumps({"what": what, "steps": steps, **result}))


def begin(run: Run, steps: int, cap: float) -> None:
    run.start(*MODEL, f"rounds.inner_steps={steps}", "checkpoint.every=1000000")
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


def begin_pinned(run: Run, steps: int, spare: bool) -> None:
    this = psutil.Process()
    cores = this.cpu_affinity()
    places = {"one": cores} if spare else {"one": cores[:1], "two": cores[-1:]}
    members = (f"members.start={len(places)}", f"members.minimum={len(places)}", "rounds.ceiling=1")
    run.start(*MODEL, *members, f"rounds.inner_steps={steps}", f"checkpoint.every={EVERY}")
    url = run.invite(len(places))
    for name, place in places.items():
        this.cpu_affinity(place)  # which it inherits
        run.join(url, name)
    for process in (this, psutil.Process(run.coordinator.pid)):
        process.cpu_affinity(cores[-1:])
    until("the first rounds", lambda: run.committed() >= WARM, PATIENCE)


def writing(run: Run, rounds: int) -> dict[str, Any]:
    """A snapshot of round k, and the moments, are written from round k + 1 on."""
    began, written, files = run.committed(), set[int](), list[Path]()
    while run.committed() <= began + rounds:
        files = list(run.folder.glob("one/outer/*/snapshot-*.safetensors"))
        written |= {int(path.name.split("-")[1].split(".")[0]) for path in files}
        time.sleep(LOOK)
    lasted = {r["round"]: sum(r["seconds"].values()) for r in run.rounds()}
    first = [k + 1 for k in sorted(written) if began < k and k + EVERY in lasted]
    usual = {k: mean(lasted[k + i] for i in range(2, EVERY)) for k in first}
    moments = [p.stat().st_size for p in run.folder.glob("one/inner/*/moments-*/*.distcp")]
    size = max(path.stat().st_size for path in files) + max(moments)
    result: dict[str, Any] = {"checkpoints": len(first), "bytes": size, "round_s_usual": median(usual.values())}
    for i, name in enumerate(("first", "second")):
        ratios = [lasted[k + i] / usual[k] for k in first]
        result |= {f"{name}_ratio": middle(ratios), f"{name}_ratio_error": spread(ratios)}
        result[f"{name}_s_more"] = middle([lasted[k + i] - usual[k] for k in first])
    return result


def middle(values: Sequence[float]) -> float:
    """The mean of the middle half."""
    quarter = len(values) // 4
    return mean(sorted(values)[quarter : len(values) - quarter])


def spread(values: Sequence[float]) -> float:
    """The standard error of `middle`: its spread when the values are drawn anew."""
    rng = random.Random(0)
    return stdev(middle(rng.choices(values, k=len(values))) for _ in range(DRAWS))


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
