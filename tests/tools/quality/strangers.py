"""What a liar costs a run: trains every lie with every seed, and writes docs/strangers.md.

    PYTHONPATH=tests:tests/tools python -m quality.strangers [--seeds 1,2,3] [--minutes 5] [--report]

What docs/strangers.jsonl has already is not run again: it can be killed at any time, and started again.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import click
from audit_runs import COLLUDE, MOST, SEALS, Caught, caught, honest_convicted
from quality.cases import RUN, Case, Trial
from quality.report import hardware, spread
from quality.runs import Figures, Kept, missing, play

from atoll.comm.build_info import installed_version
from atoll.comm.codecs.codec import NonFinite
from atoll.comm.config.load import load_run
from atoll.node.config import NodeConfig
from atoll.node.simulate.conditions import Conditions

DOCS = Path(__file__).resolve().parents[3] / "docs"
CACHE = Path.home() / ".cache" / "atoll"
NODES, ROUNDS, INNER_STEPS, SEEDS = 8, 40, 3, (1, 2, 3)
SETTINGS = (
    *("model.dim=32", "model.layers=1", "model.heads=2", "model.kv_heads=2", "model.ffn_dim=96"),
    *("model.seq_len=64", "inner.batch_size=4", f"rounds.inner_steps={INNER_STEPS}", f"members.start={NODES}"),
    *("inner.optimizer=adamw", "inner.lr=4e-3", "inner.min_lr=4e-4", "reduce.chunk=512", "outer.clip=true"),
    "security.weight_bound=1.5",
    *("data.eval_every=1000", "data.val_batches=8"),
)
BARS = {0: 0.3, 1: 2.0, 2: 5.0}  # percents of loss, by the number of liars
# The lies, and how the table names them.
LIES = {
    "flip:10": "ten times its delta, the other way",
    "noise:100": "noise, 100 times as long as its delta",
    "noise:1e4": "noise, 10,000 times as long as its delta",
    "zeros": "zeros",
    "replay": "its first delta, again and again",
    "copy": "another's delta",
    "nan": "bytes that are no numbers",
    "weight:8": "its delta, for 8 times the samples",
    "weight:1000": "its delta, for 1,000 times the samples",
    "seal:0.125": "noise of 3 sigma sealed in an eighth of the chunks",
}


@dataclass(frozen=True)
class Stranger:
    """A run with liars, or without."""

    lie: str = ""
    liars: int = 0
    defence: bool = True
    merge: str = "mean"

    def trial(self, seed: int) -> Trial:
        """The run with this seed."""
        return _trial(self, seed)

    def _make(self, seed: int) -> Trial:
        key = f"{self.lie or 'none'} x{self.liars} {'on' if self.defence else 'off'} {self.merge}"
        run, steps = load_run(RUN, (*SETTINGS, f"outer.merge={self.merge}")), ROUNDS * INNER_STEPS
        tokens = steps * NODES * run.inner.batch_size * run.model.seq_len
        inner = replace(run.inner, decay_tokens=tokens, warmup_tokens=tokens // 20)
        conditions = Conditions(NODES, steps, liars=self.liars, lie=self.lie, defence=self.defence)
        conditions.check()
        case = Case(key, key, bf16=False, together=0.0)
        return Trial(case, steps, seed, replace(run, seed=seed, inner=inner), conditions)


@cache
def _trial(stranger: Stranger, seed: int) -> Trial:
    return stranger._make(seed)


HONEST = Stranger()
ALL = (
    HONEST,
    *(Stranger(lie, 1) for lie in LIES),
    *(Stranger(lie, 2) for lie in LIES),
    Stranger(defence=False),
    *(Stranger(lie, 1, defence=False) for lie in LIES),
)
MERGES = ("centered", "trimmed")  # besides the mean
MERGED_LIES = ("flip:10", "noise:1e4", "replay")
MERGED = tuple(
    Stranger(lie, liars, defence, merge)
    for merge in MERGES
    for lie, liars, defence in (
        ("", 0, True),
        *((lie, liars, defence) for lie in MERGED_LIES for liars in (1, 2) for defence in (False, True)),
    )
)


@click.command()
@click.option("--seeds", default=",".join(map(str, SEEDS)), show_default=True, help="Which ones.")
@click.option("--minutes", default=float("inf"), help="Begin no run after so many.")
@click.option("--report", "only_report", is_flag=True, help="Run nothing, write the page from what there is.")
@click.option("--out", default=DOCS, type=click.Path(path_type=Path), help="Folder of page and figures.")
def main(seeds: str, minutes: float, only_report: bool, out: Path) -> None:
    """Train what is missing, and write strangers.md."""
    import torch

    torch.set_num_threads(1)  # a model of nothing: more would wait for one another
    kept, began = Kept(out / "strangers.jsonl"), time.monotonic()
    trials = [stranger.trial(int(seed)) for seed in seeds.split(",") for stranger in (*ALL, *MERGED)]
    for t in missing(trials, kept):
        if only_report or time.monotonic() - began > 60 * minutes:
            break
        figures = played(t)
        kept.add(t, figures)
        click.echo(f"{t.case.key}, seed {t.seed}: {_loss(figures)}, {figures['cpu_seconds']:.0f} CPU s")
    (out / "strangers.md").write_text(page(kept, [int(seed) for seed in seeds.split(",")], audited()))
    click.echo(f"written: {out / 'strangers.md'}; {len(missing(trials, kept))} of {len(trials)} runs are missing")


def played(t: Trial) -> Figures:
    """The figures of a run; of one that diverged the loss is None."""
    try:
        return play(t, NodeConfig(), CACHE, hardware(), lambda record: None) | {"version": installed_version()}
    except NonFinite:
        about = {"cpu_seconds": 0.0, "hardware": hardware(), "day": time.strftime("%Y-%m-%d")} | {
            "version": installed_version()
        }
        return {"val_loss": None, "decisions": [], "refused": 0, **about}


def _loss(figures: Figures) -> str:
    return "diverged" if figures["val_loss"] is None else f"loss {figures['val_loss']:.4f}"


@dataclass(frozen=True)
class Length:
    """The figures there are of these seeds."""

    kept: Kept
    seeds: Sequence[int]

    def of(self, stranger: Stranger) -> dict[int, Figures]:
        """The figures of a run, by seed."""
        found = {seed: self.kept.get(stranger.trial(seed)) for seed in self.seeds}
        return {seed: figures for seed, figures in found.items() if figures is not None}

    def gaps(self, stranger: Stranger) -> list[float | None]:
        """Percents of loss above the run without liars and with the defence, by seed; None: it diverged."""
        base, found = self.of(HONEST), self.of(stranger)
        both = [(found[seed]["val_loss"], base[seed]["val_loss"]) for seed in found if seed in base]
        return [100 * (loss / without - 1) if loss is not None else None for loss, without in both]


@dataclass(frozen=True)
class Audited:
    """What came of audits in the coordinator's machine."""

    alone: Caught
    colluding: Caught
    honest: int  # rounds of honest members
    convicted: int  # of these, in which anything was decided against one


def audited(runs: int = 100, honest: int = 1000) -> Audited:
    """Play so many runs with an owner that forges, and so many rounds of honest members: ten seconds."""
    return Audited(caught(SEALS, 0, runs), caught(COLLUDE, 1000, runs), honest, honest_convicted(honest))


def page(kept: Kept, seeds: Sequence[int], audits: Audited) -> str:
    """docs/strangers.md of the figures that there are."""
    length = Length(kept, seeds)
    runs = [f for stranger in (*ALL, *MERGED) for f in length.of(stranger).values()]
    text = HEAD.format(
        runs=len(runs),
        minutes=sum(f["cpu_seconds"] for f in runs) / 60,
        noise=_noise(length),
        harmful=_harmful(length),
        hardware="; ".join(sorted({f["hardware"] for f in runs})) or "none yet",
    )
    lines = [text, "| what liars send | off, one of 8 | on, one of 8 | on, two of 8 | found out, one of 8 | |"]
    lines.append("|---|---|---|---|---|---|")
    for lie, title in LIES.items():
        off, one, two = Stranger(lie, 1, defence=False), Stranger(lie, 1), Stranger(lie, 2)
        gaps = [length.gaps(s) for s in (off, one, two)]
        cells = [f"`{lie}`: {title}", *map(_gaps, gaps), found_out(length, one)]
        lines.append(f"| {' | '.join(cells)} | {_verdict((1, gaps[1]), (2, gaps[2]))} |")
    without = length.gaps(Stranger(defence=False))
    cost = [-gap if gap is not None else None for gap in without]
    lines += [
        "",
        f"Without liars, the defence costs {_gaps(cost)} of loss: {_verdict((0, cost)) or 'not run'}.",
        "",
    ]
    lines += _merges(length)
    struck = sum(honest_struck(f) for stranger in (*ALL, *MERGED) for f in length.of(stranger).values())
    lines += [
        f"Decisions against honest members, over all runs: {struck}.",
        "",
        AUDITS.format(most=MOST, a=audits),
    ]
    return "\n".join(lines)


def _merges(length: Length) -> list[str]:
    """The table of other merges than the mean."""
    lines = [
        MERGE_HEAD,
        "| merge | what liars send | off, one of 8 | off, two of 8 | on, one of 8 | on, two of 8 | |",
    ]
    lines.append("|---|---|---|---|---|---|---|")
    for merge in MERGES:
        for lie in MERGED_LIES:
            both = [(defence, liars) for defence in (False, True) for liars in (1, 2)]
            gaps = [length.gaps(Stranger(lie, liars, defence, merge)) for defence, liars in both]
            cells = [f"`{merge}`", f"`{lie}`", *map(_gaps, gaps)]
            lines.append(f"| {' | '.join(cells)} | {_verdict((1, gaps[2]), (2, gaps[3]))} |")
    costs = [(merge, length.gaps(Stranger(merge=merge))) for merge in MERGES]
    said = ", ".join(f"`{merge}` {_gaps(cost)}" for merge, cost in costs)
    return [*lines, "", f"Without liars, and with the defence, the final loss is above the mean's by: {said}.", ""]


def _harmful(length: Length) -> str:
    """The lies that cost more than the bar where nothing is done about them."""
    gaps = {lie: length.gaps(Stranger(lie, 1, defence=False)) for lie in LIES}
    found = [f"`{lie}`" for lie in LIES if gaps[lie] and _verdict((1, gaps[lie])) != "met"]
    return ", ".join(found) or "none yet"


def _noise(length: Length) -> str:
    """The largest difference that the defence makes where there is nothing to defend against."""
    gaps = [abs(gap) for gap in length.gaps(Stranger(defence=False)) if gap is not None]
    return f"up to {max(gaps):.1f} %" if gaps else "an unknown part"


def _gaps(gaps: Sequence[float | None]) -> str:
    if not gaps:
        return "not run"
    if any(gap is None for gap in gaps):
        return "diverged"
    return spread([gap for gap in gaps if gap is not None], "+.2f", " %")


def _verdict(*of: tuple[int, Sequence[float | None]]) -> str:
    missed = list[str]()
    for liars, gaps in of:
        if not gaps:
            return "not run"
        numbers = [gap for gap in gaps if gap is not None]
        mean = sum(numbers) / len(numbers) if len(numbers) == len(gaps) else float("inf")
        if mean > BARS[liars]:
            missed.append(f"**missed** by {mean - BARS[liars]:.2f} %" + (f" with {liars}" if len(of) > 1 else ""))
    return ", ".join(missed) or "met"


def found_out(length: Length, stranger: Stranger) -> str:
    """In which rounds the liars of a run were found out, over the seeds."""
    runs = list(length.of(stranger).values())
    if any(f["refused"] for f in runs):
        return "refused, in each round"
    struck = [first(f, stranger.liars, ()) for f in runs]
    out = [first(f, stranger.liars, ("no contributor", "evicted", "banned")) for f in runs]
    if not any(struck):
        return "no"
    out_ = f"; out in {_rounds(out)}" if any(out) else ""
    return f"struck in {_rounds(struck)}{out_}"


def first(figures: Figures, liars: int, consequences: Sequence[str]) -> int | None:
    """The round of the first decision against a liar with one of these consequences (none: with any)."""
    against = [d for d in figures["decisions"] if d["node"] >= NODES - liars]
    return next((d["round"] for d in against if not consequences or d["consequence"] in consequences), None)


def honest_struck(figures: Figures) -> int:
    """Decisions against members that do not lie."""
    liars: Any = figures["decided"]["conditions"].get("liars", 0)
    return sum(d["node"] < NODES - liars for d in figures["decisions"])


def _rounds(found: Sequence[int | None]) -> str:
    return ", ".join("never" if round_ is None else str(round_) for round_ in found)


HEAD = """# What a liar costs

Made by `make strangers`; do not edit. {runs} runs, {minutes:.0f} CPU minutes.
Hardware: {hardware}.

Members of a run of strangers may be broken or malicious. Here one or two of eight lie, in every round of forty, in
one way each; the table says what that does to the final loss, without a defence and with it. `atoll simulate`
shows the same of a run of your own, this one in a minute or two each:

    atoll simulate demo --nodes 8 --steps 80 rounds.inner_steps=10 --no-baseline --liars 1 --liar flip:10 \\
        --out sim-off --defence off
    atoll simulate demo --nodes 8 --steps 80 rounds.inner_steps=10 --no-baseline --liars 1 --liar flip:10 \\
        --out sim-on

Who was struck, and when, is under `decisions` in the summary.json of each folder. Leave the defence as it is: all
of it is on in runs with invites unless the config says otherwise. What it does not defend is named in
[SECURITY.md](../SECURITY.md).

**Off** is a plain weighted mean of what is sent. **On** is what a run does: deltas are clipped to the median of
the members' norms (`outer.clip`), no weight is above 1.5 times the median, and sealed chunks are audited, by two
members each, before the commit (1.3 a round on average, drawn by the run's seed). Who sends what is unlike all
others in length, or in its direction to the last round's merged delta, is struck; strikes halve in 20 rounds, and
six in a row put a member into quarantine, where it trains on and its work is not taken. Who is found to seal
something else than its inputs come to is banned, and its chunks are made anew before anything is applied.

Figures are percents of the final loss above that of the same seed without liars and with the defence: means over
the seeds, in brackets the least and the largest. The bars are on the means: 2 % with one liar of eight, 5 % with
two, 0.3 % for the defence where nobody lies. "Found out" are the rounds in which the one liar was first struck,
and those after which its work counted no more, by seed.

The model is a test of the algorithms, no forecast: one layer, sequences of 64 bytes, three AdamW steps a round.
Where nobody lies, what the defence does to the deltas changes the loss by {noise}, in either direction: so much
is in every figure. So the defence matters to it where liars send {harmful};
what the other lies do to a model so small, in so short a run, cannot be told from that. The run's length and its
learning rate go by what the honest members trained; a liar's samples are missing from the run, and of eight
members one of whom is out, seven train.

**What this does not say.** Liars tell the truth about the norm of what they send; who does not is withdrawn before
the commit by real coordinators, which compare it with what owners saw, and is not simulated. Nor are
seals longer than twice the longest delta: real members see them, and they are always audited. Auditors are honest.
Two members that send the same delta cannot be told apart, so a copy is not found out: it costs what a missing
member does. A liar that sends its own first delta for ever, or zeros, is one whose work is missing, too.
"""

MERGE_HEAD = """## Other merges

`outer.merge: centered` and `trimmed` in place of the mean. **Off** is that merge and nothing else: neither
clipping nor bounded weights, nobody is struck. Figures, bars and the run that they are compared with are those of
the first table.
"""

AUDITS = """## How soon a forged seal is found

Here the coordinator's own machine draws and judges, and members answer it with real signatures
(`tests/audit_runs.py`): eight of them, 16 chunks, `security.audit: auto`, and each round drawn anew.

| | |
|---|---|
| an owner seals something else: banned within {most} rounds | {a.alone} |
| the same, and a second member that says of it all that it is well | {a.colluding} |
| of {a.honest:,} rounds of honest members, those in which anything was held against one | {a.convicted} |
"""

if __name__ == "__main__":
    main()
