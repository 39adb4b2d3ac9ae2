"""Deltas that are unlike the others of their round, by what owners and relays tell of them. Pure.

With each seal an owner that has the delta m of an earlier round tells, for each term x of the mean, its norm and
its length along m (`Seal.dots`), relays the same of what they average. Before a round is committed
`charge_outliers` makes of these each contributor's cosine to the last round, and has `atoll.outer_opt.outliers`
say which are odd. In runs that exchange fragments in turns, all of it is of the round's fragment.

Who tells may lie, and its sample is its own, so that nobody can recompute it. So each member has one voice,
however much it owns:

    voice v on contributor i    cos = sum over chunks (dot |m|) / sqrt(sum |x|^2 sum |m|^2)
    off(v, i)                   cos less the median of v's cosines: a voice is held against itself alone
    off(i)                      the middle of off(v, i) over v, i itself not asked; 0 where voices are at odds

One voice of three or more moves the middle no farther than honest ones disagree, nor do two of five: one or two
liars of eight convict nobody, and clear no liar. Where fewer than `MIN_VOICES` speak of a contributor, or the last
round left its work out, which then honestly points elsewhere, it is compared by its length alone, as it told that
itself. To be odd is no proof of anything: it weighs as much as to be late, counts once a round, decays, and never
puts anybody out of the run (`conduct`, `comm.strikes`).
"""

import struct
from collections.abc import Iterator, Sequence
from math import fsum, sqrt
from statistics import median, median_high, median_low

from atoll.comm.bitmap import bit, places
from atoll.comm.ids import NodeId
from atoll.coordinator.state_machine import ledger as book
from atoll.coordinator.state_machine.conduct import Evidence, Offence, charge
from atoll.coordinator.state_machine.events import Contribution, Effect
from atoll.coordinator.state_machine.ledger import Ledger, Seal
from atoll.coordinator.state_machine.norms import came_by, terms_of
from atoll.coordinator.state_machine.state import State
from atoll.outer_opt.outliers import SHORTEST, odd_ones

MIN_VOICES = 3  # that must have seen a delta, and deltas that a voice must have seen, to tell their directions
FEW_SAMPLES = 0.25  # of the median's: what has fewer behind it is honestly short, and points wherever noise does
Cosines = dict[NodeId, dict[NodeId, float]]  # of each voice: of each contributor, but itself


def charge_outliers(state: State, out: list[Effect]) -> State:
    """The state with those charged whose deltas of the round, which is about to be committed, are unlike most."""
    if not state.config.outer.clip or not state.config.security.outliers:
        return state
    r = state.round
    work = _contributions(r.ledger)
    nodes = [n for n in work if n in r.ledger.contributions]
    usual = median([work[n].claimed for n in nodes] or [0])
    few = {n for n in nodes if work[n].claimed < FEW_SAMPLES * usual}
    here = state.members.here
    timely = [n for n in nodes if n in here and not here[n].missed and n not in few]
    cosines = directions(_heard(r.ledger), timely)
    norms = _lengths([work[n].norm for n in nodes], [n in few for n in nodes])
    dots = [norm * cosines.get(n, 0.0) for n, norm in zip(nodes, norms, strict=True)]
    compared = [n in cosines for n in nodes]
    found = odd_ones([norm * norm for norm in norms], dots, 1.0 if cosines else 0.0, compared)
    for i, sentence in found.items():
        facts = ("norm", f"{norms[i]:.6g}"), ("cosine", f"{cosines[nodes[i]]:.3f}" if compared[i] else "")
        state = charge(state, nodes[i], Evidence(r.number, Offence.OUTLIER, sentence, facts), out)
    return state


def directions(heard: Cosines, nodes: Sequence[NodeId]) -> dict[NodeId, float]:
    """The cosine to the last round of each of these contributors of which enough voices tell."""
    offsets: dict[NodeId, list[float]] = {}
    middles: list[float] = []
    for told in heard.values():
        cosines = {n: told[n] for n in nodes if n in told}
        if len(cosines) >= MIN_VOICES:
            middles.append(middle := median(cosines.values()))
            for node, cosine in cosines.items():
                offsets.setdefault(node, []).append(cosine - middle)
    return {n: median(middles) + _middle(offs) for n, offs in offsets.items() if len(offs) >= MIN_VOICES}


def _middle(offsets: Sequence[float]) -> float:
    """The median, of an even number the one nearer to 0; 0 where half are above it and half below."""
    low, high = median_low(offsets), median_high(offsets)
    return 0.0 if low * high <= 0 else min(low, high, key=abs)


def _contributions(ledger: Ledger) -> dict[NodeId, Contribution]:
    """The work of each contributor. It may have come in again, or go on with a norm that others told of it, which
    is longer: its own word is the shortest."""
    found: dict[NodeId, Contribution] = {}
    for entry in ledger.entries:
        if entry.contribution is not None:
            known = found.get(entry.node, entry.contribution)
            found[entry.node] = min(known, entry.contribution, key=lambda c: c.norm)
    return found


def _lengths(norms: Sequence[float], few: Sequence[bool]) -> list[float]:
    """The norms; of those with few steps behind them, not so short that this would be odd."""
    shortest = 2 * SHORTEST * median([n for n in norms if n > 0] or [0.0])
    return [max(n, shortest) if short else n for n, short in zip(norms, few, strict=True)]


# What was told


def _heard(ledger: Ledger) -> Cosines:
    """What each owner and each relay tells of the others' directions, over all that it merged."""
    sums: dict[tuple[NodeId, NodeId], list[tuple[float, float, float]]] = {}
    for voice, node, norm, dot, reference in _told(ledger):
        sums.setdefault((voice, node), []).append((dot * reference, norm * norm, reference * reference))
    found: Cosines = {}
    for (voice, node), parts in sums.items():
        along, square, of_reference = (fsum(column) for column in zip(*parts, strict=True))
        if square > 0:
            found.setdefault(voice, {})[node] = along / (sqrt(square) * sqrt(of_reference))
    return found


def _told(ledger: Ledger) -> Iterator[tuple[NodeId, NodeId, float, float, float]]:
    """Voice, contributor, norm, dot and reference of each contribution to each sealed chunk that somebody else
    tells of."""
    nodes = [entry.node for entry in ledger.entries]
    terms: dict[tuple[bytes, bytes], list[int]] = {}  # few for many chunks
    for c, seal in ledger.sealed.items():
        if seal.dots:
            alike = seal.inputs, seal.means
            if alike not in terms:
                terms[alike] = [i if not bit(seal.means, i) else -1 for i in terms_of(ledger, seal)]
            for place, norm, dot, reference in _unpacked(terms[alike], seal.norms, seal.dots):
                if place >= 0 and nodes[place] != seal.by:
                    yield seal.by, nodes[place], norm, dot, reference
        yield from _summed(ledger, c, seal, nodes)


def _summed(
    ledger: Ledger, c: int, seal: Seal, nodes: Sequence[NodeId]
) -> Iterator[tuple[NodeId, NodeId, float, float, float]]:
    """The same of the contributions that came by a relay."""
    for told in book.region_sums(ledger, c) if seal.means else ():
        if told.dots:
            for place, norm, dot, reference in _unpacked(places(told.inputs), told.norms, told.dots):
                if came_by(ledger, seal, place, told.by) and nodes[place] != told.by:
                    yield told.by, nodes[place], norm, dot, reference


def _unpacked(terms: Sequence[int], norms: bytes, dots: bytes) -> Iterator[tuple[int, float, float, float]]:
    """Place, norm, dot and reference of each term."""
    count = len(norms) // book.NORM_BYTES
    reference, *along = struct.unpack(f"<{1 + count}f", dots)
    for place, norm, dot in zip(terms, struct.unpack(f"<{count}f", norms), along, strict=True):
        yield place, norm, dot, reference
