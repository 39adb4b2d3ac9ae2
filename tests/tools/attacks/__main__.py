"""What attacks cost honest members: rounds, calls and memory without an attack and with it, in a run of real
processes. Writes docs/attacks.md, and adds to docs/attacks.jsonl. About an hour.

    PYTHONPATH=tests:tests/tools python -m attacks [--only flip:10,health] [--page] [--keep FOLDER] [--out docs]
    PYTHONPATH=tests:tests/tools python -m attacks --long [--only "never seals"]
"""

import dataclasses
import json
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from multiprocessing import Process
from pathlib import Path

import click
from attacks.beginning import Beginning, beginning
from attacks.cases import ATTACKS, BEGINNINGS, SINGLE_ROUNDS, Attack
from attacks.page import load, load_beginnings, page, slowdown
from attacks.trial import LONG_LENGTHS, Lengths, Trial, trial
from attacks.village import LONG_ROUND, ROUND, Village
from bench.report import this_machine

DOCS = Path(__file__).resolve().parents[3] / "docs"


@click.command()
@click.option("--only", default="", help="Some attacks, by their words, separated by commas.")
@click.option("--rounds", default="8,9,24,2", show_default=True, help="Before, with (at least, at most), after.")
@click.option("--long", "is_long", is_flag=True, help="Those that cost single rounds, where rounds are long.")
@click.option("--page", "only_page", is_flag=True, help="Attack nothing, write the page from what there is.")
@click.option("--keep", type=click.Path(path_type=Path), help="Folder that keeps the run's logs.")
@click.option("--out", default=DOCS, type=click.Path(path_type=Path), help="Folder of page and figures.")
def main(only: str, rounds: str, is_long: bool, only_page: bool, keep: Path | None, out: Path) -> None:
    """Make the attacks, one after the other, and write the page."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was started is ended, too
    wanted = [word.strip() for word in only.split(",") if word.strip()]
    if unknown := set(wanted) - {attack.word for attack in (*ATTACKS, *BEGINNINGS)}:
        raise click.BadParameter(f"there is no attack {', '.join(sorted(unknown))}")

    def chosen(of: Sequence[Attack]) -> list[Attack]:
        return [attack for attack in of if not only_page and (not wanted or attack.word in wanted)]

    attacks, begun_by = ([], []) if is_long else (chosen(ATTACKS), chosen(BEGINNINGS))
    single = [attack for attack in chosen(ATTACKS) if attack.word in SINGLE_ROUNDS]
    lengths, figures = Lengths(*map(int, rounds.split(","))), out / "attacks.jsonl"
    out.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        folder = keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="attacks")))
        folder.mkdir(parents=True, exist_ok=True)
        if attacks:
            in_one_run(folder, attacks, lengths, figures)
        for first in begun_by:
            (own := folder / f"beginning-{first.word.replace(' ', '-')}").mkdir(parents=True)
            keep_figures(figures, begun := beginning(own, first))
            click.echo(
                f"{begun.first}: first commit after {begun.seconds:.1f} s, others {begun.others:.2f} cores; "
                f"{begun.ended}; {begun.harmed}"
            )
        at_once(folder, single, figures)
    trials = load(figures)
    if any(each.paced == ROUND for each in trials):
        (out / "attacks.md").write_text(page(trials, load_beginnings(figures), str(this_machine())))
    else:
        click.echo(f"{figures} has no trials in short rounds: no page is made of it")


def in_one_run(folder: Path, attacks: Sequence[Attack], lengths: Lengths, figures: Path) -> None:
    """Make these attacks one after the other."""
    began = time.monotonic()
    with Village.opened(folder) as village:
        click.echo(f"the run is up after {time.monotonic() - began:.0f} s")
        for attack in attacks:
            began = time.monotonic()
            keep_figures(figures, done := trial(village, attack, lengths))
            click.echo(f"{line(done)}; {time.monotonic() - began:.0f} s")


def at_once(folder: Path, attacks: Sequence[Attack], figures: Path) -> None:
    """Make these attacks where rounds are long, each on a run of its own, at the same time: all of them wait."""
    makers = [Process(target=in_long_rounds, args=(folder, attack, figures)) for attack in attacks]
    try:
        for maker in makers:
            maker.start()
        for maker in makers:
            maker.join()
    finally:
        for maker in makers:
            if maker.is_alive():
                maker.terminate()
                maker.join()
    if failed := [attack.word for attack, maker in zip(attacks, makers, strict=True) if maker.exitcode]:
        raise click.ClickException(f"in long rounds not done: {', '.join(failed)}")


def in_long_rounds(folder: Path, attack: Attack, figures: Path) -> None:
    """A trial of a run of its own, with long rounds."""
    (own := folder / f"long-{attack.word.replace(' ', '-')}").mkdir(parents=True)
    with Village.opened(own, seconds=LONG_ROUND) as village:
        keep_figures(figures, done := trial(village, attack, LONG_LENGTHS))
    click.echo(line(done))


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
