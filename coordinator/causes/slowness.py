"""Whether a round was slow: by what rounds took before, and its exchange by what its plan predicted. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from atoll.coordinator.causes.observations import PHASES

MEMORY = 16  # rounds by which the next ones are judged
MIN_ROUNDS = 3  # rounds that have to be known
SLOW_TIMES, SLOW_SECONDS = 1.25, 0.75  # a round is slow that takes so many times, and so much, longer than usual
SPREADS = 4.0  # median absolute deviations that are no slowness: some runs are restless
EXCHANGE_TIMES, EXCHANGE_SECONDS = 2.0, 1.0  # the same, of an exchange and its prediction


@dataclass(frozen=True, slots=True)
class RoundPace:
    """Seconds that a committed round took."""

    inner: float
    collect: float
    reduce: float
    commit: float

    @property
    def total(self) -> float:
        return self.inner + self.collect + self.reduce + self.commit


def remember(paces: Sequence[RoundPace], latest: RoundPace) -> tuple[RoundPace, ...]:
    """The rounds by which the next one is judged."""
    return (*paces, latest)[-MEMORY:]


def usual(paces: Sequence[RoundPace]) -> dict[str, float]:
    """Seconds of each phase in the middle of the rounds before; empty where they are too few."""
    if len(paces) < MIN_ROUNDS:
        return {}
    return {phase: median(getattr(pace, phase) for pace in paces) for phase in PHASES}


def is_slow(latest: RoundPace, predicted: float, paces: Sequence[RoundPace]) -> bool:
    """Whether a round was slow; `predicted`: seconds of its reduce by its plan, 0: not known; `paces`: the rounds
    before."""
    exchange = latest.reduce + latest.commit
    if len(paces) < MIN_ROUNDS:
        return bool(predicted) and exchange > EXCHANGE_TIMES * predicted + EXCHANGE_SECONDS
    totals = [pace.total for pace in paces]
    middle = median(totals)
    spread = median(abs(total - middle) for total in totals)
    if latest.total > max(SLOW_TIMES * middle, middle + SLOW_SECONDS, middle + SPREADS * spread):
        return True
    before = median(pace.reduce + pace.commit for pace in paces)
    return exchange > EXCHANGE_TIMES * max(predicted, before) + EXCHANGE_SECONDS
