"""The dues of a reduce: what one member waits for, and of whom: contributions and regions' sums where it is an
owner or relay, sealed chunks everywhere. Pure; `ReduceProtocol` asks it of its own records.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice

from atoll.comm.allreduce.chunk_record import ChunkRecord, ChunkState
from atoll.comm.allreduce.routes import Routes
from atoll.comm.ids import NodeId


def contributors_due(routes: Routes, collecting: Mapping[int, ChunkRecord], window: int) -> Iterator[NodeId]:
    """The members, other than this one, of which a contribution is due: one of the first `window` to the chunks
    that are `collecting` here, by chunk, is not here. As all members send theirs in one order, those behind it may
    be here: then it was lost, or refused."""
    ordered = sorted(collecting, key=lambda c: (collecting[c].since, c))
    for node, place in routes.places.items():
        if place == routes.place or place not in routes.contributors:
            continue
        first = islice((c for c in ordered if routes.contributes_here(c, place)), window)
        if any(place not in collecting[c].arrived for c in first):
            yield node


def holding_up(routes: Routes, collecting: Mapping[int, ChunkRecord]) -> list[NodeId]:
    """The members for whose contributions the merge at hand waits, where most others' are here: those that the
    first of the chunks that are `collecting` here lacks."""
    if not collecting:
        return []
    c = min(collecting, key=lambda c: (collecting[c].since, c))
    due = [place for place in routes.contributors if routes.contributes_here(c, place)]
    lacking = [place for place in due if place not in collecting[c].arrived and place != routes.place]
    return [routes.plan.members[place].node for place in lacking] if 2 * len(lacking) < len(due) else []


def relays_due(routes: Routes, collecting: Mapping[int, ChunkRecord]) -> Iterator[NodeId]:
    """The relays whose region's sum of a chunk that this member owns, and collects, is not here."""
    for node, place in routes.places.items() if routes.plan.layered else ():
        owned = (c for c, x in collecting.items() if not x.relayed and place not in x.region_sums)
        if any(routes.plan.relays_for(c, place) for c in owned):
            yield node


def missing(routes: Routes, chunks: Sequence[ChunkRecord]) -> list[int]:
    """The sealed chunks that are to come to this member, and are not here."""
    contributes = routes.contributes(routes.place)
    late = ((c, x) for c, x in enumerate(chunks) if x.state is ChunkState.AWAITED)
    return [c for c, chunk in late if contributes or chunk.relayed]


def dues(
    routes: Routes, chunks: Sequence[ChunkRecord], collecting: Mapping[int, ChunkRecord], window: int
) -> list[tuple[NodeId, str]]:
    """The frames that this member waits for, by member, in words: "contributions", "region's sums", or "3 of its
    chunks". A member may be listed more than once."""
    me = routes.plan.members[routes.place].node
    late = [(node, "contributions") for node in contributors_due(routes, collecting, window)]
    late += [(node, "region's sums") for node in relays_due(routes, collecting)]
    sources = (chunks[c].source for c in missing(routes, chunks))
    owed = Counter(source for source in sources if source is not None and source != me)
    return late + [(node, f"{count} of its chunks") for node, count in owed.items()]
