"""Return to an older state when all who held that of the last commit are gone at once. Pure.

The run waits for one of them, then goes on without.

A node has its state on disk and says, before it says its layout, which one that is (`StateReported`). So after a
power cut of the whole fleet the newest state that came back is known, and proven: every commit's digest is
remembered (`CommittedState`), and counts whatever number the node knows the state by.

    somebody holds state k          the others fetch it; nothing happens here
    nobody, but one proves j < k    waits for those who may still bring k, from that proof on `checkpoint.patience`
                                    seconds for each round that would be lost; then rounds j+1 ... k are void
    nobody proves anything          waits, and says so: a run never begins anew by itself

Who is back may need a moment to say what it holds, or can make of that, so a node gets `SETTLE_SECONDS` for it
whenever it comes, or is heard again after a break, even when patience runs out meanwhile, until it has run out
twice. A suspect gets none: what it holds may never be heard. Time in which the coordinator itself took nothing in
(its disk was full, its process stopped) is no waiting: then it begins again.

A void round keeps its number, so nothing goes backwards and no fence is used twice: state k *is* state j, and who
holds j holds k. Its record says void and has no contributors; the clock of the LR schedule goes back to the tokens
of round j; the samples in it stay consumed, for no sample counts twice. Whoever comes later with the real state k
differs from the run's digest, and fetches the run's.

A node contributes only once its disk has the last round. So where disks work, only the newest commit can be void:
all died between its commit and the end of its write to any disk.
"""

from atoll.comm.ids import NodeId
from atoll.comm.replace import replace
from atoll.coordinator.state_machine import members as who
from atoll.coordinator.state_machine.events import CommitRecord, Effect, Note, Publish
from atoll.coordinator.state_machine.ledger import Ledger
from atoll.coordinator.state_machine.members import REDUCER, MemberState
from atoll.coordinator.state_machine.state import (
    CommittedState,
    LostState,
    RoundState,
    State,
    most_common,
    order,
)

MAX_PAST_COMMITS = 256  # commits
SETTLE_SECONDS = 10.0  # seconds that who came back has to say what it can make of what it holds
MAX_TICK_GAP_SECONDS = 5.0  # seconds without a tick after which the coordinator itself was away


def wait_reason(state: State) -> str:
    """The sentence that says for whom a run waits whose state is lost."""
    k, proven, may = state.committed, newest_proven(state), possible_holders(state)
    reason = f"no living member holds the state of round {k}: "
    names = state.names(may or sorted(state.makers, key=order))
    if proven is None:
        had = f"; {names} had it" if names else ""
        return f"{reason}waits for a node whose disk has it, or an earlier one{had}"
    j = proven.round
    if not may:
        return f"{reason}all who may have had it are back without it; goes on from the state of round {j}"
    limit = (k - j) * state.config.checkpoint.patience
    return f"{reason}waits {limit:g} s at most for {names} to return, then goes on from the state of round {j}"


def newest_proven(state: State) -> CommittedState | None:
    """The newest of the run's states that a member here proves to hold."""
    known = {past.digest: past for past in state.past}
    told = (known.get(m.state_digest) for m in state.members.here.values() if m.state_round >= 0)
    return max((past for past in told if past is not None), key=lambda past: past.round, default=None)


def possible_holders(state: State) -> list[NodeId]:
    """Nodes that may still bring the state: they had it, or could make it, and have not said otherwise since."""
    k, members = state.committed, state.members
    away = [
        n
        for n, m in members.departed.items()
        if m.state is MemberState.EVICTED and (n in state.makers or m.state_round == k)
    ]
    coming = [n for n, m in members.here.items() if m.state is MemberState.JOINING and m.role != REDUCER]
    return away + coming


def go_on_without(state: State, now: float, out: list[Effect]) -> State:
    """Declare rounds void when it is time."""
    past = newest_proven(state) if state.state_lost else None
    if past is None:
        return state if state.lost_state is None else replace(state, lost_state=None)
    since = _waiting(state, now)
    if since != state.lost_state:
        return replace(state, lost_state=since)
    patience = (state.committed - past.round) * state.config.checkpoint.patience
    settled = now >= since.returned_at + SETTLE_SECONDS
    all_back = since.all_back_at is not None and now >= since.all_back_at + SETTLE_SECONDS
    late, too_late = now >= since.at + patience, now >= since.at + 2 * patience
    return _void(state, past, now, out) if too_late or (settled and (late or all_back)) else state


def _waiting(state: State, now: float) -> LostState:
    """Since when the run waits, and who came meanwhile."""
    since = state.lost_state
    if since is None or now > since.seen_at + MAX_TICK_GAP_SECONDS:
        since = LostState(now, now)
    elif now > since.seen_at + MAX_TICK_GAP_SECONDS / 4:
        since = replace(since, seen_at=now)
    returned = _returned(state)
    if not returned <= since.returned:
        since = replace(since, returned_at=now)
    if returned != since.returned:
        since = replace(since, returned=returned)
    if possible_holders(state):
        return replace(since, all_back_at=None)
    return since if since.all_back_at is not None else replace(since, all_back_at=now)


def _returned(state: State) -> frozenset[tuple[NodeId, int, bool]]:
    """Lives that are trusted and may bring the state, and whether they are connected. A maker is one of them that
    has said it holds an older one: it may make the newest from what it has of the reduce, once it is told what the
    round came to."""
    here = state.members.here.items()
    trusted = ((n, m) for n, m in here if m.suspected is None and m.role != REDUCER)
    able = ((n, m) for n, m in trusted if m.state is MemberState.JOINING or n in state.makers)
    return frozenset((n, m.life, m.connected) for n, m in able)


def _void(state: State, past: CommittedState, now: float, out: list[Effect]) -> State:
    j, k = past.round, state.committed
    rounds = f"round {k} is" if j == k - 1 else f"rounds {j + 1} to {k} are"
    reason = f"{rounds} void: the state was lost with all who held it"
    out.append(Note(f"{reason}; the run goes on from the state of round {j}"))
    out += [Publish(_record(state, past, number, reason)) for number in range(j + 1, k + 1)]
    here = state.members.here.values()
    holders = [m for m in here if m.state_round >= 0 and m.state_digest == past.digest]
    return replace(
        state,
        members=who.put(state.members, *(replace(m, state_round=k) for m in holders)),
        digest=past.digest,
        sealed=b"",
        makers=frozenset(),
        tokens=past.tokens,
        pending=None,
        past=tuple(p for p in state.past if p.round < j or p is past),
        lost_state=None,
        round=RoundState(
            number=k + 1,
            reason="the next round is about to start",
            started_at=now,
            ledger=replace(Ledger(), attempt=state.round.ledger.attempt),
        ),
    )


def _record(state: State, past: CommittedState, number: int, reason: str) -> CommitRecord:
    """The record of a void round, in the place of what was on record."""
    return CommitRecord(
        round=number,
        epoch=state.epoch,
        attempts=0,
        members=(),
        contributors={},
        tokens=past.tokens,
        train_loss=0.0,
        seconds={},
        bytes_up={},
        bytes_down={},
        reason=reason,
        sealed_digest="",
        state_digest=past.digest.hex(),
        void=True,
    )


def remember(state: State) -> tuple[CommittedState, ...]:
    """The earlier commits, with the last one added, as they are when the next round commits."""
    here = state.members.here
    told = state.digest or most_common({n: here[n].state_digest for n in state.holders})[0]
    return (
        (*state.past, CommittedState(state.committed, told, state.tokens))[-MAX_PAST_COMMITS:]
        if told
        else state.past
    )
