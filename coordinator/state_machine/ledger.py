"""The chunk ledger of one round: who contributed, who owns a chunk, which is sealed with which digest. Pure.

    contribute (any member, once) --> open attempt 1 --> seal every chunk --> commit
                                          |   ^
                                          +---+  a member is lost: attempt 2, 3, ...

An attempt continues the one before: entries keep their places, owners that stay keep their chunks, sealed chunks
stay sealed. A lost owner's unsealed chunks are dealt to others. Those that it had sealed are orphans until the
members have told who holds them; what nobody holds is reopened. The first seal of a chunk wins, only its owner can
seal it, and only under the attempt in which it got the chunk (`since`), so what is late changes nothing.

The first attempt may be in two levels (see `comm.plan`). A chunk that loses a relay starts anew, flat, with the
same owner; so does an unsealed one when a member comes back: what it brought before may be in a region's sum.
"""

from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence

from msgspec import Struct

from atoll.comm.bitmap import bit, bitmap, places
from atoll.comm.chunks import Chunks
from atoll.comm.digest import root
from atoll.comm.ids import NodeId
from atoll.comm.replace import replace
from atoll.coordinator.state_machine.events import Contribution

NORM_BYTES = 4  # of an fp32 number
Deal = Callable[[int], tuple[NodeId, ...]]  # owners for so many chunks


class Entry(Struct, frozen=True, gc=False):
    """One place in the order in which contributions are summed."""

    node: NodeId
    contribution: Contribution | None  # None: it owns chunks and brings no delta
    gone: bool = False  # takes part no more; what arrived of it counts
    since: int = 0  # the attempt in which it came


class Seal(Struct, frozen=True, gc=False):
    """The mark of a merged chunk whose bytes do not change any more."""

    digest: bytes
    inputs: bytes  # bitmap of the places whose contributions are in it
    by: NodeId = NodeId("")  # who sealed it
    since: int = 0  # the attempt in which that one got the chunk
    # l2 of each term as it was merged, fp32, by place: contributions, and regions' means at their relays' places;
    # empty: nobody looks
    norms: bytes = b""
    means: bytes = b""  # bitmap of the places whose terms are regions' means
    # l2 of the delta that an earlier round sealed of this chunk, then each term's length along it, fp32, by place;
    # empty: it was not told
    dots: bytes = b""


class RegionSum(Struct, frozen=True, gc=False):
    """A relay's word on the contributions to a chunk that it averaged for its region."""

    by: NodeId
    since: int  # the attempt in which the chunk got its owner
    inputs: bytes  # bitmap of their places
    norms: bytes  # l2 of each, fp32, by place
    dots: bytes = b""  # as a seal's


class Ledger(Struct, frozen=True, gc=False):
    """The book of one round; the functions of this module open, continue and close its attempts.

    Invariant: `owners` and `since` have one item for each chunk, or none before the first attempt.
    """

    contributions: dict[NodeId, Contribution] = {}
    attempt: int = 0  # 0: none was opened yet
    entries: tuple[Entry, ...] = ()  # of all attempts of the round
    contributors: bytes = b""  # bitmap of the entries that bring a delta
    members: tuple[NodeId, ...] = ()  # of the attempt: who contributes and must hold every sealed chunk
    owners: tuple[NodeId | None, ...] = ()  # of each chunk; None: sealed by one that is gone
    since: tuple[int, ...] = ()  # of each chunk: the attempt in which it got its owner
    sealed: dict[int, Seal] = {}
    sealed_before: tuple[int, ...] = ()  # chunks that were sealed when the attempt was opened
    regions: tuple[int, ...] = ()  # of the first attempt's entries; empty: it was not in regions
    relays: tuple[tuple[int, ...], ...] = ()  # (regions, chunks) places; empty: no chunk is in two levels
    flat: bool = False  # the next attempt is; until then what is sealed still has its relays
    layered: frozenset[int] = frozenset()  # chunks that are reduced in two levels
    withdrawn: bool = False  # somebody withdrew since the attempt was opened
    sums: dict[int, tuple[RegionSum, ...]] = {}  # by chunk
    # chunks whose seals were taken back: their owners from the next attempt on, or None: they are dealt
    reassigned: dict[int, NodeId | None] = {}
    # Of each attempt in which a chunk got its owner: a bitmap of the places whose contributions an owner waits for
    # that has chunks since then.
    required: dict[int, bytes] = {}

    @property
    def complete(self) -> bool:
        return self.attempt > 0 and len(self.sealed) == len(self.owners)

    @property
    def digests(self) -> list[bytes]:
        """The digest of each chunk, in order. KeyError if one is not sealed."""
        return [self.sealed[c].digest for c in range(len(self.owners))]

    @property
    def root(self) -> bytes:
        """One digest over all chunks. KeyError if one is not sealed."""
        return root(self.digests)

    @property
    def unsealed(self) -> tuple[int, ...]:
        return tuple(c for c in range(len(self.owners)) if c not in self.sealed)

    @property
    def orphans(self) -> tuple[int, ...]:
        """Sealed chunks of which it is not known who holds them."""
        if None not in self.owners:
            return ()
        return tuple(c for c, owner in enumerate(self.owners) if owner is None)

    @property
    def workers(self) -> set[NodeId]:
        """Members that others wait for beside the contributors: owners, who may have sealed what nobody else has
        yet, and relays."""
        owners = {owner for owner in self.owners if owner is not None}
        return owners | {self.entries[row[c]].node for row in self.relays for c in self.layered}

    @property
    def gone(self) -> set[NodeId]:
        """The workers that take part no more."""
        if not self.withdrawn:
            return set()
        return self.workers - {e.node for e in self.entries if not e.gone}

    @property
    def newest(self) -> int:
        """The last attempt in which a chunk got an owner."""
        return max(self.since, default=0)


def contribute(ledger: Ledger, node: NodeId, contribution: Contribution) -> Ledger:
    """Enter a member's contribution; the first one counts."""
    if node in ledger.contributions:
        return ledger
    return replace(ledger, contributions=ledger.contributions | {node: contribution})


def withdraw(ledger: Ledger, node: NodeId) -> Ledger:
    """The member is gone or has lost what it encoded; it takes no part in the next attempt. One that only owns
    chunks has lost what it was sent."""
    entries = (replace(e, gone=True) if e.node == node and e.contribution is None else e for e in ledger.entries)
    contributions = {n: c for n, c in ledger.contributions.items() if n != node}
    return replace(ledger, contributions=contributions, entries=tuple(entries), withdrawn=True)


def leave(ledger: Ledger, node: NodeId) -> Ledger:
    """The member has given up what it got in this reduce. If it comes back to it, then with nothing, and at
    another place."""
    entries = tuple(replace(e, gone=True) if e.node == node else e for e in ledger.entries)
    return withdraw(replace(ledger, entries=entries), node)


def reopen(
    ledger: Ledger, members: tuple[NodeId, ...], reducers: tuple[NodeId, ...], chunks: int, deal: Deal
) -> Ledger:
    """Open the next attempt among `members`, who all contributed, and `reducers`, who only own chunks."""
    attempt = ledger.attempt + 1
    wanted: dict[NodeId, Contribution | None] = {n: ledger.contributions[n] for n in members}
    wanted |= dict.fromkeys(reducers)
    entries = [replace(e, gone=e.gone or wanted.get(e.node, e) != e.contribution) for e in ledger.entries]
    staying = {e.node for e in entries if not e.gone}
    known = {e.node for e in ledger.entries if e.contribution is not None}
    returned = any(n in known for n in wanted if n not in staying)
    entries += [Entry(n, c, since=attempt) for n, c in wanted.items() if n not in staying]
    owners: list[NodeId | None] = list(ledger.owners) or [None] * chunks
    since = list(ledger.since) or [attempt] * chunks
    lost = [c for c, owner in enumerate(owners) if owner not in staying or c in ledger.reassigned]
    free = [c for c in lost if c not in ledger.sealed]
    for c in lost:
        owners[c], since[c] = None, attempt
    for c, owner in zip(free, deal(len(free)), strict=True):
        chosen = ledger.reassigned.get(c)
        owners[c] = chosen if chosen in staying else owner
    broken = {
        c
        for c in ledger.layered
        if ledger.flat
        or since[c] == attempt
        or (returned and c not in ledger.sealed)
        or any(entries[row[c]].gone for row in ledger.relays)
    }
    for c in broken:
        since[c] = attempt
    kept = tuple(sorted(ledger.sealed))
    return replace(
        ledger,
        relays=() if ledger.flat else ledger.relays,
        flat=False,
        layered=ledger.layered - broken,
        attempt=attempt,
        entries=tuple(entries),
        contributors=bitmap((i for i, e in enumerate(entries) if e.contribution is not None), len(entries)),
        members=members,
        owners=tuple(owners),
        since=tuple(since),
        sealed_before=kept,
        withdrawn=False,
        reassigned={},
        required=_required(entries, since),
    )


def _required(entries: Sequence[Entry], since: Sequence[int]) -> dict[int, bytes]:
    """A bitmap of the contributors that were there when a chunk got its owner, and still are, by that attempt."""
    here = [(place, e.since) for place, e in enumerate(entries) if e.contribution is not None and not e.gone]
    size = len(entries)
    return {attempt: bitmap((place for place, came in here if came <= attempt), size) for attempt in set(since)}


def divide(ledger: Ledger, regions: Mapping[NodeId, int], relays: Sequence[Sequence[NodeId]]) -> Ledger:
    """Enter the regions of the members, and `relays` (regions, chunks), in a round's first attempt. Its chunks are
    reduced in two levels if there are relays."""
    places = {e.node: i for i, e in enumerate(ledger.entries)}
    return replace(
        ledger,
        regions=tuple(regions[e.node] for e in ledger.entries),
        relays=tuple(tuple(places[n] for n in row) for row in relays),
        layered=frozenset(range(len(ledger.owners))) if relays else frozenset(),
    )


def flatten(ledger: Ledger) -> Ledger:
    """Make the next attempt a flat one: it has no relays."""
    return replace(ledger, flat=True)


def adopt(ledger: Ledger, here: Mapping[NodeId, Mapping[int, bytes]], deal: Deal) -> Ledger:
    """Give the orphans to members that hold them, by what all members told of what is `here`, with its digests;
    reopen those that nobody holds. A new attempt with otherwise the same owners."""
    attempt, owners, since, sealed = (
        ledger.attempt + 1,
        list(ledger.owners),
        list(ledger.since),
        dict(ledger.sealed),
    )
    given = dict.fromkeys(here, 0)
    reopened = []
    for c in ledger.orphans:
        holders = [n for n, chunks in here.items() if chunks.get(c) == sealed[c].digest]
        since[c] = attempt
        if holders:
            owners[c] = owner = min(holders, key=lambda n: given[n])
            given[owner] += 1
        else:
            del sealed[c]
            reopened.append(c)
    for c, owner in zip(reopened, deal(len(reopened)), strict=True):
        owners[c] = owner
    return replace(
        ledger,
        attempt=attempt,
        owners=tuple(owners),
        since=tuple(since),
        sealed=sealed,
        sealed_before=tuple(sorted(sealed)),
        required=_required(ledger.entries, since),
    )


def seal(
    ledger: Ledger,
    node: NodeId,
    since: int,
    seals: tuple[tuple[int, bytes, bytes], ...],
    norms: Sequence[bytes] | None = None,
    required: bytes = b"",
    dots: Sequence[bytes] = (),
) -> Ledger:
    """Enter (chunk, digest, inputs) seals of an owner since that attempt; a second one of a chunk, one of a chunk
    that it does not own, one that no contribution is in, or that lacks one of the places of the bitmap `required`,
    changes nothing. `norms` of each seal's terms (None: nobody looks): nor does one that does not tell them
    all; `dots` are left out where they are not of all."""
    sealed, must = dict(ledger.sealed), int.from_bytes(required, "little")
    for number, (chunk, digest, inputs) in enumerate(seals):
        owned = 0 <= chunk < len(ledger.owners) and ledger.owners[chunk] == node and ledger.since[chunk] == since
        if not owned or chunk in ledger.reassigned or not any(inputs := _of_contributors(ledger, inputs)):
            continue
        if must & ~int.from_bytes(inputs, "little"):
            continue
        entry = Seal(digest, inputs, node, since)
        if norms is not None:
            terms, means = _term_count(ledger, chunk, inputs)
            told = norms[number] if number < len(norms) else b""
            if len(told) != NORM_BYTES * terms:
                continue
            entry = replace(entry, norms=told, means=means, dots=_whole(dots, number, terms))
        sealed.setdefault(chunk, entry)
    return replace(ledger, sealed=sealed)


def _whole(dots: Sequence[bytes], number: int, terms: int) -> bytes:
    """What the report's seal of this number tells as dots; empty unless it is of so many terms."""
    told = dots[number] if number < len(dots) else b""
    return told if len(told) == NORM_BYTES * (1 + terms) else b""


def _of_contributors(ledger: Ledger, inputs: bytes) -> bytes:
    """The bitmap without places that bring nothing, or that nobody has yet."""
    size = len(ledger.contributors)
    wanted = int.from_bytes(inputs, "little") & int.from_bytes(ledger.contributors, "little")
    return wanted.to_bytes(size, "little")


def _term_count(ledger: Ledger, chunk: int, inputs: bytes) -> tuple[int, bytes]:
    """The number of terms of a chunk's mean, and a bitmap of the places of those that are regions' means."""
    if chunk not in ledger.layered:
        return int.from_bytes(inputs, "little").bit_count(), b""
    contributions, means = seal_terms(ledger, chunk, inputs)
    return len(contributions) + len(means), bitmap(means, len(ledger.regions)) if means else b""


def seal_terms(ledger: Ledger, chunk: int, inputs: bytes) -> tuple[list[int], list[int]]:
    """The places whose contributions an owner merges where a chunk has these inputs, and the relays' places whose
    regions' means it merges in the stead of their members."""
    there = [i for i, e in enumerate(ledger.entries) if e.contribution is not None and bit(inputs, i)]
    if chunk not in ledger.layered:
        return there, []
    row = [of_region[chunk] for of_region in ledger.relays]
    home = next((g for g, i in enumerate(row) if ledger.entries[i].node == ledger.owners[chunk]), -1)
    far = {i: ledger.regions[i] for i in there if i < len(ledger.regions) and ledger.regions[i] != home}
    return [i for i in there if i not in far], sorted({row[g] for g in far.values()})


def enter_sums(
    ledger: Ledger,
    node: NodeId,
    since: int,
    sums: tuple[tuple[int, bytes, bytes], ...],
    dots: Sequence[bytes] = (),
) -> Ledger:
    """Enter what a relay says of the (chunk, inputs, norms) that it averaged since that attempt; the first word on
    a chunk counts."""
    if not sums:
        return ledger
    found = dict(ledger.sums)
    for number, (chunk, inputs, norms) in enumerate(sums):
        known = found.get(chunk, ())
        if chunk not in ledger.layered or ledger.since[chunk] != since:
            continue
        if any((s.by, s.since) == (node, since) for s in known):
            continue
        whole = len(norms) == NORM_BYTES * len(places(inputs))
        if whole and any(ledger.entries[row[chunk]].node == node for row in ledger.relays):
            told = _whole(dots, number, len(places(inputs)))
            found[chunk] = (*known, RegionSum(node, since, inputs, norms, told))
    return replace(ledger, sums=found)


def region_sums(ledger: Ledger, c: int) -> Iterator[RegionSum]:
    """What relays said of a sealed chunk's inputs, as it was sealed."""
    return (s for s in ledger.sums.get(c, ()) if s.since == ledger.sealed[c].since)


def told_by_relays(ledger: Ledger, c: int) -> dict[int, bytes | None]:
    """By the places of the relays whose means are in a sealed chunk, and which are not gone: the norms that each
    told of what it averaged; empty where it told those of other inputs than were sealed, None where nothing."""
    seal, found = ledger.sealed[c], dict[int, bytes | None]()
    told = {sum_.by: sum_ for sum_ in region_sums(ledger, c)}
    for place in places(seal.means):
        if not (entry := ledger.entries[place]).gone:
            sum_, region = told.get(entry.node), ledger.regions[place]
            inside = [i for i in places(seal.inputs) if i < len(ledger.regions) and ledger.regions[i] == region]
            other = sum_ is not None and list(places(sum_.inputs)) != inside
            found[place] = None if sum_ is None else b"" if other else sum_.norms
    return found


def is_told(ledger: Ledger, c: int) -> bool:
    """Whether the chunk is sealed, and all relays whose means are in it told what those are of."""
    return c in ledger.sealed and all(told_by_relays(ledger, c).values())


def unlooked(ledger: Ledger, staying: Container[NodeId]) -> set[int]:
    """The sealed chunks with the mean of a relay that did not tell what is in it, and of which somebody has
    something to show who is not among those who stay: it was drawn by nobody, and never will be."""
    found = set[int]()
    for c in ledger.layered & ledger.sealed.keys():
        seal, told = ledger.sealed[c], {sum_.by for sum_ in region_sums(ledger, c)}
        relays = {ledger.entries[place].node for place in places(seal.means)}
        shown_by = relays.union(ledger.entries[place].node for place in places(seal.inputs))
        if relays - told and any(node not in staying for node in (seal.by, *shown_by)):
            found.add(c)
    return found


def made_by(ledger: Ledger, nodes: Container[NodeId]) -> set[int]:
    """The sealed chunks that these nodes sealed, or summed for their region."""
    relayed = {c for row in ledger.relays for c in ledger.layered if ledger.entries[row[c]].node in nodes}
    return {c for c, seal in ledger.sealed.items() if seal.by in nodes or c in relayed}


def unseal(ledger: Ledger, chunks: Collection[int], owners: Mapping[int, NodeId] | None = None) -> Ledger:
    """Take back the seals of these chunks: from the next attempt on they are reduced anew, by whoever they are
    dealt to, or by these owners."""
    return replace(
        ledger,
        sealed={c: s for c, s in ledger.sealed.items() if c not in chunks},
        reassigned=ledger.reassigned | {c: (owners or {}).get(c) for c in chunks},
    )


def contributed_samples(ledger: Ledger, node: NodeId, front: int) -> int:
    """Samples from the lease's front on that are in the node's contributions, sealed or not."""
    contributed = (e.contribution for e in ledger.entries if e.node == node)
    return max((c.samples for c in contributed if c is not None and c.front == front), default=0)


class Inclusion(Struct, frozen=True, gc=False):
    """The part of one node's work that is in the sealed chunks of a round."""

    contribution: Contribution  # the one with the most samples, of those that are in them
    part: float  # of all elements
    samples: dict[int, int]  # of each of its leases, by the front: how many from there on are in them


def inclusions(ledger: Ledger, chunks: Chunks) -> dict[NodeId, Inclusion]:
    """The nodes whose contributions are in the sealed chunks, each with how much of them is."""
    alike = [(inputs, sum(map(chunks.size, inside))) for inputs, inside in _alike(ledger).items()]
    everything = sum(size for _, size in alike)
    elements, mask = [everything] * len(ledger.entries), _mask(ledger)
    for inputs, size in alike:
        for place in _bits(mask & ~inputs):
            elements[place] -= size
    found: dict[NodeId, tuple[Contribution, int, dict[int, int]]] = {}
    for entry, size in zip(ledger.entries, elements, strict=True):
        if not size or (new := entry.contribution) is None:
            continue
        best, others, samples = found.get(entry.node, (new, 0, {}))
        longest = max(best, new, key=lambda c: c.samples)
        samples[new.front] = max(new.samples, samples.get(new.front, 0))
        found[entry.node] = longest, others + size, samples
    return {n: Inclusion(longest, size / chunks.numel, samples) for n, (longest, size, samples) in found.items()}


def missing_contributors(ledger: Ledger, nodes: Container[NodeId]) -> dict[int, tuple[NodeId, ...]]:
    """The sealed chunks that lack something of these nodes, each with those that it has nothing of."""
    mask, where = _mask(ledger), dict[NodeId, int]()
    for place, entry in enumerate(ledger.entries):
        where[entry.node] = where.get(entry.node, 0) | 1 << place
    found: dict[int, tuple[NodeId, ...]] = {}
    for inputs, inside in _alike(ledger).items():
        missing = {ledger.entries[place].node for place in _bits(mask & ~inputs)}
        without = [n for n in missing if n in nodes and not where[n] & inputs]
        if without:
            found |= dict.fromkeys(inside, tuple(sorted(without, key=lambda n: int(n[1:]))))
    return {c: found[c] for c in ledger.sealed if c in found}


def _alike(ledger: Ledger) -> dict[int, list[int]]:
    """The sealed chunks by the bitmap, as a number, of what is in them: mostly one for all."""
    found: dict[bytes, list[int]] = {}
    for c, s in ledger.sealed.items():
        found.setdefault(s.inputs, []).append(c)
    numbers: dict[int, list[int]] = {}
    for inputs, inside in found.items():
        numbers.setdefault(int.from_bytes(inputs, "little"), []).extend(inside)
    return numbers


def _mask(ledger: Ledger) -> int:
    """The places of contributions."""
    return sum(1 << place for place, e in enumerate(ledger.entries) if e.contribution is not None)


def _bits(number: int) -> Iterator[int]:
    """The bits that are set, as a walk over those alone."""
    while number:
        lowest = number & -number
        yield lowest.bit_length() - 1
        number ^= lowest
