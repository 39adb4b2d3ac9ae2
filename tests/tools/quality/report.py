"""What was measured, as a page."""

import os
import platform
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from quality.cases import DEMO, NODES, Case, Size, trial
from quality.claims import CLAIMED, CLAIMS, SPARSER, TREND, TRIED, Claim, Figures, Verdict, loss
from quality.runs import Kept

SETTING = """\
Every run is `atoll simulate` of 4 nodes: the model, data, inner optimizers, codecs and outer optimizer of real
nodes, on a virtual clock. The model is the demo's, 0.82M parameters on bytes of the Python standard library,
and one of an eighth of its size to see which way the figures go. A step is 32 sequences of 128 bytes over all
nodes, a round 30 steps where nothing else is said; the learning rate is a cosine to a tenth of its peak, after
a warm-up over a twentieth of the steps. The peak is what measures best for the inner optimizer: 1.2e-2 for
Muon, 3e-3 for AdamW. The first tenth of the steps is data-parallel except where it says otherwise: rounds of
one step, on the method's wire. int8 and int4 have blocks of 64 elements.

This is not what a run has by default, which was not measured: that is Muon, int8 and blocking too, but rounds of
100 steps (H=100), no data-parallel start, and blocks of 96 elements with a twentieth more rounding error.

Both sides of a comparison have the same tokens, global batch, order of the data and seed. All compute in bf16,
with parameters, gradients, optimizers, deltas and evaluations in fp32; real processes, and the simulation they
are compared with, all in fp32. The loss is that of the last anchor, in nats a byte, on 32,768 bytes of files
that are not trained on. A seed changes the initial parameters and the order of the data. Values are means over
seeds, in brackets the least and the largest; the bar is on the mean. Finished runs are kept in `quality.jsonl`
and not run again; what was not run says so.
"""
LIMITS = """\
**What this does not say.** A model this small on so little text is a test of the algorithms, not a forecast:
published gaps shrink with the size of the model and the length of the run, and a run of 30 rounds is short for
an outer momentum or an error feedback, which remember ten of them. Differences below a few tenths of a percent
are within what another seed changes. The times are of virtual seconds: how real nodes wait is measured
elsewhere.

**What the missed bars are bounded by.** Data-parallel Muon itself gains 7 % on a data-parallel AdamW of the
same care; local updates with Muon cannot be expected to gain 12 %. With overlap, steps that are taken while the
whole model travels start from parameters without the others' last round, and are worth less: the loss grows
with the exchange's share of a round. To train on from a guess of the new anchor instead (the anchor moved by
the node's own delta, in full or shrunk to what the mean has of it, with the last round's mean for the others')
made no difference at an eighth of the size, or was worse. An exchange is a fixed delay here; a fragment of ten
is taken to travel for a tenth of the whole model's time. Real nodes take the data-parallel start of a run in
fragments from the checkpoint of a run without (`init_from`).

`sparse` sends a 64th of each delta. With the published settings much of what is learnt in 30 rounds is never
sent, and of single steps little is, so that a data-parallel start gains it less than others. Here it begins
without one; its rounds of 10 steps and outer learning rate of 4 were searched at an eighth of the size, those
of the fp32 wire it is compared with were not.
"""
TRENDS = """\
Percent of the loss, mean of the seeds that both runs of a comparison were made with.
"""


@dataclass(frozen=True)
class Length:
    """All figures at one number of inner steps and size of model."""

    steps: int
    seeds: tuple[int, ...]
    kept: Kept
    size: Size = DEMO

    @property
    def title(self) -> str:
        return f"{self.steps:,} inner steps, {self.size.title}"

    def of(self, case: Case) -> dict[int, Figures]:
        """By seed."""
        found = {seed: self.kept.get(trial(case, self.steps, seed, self.size)) for seed in self.seeds}
        return {seed: figures for seed, figures in found.items() if figures is not None}

    def values(self, claim: Claim) -> dict[int, float]:
        """One for each seed that both cases were run with."""
        of, against = self.of(claim.of), self.of(claim.against)
        return {seed: claim.compare(of[seed], against[seed]) for seed in of if seed in against}

    def losses(self, of: Case, against: Case) -> dict[int, float]:
        """Percent that the loss is above the other's, for each seed that both cases were run with."""
        a, b = self.of(of), self.of(against)
        return {seed: loss(a[seed], b[seed]) for seed in a if seed in b}


def hardware() -> str:
    import torch

    cpuinfo = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*: (.*)", cpuinfo.read_text()) if cpuinfo.exists() else None
    cores = len(os.sched_getaffinity(0))
    return f"{cores} cores, {found[1] if found else platform.machine()}, torch {torch.__version__} fp32"


def page(claimed: Length, trend: Sequence[Length], picture: str) -> str:
    """As Markdown: all claims at one length, and how they go with size and length."""
    return "\n".join((*_head((claimed, *trend), picture), *_length(claimed), *_trend(trend), ""))


def _head(lengths: Sequence[Length], picture: str) -> list[str]:
    cases = dict.fromkeys((*CLAIMED, *TRIED, *SPARSER, *(case for pair in TREND for case in pair)))
    every = (f for length in lengths for case in cases for f in length.of(case).values())
    runs = list({id(f): f for f in every}.values())
    hours = sum(f["cpu_seconds"] for f in runs) / 3600
    days = sorted({f["day"] for f in runs})
    return [
        "# Training quality",
        "",
        f"Made by `make quality`; do not edit. {len(runs)} runs, {hours:.1f} CPU hours, "
        f"{' to '.join(days[:1] + days[1:][-1:])}.",
        *(f"Hardware: {place}." for place in sorted({f["hardware"] for f in runs})),
        "",
        SETTING,
        f"![Loss of the runs, and what they cost]({picture})",
        "",
        LIMITS,
    ]


def _length(length: Length) -> list[str]:
    lines = [f"## {length.title}", ""]
    lines += ["| claim | bar | aim | measured | seeds | |", "|---|---|---|---|---|---|"]
    lines += [_row(_claim(claim, length)) for claim in CLAIMS]
    lines += ["", "| run | loss | MB sent by a node | times less | tokens lost | seeds | CPU s |"]
    lines += ["|---|---|---|---|---|---|---|"]
    lines += [_row(_case(case, length)) for case in CLAIMED if not case.steps]
    tried = [case for case in TRIED if length.of(case)]
    if len(tried) > 2:
        lines += [
            "",
            "What the optimizer and the outer learning rate and momentum were chosen from:",
            "",
            "| run | loss | seeds |",
            "|---|---|---|",
        ]
        lines += [_row((c.title, spread(_losses(length.of(c)), ".3f"), str(len(length.of(c))))) for c in tried]
    return [*lines, ""]


def _trend(lengths: Sequence[Length]) -> list[str]:
    """Percents of loss, a column for each length that has any."""
    shown = [length for length in lengths if any(length.losses(*pair) for pair in TREND)]
    heads = (f"{length.size.params}, {length.steps:,} steps" for length in shown)
    lines = ["## The same with the model's size and the run's length", "", TRENDS]
    lines += [_row(("loss of", "against", *heads)), "|---" * (2 + len(shown)) + "|"]
    lines += [_row((a.title, b.title, *(_cell(length.losses(a, b)) for length in shown))) for a, b in TREND]
    for length in shown:
        found = [case for case in SPARSER if length.of(case)]
        if len(found) > 1:
            lines += ["", f"Sparse deltas, {length.title}:", "", "| run | loss | times less | seeds |"]
            lines += ["|---|---|---|---|", *(_row(_case(case, length)[i] for i in (0, 1, 3, 5)) for case in found)]
    return lines


def _cell(values: dict[int, float]) -> str:
    return (
        f"{spread(list(values.values()), '+.2f', ' %')}, {len(values)} seed{'s' * (len(values) > 1)}"
        if values
        else ""
    )


def _claim(claim: Claim, length: Length) -> tuple[str, ...]:
    values = list(length.values(claim).values())
    verdict = claim.verdict(values)
    sign = "" if claim.more or claim.unit == "x" else "+"
    form = f"{sign}.2f" if claim.unit == "%" else ",.0f"
    bars = ("" if bar is None else f"{bar:{sign}g} {claim.unit}" for bar in (claim.bar, claim.aim))
    shown = f"**{verdict}**" if verdict is Verdict.MISSED else str(verdict)
    return claim.text, *bars, spread(values, form, f" {claim.unit}"), str(len(values) or ""), shown


def _case(case: Case, length: Length) -> tuple[str, ...]:
    found = length.of(case)
    if not found:
        return case.title, "not run", "", "", "", "", ""
    some = list(found.values())
    sent = mean(f["bytes_per_node"] for f in some)
    less = mean(f["fp32_allreduce_bytes"] for f in some) / sent
    lost = mean(f["inner_steps_lost"] for f in some) / (length.steps * NODES)
    return (
        case.title,
        spread(_losses(found), ".3f"),
        f"{sent / 1e6:,.1f}",
        f"{less:,.0f}x",
        f"{100 * lost:.1f} %" if lost else "",
        str(len(found)),
        f"{mean(f['cpu_seconds'] for f in some):.0f}",
    )


def _losses(found: dict[int, Figures]) -> list[float]:
    return [f["val_loss"] for f in found.values()]


def spread(values: Sequence[float], form: str, unit: str = "") -> str:
    """Mean, and the range where there is more than one value."""
    if not values:
        return ""
    reach = f" ({min(values):{form}} to {max(values):{form}})" if len(values) > 1 else ""
    return f"{mean(values):{form}}{unit}{reach}"


def _row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
