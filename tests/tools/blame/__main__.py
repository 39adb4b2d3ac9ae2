"""Who is named when something goes wrong: fourteen kinds of harm, done to a run of real processes in network
namespaces, several times each. Prints a table, and writes it where it is told. Needs root, for the namespaces.

    python -m blame [--times N] [--kinds dead,clock] [--out docs/blame.jsonl] [--keep FOLDER]
"""

import argparse
import dataclasses
import json
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from blame.cases import CASES
from blame.fleet import Fleet, unavailable
from blame.trial import IN_TIME, Trial, trial

from atoll.coordinator.causes.explanation import Kind


def main() -> int:
    parser = argparse.ArgumentParser(description="Who is named when something goes wrong.")
    parser.add_argument("--times", type=int, default=5, help="repetitions of each kind")
    parser.add_argument("--first", type=int, default=0, help="number of the first repetition")
    parser.add_argument("--kinds", default="", help="some of them, separated by commas; all if not given")
    parser.add_argument("--out", type=Path, help="file to append the trials to, JSON lines")
    parser.add_argument("--keep", type=Path, help="folder that keeps the runs' logs")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was started is ended, too
    if why := unavailable():
        print(why, file=sys.stderr)
        return 1
    wanted = [Kind(word.strip()) for word in arguments.kinds.split(",") if word.strip()]
    kinds = [kind for kind in CASES if not wanted or kind in wanted]
    trials = list[Trial]()
    for repetition in range(arguments.first, arguments.first + arguments.times):
        began = time.monotonic()
        with ExitStack() as stack:
            folder = arguments.keep / str(repetition) if arguments.keep else None
            if folder is None:
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="blame")))
            folder.mkdir(parents=True, exist_ok=True)
            fleet = stack.enter_context(Fleet.opened(folder))
            print(f"repetition {repetition}: up after {time.monotonic() - began:.0f} s", flush=True)
            for kind in kinds:
                done = trial(fleet, kind, repetition)
                trials.append(done)
                print(line(done), flush=True)
                if arguments.out:
                    with open(arguments.out, "a") as out:
                        print(json.dumps(dataclasses.asdict(done)), file=out)
        print(f"repetition {repetition}: {time.monotonic() - began:.0f} s", flush=True)
    print("\n".join(table(trials)))
    return 0


def line(t: Trial) -> str:
    mark = "right" if t.right else "WRONG"
    rest = f"{t.named_after:.1f} s after the round's end" if t.named_after >= 0 else "not at all"
    notes = ("" if t.settled else ", not settled before") + ("" if t.on_record else ", not on record")
    return f"{mark}  {t.kind:22} {t.found:40} {rest}{notes}  {t.sentence}"


def table(trials: Sequence[Trial]) -> list[str]:
    """The table of docs/blame.md."""
    lines = ["| kind | named rightly | seconds from the round's end, median and most |", "|---|---|---|"]
    for kind in dict.fromkeys(t.kind for t in trials):
        of = [t for t in trials if t.kind is kind]
        times = [t.named_after for t in of if t.named_after >= 0]
        soon = f"{statistics.median(times):.1f}, {max(times):.1f}" if times else "-"
        lines.append(f"| {kind} | {sum(t.right for t in of)} of {len(of)} | {soon} |")
    right = sum(t.right and t.named_after <= IN_TIME for t in trials)
    lines.append(f"| all, within {IN_TIME:g} s | {right} of {len(trials)} | |")
    return lines


if __name__ == "__main__":
    sys.exit(main())
