"""Schedule of the outer rule over rounds: its momentum's warm-up and decay, and rounds of unusual length.

Pier (arXiv 2511.17849) warms the outer momentum up and lets it decay: the first deltas are large and say little
about the later ones, and a long memory at the end overshoots. Here both are linear (that form is ours):

    mu_k = mu min(1, (k - 1) / warmup)                                     in round k = 1, 2, ...
    mu_k = mu + (final - mu) min(1, max(0, k - begin) / (end - begin))     where there is a decay

A momentum of mu for rounds of H inner steps forgets at a rate of mu^(1/H) a step. In a round of H' steps, with
r = H' / H (derived; AutoLoCo, arXiv 2609.36662, corrects for the same),

    mu' = mu^r,    eta' = eta (1 - mu') / (1 - mu)

keeps that rate, and keeps eta / (1 - mu), which is how far the anchor goes in the end by each unit of delta.

Every machine must get the same coefficients: the power is computed in decimal arithmetic, whose digits do not
depend on the processor's or the system's mathematics.
"""

from dataclasses import dataclass, replace
from decimal import Context, Decimal
from typing import Protocol

from atoll.outer_opt.nesterov import Nesterov
from atoll.outer_opt.rule import Rule

DECIMAL = Context(prec=30)  # digits


class Schedule(Protocol):
    """The outer rule of each round."""

    def at(self, k: int, length: float = 1.0) -> Rule:
        """The rule of round `k` (from 1 on), whose inner steps were `length` times the usual number."""


@dataclass(frozen=True)
class Constant:
    """A `Schedule` of one rule for every round, however long."""

    rule: Rule

    def at(self, k: int, length: float = 1.0) -> Rule:
        return self.rule


@dataclass(frozen=True)
class Ramp:
    """A `Schedule` of Nesterov's rule whose momentum rises, and falls at the end (Pier, arXiv 2511.17849)."""

    rule: Nesterov  # with the momentum of the time between warm-up and decay
    warmup: int = 0  # rounds until the momentum is there
    begin: int = 0  # the round in which its decay begins
    end: int = 0  # and the one from which on it is `final`; 0: no decay
    final: float = 0.0

    def at(self, k: int, length: float = 1.0) -> Nesterov:
        mu = self.rule.momentum
        if self.end and k > self.begin:
            mu += (self.final - mu) * min(1.0, (k - self.begin) / max(1, self.end - self.begin))
        if k <= self.warmup:
            mu *= (k - 1) / self.warmup
        return for_length(replace(self.rule, momentum=mu), length)


@dataclass(frozen=True)
class DataParallelStart:
    """A `Schedule` with another rule in the first rounds; those after them count from 1 again."""

    first: Rule
    rounds: int  # how many have it
    then: Schedule

    def at(self, k: int, length: float = 1.0) -> Rule:
        return self.first if k <= self.rounds else self.then.at(k - self.rounds, length)


def for_length(rule: Nesterov, length: float) -> Nesterov:
    """The rule with the same decay a token for a round of `length` times the usual inner steps: mu' = mu^length
    and eta' = eta (1 - mu') / (1 - mu), as the module derives."""
    if length == 1.0 or rule.momentum == 0.0:
        return rule
    mu = float(DECIMAL.power(Decimal(rule.momentum), Decimal(length)))
    return Nesterov(rule.lr * (1.0 - mu) / (1.0 - rule.momentum), mu)
