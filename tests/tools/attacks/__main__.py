"""What attacks cost honest members: rounds, calls and memory without an attack and with it, in a run of real
processes. Writes docs/attacks.md, and adds to docs/attacks.jsonl. About 45 minutes.

    PYTHONPATH=tests:tests/tools python -m attacks [--only flip:10,health] [--page] [--keep FOLDER] [--out docs]
"""

import dataclasses
import json
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import click
from attacks.beginning import Beginning, beginning
from attacks.cases import ATTACKS, BEGINNINGS, Attack
from attacks.page import load, load_beginnings, page, slowdown
from attacks.trial import Lengths, Trial, trial
from attacks.village import Village
from bench.report import this_machine

DOCS = Path(__file__).resolve().parents[3] / "docs"


@click.command()
@click.option("--only", default="", help="Some attacks, by their words, separated by commas.")
@click.option("--rounds", default="8,9,24,2", show_default=True, help="Before, with (at least, at most), after.")
@click.option("--page", "only_page", is_flag=True, help="Attack nothing, write the page from what there is.")
@click.option("--keep", type=click.Path(path_type=Path), help="Folder that keeps the run's logs.")
@click.option("--out", default=DOCS, type=click.Path(path_type=Path), help="Folder of page and figures.")
def main(only: str, rounds: str, only_page: bool, keep: Path | None, out: Path) -> None:
    """Make the attacks, one after the other, and write the page."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was started is ended, too
    wanted = [word.strip() for word in only.split(",") if word.strip()]
    if unknown := set(wanted) - {attack.word for attack in (*ATTACKS, *BEGINNINGS)}:
        raise click.BadParameter(f"there is no attack {', '.join(sorted(unknown))}")

    def chosen(of: Sequence[Attack]) -> list[Attack]:
        return [attack for attack in of if not only_page and (not wanted or attack.word in wanted)]

    attacks = chosen(ATTACKS)
    lengths, figures = Lengths(*map(int, rounds.split(","))), out / "attacks.jsonl"
    out.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        if attacks:
            folder = keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="attacks")))
            folder.mkdir(parents=True, exist_ok=True)
            began = time.monotonic()
            village = stack.enter_context(Village.opened(folder))
            click.echo(f"the run is up after {time.monotonic() - began:.0f} s")
        for attack in attacks:
            began = time.monotonic()
            done = trial(village, attack, lengths)
            keep_figures(figures, done)
            click.echo(f"{line(done)}; {time.monotonic() - began:.0f} s")
    for first in chosen(BEGINNINGS):
        with ExitStack() as stack:
            folder = keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="attacks")))
            (own := folder / f"beginning-{first.word.replace(' ', '-')}").mkdir(parents=True)
            keep_figures(figures, begun := beginning(own, first))
        click.echo(
            f"{begun.first}: first commit after {begun.seconds:.1f} s, others {begun.others:.2f} cores; "
            f"{begun.ended}; {begun.harmed}"
        )
    if trials := load(figures):
        (out / "attacks.md").write_text(page(trials, load_beginnings(figures), str(this_machine())))


def keep_figures(path: Path, done: Trial | Beginning) -> None:
    """Append what came of an attack to a file of JSON lines."""
    with open(path, "a") as kept:
        print(json.dumps(dataclasses.asdict(done)), file=kept)


def line(t: Trial) -> str:
    """A trial in a line."""
    rounds = f"rounds {t.before.seconds:.2f} -> {t.during.seconds:.2f} s (slow: {t.slow})"
    calls = f"calls {slowdown(t):.2f} times as long of {sum(of.count for of in t.during.calls.values())}"
    beside = f"others {t.before.others:.2f}, {t.during.others:.2f} cores"
    return f"{t.attack}: {rounds}, {calls}, {beside}; {t.ended}; {t.harmed}"


if __name__ == "__main__":
    main()
