"""Explanations by the paths between members: broken ones, lossy ones, slow ones, and bytes that were spoiled on
them. Pure.

A path has two ends, and both tell what they saw of it. Of a path that carries nothing one way, the sender's
acknowledgements stop while it still hears the other side, whose machine goes on sending; at the other end nothing
comes in at all. Of one that is slow, the sender has bytes on their way for long; where it loses what it carries,
they are sent again, and where it is full, the round trips get longer first.

What several of a node's paths have in common is the node's own link; what one pair has alone, the path between
them.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from statistics import median

from atoll.comm.ids import NodeId
from atoll.comm.incidents import IncidentKind
from atoll.coordinator.causes.account import LinkAccount
from atoll.coordinator.causes.explanation import Confidence, Explanation, Kind, Weight
from atoll.coordinator.causes.limits import MIN_SLOW_SECONDS, holds_back, mbit
from atoll.coordinator.causes.observations import GONE, Observations, Standing

Path = tuple[NodeId, NodeId]  # from, to

MUTE_SECONDS = 2.5  # without an acknowledgement after which a path is broken
HEARD_SHARE = 0.6  # of that time: who heard something of the other side within it is not deaf
LOSSY_SHARE, LOSSY_SEGMENTS = 0.01, 4  # segments that were sent again: of all that were, and how many at least
LONG_QUEUE_SECONDS = 0.08  # of a path whose losses are those of a full queue: so much longer are its round trips
SLOW_RATE = 0.5  # times the usual rate: a path that carries less is slow
SLOW_AMONG_OTHERS = 0.25  # times the others' rate, where a path's usual one is not known
COMMON_SHARE = 0.6  # of a node's paths that must be alike for its own link to be to blame


def by_exchange(seen: Observations) -> Iterator[Explanation]:
    """For whom the others waited in the exchange, where no path says more: who did not finish in time, or sealed
    its chunks last, or had all last."""
    there = {n: m for n, m in seen.members.items() if m.standing is Standing.HERE}
    if late := seen.late & there.keys() if 2 * len(seen.late) < len(seen.members) else ():
        for node in late:
            sentence = f"{seen.name(node)} did not do its part of the exchange in time, and nothing says why"
            yield Explanation(Kind.UNKNOWN, node, sentence, Weight.SLOWNESS, seen.exchange_excess, Confidence.SEEN)
        return
    for moment, what in (("sealed", "the chunks of "), ("complete", "")):
        at = {n: s for n, m in there.items() if (s := getattr(m, moment)) is not None}
        if len(at) < 2:
            continue
        last = max(at, key=lambda n: at[n])
        longer = min(at[last] - median(s for n, s in at.items() if n != last), seen.exchange_excess)
        if longer >= MIN_SLOW_SECONDS:
            whom = f"{what}{seen.name(last)}"
            sentence = f"the exchange waited {longer:.1f} s for {whom}, and nothing says why"
            yield Explanation(Kind.UNKNOWN, last, sentence, Weight.SLOWNESS, longer, Confidence.SEEN)
            return


def by_paths(seen: Observations) -> Iterator[Explanation]:
    """Explanations by paths, the broken ones first: what they cost is not looked for in how slow they were."""
    yield from _spoiled(seen)
    broken = list(_broken(seen))
    yield from broken
    if not broken:
        yield from _lost(seen)
        slow = dict(_slow_paths(seen))
        lossy = {path: s for path, s in _links(seen) if _is_lossy(s)}
        yield from _common(seen, Kind.PACKET_LOSS, lossy, slow)
        yield from _common(seen, Kind.SLOW_LINK, {p: s for p, (s, _) in slow.items() if p not in lossy}, slow)


def _links(seen: Observations) -> Iterator[tuple[Path, LinkAccount]]:
    """Each path with what its sender says of it."""
    for sender, account in seen.accounts.items():
        for link in account.links:
            yield (sender, link.peer), link


# Bytes


def _spoiled(seen: Observations) -> Iterator[Explanation]:
    """Who got bytes that were not what was sent, from whom."""
    paths = {(of, by) for by, of in seen.forged}
    for node, account in seen.accounts.items():
        spoils = (i.peer for i in account.incidents if i.kind is IncidentKind.BYTES_SPOILED)
        paths.update((peer, node) for peer in spoils if peer is not None)
    if not paths:
        return
    for culprit, peer, of in _ends(seen, paths):
        name = seen.name(culprit)
        if peer is not None:
            sentence = f"what {name} sent to {seen.name(peer)} arrived as something else"
            known = Confidence.TOLD
        elif {s for s, _ in of} == {culprit}:
            sentence = f"what {name} sent arrived as something else at {seen.names({r for _, r in of})}"
            known = Confidence.AGREED
        else:
            sentence = f"what {seen.names({s for s, _ in of})} sent arrived at {name} as something else"
            known = Confidence.TOLD  # it alone says so
        yield Explanation(
            *(Kind.CORRUPT_BYTES, culprit, sentence, Weight.BREAK, seen.exchange_excess, known),
            peer=peer or "",
            facts=(("paths", str(len(of))),),
        )


# Partitions


def _broken(seen: Observations) -> Iterator[Explanation]:
    """The paths that carried nothing, between members that both lived."""
    alive = {n for n, m in seen.members.items() if m.standing not in GONE}
    pairs = {frozenset(pair) for pair in seen.broken}
    pairs |= {frozenset(path) for path, link in _links(seen) if link.mute >= MUTE_SECONDS}
    living = [pair for pair in pairs if len(pair) == 2 and pair <= alive and not _spoils_between(seen, pair)]
    cuts: dict[Path, Confidence] = {}
    vague: set[Path] = set()
    for a, b in (sorted(pair, key=lambda n: int(n[1:])) for pair in living):
        if _carries(seen, a, b):
            continue
        if (cut := _direction(seen, a, b)) is not None:
            cuts[cut[0]] = cut[1]
        else:
            vague.add((a, b))
    for culprit, peer, of in _ends(seen, cuts.keys()):
        known = max((cuts[path] for path in of), key=[Confidence.TOLD, Confidence.AGREED].index)
        if peer is not None:
            here, there = seen.name(culprit), seen.name(peer)
            sentence = f"what {here} sends to {there} does not arrive, what {there} sends to {here} does"
        elif {s for s, _ in of} == {culprit}:
            all_of = seen.names({r for _, r in of})
            sentence = f"what {seen.name(culprit)} sends does not arrive at {all_of}, it hears them"
        else:
            sentence = f"what {seen.names({s for s, _ in of})} send to {seen.name(culprit)} does not arrive"
        yield Explanation(
            *(Kind.ONE_WAY_PARTITION, culprit, sentence, Weight.BREAK, seen.exchange_excess, known),
            peer=peer or "",
        )
    for culprit, peer, of in _ends(seen, vague):
        name, others = seen.name(culprit), seen.names({n for path in of for n in path} - {culprit})
        sentence = f"{name} and {others} cannot reach each other" if peer else f"{name} can reach none of {others}"
        both = any(_misses(seen, a, b) and _misses(seen, b, a) for a, b in of)
        yield Explanation(
            *(Kind.PARTITION, culprit, sentence, Weight.BREAK, seen.exchange_excess),
            Confidence.AGREED if both else Confidence.TOLD,
            peer=peer or "",
        )


def _misses(seen: Observations, node: NodeId, peer: NodeId) -> bool:
    """Whether a member says of another that nothing passes between them."""
    link = seen.account(node).link(peer)
    return (node, peer) in seen.broken or (link is not None and link.mute >= MUTE_SECONDS)


def _lost(seen: Observations) -> Iterator[Explanation]:
    """Who gave up whom, though the path between them carried what it was given."""
    pairs = {(a, b) for a, b in seen.broken if a != b and _carries(seen, a, b)}
    for culprit, peer, of in _ends(seen, pairs):
        name, others = seen.name(culprit), seen.names({n for path in of for n in path} - {culprit})
        who = f"{name} gave up {others}" if {a for a, _ in of} == {culprit} else f"{others} gave up {name}"
        sentence = f"{who}, though the paths between them carried what they were given"
        yield Explanation(
            *(Kind.UNKNOWN, culprit, sentence, Weight.SLOWNESS, seen.exchange_excess, Confidence.AGREED),
            peer=peer or "",
        )


def _carries(seen: Observations, a: NodeId, b: NodeId) -> bool:
    """Whether both ends of a path say that it carried what it was given, both ways."""
    links = seen.account(a).link(b), seen.account(b).link(a)
    return all(link is not None and link.sent and link.received and link.mute < MUTE_SECONDS for link in links)


def _spoils_between(seen: Observations, pair: frozenset[NodeId]) -> bool:
    """Whether a path broke because of what it carried."""
    return any(
        incident.kind is IncidentKind.BYTES_SPOILED and incident.peer in pair - {node}
        for node in pair
        for incident in seen.account(node).incidents
    )


def _direction(seen: Observations, a: NodeId, b: NodeId) -> tuple[Path, Confidence] | None:
    """The way that carries nothing, of a pair that cannot talk; None: both do not, or nobody can tell."""
    found: dict[Path, int] = {}
    for x, y in ((a, b), (b, a)):
        link = seen.account(x).link(y)
        if link is None or link.mute < MUTE_SECONDS:
            continue
        if link.deaf < HEARD_SHARE * link.mute:
            found[x, y] = found.get((x, y), 0) + 1  # it hears who does not hear it
        else:
            found[y, x] = found.get(
                (y, x), 0
            )  # nothing comes from there; so it is as well where both ways are cut
    ways = [path for path, heard in found.items() if heard]
    if len(ways) != 1:
        return None
    sender, receiver = ways[0]
    there = seen.account(receiver).link(sender)  # it lacks the acknowledgements that its peer does not send it
    agrees = there is not None and there.mute >= MUTE_SECONDS
    return ways[0], Confidence.AGREED if agrees else Confidence.TOLD


# Loss and slowness


def _is_lossy(link: LinkAccount) -> bool:
    full = link.queue > max(LONG_QUEUE_SECONDS, link.rtt)
    return link.resent >= LOSSY_SEGMENTS and link.lost >= LOSSY_SHARE and not full


def _slow_paths(seen: Observations) -> Iterator[tuple[Path, tuple[LinkAccount, float]]]:
    """The paths that carried less than they usually do, or than the others, and the seconds that this took; not
    those that were given no more, as the owner of either end limits it."""
    found = [(path, link) for path, link in _links(seen) if not holds_back(seen, *path)]
    rates = {path: link.rate for path, link in found if link.rate}
    for path, link in found:
        others = [rate for other, rate in rates.items() if other != path]
        among = median(others) if others else 0.0
        expected = link.usual or among
        limit = SLOW_RATE if link.usual else SLOW_AMONG_OTHERS
        if link.rate and expected and link.rate < limit * expected:
            longer = link.busy - link.sent / expected
            if longer >= MIN_SLOW_SECONDS:
                yield path, (link, longer)


def _common(
    seen: Observations,
    kind: Kind,
    links: dict[Path, LinkAccount],
    slow: dict[Path, tuple[LinkAccount, float]],
) -> Iterator[Explanation]:
    excess = seen.exchange_excess
    for culprit, peer, of in _ends(seen, links.keys()):
        longest = max((slow[path][1] for path in of if path in slow), default=0.0)
        worst = max((links[path] for path in of), key=lambda link: (link.lost, link.busy))
        yield Explanation(
            *(kind, culprit, _said(seen, kind, culprit, peer, of, worst), Weight.SLOWNESS),
            max(min(longest, excess), excess if kind is Kind.PACKET_LOSS and longest else 0.0),
            Confidence.AGREED if _both_ends(seen, of) else Confidence.TOLD,
            peer=peer or "",
            facts=_figures(worst),
        )


def _both_ends(seen: Observations, paths: Iterable[Path]) -> bool:
    """Whether the receivers, too, tell of what came over these paths: no more than the senders say they sent."""
    ends = [(seen.account(s).link(r), seen.account(r).link(s)) for s, r in paths]
    return all(
        there is not None and here is not None and there.received <= 1.25 * here.sent + 1e6 for here, there in ends
    )


def _said(
    seen: Observations, kind: Kind, culprit: NodeId, peer: NodeId | None, of: set[Path], worst: LinkAccount
) -> str:
    name = seen.name(culprit)
    out = {s for s, _ in of} == {culprit}
    if peer is not None:
        where = f"the path from {name} to {seen.name(peer)}"
    else:
        where = f"the link of {name}, {'up' if out else 'down'},"
    if kind is Kind.PACKET_LOSS:
        return f"{where} loses packets: {100 * worst.lost:.1f} % had to be sent again"
    usual = f", usually {mbit(worst.usual)}" if worst.usual else ""
    return f"{where} is slow: it carried {mbit(worst.rate)}{usual}"


def _figures(link: LinkAccount) -> tuple[tuple[str, str], ...]:
    return (
        ("bytes", str(link.sent)),
        ("seconds on the way", f"{link.busy:.2f}"),
        ("Mbit/s", f"{8e-6 * link.rate:.3g}"),
        ("usual Mbit/s", f"{8e-6 * link.usual:.3g}"),
        ("segments", str(link.segments)),
        ("sent again", str(link.resent)),
        ("round trip, ms", f"{1e3 * link.rtt:.1f}"),
        ("queue, ms", f"{1e3 * link.queue:.1f}"),
    )


# Ends


def _ends(seen: Observations, paths: Iterable[Path]) -> Iterator[tuple[NodeId, NodeId | None, set[Path]]]:
    """Who is to blame for these paths: one node for what most of its paths out, or in, have in common, else the
    sender with its peer. Each path is laid at one door."""
    left = set(paths)
    while left:
        out, into = Counter(s for s, _ in left), Counter(r for _, r in left)
        candidates = [(k, n, True) for n, k in out.items()] + [(k, n, False) for n, k in into.items()]
        count, node, sends = max(candidates, key=lambda c: (c[0], c[2], -int(c[1][1:])))
        mine = {path for path in left if path[not sends] == node}
        if count > 1 and count >= COMMON_SHARE * _partners(seen, node):
            yield node, None, mine
        else:
            mine = {min(left, key=lambda path: (int(path[0][1:]), int(path[1][1:])))}
            [(node, peer)] = mine
            yield node, peer, mine
        left -= mine


def _partners(seen: Observations, node: NodeId) -> int:
    """How many others the node has a path to, by what it or they say."""
    own = {link.peer for link in seen.account(node).links}
    return len(own | {n for n, account in seen.accounts.items() if account.link(node) is not None} - {node})
