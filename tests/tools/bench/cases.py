"""What is measured, under which bars: data, and the arithmetic on what came out. No process is started here.

A *must* is the bar; an *aim* is what would be good. A bar that is missed is shown. Only what fails (an error, a
round that did not commit, digests that differ) is an error of the harness.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from statistics import median
from typing import Any

TIMES = 5  # measured, after a warm-up
BYTES_TOLERANCE = 3.0  # percent
MEMORY, ENOUGH = 2.5, 25_000_000  # payloads of a peer; elements from which on they stand out from its process


@dataclass(frozen=True, slots=True)
class Link:
    """Of every peer, both ways."""

    mbit: float
    rtt: float  # ms
    loss: float = 0.0  # percent of segments
    slowest: float = 0.0  # Mbit/s of the last peer; 0: as the others


@dataclass(frozen=True, slots=True)
class Case:
    """An int8 all-reduce."""

    key: str
    title: str
    peers: int
    numel: int
    must: float | None  # a ratio to gloo on loopback, else seconds
    aim: float | None
    link: Link | None = None  # None: loopback, against gloo
    limit: float = 0.0  # seconds; no codec of a byte an element can be faster on these links
    others: tuple[tuple[str, float], ...] = ()  # published seconds
    kill: bool = False  # the last peer, at half time

    @property
    def full_title(self) -> str:
        return f"{self.title}, {self.numel / 1e6:g}M"

    def scaled(self, share: float) -> "Case":
        """The same with a smaller vector, for which nobody else has figures."""
        if share == 1:
            return self
        return replace(self, numel=int(self.numel * share), limit=self.limit * share, others=())


HOME = Link(100, 50)
CASES = (
    Case("a", "loopback, 4 peers", 4, 25_000_000, 1.2, 0.9),
    Case("b", "loopback, 8 peers", 8, 25_000_000, 1.2, 0.9),
    Case(
        *("c", "100 Mbit/s, 50 ms", 4, 25_000_000, 3.3, 3.1, HOME, 3.0),
        others=(("PRIME", 3.5), ("PCCL", 4.3), ("hivemind fp16", 12.6)),
    ),
    Case(
        *("d", "100 Mbit/s, 100 ms, 0.05 % loss", 4, 25_000_000, 3.6, 3.3, Link(100, 100, 0.05), 3.0),
        others=(("PRIME", 4.0), ("PCCL", 5.5)),
    ),
    Case(
        *("e", "100 Mbit/s, one peer 20, 50 ms", 4, 25_000_000, 11, 10.3, Link(100, 50, 0, 20), 10.0),
        others=(("PRIME", 15.8), ("PCCL", 17.2)),
    ),
    Case(
        *("f", "1 Gbit/s, 100 ms, 0.01 % loss", 4, 50_000_000, 1.5, 0.9, Link(1000, 100, 0.01), 0.6),
        others=(("PRIME", 3.2), ("PCCL", 4.9)),
    ),
    Case("g", "as c, a peer killed at half time", 4, 25_000_000, None, None, HOME, kill=True),
)
REGIONS = Case("k", "two regions of 3, 300 Mbit/s 4 ms within, 100 Mbit/s 80 ms between", 6, 8_000_000, None, None)
AUDITS = Case("l", "100 Mbit/s, 50 ms", 4, 60_000_000, None, None, HOME, 7.2)
AUDITED_NUMELS, AUDITS_COST = (60_000_000, 150_000_000), 3.0  # percent of a reduce
CODEC, FLEET, TRAINER, PLAN, WAN = "h", "n", "t", "plan", "wan"  # sections that are not an all-reduce
KEYS = (*(case.key for case in CASES), REGIONS.key, AUDITS.key, CODEC, FLEET, TRAINER, PLAN, WAN)


class Verdict(StrEnum):
    AIM = "aim met"
    MUST = "must met"
    MISSED = "missed"
    FAILED = "failed"
    LEFT_OUT = "not run"
    TOLD = ""  # it has no bar


@dataclass(frozen=True, slots=True)
class Row:
    key: str
    title: str
    unit: str
    values: tuple[float, ...] = ()
    must: float | None = None  # at most
    aim: float | None = None
    note: str = ""
    command: str = ""
    failure: str = ""  # what went wrong
    left_out: str = ""  # why it was not run

    @property
    def measured(self) -> float | None:
        return median(self.values) if self.values else None

    @property
    def verdict(self) -> Verdict:
        if self.failure:
            return Verdict.FAILED
        if self.left_out or self.measured is None:
            return Verdict.LEFT_OUT
        if self.must is None:
            return Verdict.TOLD
        if self.aim is not None and self.measured <= self.aim:
            return Verdict.AIM
        return Verdict.MUST if self.measured <= self.must else Verdict.MISSED


@dataclass(frozen=True, slots=True)
class Outcome:
    """One call of `atoll bench allreduce` that did what it was asked."""

    seconds: tuple[float, ...]
    rel_err: float
    tx: tuple[int, ...]  # bytes of each peer in one iteration
    rx: tuple[int, ...]
    payload: float  # bytes of one encoded vector
    levels: tuple[int, ...] = ()  # of each iteration's plan
    memory: float = 0.0  # bytes at the largest peer's peak beyond its vectors and its process; 0: not told


class Failed(Exception):
    """A measurement did not happen as asked; the message is the row's reason."""


def outcome(told: Mapping[str, Any], killed: int = 0) -> Outcome:
    """What the command printed, if it says that everything went well; else `Failed`."""
    try:
        if not all(told["committed"]):
            rounds = [k + 1 for k, good in enumerate(told["committed"]) if not good]
            raise Failed(f"not committed: iteration {', '.join(map(str, rounds))}")
        if told["digests_equal"] is not True:
            raise Failed("the peers' digests differ")
        if told["killed"] != ([killed] if killed else []):
            raise Failed(f"peers killed: {told['killed']}")
        if told.get("killed_late"):
            raise Failed("the peer was killed too late: it had the result")
        return Outcome(
            seconds=tuple(float(s) for s in told["seconds"]),
            rel_err=float(told["rel_err"]),
            tx=tuple(told["tx_bytes"]),
            rx=tuple(told["rx_bytes"]),
            payload=float(told.get("payload_mb", 0)) * 1e6,
            levels=tuple(told.get("levels", ())),
            memory=1e6 * max(told.get("beyond_mb", [0.0])),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise Failed(f"its JSON is not as documented: {error!r}") from None


@dataclass(frozen=True, slots=True)
class Measured:
    """All that was measured of a case, in turns."""

    case: Case
    outcomes: tuple[Outcome, ...] = ()
    gloo: tuple[tuple[float, ...], ...] = ()  # seconds of each turn
    command: str = ""
    failure: str = ""
    left_out: str = ""

    @property
    def ours(self) -> tuple[float, ...]:
        return tuple(s for outcome in self.outcomes for s in outcome.seconds)

    @property
    def baseline(self) -> tuple[float, ...]:
        return tuple(s for turn in self.gloo for s in turn)


def rows(measured: Sequence[Measured], bars: bool) -> list[Row]:
    """The table's rows of the all-reduces, and of the error and the bytes that they showed."""
    by_key = {m.case.key: m for m in measured}
    found = [_speed(m, by_key.get("c")) for m in measured]
    found += [row for m in measured if m.outcomes for row in _error_and_bytes(m)]
    return found if bars else [replace(row, must=None, aim=None) for row in found]


def _speed(m: Measured, plain: Measured | None) -> Row:
    case = m.case
    row = Row(
        *(case.key, case.full_title, "s", m.ours, case.must, case.aim),
        command=m.command,
        failure=m.failure,
        left_out=m.left_out,
    )
    if case.link is None:
        ratios = (median(o.seconds) / median(g) for o, g in zip(m.outcomes, m.gloo, strict=False))
        note = f"{spread(m.ours)} s, gloo fp32 {spread(m.baseline)} s" if m.ours and m.baseline else ""
        return replace(row, unit="x gloo", values=tuple(ratios), note=note)
    if case.kill and plain is not None and plain.ours:
        base = median(plain.ours)
        note = f"{median(m.ours) / base - 1:+.0%} to c" if m.ours else ""
        return replace(row, must=1.35 * base + 1, aim=1.22 * base + 0.3, note=note)
    return replace(row, note=f"limit {case.limit:g} s" if case.limit else "bars need case c")


def _error_and_bytes(m: Measured) -> list[Row]:
    case, outcome = m.case, m.outcomes[-1]
    title = f"error of the int8 mean, {case.peers} peers"
    found = []
    if case.link is None:
        bars = (0.9, None) if case.peers == 4 else (None, None)
        found.append(Row("i", title, "%", tuple(100 * o.rel_err for o in m.outcomes), *bars))
    if all(o.memory > 0 and o.payload for o in m.outcomes) and not case.kill:
        values, bar = tuple(o.memory / o.payload for o in m.outcomes), MEMORY if case.numel >= ENOUGH else None
        found.append(Row("m", f"memory beyond the flat vectors, {case.full_title}", "payloads", values, bar))
    if outcome.payload and not case.kill:
        over = tuple(bytes_over(o) for o in m.outcomes)
        found.append(Row("j", f"bytes over 2(N-1)/N of the payload, {case.key}", "%", over, BYTES_TOLERANCE))
    return found


def bytes_over(outcome: Outcome) -> float:
    """Percent by which the peers' traffic, sent and received, exceeds the formula's."""
    n = len(outcome.tx)
    each_way = 2 * (n - 1) / n * outcome.payload
    return 100 * ((sum(outcome.tx) + sum(outcome.rx)) / (2 * n * each_way) - 1)


def spread(values: Sequence[float]) -> str:
    """Median and range."""
    if len(values) < 2:
        return "".join(f"{v:.3g}" for v in values)
    return f"{median(values):.3g} ({min(values):.3g} to {max(values):.3g})"
