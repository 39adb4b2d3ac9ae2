"""Return to an older state when all who held that of the last commit are gone at once. Pure.

The run waits for one of them, then goes on without.

A node has its state on disk and says, before it says its layout, which one that is (`StateReported`). So after a
power cut of the whole fleet the newest state that came back is known, and proven: every commit's digest is
remembered (`CommittedState`), and counts whatever number the node knows the state by.

    somebody gives state k          the others fetch it; nothing happens here
    nobody, but one proves j < k    waits for those who may still bring k, from that proof on `checkpoint.patience`
                                    seconds for each round that would be lost; then rounds j+1 ... k are void
    nobody proves anything          waits, and says so: a run never begins anew by itself

Where the makers of state k made different ones, and as many this as that, nobody can tell who is right, and no
member's word convicts another; nor where most of them are gone before its digest is known, once they were
waited for, and those that are left are so few that all may lie. Then state k is as good as lost (`State.tied`):
its makers go back to what their disks have of before it, and have `members.stall` seconds to say what that is. As
soon as state k-1 is proven round k is void, unless a maker that was not heard says the same as others, of more
than may lie. Where no disk has it, patience runs out, and the run goes on with the one that most have, or the
first of them, unless all who have it may lie: then it waits.

While it is in doubt no round is begun, closed, opened or committed. Both patiences run once, however often who
has the state comes and goes; who goes has one more from then on, so that two are the most of each. Those who are
too few are believed, where nobody has the state before, once they were alone with it for a patience without a
break: not for a moment in which the others' streams broke, or they began anew.

Nor is who made state k waited for without end where it is here and says nothing, so that the others are too few
to name it, or have state k-1 and nothing newer: `members.stall` seconds after the commit one more patience begins,
and then it is put out, and has the time of who is gone to come back.

Who is back may need a moment to say what it holds, or can make of that, so a node gets `SETTLE_SECONDS` for it
whenever it comes, or is heard again after a break, even when patience runs out meanwhile, until it has run out
twice. A suspect gets none: what it holds may never be heard. Who holds state k and saves bytes is waited for like
one that is away, and proves nothing: it may come with it, and the others cannot tell when (`byte_saving`). Time in
which the coordinator itself took nothing in (its disk was full, its process stopped) is no waiting: then it begins
again.

A void round keeps its number, so nothing goes backwards and no fence is used twice: state k *is* state j, and who
holds j holds k. Of the exchange's members for whom the commit did not wait it is not known which of the two they
hold by now: they say it. Its record says void and has no contributors; the clock of the LR schedule goes back to
the tokens of round j, and so does the credit for them; the samples in it stay consumed, for no sample counts
twice. Whoever comes later with the real state k differs from the run's digest, and fetches the run's.

A node contributes only once its disk has the last round. So where disks work, only the newest commit can be void:
all died between its commit and the end of its write to any disk.
"""

from collections.abc import Container
from math import inf

from atoll.comm.ids import NodeId
from atoll.comm.replace import replace
from atoll.coordinator.causes.observations import Standing
from atoll.coordinator.causes.verdict import of_void
from atoll.coordinator.state_machine import members as who
from atoll.coordinator.state_machine.changes import remove
from atoll.coordinator.state_machine.conduct import Consequence, consequence
from atoll.coordinator.state_machine.credit import take_back
from atoll.coordinator.state_machine.events import CommitRecord, Effect, Note, Publish
from atoll.coordinator.state_machine.ledger import Ledger
from atoll.coordinator.state_machine.makers import (
    are_few,
    are_too_few,
    believed_digest,
    makers_here,
    may_tell,
    silent_makers,
    told_digests,
    told_late,
    took_part,
)
from atoll.coordinator.state_machine.members import REDUCER, Member, MemberState
from atoll.coordinator.state_machine.state import (
    CommittedState,
    LostState,
    Phase,
    RoundState,
    State,
    UnnamedState,
    most_common,
    order,
)

MAX_PAST_COMMITS = 256  # commits
SETTLE_SECONDS = 10.0  # seconds that who came back has to say what it can make of what it holds
MAX_TICK_GAP_SECONDS = 5.0  # seconds without a tick after which the coordinator itself was away


def wait_reason(state: State) -> str:
    """The sentence that says for whom a run waits whose state is lost, or in doubt; empty: it is not."""
    k, doubt = state.committed, is_in_doubt(state)
    if not doubt and not state.state_lost:
        since = state.lost_state
        return _why_silent(state) if since is not None and since.silent_at < inf and not state.digest else ""
    if state.tied:
        return f"nobody can tell which state of round {k} is right: waits for who has the state before it on disk"
    proven, may = newest_proven(state), possible_holders(state)
    if doubt:
        had, limit = state.names([*may, *silent_makers(state)]), state.config.checkpoint.patience
        few = f"too few are here of those that made the state of round {k} to tell which is right: "
        waits = f"waits {limit:g} s at most for {had} to tell it, too, then " if had else ""
        return f"{few}{waits}goes back to the state before it, where a member has that"
    silent = [n for n in may if n in state.members.here and state.members.here[n].saves_bytes]
    reason = f"no living member holds the state of round {k}: "
    if silent:
        reason = f"the state of round {k} is only where bytes are saved ({state.names(silent)}): "
    names = state.names(may or sorted(state.makers, key=order))
    if proven is None:
        had = f"; {names} had it" if names else ""
        return f"{reason}waits for a node whose disk has it, or an earlier one{had}"
    j = proven.round
    if not may:
        return f"{reason}all who may have had it are back without it; goes on from the state of round {j}"
    limit = (k - j) * state.config.checkpoint.patience
    return f"{reason}waits {limit:g} s at most for {names} to return, then goes on from the state of round {j}"


def _why_silent(state: State) -> str:
    """For whom a run waits whose state is told by too few of those that made it, and are here."""
    if not (silent := silent_makers(state)):
        return ""
    made, limit = f"the state of round {state.committed}", state.config.checkpoint.patience
    return f"{state.names(silent)} made {made} and did not say which it is: waits {limit:g} s at most for that"


def newest_proven(state: State, but: Container[NodeId] = ()) -> CommittedState | None:
    """The newest of the run's states that a member here, `but` for these, proves to hold."""
    late = told_late(state)
    known = {past.digest: past for past in (*state.past, *((late,) if late is not None else ()))}
    here = state.members.here.items()
    giving = (m for n, m in here if m.state_round >= 0 and not m.saves_bytes and n not in but)
    told = (known.get(m.state_digest) for m in giving)
    return max((past for past in told if past is not None), key=lambda past: past.round, default=None)


def possible_holders(state: State) -> list[NodeId]:
    """Nodes that may still bring the state: they had it, or could make it, and have not said otherwise since, nor
    are kept out for ever."""
    k, members = state.committed, state.members
    away = [
        n
        for n, m in members.departed.items()
        if m.state is MemberState.EVICTED
        and (n in state.makers or n in state.unawaited or m.state_round == k)
        and consequence(state, n) is not Consequence.BANNED
    ]
    coming = [
        n
        for n, m in members.here.items()
        if (m.state is MemberState.JOINING and m.role != REDUCER) or (m.saves_bytes and m.state_round == k)
    ]
    return away + coming


def go_on_without(state: State, now: float, out: list[Effect]) -> State:
    """Declare rounds void when it is time."""
    past = _proven_enough(state) if state.state_lost or state.tied else None
    doubt = is_in_doubt(state)
    silent = _silent(state, now) if past is None and not doubt else []
    if past is None and not state.tied and not doubt and not silent:
        since = None
        if state.lost_state is not None and not state.digest:  # who has it may be here for a moment alone
            since = replace(_seen(state.lost_state, now), lost_at=inf, alone_at=inf)
        return state if since == state.lost_state else replace(state, lost_state=since)
    if past is not None and state.tied and past.round == state.committed - 1:  # nothing newer can be proven
        return _void(state, past, now, out)
    since = _unheard(state, now) if silent else _waiting(state, now, doubt)
    if since != state.lost_state:
        return replace(state, lost_state=since)
    if silent:
        late = now >= since.silent_at + state.config.checkpoint.patience
        return _put_out(state, silent, out) if late else state
    began, last = (since.doubted_at, since.doubted_at) if doubt else (since.at, since.lost_at)
    alone = now >= since.alone_at + state.config.checkpoint.patience
    if state.tied and past is None:
        return _end_tie(state, alone, out) if now >= began + state.config.checkpoint.patience else state
    lost = state.committed - past.round if past is not None else 1  # rounds
    patience = lost * state.config.checkpoint.patience
    settled = now >= since.returned_at + SETTLE_SECONDS
    all_back = since.all_back_at is not None and now >= since.all_back_at + SETTLE_SECONDS
    late, too_late = now >= last + patience, now >= began + 2 * patience
    if not (too_late or (settled and (late or all_back))):
        return state
    if past is not None:
        return _void(state, past, now, out)
    return _end_doubt(state, alone, out)


def _proven_enough(state: State) -> CommittedState | None:
    """The state to go back to. While members have different ones of the last commit, one of before the commit
    before it is such a state where so many prove it that not all may lie."""
    past = newest_proven(state)
    if past is None or not state.tied or past.round == state.committed - 1:
        return past
    votes = sum(m.state_digest == past.digest for m in state.members.here.values())
    return past if may_tell(state, votes, made=False) else None


def _end_doubt(state: State, alone: bool, out: list[Effect]) -> State:
    """Those who have the last commit's state are as few as may lie. Where a member proves the state before, all go
    back to that: it costs one round. Else they are believed, if they agree: it would cost more. `alone`: they are
    the only ones that have any, and that not for a moment in which the others' streams broke."""
    here, past = state.members.here, newest_proven(state)
    told = {n: here[n].state_digest for n in sorted(here, key=order) if here[n].state_round == state.committed}
    digest, votes = most_common(told)
    if not votes or votes < len(told) or (past is not None and past.round == state.committed - 1):
        return begin_tie(state, tuple(told), out)
    if not alone:
        return state
    k, has = state.committed, "has" if votes == 1 else "have"
    out.append(
        Note(f"nobody else has a state of round {k - 1} or {k}: the run has what {state.names(told)} {has}")
    )
    return replace(state, digest=digest, lost_state=None)


def is_in_doubt(state: State) -> bool:
    """Whether nobody knows the last commit's digest, for too few of those that made it are here, or told."""
    lost = state.members.losses - state.losses_at_commit  # at least so many; else no look at each is worth it
    if state.digest or state.tied or not state.makers or state.state_lost:
        return False
    if not are_few(state, len(state.makers) - lost):
        return False
    over = state.round.phase is Phase.FINISHED  # nothing is trained from it
    return not over and are_too_few(state, most_common(told_digests(state))[1])


def _silent(state: State, now: float) -> list[NodeId]:
    """Who made the last commit's state and has not said which it is in the time after which a trainer counts as
    hung, where the others that said it are too few to name it, or some have an older one, and cannot go on."""
    waits = state.committed and not state.digest and not state.tied and state.round.phase is not Phase.FINISHED
    if not waits or now <= state.round.started_at + state.config.members.stall:
        return []
    silent = silent_makers(state)
    if may_tell(state, len(silent), made=False) and len(silent) > 1:
        return []  # not all of them lie: those that do not will say it
    return silent if told_digests(state) or newest_proven(state, state.makers) is not None else []


def _put_out(state: State, silent: list[NodeId], out: list[Effect]) -> State:
    """They go, whatever progress their heartbeats tell."""
    for node in silent:
        reason = f"it did not say which state of round {state.committed} it made"
        state = remove(state, node, MemberState.EVICTED, reason, out, Standing.STALLED)
    return state


def _unheard(state: State, now: float) -> LostState:
    """Since when the run waits for those that do not say what they made."""
    since = _seen(state.lost_state, now)
    return replace(since, silent_at=min(since.silent_at, now), lost_at=inf, alone_at=inf)


def _waiting(state: State, now: float, doubt: bool) -> LostState:
    """Since when the run waits, and who came meanwhile. In doubt all have to tell what they made."""
    since = _seen(state.lost_state, now)
    if doubt:
        since = replace(since, doubted_at=min(since.doubted_at, now), lost_at=inf)
    else:
        since = replace(since, at=min(since.at, now), lost_at=min(since.lost_at, now))
    reading = _going_back(state) if now < since.at + state.config.members.stall else []
    alone = _is_undisputed(state) and all(m.state_digest for m in reading)
    since = replace(since, alone_at=min(since.alone_at, now) if alone else inf)
    returned = _returned(state)
    if not returned <= since.returned:
        since = replace(since, returned_at=now)
    if returned != since.returned:
        since = replace(since, returned=returned)
    untold = doubt and any(m.state_round != state.committed for m in makers_here(state))
    if possible_holders(state) or untold or reading:
        return replace(since, all_back_at=None)
    return since if since.all_back_at is not None else replace(since, all_back_at=now)


def _is_undisputed(state: State) -> bool:
    """Whether those here that say what the last commit's state is agree, and nobody proves the one before it."""
    told = {m.state_digest for m in state.members.here.values() if m.state_round == state.committed}
    if state.tied:
        told = set(_told(state).values())
    past = newest_proven(state)
    return len(told) == 1 and (past is None or past.round < state.committed - 1)


def _going_back(state: State) -> list[Member]:
    """While members have different states of the last commit, or none: its makers that are here and have not said
    yet what their disks have of before it."""
    here = [state.members.here.get(n) for n in state.makers] if state.tied else []
    return [m for m in here if m is not None and m.suspected is None and m.state_round < 0]


def _seen(since: LostState | None, now: float) -> LostState:
    """The wait goes on, unless the coordinator was away."""
    if since is None or now > since.seen_at + MAX_TICK_GAP_SECONDS:
        return LostState(now)
    return replace(since, seen_at=now) if now > since.seen_at + MAX_TICK_GAP_SECONDS / 4 else since


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
    why = "nobody can tell which state of it is right" if state.tied else "the state was lost with all who held it"
    reason = f"{rounds} void: {why}"
    out.append(Note(f"{reason}; the run goes on from the state of round {j}"))
    out += [Publish(_record(state, past, number, reason, now)) for number in range(j + 1, k + 1)]
    here = state.members.here.values()
    holders = [m for m in here if m.state_round >= 0 and m.state_digest == past.digest]
    return replace(
        state,
        members=who.put(state.members, *(_in_void_round(state, m) for m in holders)),
        digest=past.digest,
        sealed=b"",
        makers=frozenset(),
        unawaited=frozenset(),
        tokens=past.tokens,
        pending=None,
        inquiry=None,
        credit=take_back(state.credit, j),
        past=(*(p for p in state.past if p.round < j), past),
        unnamed=None,
        lost_state=None,
        tied=False,
        round=_next_round(state, "the next round is about to start", now),
    )


def _in_void_round(state: State, member: Member) -> Member:
    """A member of which was known that it holds the state to which the run returns. A maker that is just back may
    have made the void one from that by now: it says it."""
    if member.state is MemberState.JOINING and member.node in state.makers:
        return replace(member, state_round=-1)
    if member.node in state.unawaited and member.state in (MemberState.ACTIVE, MemberState.RECOVERING):
        reason = f"says whether it made the state of round {state.committed}, which is void"
        return replace(member, state=MemberState.RECOVERING, state_round=-1, reason=reason)
    return replace(member, state_round=state.committed)


def _next_round(state: State, reason: str, started_at: float) -> RoundState:
    """The round after the last commit, which is yet to begin."""
    ledger = replace(Ledger(), attempt=state.round.ledger.attempt)
    return RoundState(number=state.committed + 1, reason=reason, started_at=started_at, ledger=ledger)


def begin_tie(state: State, told: tuple[NodeId, ...], out: list[Effect]) -> State:
    """Nobody is taken to hold the last commit's state, of which those that told made different ones, or which
    too few of its makers told."""
    k, here = state.committed, state.members.here
    has, digests = "has" if len(told) == 1 else "have", {here[n].state_digest for n in told}
    reason = f"nobody has told what {len(state.makers)} made in round {k}"
    if len(digests) > 1:
        reason = f"{state.names(told)} made different states of round {k}, and nobody can tell which is right"
    elif told:
        alone = f"{state.names(told)} alone {has} what {len(state.makers)} made in round {k}"
        reason = f"{alone}, and nobody can tell whether it is right"
    out.append(Note(f"{reason}: goes back to the state before it"))
    why, changed = (
        f"goes back to the state before round {k}: nobody can tell which of that is right",
        list[Member](),
    )
    for n in sorted({*told, *state.holders, *(m.node for m in makers_here(state))}, key=order):
        digest = here[n].state_digest if here[n].state_round == k else b""  # else it is of an older state
        member = replace(here[n], state_round=-1, state_digest=digest)
        if member.state is not MemberState.JOINING:  # first it says which model it has
            member = replace(member, state=MemberState.RECOVERING, reason=why)
        changed.append(member)
    state = replace(state, members=who.put(state.members, *changed), tied=True, lost_state=None)
    return replace(state, round=_next_round(state, reason, state.round.started_at))


def record_opinion(state: State, node: NodeId, digest: bytes, out: list[Effect]) -> State:
    """Enter what a member says that it holds of the commit of which different states were made. Of the makers, one
    that was not heard before may say the same as one of the others: then it is the run's."""
    member = replace(state.members.here[node], state_round=-1, state_digest=digest)
    state = replace(state, members=who.put(state.members, member))
    told = {n: d for n, d in _told(state).items() if n in state.makers}
    alike = [n for n, d in told.items() if d == digest]
    if node not in told or len(alike) < 2 or 2 * len(alike) <= len(told) or not may_tell(state, len(alike)):
        return state
    out.append(Note(f"{state.names(alike)} made the same state of round {state.committed}: it is the run's", node))
    return _without_tie(state, digest, alike)


def _end_tie(state: State, alone: bool, out: list[Effect]) -> State:
    """No disk has an older state: go on with the one that most have, of as many the first's. Where others differ,
    and all who have it may lie, the run waits."""
    told = _told(state)
    digest, votes = most_common(told)
    if votes == len(told):
        sure = alone
    else:
        sure = may_tell(state, votes, state.makers.issuperset(told))
    if not votes or not sure:
        return state
    alike = [n for n, d in told.items() if d == digest]
    k, name = state.committed, state.name(alike[0])
    out.append(Note(f"no disk has a state before that of round {k}: the run goes on with what {name} has"))
    return _without_tie(state, digest, alike)


def _told(state: State) -> dict[NodeId, bytes]:
    """What makers that are here, and those for whom the commit did not wait, said that they hold of the last
    commit's state, while it is tied."""
    here, able = state.members.here, state.makers | state.unawaited
    members = (here[n] for n in sorted(here, key=order) if n in able)
    return {m.node: m.state_digest for m in members if m.state_round < 0 and m.state_digest}


def _without_tie(state: State, digest: bytes, holders: list[NodeId]) -> State:
    here = state.members.here
    members = who.put(state.members, *(replace(here[n], state_round=state.committed) for n in holders))
    return replace(state, members=members, digest=digest, tied=False, lost_state=None)


def _record(state: State, past: CommittedState, number: int, reason: str, now: float) -> CommitRecord:
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
        committed_at=now,
        verdict=of_void(state.names(sorted(state.makers, key=order)) or "nobody", state.tied),
    )


def remember(state: State) -> State:
    """The state with the last commit among the earlier ones, as it is when the next round commits. Where its
    digest is not known, its makers may tell it later: that round is proven then."""
    if not (digest := state.digest or believed_digest(state)):
        there = took_part(state)
        unnamed = UnnamedState(state.committed, state.tokens, state.makers, there, state.fleet)
        return replace(state, unnamed=unnamed)
    past = (*state.past, CommittedState(state.committed, digest, state.tokens))
    return replace(state, past=past[-MAX_PAST_COMMITS:], unnamed=None)
