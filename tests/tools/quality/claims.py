"""What is claimed of training quality, and under which bars: cases, and the figures that compare two of them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from statistics import mean
from typing import Any

from quality.cases import Case, varied

Figures = Mapping[str, Any]  # of one run (`runs.play`)
Compare = Callable[[Figures, Figures], float]

# What measures best for AdamW: 6e-3 and 1.2e-2 are worse. Muon has what is best for it (`run.yaml`).
BY_ADAMW = ("inner.optimizer=adamw", "inner.lr=3e-3", "inner.min_lr=3e-4")
ADAMW = Case("dp-adamw", "data-parallel AdamW", BY_ADAMW, parallel=True)
MUON = Case("dp-muon", "data-parallel Muon", ("inner.optimizer=muon",), parallel=True)
BEST = Case("muon-int8", "Muon, int8, blocking, H=30 after a data-parallel start")
FP32 = varied(BEST, "fp32", "fp32 wire", "reduce.codec=fp32")
BF16 = varied(BEST, "bf16", "bf16 wire", "reduce.codec=bf16")
INT4 = varied(BEST, "int4", "int4 wire with error feedback", "reduce.codec=int4", "outer.feedback=0.9")
FP32_ADAMW = varied(FP32, "fp32-adamw", "fp32 wire, AdamW", *BY_ADAMW)
# Sparse deltas carry little of single steps: they are compared without a data-parallel start.
COLD_ADAMW = varied(
    replace(FP32_ADAMW, together=0.0), "fp32-adamw-cold", "fp32 wire, AdamW, no data-parallel start"
)
COLD_ADAMW_10 = varied(
    *(COLD_ADAMW, "fp32-adamw-cold-10", "fp32 wire, AdamW, no data-parallel start, rounds of 10 steps"),
    "rounds.inner_steps=10",
)
SPARSE = Case(
    "sparse",
    "sparse, AdamW, rounds of 10 steps, no data-parallel start",
    BY_ADAMW[1:],
    "sparse",
    together=0.0,
)
PAPERS_SPARSE = Case(
    *("sparse-paper", "sparse as published: rounds of 30 steps, outer 1; a data-parallel start on its wire"),
    *((*BY_ADAMW[1:], "rounds.inner_steps=30", "outer.lr=1"), "sparse"),
)
COLD_SPARSE = varied(replace(PAPERS_SPARSE, together=0.0), "sparse-cold", "as published, no data-parallel start")
COLD = varied(replace(FP32, together=0.0), "fp32-cold", "fp32 wire, no data-parallel start")
COLD_INT4 = varied(
    *(replace(INT4, together=0.0), "int4-cold", "int4 with feedback, H=53, no data-parallel start"),
    *("rounds.inner_steps=53", "reduce.block=256"),
)
BLOCKING = Case("blocking", "H=50, blocking", ("inner.optimizer=muon", "overlap.delay=0"), method="overlapped")
OVERLAPPED = varied(
    BLOCKING, "overlapped", "overlapped: exchanges of half a round", "overlap.delay=1", latency=25.0
)
# The same bandwidth: what the whole model takes 25 or 40 steps for, a tenth of it takes 2.5 or 4 for, ten times.
TENTHS = ("overlap.delay=1", "fragments.count=10")
PIECEWISE = varied(
    *(BLOCKING, "overlapped-10", "overlapped in 10 fragments: exchanges of half of the time"),
    *TENTHS,
    latency=2.5,
)
LATE_PIECEWISE = varied(
    *(BLOCKING, "late-10", "overlapped in 10 fragments: exchanges of 80 % of the time"), *TENTHS, latency=4.0
)
SOON = varied(BLOCKING, "soon", "overlapped: exchanges of a tenth of a round", "overlap.delay=1", latency=5.0)
DROPPED = varied(BEST, "dropped", "half of the contributions dropped", drop=0.5)
CHURN = varied(BEST, "churn", "a node killed and one joining every 5 rounds", churn=5)
WAIT = ("rounds.quorum=1", "rounds.grace=100", "rounds.ceiling=1")
UNEQUAL = {"speeds": (1.0, 1.0, 0.8, 0.5)}
# Data parallelism waits for the slowest in each step, whatever the quorum.
ALL_WAIT = varied(
    replace(BEST, together=0.0),
    "all-wait",
    "the same, all wait",
    *WAIT,
    **UNEQUAL,
)
ONE = ("rounds.quorum=0.0001", "rounds.grace=0.5", "overlap.delay=2")
GRACE = varied(
    replace(BEST, together=0.0),
    "grace",
    "speeds 1, 1, 0.8, 0.5, K=1 with grace, no data-parallel start",
    *ONE,
    **UNEQUAL,
)
# At the ceiling real nodes wait, and so have the tokens of the simulation.
SIMULATED = replace(
    varied(BEST, "simulated", "Muon, int8, H=30 after a data-parallel start; 300 steps", "rounds.ceiling=1"),
    steps=300,
    bf16=False,
)
REAL = replace(SIMULATED, key="real", title="the same in real processes", real=True)
# What is measured in virtual seconds needs no training: a model that costs nothing.
SMALL = (
    "model.dim=16",
    "model.layers=1",
    "model.heads=2",
    "model.kv_heads=2",
    "model.ffn_dim=16",
    "model.seq_len=16",
)
WAITING = Case(
    *("waiting", "a reduce of 50 % of the round, blocking", (*SMALL, "rounds.inner_steps=10")),
    steps=800,
    together=0.0,
    bf16=False,
    conditions=(("latency", 10.0),),
)
HIDDEN = varied(WAITING, "hidden", "a reduce of 80 % of the round, overlapped", "overlap.delay=10", latency=8.0)


class Verdict(StrEnum):
    AIM = "aim met"
    MET = "met"
    MISSED = "missed"
    LEFT_OUT = "not run"


@dataclass(frozen=True)
class Claim:
    """`bar` and `aim` are upper bounds of the mean, or lower ones where more is better."""

    text: str
    of: Case
    against: Case
    compare: Compare
    unit: str
    bar: float
    aim: float | None = None
    more: bool = False

    def verdict(self, values: Sequence[float]) -> Verdict:
        if not values:
            return Verdict.LEFT_OUT
        if self.aim is not None and self._holds(mean(values), self.aim):
            return Verdict.AIM
        return Verdict.MET if self._holds(mean(values), self.bar) else Verdict.MISSED

    def _holds(self, value: float, bar: float) -> bool:
        return value >= bar if self.more else value <= bar


def loss(of: Figures, against: Figures) -> float:
    """Percent that the loss is above the other's."""
    return 100.0 * (float(of["val_loss"]) / float(against["val_loss"]) - 1.0)


def reduction(of: Figures, against: Figures) -> float:
    return float(of["fp32_allreduce_bytes"]) / float(of["bytes_per_node"])


def goodput(of: Figures, against: Figures) -> float:
    return 100.0 * float(of["goodput"])


def utilisation(of: Figures, against: Figures) -> float:
    return 100.0 * float(of["utilisation"])


def off_formula(of: Figures, against: Figures) -> float:
    """Percent that the utilisation is off H / (H + reduce), which is a half."""
    return 100.0 * abs(float(of["utilisation"]) / 0.5 - 1.0)


def apart(of: Figures, against: Figures) -> float:
    """Percent between the losses, whichever is larger."""
    return abs(loss(of, against))


CLAIMS = (
    Claim("real processes against the simulation of the same run", REAL, SIMULATED, apart, "%", 1.0),
    Claim(
        "Muon, int8, H=30 after a data-parallel start, against data-parallel AdamW", BEST, ADAMW, loss, "%", -12.0
    ),
    Claim(
        "Muon, int8, H=30 after a data-parallel start, against data-parallel Muon", BEST, MUON, loss, "%", 8.0, 3.0
    ),
    Claim("int8 against fp32 wire", BEST, FP32, loss, "%", 0.2),
    Claim("int4 with error feedback against fp32 wire", INT4, FP32, loss, "%", 0.7),
    Claim(
        "sparse, 2 bits with feedback, against fp32 wire with AdamW: neither with a data-parallel start",
        SPARSE,
        COLD_ADAMW,
        loss,
        "%",
        2.0,
    ),
    Claim("the same against fp32 wire with such a start", SPARSE, FP32_ADAMW, loss, "%", 2.0),
    Claim("sparse: times fewer bytes than fp32 data parallelism", SPARSE, SPARSE, reduction, "x", 400, 4000, True),
    Claim(
        "overlapped against blocking at the same H: exchanges of a tenth of a round",
        SOON,
        BLOCKING,
        loss,
        "%",
        1.0,
    ),
    Claim("overlapped in 10 fragments: exchanges of half of the time", PIECEWISE, BLOCKING, loss, "%", 1.0),
    Claim("the same, exchanges of 80 % of the time", LATE_PIECEWISE, BLOCKING, loss, "%", 1.0),
    Claim(
        "overlapped, the whole model at once: exchanges of half of a round", OVERLAPPED, BLOCKING, loss, "%", 1.0
    ),
    Claim("half of each node's contributions dropped", DROPPED, BEST, loss, "%", 3.0),
    Claim("a node killed and one joining every 5 rounds", CHURN, BEST, loss, "%", 1.5),
    Claim("speeds 1, 1, 0.8, 0.5: K=1 with grace, goodput", GRACE, GRACE, goodput, "%", 98.0, more=True),
    Claim("the same, loss against all wait", GRACE, ALL_WAIT, loss, "%", 1.0),
    Claim(
        "int4 in blocks of 256 and H=53: times fewer bytes than fp32 data parallelism",
        COLD_INT4,
        COLD,
        reduction,
        "x",
        400,
        4000,
        True,
    ),
    Claim("the same, loss against fp32 wire", COLD_INT4, COLD, loss, "%", 2.0),
    Claim("blocking, a reduce as long as the training: off the formula", WAITING, WAITING, off_formula, "%", 3.0),
    Claim("overlapped, a reduce of 80 % of it: utilisation", HIDDEN, HIDDEN, utilisation, "%", 98.0, more=True),
)
# In the order in which they are run: what most claims need first.
CLAIMED = (
    *(
        BEST,
        MUON,
        ADAMW,
        FP32,
        INT4,
        SPARSE,
        FP32_ADAMW,
        COLD_ADAMW,
        WAITING,
        HIDDEN,
        DROPPED,
        OVERLAPPED,
        BLOCKING,
        SOON,
        PIECEWISE,
        LATE_PIECEWISE,
        GRACE,
        ALL_WAIT,
        CHURN,
    ),
    *(COLD, COLD_INT4, SIMULATED, REAL),
)


# How comparisons of losses go with the model's size and the run's length (`trend`): of what, and against what.
TREND = (
    (MUON, ADAMW),
    (BEST, ADAMW),
    (BEST, MUON),
    (FP32_ADAMW, ADAMW),
    (BF16, FP32),
    (BEST, FP32),
    (INT4, FP32),
    (SPARSE, COLD_ADAMW),
    (SPARSE, FP32_ADAMW),
    (PAPERS_SPARSE, FP32_ADAMW),
    (SOON, BLOCKING),
    (PIECEWISE, BLOCKING),
    (OVERLAPPED, BLOCKING),
    (DROPPED, BEST),
)
COMPARED = tuple(dict.fromkeys(case for pair in TREND for case in pair))


def tried(optimizer: str, lr: float, momentum: float, *more: str) -> Case:
    """A candidate for the default of the inner optimizer, and the outer learning rate and momentum."""
    title = ", ".join((optimizer, f"outer {lr:g}, {momentum:g}", *more))
    key = f"{optimizer}-{lr:g}-{momentum:g}" + "".join(f" {setting}" for setting in more)
    inner = BY_ADAMW if optimizer == "adamw" else (f"inner.optimizer={optimizer}",)
    return Case(key, title, (*inner, f"outer.lr={lr}", f"outer.momentum={momentum}", *more))


TRIED = (
    MUON,
    *(tried("muon", *outer) for outer in ((0.7, 0.5), (0.9, 0.5), (0.9, 0.7), (0.9, 0.8), (0.7, 0.9))),
    ADAMW,
    *(tried("adamw", *outer) for outer in ((0.7, 0.5), (0.9, 0.7), (0.7, 0.9))),
)
SPARSER = (
    COLD_ADAMW,
    COLD_ADAMW_10,
    SPARSE,
    PAPERS_SPARSE,
    varied(replace(SPARSE, together=0.1), "sparse-start", "sparse with a data-parallel start, on its wire"),
    COLD_SPARSE,
    varied(COLD_SPARSE, "sparse-10", "the same, rounds of 10 steps", "rounds.inner_steps=10"),
)
