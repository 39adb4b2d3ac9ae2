"""Paths between two members that broke, remembered over rounds. Pure.

That one member cannot reach another may be true, or a lie of one of them, or the doing of the other: nobody can
tell it from one pair. So nobody is held to account for one:

    a path broke twice in a round   the attempt goes on without one of its ends, another one the next time
    it broke in two rounds          both ends own no chunks for a while: then they need no path, and what they say
                                    of each other changes nothing
    one lost its session, and so    as if it broke twice: else the two could end attempts again and again; who did
    few others said so              so to two owns nothing alone, and nobody waits for it; to three, or where more
                                    say so, it is charged with what that cost
    with a third of the members,    it is this member: it owns nothing, it is left out of the attempt, and charged
      two more than a quarter       (ACCUSER) for each round in which a path to it broke again; for paths that
                                    broke once in a round, by turns, nobody is charged: it owns nothing, and owes
                                    the others the time that its word costs

A path whose one end is to blame so says nothing of its other end. Who alone says of the others that it cannot
reach them has a whole strike; of whom the others say it, too, is asleep, or has a bad link: it is charged with
what that cost the round. So a member cannot keep another one out by its word, nor can two. `reduce` asks and
tells.

What is said of an attempt in which the coordinator was away, or that it opened before all had time to come back,
costs that attempt alone: some may not have had its plan yet, so that the others heard nothing of them, though no
path broke.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping

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
OVER_AND_OVER = 4  # rounds in which it broke, from which on who still says so is held to account
MAX_PATHS = 1000  # that are remembered


def needed(ledger: Ledger, a: NodeId, b: NodeId) -> bool:
    """Whether the plan in force needs the path between the two: one of them merges what the other sends."""
    workers = ledger.workers
    return a in workers or b in workers


def culprits(state: State) -> frozenset[NodeId]:
    """The members that are to blame as the paths to so many others broke (`_enough`), of those remembered, each
    twice in a round, or with others. That one end had no session the coordinator saw: the other one said the
    truth."""
    sure = [path.pair for path in _remembered(state) if frozenset(path.rounds) - path.blinks - path.once]
    return _breakers(sure, _enough(state))


def _unreliable(state: State) -> frozenset[NodeId]:
    """The culprits, and those to which paths broke once in a round: from as many in two rounds or more, or from
    most in one. Each may have been its other end's doing, so nobody is charged for it; but such a member owns
    nothing, and its other ends may."""
    broken = {path: frozenset(path.rounds) - path.blinks for path in _remembered(state)}
    twice = [path.pair for path, rounds in broken.items() if len(rounds) > 1 or rounds - path.once]
    once = [path.pair for path, rounds in broken.items() if rounds]
    most = max(MIN_ACCUSERS, len(state.round.participants) // 2 + 1)
    return culprits(state) | _breakers(twice, _enough(state)) | _breakers(once, most)


def _breakers(pairs: list[Pair], partners: int) -> frozenset[NodeId]:
    """Who is in the pairs with so many others or more: first the one with the most, then who has as many without
    it, and so on."""
    found = set[NodeId]()
    while pairs:
        times = Counter(n for pair in pairs for n in pair)
        worst = max(times, key=lambda n: (times[n], order(n)))
        if times[worst] < partners:
            break
        found.add(worst)
        pairs = [pair for pair in pairs if worst not in pair]
    return frozenset(found)


def _third(state: State) -> int:
    """So many say the same of a member that it is not these who are to blame. Who went in this round counts: else
    those who stay would be more."""
    return _third_of(len(state.round.participants.keys() | state.round.gone.keys()))


def _third_of(members: int) -> int:
    return max(2, min(MIN_ACCUSERS, members - 1), -(-members // 3))


def _enough(state: State) -> int:
    """To so many others a member's paths broke that it is not these who are to blame: a quarter of all may lie,
    and one more path may have broken. All of whom paths are remembered count, whoever went since."""
    known = {n for path in _remembered(state) for n in path.pair}
    members = len(state.round.participants.keys() | state.round.gone.keys() | known)
    return max(_third_of(members), members // 4 + 2)


def is_known(state: State, accusers: int) -> bool:
    """Whether so many who say that they cannot reach a member are enough to hold it against that."""
    return accusers >= _third(state)


def _blinkers(state: State, partners: int) -> frozenset[NodeId]:
    """The members that had no session as so few could not reach them that nothing was held against them, of so
    many others in turn or more: each of these says what the coordinator sees, too."""
    found = Counter(n for path in _remembered(state) for n in path.blinked)
    return frozenset(n for n, k in found.items() if k >= partners)


def without_paths(state: State, members: Collection[NodeId]) -> frozenset[NodeId]:
    """The `members` that are to own nothing, as their paths to other ones are broken."""
    if not state.conduct.broken:
        return frozenset()
    there, to_blame = frozenset(members), _unreliable(state) | _blinkers(state, 2)
    found = set[NodeId]()
    for path in _remembered(state):
        if there.issuperset(path.pair) and len(path.rounds) >= BROKEN_ROUNDS:
            found.update(to_blame.intersection(path.pair) or path.pair)
    return frozenset(found)


def remember(state: State, out: list[Effect]) -> State:
    """Remember the paths that broke in the round that is about to be committed; charge the culprits."""
    r, blinked_pairs = state.round, _blinks(state)
    if not r.lost and not blinked_pairs:
        return state
    times = Counter(r.lost)
    partners = Counter(n for pair in times for n in pair)
    odd = {n for pair, k in times.items() for n in pair if k > 1 or partners[n] > 1}
    known = {path.pair: path for path in _remembered(state)}
    for pair in dict.fromkeys((*times, *blinked_pairs)):
        path, now = known.pop(pair, BrokenPath(pair, ())), {r.number}
        once = path.once | (now if not odd.intersection(pair) else set())
        blinks = path.blinks | (now if pair not in times else set())
        blinked = path.blinked | blinked_pairs.get(pair, frozenset())
        known[pair] = BrokenPath(pair, (*path.rounds, r.number), once, blinks, blinked)
    paths = tuple(sorted(known.values(), key=lambda path: path.rounds[-1]))[-MAX_PATHS:]
    state = replace(state, conduct=replace(state.conduct, broken=paths))
    many = _blinkers(state, max(MIN_ACCUSERS, _third(state)))
    for node in sorted(r.broke_off.keys() & _blinkers(state, 2), key=order):
        if node in many:
            what = "its connections broke, as others said round by round,"
            state = charge_who_broke_off(state, node, what, out)
        else:
            state = lend_time(state, node, r.interrupted.get(node, 0.0))
    return _charge_culprits(state, times, odd, out)


def _charge_culprits(state: State, times: Mapping[Pair, int], odd: Collection[NodeId], out: list[Effect]) -> State:
    """Charge those to blame for paths that broke in the round, so often each: the `odd`, which broke twice, or
    with others, too. Who says by turns that it cannot reach others owes the time that this costs."""
    r, paths = state.round, state.conduct.broken
    assert r.plan is not None and r.planned_at is not None
    seconds, to_blame = r.plan.opened_at - r.planned_at, culprits(state)
    new = excused(state, odd)
    for node in sorted(_unreliable(state).intersection(n for pair in times for n in pair), key=order):
        if node not in odd or node not in to_blame:
            state = _lend_to_accusers(state, node, times, seconds)
            continue
        others = sorted({n for path in paths for n in path.pair if node in path.pair} - {node}, key=order)
        sentence = f"its paths to {state.names(others)} broke, those between others did not"
        facts = tuple((str(n), _rounds(paths, node, n)) for n in others[:20])
        others_say_so = _others_say_so(state, node, times)
        if others_say_so and node in new:
            state = lend_time(state, node, seconds)
            continue
        part = strike_part(state, seconds) if others_say_so else 1.0
        state = charge(state, node, Evidence(r.number, Offence.ACCUSER, sentence, facts, part=part), out)
    return state


def _lend_to_accusers(state: State, node: NodeId, times: Mapping[Pair, int], seconds: float) -> State:
    """An unreliable member that says itself that it cannot reach others owes the time which that costs; so does
    who alone says it of such a one over and over: it owns nothing for a while, and needs no path to it."""
    said = state.round.accused
    if any({by, of} == set(pair) for pair in times for by, of in said if by == node):
        return lend_time(state, node, seconds)
    for path in _remembered(state):
        if path.pair in times and node in path.pair and len(path.rounds) >= OVER_AND_OVER:
            for other in set(path.pair) - {node}:
                state = lend_time(state, other, seconds)
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


def _blinks(state: State) -> dict[Pair, frozenset[NodeId]]:
    """The paths of members that had no session, which these are, while so few said that they could not reach them
    that it may be the doing of these: that ended an attempt, and nobody knows whose doing it was."""
    found = dict[Pair, frozenset[NodeId]]()
    for peer in sorted(state.round.broke_off, key=order):
        said = sorted((node for node, of in state.round.accused if of == peer), key=order)
        for node in said if not is_known(state, len(said)) else ():
            pair = (node, peer) if order(node) < order(peer) else (peer, node)
            found[pair] = found.get(pair, frozenset()) | {peer}
    return found


def _others_say_so(state: State, node: NodeId, broken: Iterable[Pair]) -> bool:
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
