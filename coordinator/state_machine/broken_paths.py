"""Paths between two members that broke, remembered over rounds. Pure.

That one member cannot reach another may be true, or a lie of one of them, or the doing of the other: nobody can
tell it from one pair. So nobody is held to account for one:

    a path broke twice in a round   the attempt goes on without one of its ends, another one the next time
    that in two rounds              both ends own no chunks for a while: then they need no path, and what they say
                                    of each other changes nothing
    one lost its session, and the   as if it broke twice: else the two could end attempts again and again; who did
    other one alone said so         so to two owns nothing alone, and to three is charged with what that cost
    with a third of the members     it is this member: it owns nothing, it is left out of the attempt, and charged
                                    (ACCUSER) for each round in which a path to it broke again

A path whose one end is to blame so says nothing of its other end. Who alone says of the others that it cannot
reach them has a whole strike; of whom the others say it, too, is asleep, or has a bad link: it is charged with
what that cost the round. So a member cannot keep another one out by its word, nor can two. `reduce` asks and
tells.

What is said of an attempt in which the coordinator was away, or that it opened before all had time to come back,
costs that attempt alone: some may not have had its plan yet, so that the others heard nothing of them, though no
path broke.
"""

from collections import Counter
from collections.abc import Collection

from atoll.comm.ids import NodeId
from atoll.comm.replace import replace
from atoll.coordinator.state_machine.changes import with_round
from atoll.coordinator.state_machine.conduct import Evidence, Offence, charge, lend_time, strike_part
from atoll.coordinator.state_machine.events import Effect
from atoll.coordinator.state_machine.ledger import Ledger
from atoll.coordinator.state_machine.newcomers import excused
from atoll.coordinator.state_machine.state import BrokenPath, Pair, State, order

MEMORY_ROUNDS = 20  # committed rounds after which a path is as good as any
MIN_ACCUSERS = 3  # of whom no two may be in league, so that they have a member charged
BROKEN_ROUNDS = 2  # rounds in which it broke, from which on the ends own nothing
MAX_PATHS = 1000  # that are remembered


def needed(ledger: Ledger, a: NodeId, b: NodeId) -> bool:
    """Whether the plan in force needs the path between the two: one of them merges what the other sends."""
    workers = ledger.workers
    return a in workers or b in workers


def culprits(state: State) -> frozenset[NodeId]:
    """The members to which the paths from at least a third of the members broke, of those remembered: first the
    one with the most, then who has as many without it, and so on."""
    most, found = _most(state), set[NodeId]()
    pairs = [path.pair for path in _remembered(state)]
    while pairs:
        partners = Counter(n for pair in pairs for n in pair)
        worst = max(partners, key=lambda n: (partners[n], order(n)))
        if partners[worst] < most:
            break
        found.add(worst)
        pairs = [pair for pair in pairs if worst not in pair]
    return frozenset(found)


def _most(state: State) -> int:
    """To the members of so many paths broke that it is not these who are to blame."""
    return max(2, -(-len(state.round.participants) // 3))


def _blinkers(state: State, partners: int) -> frozenset[NodeId]:
    """The members that had no session as one alone could not reach them, of so many others in turn or more: each
    of these says what the coordinator sees, too."""
    found = Counter(n for path in _remembered(state) for n in path.blinked)
    return frozenset(n for n, k in found.items() if k >= partners)


def without_paths(state: State, members: Collection[NodeId]) -> frozenset[NodeId]:
    """The `members` that are to own nothing, as their paths to other ones are broken."""
    if not state.conduct.broken:
        return frozenset()
    there, to_blame = frozenset(members), culprits(state) | _blinkers(state, 2)
    found = set[NodeId]()
    for path in _remembered(state):
        if there.issuperset(path.pair) and len(path.rounds) >= BROKEN_ROUNDS:
            found.update(to_blame.intersection(path.pair) or path.pair)
    return frozenset(found)


def remember(state: State, out: list[Effect]) -> State:
    """Remember the paths that broke in the round that is about to be committed; charge the culprits."""
    r, blinks = state.round, _blinks(state)
    if not r.lost and not blinks:
        return state
    assert r.plan is not None and r.planned_at is not None
    times = Counter(r.lost)
    partners = Counter(n for pair in times for n in pair)
    broken = [pair for pair, k in times.items() if k > 1 or max(partners[n] for n in pair) > 1]
    known = {path.pair: path for path in _remembered(state)}
    for pair in (*broken, *(pair for pair in blinks if pair not in broken)):
        rounds = known[pair].rounds if pair in known else ()
        blinked = known[pair].blinked if pair in known else frozenset[NodeId]()
        known[pair] = BrokenPath(pair, (*rounds, r.number), blinked | r.broke_off.intersection(pair))
    paths = tuple(sorted(known.values(), key=lambda path: path.rounds[-1]))[-MAX_PATHS:]
    state = replace(state, conduct=replace(state.conduct, broken=paths))
    odd = {n for pair in broken for n in pair if times[pair] > 1 or partners[n] > 1}  # else the other end is
    for node in sorted(r.broke_off & _blinkers(state, max(MIN_ACCUSERS, _most(state))), key=order):
        state = charge_who_broke_off(state, node, "its connections broke, as others said round by round,", out)
    new = excused(state, odd)
    for node in sorted(odd.intersection(culprits(state)), key=order):
        others = sorted({n for path in paths for n in path.pair if node in path.pair} - {node}, key=order)
        sentence = f"its paths to {state.names(others)} broke, those between others did not"
        facts = tuple((str(n), _rounds(paths, node, n)) for n in others[:20])
        seconds, others_say_so = r.plan.opened_at - r.planned_at, _others_say_so(state, node, broken)
        if others_say_so and node in new:
            state = lend_time(state, node, seconds)
            continue
        part = strike_part(state, seconds) if others_say_so else 1.0
        state = charge(state, node, Evidence(r.number, Offence.ACCUSER, sentence, facts, part=part), out)
    return state


def charge_who_broke_off(state: State, node: NodeId, what: str, out: list[Effect]) -> State:
    """Charge a member that ended attempts of the round, as `what` says, with the time that these had taken."""
    if not (seconds := state.round.interrupted.get(node, 0.0)):
        return state
    left = {n: s for n, s in state.round.interrupted.items() if n != node}
    state = with_round(state, replace(state.round, interrupted=left))
    sentence = f"{what} in the middle of an exchange, {seconds:.0f} s after that was planned"
    evidence = Evidence(state.round.number, Offence.SILENT, sentence, part=strike_part(state, seconds))
    return charge(state, node, evidence, out)


def _blinks(state: State) -> list[Pair]:
    """The paths of members that lost their sessions for a moment, while one alone said that it could not reach
    them: that ended an attempt, and nobody knows who of the two wanted that."""
    r, here = state.round, state.members.here
    found = list[Pair]()
    for peer in sorted(r.broke_off, key=order):
        said = [node for node, of in r.accused if of == peer]
        if len(said) == 1 and peer in here and here[peer].connected:
            node = said[0]
            found.append((node, peer) if order(node) < order(peer) else (peer, node))
    return found


def _others_say_so(state: State, node: NodeId, broken: Collection[Pair]) -> bool:
    """Whether at least half of those whose paths to this member broke in the round say so themselves."""
    others = [n for pair in broken if node in pair for n in pair if n != node]
    return 2 * sum((n, node) in state.round.accused for n in others) >= len(others)


def _remembered(state: State) -> list[BrokenPath]:
    """The paths with the rounds of them that are not forgotten."""
    since = state.committed - MEMORY_ROUNDS
    left = ((path, tuple(k for k in path.rounds if k > since)) for path in state.conduct.broken)
    return [replace(path, rounds=rounds) for path, rounds in left if rounds]


def _rounds(paths: Collection[BrokenPath], a: NodeId, b: NodeId) -> str:
    rounds = next(path.rounds for path in paths if {a, b} == set(path.pair))
    return f"rounds {', '.join(map(str, rounds))}"
