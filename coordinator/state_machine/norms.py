"""The norms that members tell of their deltas, held to what others saw of them before a round is committed. Pure.

Deltas are clipped by the norm that their makers tell: who tells too little is not clipped. So owners report, with
each seal, the norm of every contribution that they merged, and relays that of those they averaged for their
region; over all chunks they may not come to more than was told:

    sum over the chunks of norm(c)**2 <= told**2

up to rounding (`tolerance`), and a quarter more: whoever lies of another's norm has to tell half of all of it to
have somebody look again, and is known by that, and tells nothing of it any more in this round. Who is found out is
withdrawn and charged, and what was sealed with its bytes is reduced again without it. What a member tells of its
own delta, in chunks that it owns, counts too: audits look at that (`audit_voices.is_well`). The mean that a
relay makes of its region is bounded, too: by the longest of its inputs as the plan scales them, and what encoding
may add (`ReduceConfig.norm_growth`).

An owner may lie as well. So some of the chunks are audited by which a delta is too long, those above all of which
one alone told: whoever lied there is known, and what was found to be so is beyond doubt. What hangs on the words
of two, and can be audited no more as somebody has gone, is reduced again. Nobody is charged where one liar would
explain it yet: the chunks of each who may be that one go to others, who look again; only if it is too long by the
least that was told of each chunk, whoever lies, is it enough. Where nobody else can look the delta is left out of
this round, and nobody is charged. Where the run needs the member (`members.minimum`), or has let it in again, its
delta stays, clipped by the norm that was seen.
`reduce.commit_or_retry` asks.
"""

import struct
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, fsum, log, log1p, sqrt

from atoll.comm.bitmap import bit, places
from atoll.comm.ids import NodeId
from atoll.comm.replace import replace
from atoll.coordinator.causes.observations import Standing
from atoll.coordinator.state_machine import audit
from atoll.coordinator.state_machine import ledger as book
from atoll.coordinator.state_machine.auditors import lot
from atoll.coordinator.state_machine.changes import drop_from_round, fail_attempt, with_round
from atoll.coordinator.state_machine.chunk_owners import able_owners, reachable
from atoll.coordinator.state_machine.conduct import Evidence, Offence, charge
from atoll.coordinator.state_machine.events import Effect, Note
from atoll.coordinator.state_machine.ledger import Ledger, Seal
from atoll.coordinator.state_machine.state import Look, State, order
from atoll.coordinator.state_machine.weights import scales

Place = int  # in the ledger's entries
Voices = dict[NodeId, float]  # who told of one chunk of a delta: the square of its norm
SLACK = 1.25  # times as long as told a delta may be
MISSED = 1e-3  # of lies of whole norms that no audit of a sample meets
MAX_SAMPLE = 16  # chunks of it
MAX_DOUBTED_ATTEMPT = 4  # of a round, in which anything is audited for that
MAX_REOPENED = 2  # attempts of a round that are for what can be audited no more
EVERYBODY = NodeId("")  # in the place of one voice
MAX_CLIPS = 2  # times that a delta which the run needs is clipped by what was told of it
LONGEST = 1e38  # a norm that leaves nothing of a delta


def tolerance(state: State) -> float:
    """Times by which a norm that was summed over chunks may exceed the same one as its maker told it.

    Both are of the same decoded numbers. Each chunk's norm travels as fp32, rounded by 2**-24 of itself; fp64 sums
    of n squares, in whatever order a machine takes them, are off by (n - 1) 2**-53 at most (Higham 2002, 4.2),
    those within a chunk, and those over the chunks, at either end. The square root halves what is said of
    squares."""
    return 1 + 2.0**-23 + (state.chunks.largest + state.chunks.count + 4) * 2.0**-52


def without_false_norms(state: State, now: float, out: list[Effect]) -> State:
    """The same state where no delta is longer than it was told; else the state with the attempt given up, to be
    gone on with without what was found false. All chunks are sealed."""
    if not state.config.outer.clip:
        return state
    before = state
    deltas, means = _too_long(state)
    for length in (*deltas, *means):
        state = _have_audited(state, length, now, out)
    if state is not before:
        return state
    for length in deltas:
        state = _judge(state, before, length, out)
    for length in means if state is before else ():  # else a mean may be of what is false
        state = _judge(state, before, length, out)
    return state if state is before else fail_attempt(state, "what was merged is longer than was told", now)


@dataclass(frozen=True, slots=True)
class _Length:
    """What is told of the length of a delta, or of a relay's means, which no honest one has."""

    place: Place
    looks: tuple[Look, ...]
    told: float  # norm
    limit: float  # norm that an honest one has at most
    what: str

    @property
    def squares(self) -> float:
        return self.limit * self.limit

    @property
    def whole(self) -> float:
        return fsum(look.square for look in self.looks)


def _too_long(state: State) -> tuple[list[_Length], list[_Length]]:
    """Of deltas, and of relays' means."""
    ledger, ratio = state.round.ledger, tolerance(state)
    seen, means = _seen_squares(ledger)
    found: tuple[list[_Length], list[_Length]] = [], []
    for place, square in sorted(seen.items()):
        contribution = ledger.entries[place].contribution
        told = contribution.norm if contribution is not None else 0.0
        limit = told * ratio
        if square > SLACK**2 * limit * limit:
            looks = tuple(_looks(ledger, place, of_means=False))
            found[0].append(_Length(place, looks, told, limit, "delta"))
    for place, square in sorted(means.items()):
        longest = _longest(state, ledger, ledger.regions[place])
        limit = longest * ratio * (1 + state.config.reduce.norm_growth)
        if square > SLACK**2 * limit * limit:
            looks = tuple(_looks(ledger, place, of_means=True))
            found[1].append(_Length(place, looks, longest, limit, "region's mean"))
    return found


def _have_audited(state: State, length: _Length, now: float, out: list[Effect]) -> State:
    """Have some of the chunks audited by which it is too long: of each who alone may have told too much, or else
    of all who told it. Who lies is known by any of them, and what is true is beyond doubt then."""
    r, node, of_mean = state.round, length.looks[0].node, length.looks[0].of_mean
    if not audit.can_be(state):
        return state
    for voice in sorted(_suspects(state, length), key=order) or [EVERYBODY]:
        attempt = r.doubted[node, of_mean, voice][0] if (node, of_mean, voice) in r.doubted else 0
        if attempt in (r.ledger.attempt, MAX_DOUBTED_ATTEMPT):
            continue  # whatever came of it
        looks = [look for look in length.looks if voice in (look.voice, EVERYBODY) and look.voice != node]
        count = _sample_size(length, fsum(look.square for look in looks))
        state, drawn = audit.look_closer(state, {look.chunk: look.square for look in looks}, count, now)
        if drawn:
            by = "others tell" if voice == EVERYBODY else f"{state.name(voice)} tells"
            told = f"as {by}, its {length.what} is longer than was told"
            out.append(Note(f"round {r.number}: {state.name(node)}: {told}: some of that is audited", node))
            at = min(r.ledger.attempt, MAX_DOUBTED_ATTEMPT)
            shown = (look.chunk for look in looks if audit.is_shown(state, look.chunk))
            of = frozenset((c, state.round.ledger.since[c]) for c in shown)
            doubted = state.round.doubted | {(node, of_mean, voice): (at, (drawn, of))}
            state = with_round(state, replace(state.round, doubted=doubted))
    return state


def _sample_size(length: _Length, told: float) -> int:
    """Of how many chunks, drawn by their squares, one at least is a lie but for one in a thousand times, if all is
    lies by which it is too long."""
    share = min((length.whole - length.squares) / told, 1 - 1e-9) if told > 0 else 0.0
    return min(ceil(log(MISSED) / log1p(-share)), MAX_SAMPLE) if share > 0 else MAX_SAMPLE


def _sampled(state: State, node: NodeId, of_mean: bool, voice: NodeId) -> frozenset[tuple[int, int]]:
    """What stands for what: the chunks, as they are owned, of which some were drawn, and all these found well."""
    keys = (node, of_mean, voice), (node, of_mean, EVERYBODY)
    samples = (state.round.doubted[key][1] for key in keys if key in state.round.doubted)
    return frozenset[tuple[int, int]]().union(
        *(of for drawn, of in samples if drawn and all(audit.was_found_well(state, c) for c in drawn))
    )


def _doubtful(state: State, by_chunk: Mapping[int, Voices], node: NodeId, of_mean: bool) -> dict[int, Voices]:
    """The chunks of which only so few told that these may be in league, and which no audit bears out, not even as
    others were drawn of those to which it belongs: two, or one where nothing can be audited."""
    few, voices = (2 if audit.can_be(state) else 1), {v for by in by_chunk.values() for v in by}
    sampled = {voice: _sampled(state, node, of_mean, voice) for voice in voices}
    since = state.round.ledger.since
    return {
        c: by
        for c, by in by_chunk.items()
        if len(by) <= few
        and node not in by
        and not audit.was_found_well(state, c)
        and not (any((c, since[c]) in sampled[voice] for voice in by) and audit.is_shown(state, c))
    }


def _alone(state: State, by_chunk: Mapping[int, Voices], node: NodeId, of_mean: bool) -> dict[NodeId, float]:
    """The squares of the doubtful chunks, by who told of them."""
    found = dict[NodeId, list[float]]()
    for by in _doubtful(state, by_chunk, node, of_mean).values():
        found.setdefault(min(by, key=order), []).append(min(by.values()))
    return {voice: fsum(squares) for voice, squares in found.items()}


# What was seen


def _seen_squares(ledger: Ledger) -> tuple[dict[Place, float], dict[Place, float]]:
    """The sum of squares that were told of each delta, and of each relay's means."""
    import numpy as np

    seen = np.zeros(len(ledger.entries))
    means = np.zeros(len(ledger.entries))
    alike: dict[tuple[bytes, bytes], list[Seal]] = {}  # few for many chunks
    for seal in ledger.sealed.values():
        alike.setdefault((seal.inputs, seal.means), []).append(seal)
    for (_, relays), seals in alike.items():
        terms = terms_of(ledger, seals[0])
        norms = np.frombuffer(b"".join(seal.norms for seal in seals), "<f4").reshape(len(seals), len(terms))
        squares = np.square(norms, dtype=np.float64)
        is_mean = np.array([bit(relays, place) for place in terms])
        total = squares.sum(axis=0)
        np.add.at(seen, np.array(terms)[~is_mean], total[~is_mean])
        np.add.at(means, np.array(terms)[is_mean], total[is_mean])
    for c, seal in ledger.sealed.items():
        for place, _, norm in _summed_norms(ledger, c, seal):
            seen[place] += norm * norm
    return _above_zero(seen.tolist()), _above_zero(means.tolist())


def _above_zero(squares: list[float]) -> dict[Place, float]:
    return {place: square for place, square in enumerate(squares) if square > 0}


def _looks(ledger: Ledger, place: Place, *, of_means: bool) -> Iterator[Look]:
    """What was told of a delta, or of a relay's means, in the chunks that are sealed now: of each by the owner, or
    the relay that summed it."""
    node = ledger.entries[place].node
    for c, seal in ledger.sealed.items():
        terms = terms_of(ledger, seal)
        if place in terms and bit(seal.means, place) is of_means:
            norm = _unpacked(seal.norms)[terms.index(place)]
            yield Look(node, of_means, c, seal.by, norm * norm)
        for at, voice, norm in _summed_norms(ledger, c, seal):
            if at == place and not of_means:
                yield Look(node, of_means, c, voice, norm * norm)


def _summed_norms(ledger: Ledger, c: int, seal: Seal) -> Iterator[tuple[Place, NodeId, float]]:
    """What relays told of the deltas that came by them into a sealed chunk: place, relay, norm."""
    for sum_ in book.region_sums(ledger, c) if seal.means else ():
        for place, norm in zip(places(sum_.inputs), _unpacked(sum_.norms), strict=True):
            if came_by(ledger, seal, place, sum_.by):
                yield place, sum_.by, norm


def terms_of(ledger: Ledger, seal: Seal) -> list[Place]:
    """The places of the terms that a seal's norms are of."""
    inside = [i for i, e in enumerate(ledger.entries) if e.contribution is not None and bit(seal.inputs, i)]
    relays = places(seal.means)
    far = {ledger.regions[i] for i in relays}
    direct = (i for i in inside if i >= len(ledger.regions) or ledger.regions[i] not in far)
    return sorted({*direct, *relays})


def came_by(ledger: Ledger, seal: Seal, place: Place, relay: NodeId) -> bool:
    """Whether the delta of the member at this place is in the seal by way of the relay."""
    if not bit(seal.inputs, place) or place >= len(ledger.regions):
        return False
    region = ledger.regions[place]
    return any(ledger.entries[i].node == relay for i in places(seal.means) if ledger.regions[i] == region)


def _unpacked(norms: bytes) -> tuple[float, ...]:
    return struct.unpack(f"<{len(norms) // book.NORM_BYTES}f", norms)


def _longest(state: State, ledger: Ledger, region: int) -> float:
    """The norm of the longest delta of a region's members, as the plan scales them."""
    scaled = zip(ledger.entries, ledger.regions, scales(ledger, state.config), strict=False)
    return max((e.contribution.norm * s for e, g, s in scaled if g == region and e.contribution), default=0.0)


# What comes of it


def _judge(state: State, before: State, length: _Length, out: list[Effect]) -> State:
    """What comes of one delta, or of one relay's means, by what is told of it in `before`: in `state` others are
    judged already, and what was sealed with theirs is not any more."""
    r, place, looks, whole = state.round, length.place, length.looks, length.whole
    node = r.ledger.entries[place].node
    if whole <= SLACK**2 * length.squares or (r.clipped.get(node, 0) >= MAX_CLIPS and not looks[0].of_mean):
        return state  # in the latter case nothing is left of it
    sentence = f"its {length.what} has a norm of {sqrt(whole):.3g}, and {length.told:.3g} was told"
    note = f"round {state.round.number}: {state.name(node)}: {sentence}"
    by_chunk = _by_chunk(before, looks)
    if _is_beyond_doubt(before, length, by_chunk):
        out.append(Note(f"{note}: it is withdrawn", node))
        witnesses = {voice for by in by_chunk.values() for voice, square in by.items() if square > 0} - {node}
        return _without(_charge(state, node, sentence, sorted(witnesses, key=order), out), place, sqrt(whole))
    suspects = _suspects(before, length)
    owners = _to_look_again(state, before, looks, suspects)
    gone = _unshown(before, by_chunk, node, looks[0].of_mean)
    if gone and not owners and before.round.reopened < MAX_REOPENED:
        out.append(Note(f"{note}, in part by what can be audited no more: that is reduced again", node))
        return with_round(
            state, replace(r, ledger=book.unseal(r.ledger, gone), reopened=before.round.reopened + 1)
        )
    who = state.names(sorted(suspects, key=order))
    if not owners:
        by = f"by {who} alone" if suspects else "by what hangs on the words of some"
        out.append(Note(f"{note}, {by}, and nobody else can tell: it is left out", node))
        return _without(state, place, sqrt(whole), Standing.DOUBTED)
    out.append(
        Note(f"{note}, by {who} {'alone' if len(suspects) == 1 else 'or one of them'}: others are to look", node)
    )
    ledger = book.unseal(r.ledger, frozenset(owners), owners)
    return with_round(state, replace(r, ledger=ledger, looks=(*r.looks, *looks)))


def _unshown(state: State, by_chunk: Mapping[int, Voices], node: NodeId, of_mean: bool) -> frozenset[int]:
    """The doubtful chunks that could be audited if nobody had gone whose part is in them."""
    if not audit.can_be(state):
        return frozenset()
    return frozenset(c for c in _doubtful(state, by_chunk, node, of_mean) if not audit.is_shown(state, c))


def _by_chunk(state: State, looks: Sequence[Look]) -> dict[int, Voices]:
    """What was told of each chunk that is sealed now, in this attempt and in earlier ones."""
    found = {look.chunk: {look.voice: look.square} for look in looks}
    for look in state.round.looks:
        if look.chunk in found and (look.node, look.of_mean) == (looks[0].node, looks[0].of_mean):
            of = found[look.chunk]
            of[look.voice] = min(look.square, of.get(look.voice, look.square))
    return found


def _is_beyond_doubt(state: State, length: _Length, by_chunk: Mapping[int, Voices]) -> bool:
    """Whether it is too long whoever else lies: the least that anybody told of each chunk, without the doubtful
    ones. Where nothing can be audited one liar is reckoned with, no matter which."""
    alone = _alone(state, by_chunk, length.looks[0].node, length.looks[0].of_mean).values()
    doubtful = fsum(alone) if audit.can_be(state) else max(alone, default=0.0)
    return fsum(min(by.values()) for by in by_chunk.values()) - doubtful > length.squares


def _suspects(state: State, length: _Length) -> set[NodeId]:
    """Who alone may have told too much, of what no audit bears out."""
    looks = {look.chunk: {look.voice: look.square} for look in length.looks}
    alone = _alone(state, looks, length.looks[0].node, length.looks[0].of_mean)
    return {voice for voice, told in alone.items() if told >= length.whole - length.squares}


def _to_look_again(
    state: State, before: State, looks: Sequence[Look], suspects: Collection[NodeId]
) -> dict[int, NodeId]:
    """Who is to merge the chunks of which the suspects told, so that none of them tells anything of it any more;
    nobody: nobody else can, or others have looked once. An honest delta is not too long then; one whose maker
    sends each something else would be, again and again."""
    node, seen = looks[0].node, Counter[NodeId]()
    others = [n for n in _able_owners(state) if n != node and n not in suspects]
    if not others or any((look.node, look.of_mean) == (node, looks[0].of_mean) for look in state.round.looks):
        return {}
    owners = dict[int, NodeId]()
    for look in looks:
        if look.voice in suspects:
            owners[look.chunk] = min(others, key=lambda n: (seen[n], lot(before, b"look", look.chunk, n)))
            seen[owners[look.chunk]] += 1
    return owners


def _charge(state: State, node: NodeId, sentence: str, witnesses: Iterable[NodeId], out: list[Effect]) -> State:
    """Charge a member with a false norm, which `witnesses` saw."""
    facts = ("witnesses", " ".join(witnesses)), ("attempt", str(state.round.ledger.attempt))
    return charge(state, node, Evidence(state.round.number, Offence.FALSE_NORM, sentence, facts), out)


def _without(state: State, place: Place, seen: float, standing: Standing = Standing.PUT_OUT) -> State:
    """The round without a member, and without what was sealed with its bytes; if the run cannot do without it, or
    it came in again, with the norm that was seen in the place of what it told."""
    r = state.round
    node, contributions = r.ledger.entries[place].node, r.ledger.contributions
    ledger = book.unseal(r.ledger, frozenset(_with_place(r.ledger, place)))
    left = [n for n in contributions if n != node and n in r.participants]
    need = max(state.config.members.minimum, 1)
    if node in contributions and (node in r.withdrawn or len(left) < need or not reachable(state, left)):
        clips = r.clipped.get(node, 0) + 1  # then nothing is left of it, and nobody judges it any more
        norm = max(seen if clips < MAX_CLIPS else LONGEST, contributions[node].norm)
        longer = replace(contributions[node], norm=norm)
        ledger = replace(ledger, contributions=contributions | {node: longer})
        clipped, distrusted = r.clipped | {node: clips}, r.distrusted | {node}  # it sums for nobody, either
        return with_round(state, replace(r, ledger=ledger, clipped=clipped, distrusted=distrusted))
    dropped = with_round(state, replace(r, ledger=ledger, withdrawn=r.withdrawn | {node}))
    return drop_from_round(dropped, node, standing)


def _with_place(ledger: Ledger, place: Place) -> Iterator[int]:
    """The sealed chunks that have the delta of the member at this place in them, or a mean that it made."""
    return (c for c, s in ledger.sealed.items() if bit(s.inputs, place) or bit(s.means, place))


def _able_owners(state: State) -> list[NodeId]:
    """The members of the attempt that take part yet, and may own chunks."""
    here = [e.node for e in state.round.ledger.entries if not e.gone and state.members.trusted(e.node)]
    able = able_owners(state, here)
    return [n for n in here if n in able]
