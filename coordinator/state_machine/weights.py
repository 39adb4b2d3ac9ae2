"""What the contributions to a round count in its mean, and how long the round was. Pure.

The arithmetic of weights and scales is that of `weights` and `clip` in `atoll.outer_opt`, which simulations use; a
test holds them equal. The members of a round's first attempt set its measures, the bound of the weights, the
largest norm and the round's length: so what one contribution counts stays as it is, whoever comes and goes in
later attempts.
"""

from statistics import median
from typing import assert_never

from atoll.comm.config.outer import WeightName
from atoll.comm.config.run import RunConfig
from atoll.coordinator.state_machine.ledger import Contribution, Ledger

BOUND = 4.0  # times the median weight, of quality


def weights(ledger: Ledger, config: RunConfig) -> list[float]:
    """Of each entry: relative; 0 for one that brings no delta."""
    name, founders = config.outer.weights, _founders(ledger)
    raw = [_weight(name, e.contribution, config) if e.contribution else 0.0 for e in ledger.entries]
    if name is not WeightName.QUALITY or not founders:
        return raw
    most = BOUND * median([_weight(name, c, config) for c in founders])
    return [min(weight, most) for weight in raw]


def scales(ledger: Ledger, config: RunConfig) -> list[float]:
    """Of each entry: what its delta is multiplied with besides its weight."""
    late = [e.contribution.damping if e.contribution and config.outer.damping else 1.0 for e in ledger.entries]
    return [a * b for a, b in zip(clips(ledger, config), late, strict=True)]


def clips(ledger: Ledger, config: RunConfig) -> list[float]:
    """Of each entry: the factor that brings its delta's norm down to the median (Covenant-72B, arXiv 2603.08163);
    1 for one that is not above it. Of an even number the lower of the middle two."""
    norms = sorted(c.norm for c in _founders(ledger) if c.norm > 0)
    if not config.outer.clip or not norms:
        return [1.0] * len(ledger.entries)
    limit = norms[(len(norms) - 1) // 2]
    told = [e.contribution.norm if e.contribution else 0.0 for e in ledger.entries]
    return [limit / norm if norm > limit else 1.0 for norm in told]


def length(ledger: Ledger, config: RunConfig) -> float:
    """Of the round, in usual rounds: inner steps behind its deltas on average; 1 where the outer rule is not kept
    per token."""
    founders = _founders(ledger)
    if not config.outer.per_token or not founders:
        return 1.0
    return sum(_steps(c, config) for c in founders) / len(founders) / config.rounds.inner_steps


def _founders(ledger: Ledger) -> list[Contribution]:
    first = min((e.since for e in ledger.entries), default=0)
    return [e.contribution for e in ledger.entries if e.since == first and e.contribution]


def _weight(name: WeightName, contribution: Contribution, config: RunConfig) -> float:
    tokens = float((contribution.samples + contribution.earlier) * config.model.seq_len)
    match name:
        case WeightName.TOKENS:
            return tokens
        case WeightName.EQUAL:
            return 1.0
        case WeightName.QUALITY:
            return tokens * (tokens / _steps(contribution, config))
        case _:
            assert_never(name)


def _steps(contribution: Contribution, config: RunConfig) -> float:
    """Inner steps behind the delta, those of rounds that left it out, or were other fragments', included."""
    return (contribution.samples + contribution.earlier) / config.inner.batch_size
