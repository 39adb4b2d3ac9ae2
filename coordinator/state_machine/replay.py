"""Replays of contributors' rounds by verifiers: members that the operator trusts, which contribute nothing. Pure.

    first attempt opens --drawn, in secret--> a verifier stays at the state that the round began with
        |                                        |
        v                                        v
    its chunks are sealed --> the verifier gets some of them from the contributor and from others, as their owners'
        |                     receipts have them: the commit waits for that, for a while
        v
    committed; meanwhile the verifier trains the same samples from the same anchor, compares (`replay_verdict`),
    tells, and fetches the state that the others have by then

The contributor's own moments are not known, so what a replay shows is no proof: it costs strikes (`conduct`), but
nobody is put out for it, and it takes two replays that look false, with none between that is well. Where most
members look false it costs nothing: then the run or the verifier is the odd one.

That a contributor does not show its chunks the verifier alone can know: it may say so of whom it likes, or have a
bad path to it. So another verifier is to ask, if there is one, and it costs strikes once two say so, with none
between that was shown some.

As BOINC does it (Anderson, "BOINC: A Platform for Volunteer Computing", 2019, adaptive replication), who was found
well ten times is drawn a tenth as often; who was not begins anew.

Drawn are members that contributed to the round before, too, and have nothing carried over: what they did follows
from the anchor and their samples alone.
"""

from collections.abc import Mapping
from typing import TypeVar

from atoll.comm.digest import digest
from atoll.comm.evidence import Evidence, Offence
from atoll.comm.ids import NodeId
from atoll.comm.replace import replace
from atoll.coordinator.state_machine import leases as data
from atoll.coordinator.state_machine.conduct import charge, identity
from atoll.coordinator.state_machine.events import Effect, Note, ReplayReported
from atoll.coordinator.state_machine.members import VERIFIER, MemberState
from atoll.coordinator.state_machine.replay_verdict import MIN_OTHERS, Verdict, verdict
from atoll.coordinator.state_machine.state import Phase, Replay, State

MAX_SKIPPED = 0.1  # share of its work that does not count by its own word, and it is drawn all the same
MAX_CHUNKS = 4  # that are compared
MAX_OTHERS = 4  # contributors that are compared with
MIN_VALID = 10  # replays that are well, before a contributor is drawn rarely
RARELY = 0.1  # share of the draws that it takes part in then
MIN_UNSHOWN = 2  # verifiers that were shown nothing, before that is held against a contributor
WARM_UP_REPLAYS = 4  # of a verifier, of which nothing follows: its optimizer has no moments yet
MIN_FETCH_SECONDS = 10.0  # for a verifier to get the chunks
SLOW_RATE = 0.5e6  # bytes a second at which a slow one gets them
MIN_REPLAY_SECONDS = 600.0  # for a whole replay
REPLAY_INNER_TIMES = 8.0  # the same, in durations of the round's inner steps
MAX_KNOWN = 10_000  # identities about which something is remembered
T = TypeVar("T")


# Drawing


def draw(state: State, now: float) -> State:
    """Draw a contributor for each verifier that has nothing to do, as the round's first attempt opens."""
    share, r = state.config.security.replay, state.round
    if not share or not r.salt or not state.committed or not state.digest:
        return state
    for verifier in _free(state):
        if _lot(state, b"whether", verifier) < share:
            taken = {task.node for task in state.replays.tasks.values()}
            pool = [n for n in _candidates(state, verifier) if n not in taken]
            tasks = (_task(state, n, verifier, now) for n in sorted(pool, key=lambda n: _rank(state, n)))
            if (task := next(filter(None, tasks), None)) is not None:
                state = _with(state, verifier, task)
    return state


def _lot(state: State, what: bytes, whom: str) -> float:
    """A number in [0, 1) that nobody can foretell who does not know the nonce."""
    return int.from_bytes(digest(b"replay", what, state.nonce, state.round.salt, whom.encode()), "big") / 2**128


def _rank(state: State, node: NodeId) -> tuple[bool, float]:
    """The order in which contributors are drawn: those first whose latest replay looked false; last, if most did,
    as it takes others to tell."""
    latest = state.replays.latest
    doubted = not latest.get(identity(state, node), True)
    return doubted == _most_look_false(latest), _lot(state, b"who", node)


def _most_look_false(latest: Mapping[str, bool]) -> bool:
    return 2 * sum(not well for well in latest.values()) > len(latest)


def _free(state: State) -> list[NodeId]:
    held = state.committed, state.digest
    return [
        n
        for n, m in state.members.here.items()
        if m.role == VERIFIER
        and m.connected
        and not m.paused
        and m.trusted_as(MemberState.SYNCED)
        and (m.state_round, m.state_digest) == held
        and n not in state.replays.tasks
    ]


def _candidates(state: State, verifier: NodeId) -> list[NodeId]:
    """The contributors whose work follows from the anchor and their samples, and that have their turn."""
    ledger, found = state.round.ledger, list[NodeId]()
    for node, work in ledger.contributions.items():
        member, lease = state.members.here.get(node), state.leases.by_node.get(node)
        counted = node in state.makers or node in state.unawaited  # in the round before
        if member is None or not lease or not member.key or not counted or member.missed:
            continue
        damped = state.config.outer.damping and work.damping < 1.0 - MAX_SKIPPED
        plain = MAX_SKIPPED * work.samples >= work.skipped and not work.earlier and not damped
        known = state.replays.valid.get(identity(state, node), 0) >= MIN_VALID
        turn = not known or _lot(state, b"turn", node) < RARELY
        # A verifier that has these very samples would go on behind them.
        again = state.replays.before.get(verifier) == data.front(lease)
        if plain and turn and not again and not _is_for_others(state, node, verifier):
            found.append(node)
    return found


def _is_for_others(state: State, node: NodeId, verifier: NodeId) -> bool:
    """Whether others than this verifier are to ask the contributor, which has shown this one nothing."""
    if identity(state, verifier) not in state.replays.unshown.get(identity(state, node), ()):
        return False
    return any(m.role == VERIFIER and n != verifier for n, m in state.members.here.items())


def _task(state: State, node: NodeId, verifier: NodeId, now: float) -> Replay | None:
    """The replay of the node's work; None: there are not enough others to compare it with."""
    r, ledger = state.round, state.round.ledger
    work, chunks = ledger.contributions[node], state.chunks.count
    place = {e.node: i for i, e in enumerate(ledger.entries) if e.contribution is not None and not e.gone}
    if node not in place:
        return None
    others = sorted((n for n in place if n != node), key=lambda n: _lot(state, b"other", n))
    usable = (c for c in range(chunks) if ledger.owners[c] not in (None, node) and c not in ledger.layered)
    chosen = sorted(usable, key=lambda c: _lot(state, b"chunk", str(c)))[:MAX_CHUNKS]
    if len(others) < MIN_OTHERS or not chosen:
        return None
    size = sum(map(state.chunks.size, chosen)) * state.config.reduce.bytes_per_element
    inner = max((r.closed_at or now) - r.started_at, 0.0)
    return Replay(
        round=r.number,
        node=node,
        who=identity(state, node),
        life=state.members.here[verifier].life,
        lease=data.first_samples(state.leases.by_node[node], work.samples),
        steps=-(-work.samples // state.config.inner.batch_size),
        tokens=state.tokens,
        fleet=max(len(r.participants), 1),
        digest=state.digest,
        chunks=tuple(sorted(chosen)),
        places=(place[node], *(place[n] for n in others[:MAX_OTHERS])),
        expires=now + max(MIN_REPLAY_SECONDS, REPLAY_INNER_TIMES * inner),
        seconds=min(MIN_FETCH_SECONDS + (1 + MAX_OTHERS) * size / SLOW_RATE, state.config.rounds.reduce_timeout),
    )


# The clock


def advance(state: State, now: float, out: list[Effect]) -> State:
    """Have verifiers ask for chunks that are sealed, and give up what comes to nothing."""
    for verifier, task in state.replays.tasks.items():
        r = state.round
        if why := _obstacle(state, verifier, task, now):
            out.append(Note(f"the replay of round {task.round} of {state.name(task.node)} is given up: {why}"))
            state = _without(state, verifier)
        elif not task.since and r.phase is Phase.REDUCING and all(c in r.ledger.sealed for c in task.chunks):
            since = tuple(r.ledger.since[c] for c in task.chunks)
            state = _with(state, verifier, replace(task, since=since, until=now + task.seconds))
    return state


def awaits_chunks(state: State, now: float) -> bool:
    """Whether the commit of the round waits for verifiers to get chunks that only its contributors have."""
    tasks = state.replays.tasks.values()
    return any(t.round == state.round.number and not t.shown and now < t.until for t in tasks)


def _obstacle(state: State, verifier: NodeId, task: Replay, now: float) -> str:
    """The reason for which the replay comes to nothing; empty: it may still come to its end."""
    member, r = state.members.here.get(verifier), state.round
    if member is None or member.life != task.life or member.state_round != task.round - 1:
        return f"{state.name(verifier)} has not the state any more that it began with"
    if member.paused:
        return f"{state.name(verifier)} is paused"
    if now >= task.expires or state.state_lost or state.tied or r.phase is Phase.FINISHED:
        return "there is no time for it"
    if task.shown:
        return ""
    if r.number != task.round or (task.since and now >= task.until):
        return f"{state.name(verifier)} did not get what was contributed in time"
    if task.node not in r.ledger.contributions:
        return "its work is not in the round any more"
    if r.ledger.layered.intersection(task.chunks):
        return "its chunks are reduced otherwise now"
    return ""


# Reports


def record(state: State, event: ReplayReported, out: list[Effect]) -> State:
    """Take in what a verifier tells, and what follows from it."""
    task = state.replays.tasks.get(event.node)
    if task is None or (task.round, task.node) != (event.round, event.contributor):
        return state
    if not event.shown:
        return _not_shown(_without(state, event.node), task, event.node, out)
    if event.work is None:
        unshown = {who: by for who, by in state.replays.unshown.items() if who != task.who}
        state = replace(state, replays=replace(state.replays, unshown=unshown))
        return _with(state, event.node, replace(task, shown=True))
    if not task.shown:
        return state
    state = _without(state, event.node)
    life, replays = state.replays.warm.get(event.node, (task.life, 0))
    replays = replays + 1 if life == task.life else 1
    book = replace(
        state.replays,
        warm={n: w for n, w in state.replays.warm.items() if n in state.members.here}
        | {event.node: (task.life, replays)},
        before={n: f for n, f in state.replays.before.items() if n in state.members.here}
        | {event.node: data.front(task.lease)},
    )
    state = replace(state, replays=book)
    if replays <= WARM_UP_REPLAYS:
        return state
    return _judge(state, task, event, out)


def _not_shown(state: State, task: Replay, verifier: NodeId, out: list[Effect]) -> State:
    """A verifier says that the contributor did not show it what it had contributed: so may a second one."""
    by = state.replays.unshown.get(task.who, frozenset()) | {identity(state, verifier)}
    unshown = {who: voices for who, voices in state.replays.unshown.items() if who != task.who}
    if len(by) < MIN_UNSHOWN:
        unshown = _newest(unshown | {task.who: by})
        says = f"{state.name(verifier)} says that it was not shown what it is about"
        out.append(Note(f"the replay of round {task.round} of {state.name(task.node)}: {says}", task.node))
    state = replace(state, replays=replace(state.replays, unshown=unshown))
    if len(by) < MIN_UNSHOWN:
        return state
    sentence = f"it did not show what it had contributed to any of {len(by)} verifiers"
    facts = (("verifiers", " ".join(sorted(by))),)
    return charge(state, task.node, Evidence(task.round, Offence.SILENT, sentence, facts, verifier), out)


def _judge(state: State, task: Replay, event: ReplayReported, out: list[Effect]) -> State:
    assert event.work is not None
    found, book = verdict(event.work, event.others), state.replays
    cosines = " ".join(f"{other.cosine:.3f}" for other in event.others)
    about = f"the replay of round {task.round} of {state.name(task.node)}"
    said = f"cosine {event.work.cosine:.3f}, with others' work {cosines}"
    if found is Verdict.UNCLEAR:
        out.append(Note(f"{about} is unclear ({said})", task.node))
        return state
    well, doubted = found is Verdict.WELL, not book.latest.get(task.who, True)
    latest = {who: w for who, w in book.latest.items() if who != task.who} | {task.who: well}
    valid = {who: n for who, n in book.valid.items() if who != task.who}
    if well:
        valid |= {task.who: min(book.valid.get(task.who, 0) + 1, MIN_VALID)}
    book = replace(book, latest=_newest(latest), valid=_newest(valid))
    state = replace(state, replays=book)
    if well:
        return state
    if not doubted:
        out.append(Note(f"{about} looks false ({said}): it is replayed again", task.node))
        return state
    if _most_look_false(book.latest):
        out.append(Note(f"{about} looks false ({said}), as do most: it is held against nobody", task.node))
        return state
    facts = (
        ("cosine", f"{event.work.cosine:.6f}"),
        ("with others", cosines),
        ("lengths of others", " ".join(f"{other.ratio:.6f}" for other in event.others)),
        ("samples", " ".join(f"{first}+{count}" for first, count in task.lease)),
    )
    sentence = "its delta is no more like its own work, replayed, than like others'"
    return charge(state, task.node, Evidence(task.round, Offence.FALSE_WORK, sentence, facts, event.node), out)


def _newest(known: Mapping[str, T]) -> dict[str, T]:
    return dict(list(known.items())[-MAX_KNOWN:])


def _with(state: State, verifier: NodeId, task: Replay) -> State:
    book = state.replays
    return replace(state, replays=replace(book, tasks=book.tasks | {verifier: task}))


def _without(state: State, verifier: NodeId) -> State:
    book = state.replays
    tasks = {n: task for n, task in book.tasks.items() if n != verifier}
    return replace(state, replays=replace(book, tasks=tasks))
