"""Weights of the contributions to a round in its mean, and the length of the round. Pure.

The rules are those of `atoll.outer_opt`. The members of a round's first attempt set its measures, the bound of the
weights, the largest norm and the round's length: so what one contribution counts stays as it is, whoever comes and
goes in later attempts.
"""

from atoll.comm.config.outer import WeightName
from atoll.comm.config.run import RunConfig
from atoll.coordinator.state_machine.events import Contribution
from atoll.coordinator.state_machine.ledger import Ledger
from atoll.outer_opt.clip import SMALLEST_FACTOR, clip_factors
from atoll.outer_opt.weights import bounded, by_quality, by_tokens, equal

RULES = {WeightName.TOKENS: by_tokens, WeightName.EQUAL: equal, WeightName.QUALITY: by_quality}


def weights(ledger: Ledger, config: RunConfig) -> list[float]:
    """Relative weights of the ledger's entries, 0 for one that brings no delta; of who claims more than the others
    no more than `security.weight_bound` allows."""
    samples = [_samples(e.contribution) if e.contribution else 0 for e in ledger.entries]
    tokens = [float(count * config.model.seq_len) for count in samples]
    steps = [count / config.inner.batch_size for count in samples]
    founders = _founders(ledger)
    return bounded(RULES[config.outer.weights](tokens, steps, founders), config.security.weight_bound, founders)


def scales(ledger: Ledger, config: RunConfig) -> list[float]:
    """Factors of the entries' deltas beside their weights: clipping, and the damping of late work; all above 0,
    else it is no plan."""
    late = [e.contribution.damping if e.contribution and config.outer.damping else 1.0 for e in ledger.entries]
    return [max(a * b, SMALLEST_FACTOR) for a, b in zip(clips(ledger, config), late, strict=True)]


def clips(ledger: Ledger, config: RunConfig) -> list[float]:
    """Factors of the entries' deltas that bring outsized norms down to the median, or to what the steps behind
    them make likely; 1 where the run does not clip."""
    norms = [e.contribution.norm if e.contribution else 0.0 for e in ledger.entries]
    if not config.outer.clip:
        return [1.0] * len(norms)
    samples = [float(_samples(e.contribution)) if e.contribution else 0.0 for e in ledger.entries]
    most = float(config.rounds.inner_steps * config.inner.batch_size)
    return clip_factors(norms, samples, most, _founders(ledger))


def round_length(ledger: Ledger, config: RunConfig) -> float:
    """The round's length in usual rounds: inner steps behind its deltas on average; 1 where the outer rule is not
    kept per token."""
    founders = [ledger.entries[i].contribution for i in _founders(ledger)]
    if not config.outer.per_token or not founders:
        return 1.0
    steps = [_samples(c) / config.inner.batch_size for c in founders if c is not None]
    return sum(bounded(steps, config.security.weight_bound)) / len(steps) / config.rounds.inner_steps


def _founders(ledger: Ledger) -> list[int]:
    """Places of the entries with a delta that were in the round's first attempt."""
    first = min((e.since for e in ledger.entries), default=0)
    return [i for i, e in enumerate(ledger.entries) if e.since == first and e.contribution]


def _samples(contribution: Contribution) -> int:
    """Samples behind a delta, those of rounds that left it out, or were other fragments', included."""
    return contribution.claimed + contribution.earlier
