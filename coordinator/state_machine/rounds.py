"""Start and close of a round. Pure.

A round closes when every member has taken its inner steps, or when a quorum has and those that would soon be there
had their grace. Members go on training until they are told, up to the ceiling, so waiting costs nobody a step; a
slow one then contributes what it has. Both windows follow what was measured: the members' pace in earlier rounds,
and how long the others took to finish in this one.
"""

from collections.abc import Iterable, Iterator
from itertools import islice
from math import ceil, inf
from statistics import median

from atoll.comm.ids import NodeId
from atoll.comm.replace import replace
from atoll.coordinator.state_machine import beginning, late_work, rollback
from atoll.coordinator.state_machine import leases as data
from atoll.coordinator.state_machine import members as who
from atoll.coordinator.state_machine.changes import marked, remove, start_over, with_member, with_round
from atoll.coordinator.state_machine.chunk_owners import reachable
from atoll.coordinator.state_machine.conduct import Evidence, Offence, charge, contributors, lend_time, owes_time
from atoll.coordinator.state_machine.events import ContributionReady, Effect, Note
from atoll.coordinator.state_machine.lateness import OWED_SHARE
from atoll.coordinator.state_machine.ledger import contribute
from atoll.coordinator.state_machine.members import TRAINABLE_STATES, VERIFIER, Member, MemberState
from atoll.coordinator.state_machine.participants import (
    absent,
    counted,
    missing,
    out_of_reach,
    saving_bytes,
    without_steps,
)
from atoll.coordinator.state_machine.state import Grace, Phase, RoundState, State, count, order

ASIDE_REASON = "its work is not taken for now, for what is held against it (atoll blame)"
MAX_MISSED_ROUNDS = 3  # whose work a member may bring at once
MANY_LATE = 20  # members
GRACE_SHARE = 0.1  # of the quorum's inner time, beyond the time at which one is expected to have its steps
MIN_COLLECT_SECONDS = 5.0  # nobody is left out of a round sooner after it was told to finish
MAX_AWAY_SHARE = 0.25  # of the participants, that may be dead when the first attempt opens
MAX_COLLECT_SHARE = 0.1  # of the quorum's inner time: how long the others, who have stopped, wait at most


def start_if_enough(state: State, now: float, out: list[Effect]) -> State:
    """Start the next round once the run has the members it needs."""
    limits, last = state.config.members, state.config.rounds.until_member
    if last and not state.has_until_member and last in map(order, state.makers):
        state = replace(state, has_until_member=True)
    if _all_committed(state):
        out.append(Note(f"the run is finished after {count(state.committed, 'round')}"))
        return with_round(
            state, replace(state.round, phase=Phase.FINISHED, reason="all rounds are committed", started_at=now)
        )
    able = len(trainers(state)) if state.config.security.replay else state.members.count(*TRAINABLE_STATES)
    first = state.committed == 0
    need, key = (limits.start, "start") if first else (limits.minimum, "minimum")
    unmade = beginning.wait_reason(state)
    if able >= need and not unmade and not rollback.is_in_doubt(state):
        ready = trainers(state)
        # What one alone commits would die with it.
        entering = contributors(state, ready, max(need, min(2, len(ready))))
        return _start(_set_aside(state, ready, entering), entering, now, out)
    return with_round(
        state,
        replace(
            state.round,
            reason=unmade or rollback.wait_reason(state) or too_few(state, able, need, key),
        ),
    )


def trainers(state: State) -> tuple[NodeId, ...]:
    """The members that can train the round and may contribute to it: verifiers do not."""
    here, able = state.members.here, state.members.of(*TRAINABLE_STATES)
    return tuple(n for n in able if here[n].role != VERIFIER) if state.config.security.replay else able


def _set_aside(state: State, ready: tuple[NodeId, ...], entering: tuple[NodeId, ...]) -> State:
    """Say of those whose work is not taken that it is not."""
    if len(ready) == len(entering):
        return state
    here, counted = state.members.here, frozenset(entering)
    aside = (here[n] for n in ready if n not in counted)
    return replace(state, members=who.put(state.members, *(replace(m, reason=ASIDE_REASON) for m in aside)))


def _all_committed(state: State) -> bool:
    """Whether the run has its rounds, and in one of them the member that it does not end without."""
    rounds = state.config.rounds
    return 0 < rounds.total <= state.committed and (state.has_until_member or not rounds.until_member)


def too_few(state: State, ready: int, need: int, key: str) -> str:
    """The reason to wait when only so many members are ready of those that the run's `members.KEY` says it needs,
    with what the others are doing."""
    able = (*TRAINABLE_STATES, MemberState.REDUCER)
    newest = reversed(state.members.here.values())  # of thousands that are ready they are found at once
    others = list(islice((m for m in newest if m.rests or not m.trusted_as(*able)), 3))[::-1]
    doing = "".join(f"; {m.name} {_doing(m)}" for m in others)
    return (
        f"{ready} of the {count(need, 'member')} that the run needs (members.{key}) "
        f"{'is' if ready == 1 else 'are'} ready{doing}"
    )


def _doing(member: Member) -> str:
    if member.trusted_as(*TRAINABLE_STATES):
        return "is paused" if member.paused else "takes no steps"
    return f"is {member.state if member.suspected is None else 'suspected'}"


def _start(state: State, members: tuple[NodeId, ...], now: float, out: list[Effect]) -> State:
    number = state.committed + 1
    state, entered = _enter(state, members, now, out)
    participants = dict(sorted(entered.items(), key=lambda entry: order(entry[0])))
    every = state.config.data.eval_every * state.turns.fragments
    due = state.committed % every == 0 and not _evaluated_before(state)
    able = [n for n in participants if state.members.here[n].measures]
    able = [n for n in able if n in state.makers] or able  # the first to have the new state
    attempts = state.round.ledger.attempt if state.round.number == number else 0
    return replace(
        state,
        round=RoundState(
            number=number,
            phase=Phase.INNER,
            reason=_training(state, len(participants)),
            started_at=now,
            participants=participants,
            ledger=replace(RoundState().ledger, attempt=attempts),
            evaluator=able[number % len(able)] if due and able else None,
        ),
    )


def _training(state: State, members: int) -> str:
    steps = count(state.steps, "inner step")
    return f"{members} members at {steps} each" if members > 1 else f"1 member at {steps}"


def _enter(
    state: State, nodes: tuple[NodeId, ...], now: float, out: list[Effect]
) -> tuple[State, dict[NodeId, float]]:
    """Make `nodes` active members with leases for the round, and for what they may have carried over; so may
    suspects that are heard again before the next one. Also returns since when each is counted, in seconds."""
    entering, rounds = frozenset(nodes), dict[NodeId, int]()  # of samples
    for node, member in state.members.here.items():
        if node in entering:
            trained = member.state is MemberState.SYNCED and state.committed > 0  # while it was not counted yet
            rounds[node] = 1 + max(member.missed, trained)
        elif member.state is MemberState.ACTIVE and node not in state.round.participants:
            rounds[node] = 1 + min(member.missed + 1, MAX_MISSED_ROUNDS)
    for node in nodes:
        member = state.members.here[node]
        if member.state is not MemberState.ACTIVE:
            out.append(Note(f"{member.name} is active from round {state.committed + 1} on", node))
    entered = dict.fromkeys(nodes, now)
    if state.config.delay(state.committed) and state.round.opened_at:  # makers did not stop in between
        entered |= {n: state.round.opened_at for n in nodes if n in state.makers}
    here = state.members.here
    changed = (m for m in map(here.__getitem__, nodes) if m.state is not MemberState.ACTIVE or m.reason)
    members = who.put(state.members, *(replace(m, state=MemberState.ACTIVE, reason="") for m in changed))
    leases = data.grant_each(state.leases, {n: state.lease * k for n, k in rounds.items()})
    return replace(state, members=members, leases=leases), entered


def _evaluated_before(state: State) -> bool:
    if state.committed == 0:
        return state.initial_val_loss is not None
    return state.pending is None or state.pending.val_loss is not None


def record_steps(state: State, node: NodeId, round_: int, now: float) -> State:
    """The member has taken the round's inner steps."""
    r = state.round
    if r.phase is not Phase.INNER or round_ != r.number or node not in r.participants or node in r.reached:
        return state
    state = _paced(replace(state, members=who.enter_step(state.members, node)), node, state.steps, now)
    return with_round(state, marked(replace(state.round, reached=r.reached | {node}), node, reached=now))


def record_contribution(state: State, event: ContributionReady, now: float, out: list[Effect]) -> State:
    """The member stopped training: enter what it can contribute."""
    r, node, work = state.round, event.node, event.contribution
    if event.round != r.number or node not in r.participants or node in r.ledger.contributions:
        return state
    lease = state.leases.by_node.get(node, ())
    if not lease or work.front != data.front(lease) or state.members.here[node].state_round != state.committed:
        return state  # trained on samples of another lease or from another state: it takes these steps again
    if not 0 < work.samples <= data.size(lease):
        reason = f"it claims {count(work.samples, 'sample')} of a lease of {data.size(lease)}"
        state = charge(state, node, Evidence(r.number, Offence.FALSE_CLAIM, reason), out)
        return remove(state, node, MemberState.EVICTED, reason, out) if node in state.members.here else state
    steps = min(work.steps, -(-work.samples // state.config.inner.batch_size))
    state = _paced(replace(state, members=who.enter_step(state.members, node)), node, steps, now)
    if r.phase not in (Phase.INNER, Phase.COLLECTING):
        return state  # too late for this round: it counts in the next
    if work.fresh:
        state = replace(state, earlier={n: e for n, e in state.earlier.items() if n != node})
    earlier = state.earlier[node][state.fragment] if node in state.earlier else 0
    entry = replace(work, life=event.life, earlier=earlier)
    answers = r.answers if r.closed_at is None else (*r.answers, now - r.asked_at)
    full = work.steps >= state.steps or work.samples == data.size(lease)
    done = r.reached | {node} if full and node not in r.reached else r.reached
    r = replace(state.round, ledger=contribute(r.ledger, node, entry), answers=answers, reached=done)
    return with_round(state, marked(r, node, contributed=now, **({"reached": now} if full else {})))


def _paced(state: State, node: NodeId, steps: int, now: float) -> State:
    if state.round.patient_until:
        return state  # the coordinator was away: how much of the time went into steps cannot be told
    member = state.members.here[node]
    took = now - state.round.participants[node]
    return with_member(state, replace(member, pace=steps / took)) if took > 0 and steps > 0 else state


def close_if_due(state: State, now: float, renew_grace: bool, out: list[Effect]) -> State:
    """INNER: tell the members to finish when the round has what it needs. How long it waits for the late takes a
    look at all of them: that is done where `renew_grace` says so, at ticks, and when the last one of them came."""
    r, away = state.round, absent(state)
    trusted = len(r.participants) - len(away)
    if r.participants and state.state_lost:
        return with_round(state, replace(r, reason=rollback.wait_reason(state)))
    if r.participants and rollback.is_in_doubt(state):  # and what pace its members have is not seen so
        return with_round(state, replace(r, reason=rollback.wait_reason(state), patient_until=now))
    if trusted < state.config.members.minimum:
        return refill(state, now, out)
    done = len(r.reached) - len(r.reached & away)
    if done < quorum(state):
        return with_round(
            state, replace(state.round, reason=_training(state, len(r.participants)), reached_at=None, grace=None)
        )
    if r.reached_at is None:
        return with_round(state, replace(state.round, reached_at=now))
    h = count(state.steps, "inner step")
    number = trusted - done - len(r.ledger.contributions.keys() - r.reached - away)
    if not number:
        return _close(state, now, _all_done(state, away, h))
    late = _late(state, away)
    if renew_grace or r.grace is None or not _is_late(state, r.grace.node, away):
        state = with_round(state, replace(state.round, grace=choose_grace(state, list(late))))
        r, late = state.round, _late(state, away)
    assert r.grace is not None
    if now < max(r.grace.until, r.patient_until):
        waits = f"{done} of {count(trusted, 'member')} reached {h}; waits for {state.names(late, number)}"
        return with_round(state, replace(state.round, reason=waits))
    short = list(late)
    names = state.names(short)
    what = "contributes the steps that it has" if len(short) == 1 else "contribute the steps that they have"
    out.append(Note(f"round {r.number} closes: {names} {what}"))
    return _close(state, now, f"a quorum has its {h}; {names} had less")


def _all_done(state: State, away: frozenset[NodeId], h: str) -> str:
    """Why the round closes when nobody is late."""
    r = state.round
    if short := [n for n in r.participants if n not in r.reached and n not in away]:
        return f"{state.names(short)} stopped short of {h}"
    lost = out_of_reach(state)
    saving = saving_bytes(state) - lost
    idle = without_steps(state) - saving - lost
    kinds = (lost, "out of reach"), (saving, "which saves bytes"), (idle, "whose trainer takes no steps")
    found = [f"{state.names([n for n in r.participants if n in nodes])}, {why}," for nodes, why in kinds if nodes]
    without = f" but {' and '.join(found)}" if found else ""
    return f"every member{without} has its {h}"


def _is_late(state: State, node: NodeId, away: frozenset[NodeId]) -> bool:
    r = state.round
    done = node in r.reached or node in r.ledger.contributions
    return not done and node not in away and node in r.participants


def _late(state: State, away: frozenset[NodeId]) -> Iterator[NodeId]:
    """The participants that the round could wait for, in order."""
    r = state.round
    there = r.ledger.contributions
    return (n for n in r.participants if n not in r.reached and n not in there and n not in away)


def choose_grace(state: State, late: list[NodeId]) -> Grace:
    """Decide until when the round waits for `late`: whose pace makes it within the grace has made it then."""
    r, rounds, here = state.round, state.config.rounds, state.members.here
    assert r.reached_at is not None
    inner = state.inner_time
    most = r.reached_at + rounds.grace * inner
    last, until = late[0], -inf
    for node in late:
        pace, missed = here[node].pace, here[node].missed
        expected = r.participants[node] + state.steps / pace if pace else most
        if expected > most or not (pace or not missed):
            continue
        share = OWED_SHARE if owes_time(state, node) else GRACE_SHARE
        if (latest := min(most, expected + share * inner)) > until:
            last, until = node, latest
    return Grace(last, max(until, r.reached_at))


def _close(state: State, now: float, why: str) -> State:
    return with_round(
        state, replace(state.round, phase=Phase.COLLECTING, closed_at=now, asked_at=now, reason=why, story=why)
    )


def many_are_away(state: State) -> bool:
    """Whether so many may be dead, or went, that those who are back first when all streams broke would make the
    round alone. They are heard again soon, or out; and have their time from then on."""
    r, here = state.round, state.members.here
    away = len(_away(state))
    if not away or away + len(r.gone) <= max(MAX_AWAY_SHARE * len(r.participants), 1):
        return False
    away += sum(n not in here for n in r.gone)
    everybody = r.participants.keys() | r.gone.keys() | set(trainers(state))
    return away > max(MAX_AWAY_SHARE * len(everybody), 1)


def _away(state: State) -> list[NodeId]:
    """Participants that may be dead. For who owes the others time nobody waits."""
    return [n for n in sorted(out_of_reach(state), key=order) if not owes_time(state, n)]


def wait_for_many(state: State, now: float) -> tuple[State, bool]:
    """COLLECTING, while many are away: whether the round waits for them. Who is away and never out, as it is heard
    now and then, is waited for no longer than any member may be silent."""
    r = state.round
    seconds = now - r.asked_at  # since the last look, if there was one, and the coordinator was not away itself
    seconds = seconds if r.away and seconds <= rollback.MAX_TICK_GAP_SECONDS else 0.0
    away = r.away | {n: r.away.get(n, 0.0) + seconds for n in _away(state)}
    if max(away.values()) > state.config.rounds.collect + state.config.members.lease:
        return state, False
    return with_round(state, replace(r, asked_at=now, away=away, reason=collect_reason(state))), True


def reduce_members(state: State, now: float, tick: bool, out: list[Effect]) -> tuple[NodeId, ...]:
    """COLLECTING: the members of the reduce once they are known, else none. Whether to wait for the late takes a
    look at all of them: while many are late only ticks do that, not each contribution."""
    r, contributions = state.round, state.round.ledger.contributions
    away = absent(state) | late_work.spared(state, now)
    late, patience = missing(state, away), min(MIN_COLLECT_SECONDS, state.config.rounds.collect)
    if late and (now < r.asked_at + patience or (late > MANY_LATE and not tick)):
        return ()
    trusted = tuple(n for n in r.participants if n not in away)
    waited_for = [n for n in trusted if n not in contributions]
    able = tuple(n for n in trusted if n in contributions)
    # What one alone commits would die with it; but of who has taken no step, or saves bytes, nothing is to be had.
    n = counted(state) - len(_unstepped(state, waited_for))
    need = max(ceil(state.config.rounds.quorum * n), min(2, n))
    if len(able) < max(need, state.config.members.minimum) or not reachable(state, able):
        return ()
    if waited_for and now < max(collect_deadline(state, waited_for), r.patient_until):
        return ()
    return able


def go_on_without(state: State, now: float, out: list[Effect]) -> State:
    """COLLECTING: say whom the reduce leaves out. Who has taken no step by now is idle from here on; for whom the
    others waited, owes them the time."""
    state = late_work.lend_to_the_late(state, now)
    r = state.round
    if 2 * len(r.away) <= len(r.participants):  # else it is no fault of theirs
        for node, seconds in r.away.items():
            state = lend_time(state, node, seconds)
    idle, trusted, saving = without_steps(state), state.members.trusted, state.members.saving
    there = {n for n in r.ledger.contributions if trusted(n) and n not in saving}
    without = [n for n in r.participants if n not in idle and n not in there]
    unstepped = _unstepped(state, [n for n in without if n not in r.ledger.contributions and trusted(n)])
    if unstepped:
        one = "its trainer has taken no step; no round waits for it until it has"
        more = "their trainers have taken no step; no round waits for them until they have"
        why = one if len(unstepped) == 1 else more
        out.append(Note(f"round {r.number} goes on without {state.names(unstepped)}: {why}"))
    if worked := [n for n in without if n not in unstepped]:
        work = f"{'its' if len(worked) == 1 else 'their'} work counts in the next"
        out.append(Note(f"round {r.number} goes on without {state.names(worked)}; {work}"))
    if not unstepped:
        return state
    round_ = replace(r, idled=r.idled.union(unstepped))
    return replace(state, members=who.set_idle(state.members, unstepped), round=round_)


def _unstepped(state: State, nodes: Iterable[NodeId]) -> list[NodeId]:
    """Those of `nodes` whose trainers have taken no step in this life."""
    return [n for n in nodes if not state.members.here[n].stepped]


def collect_reason(state: State) -> str:
    """The sentence that says whom a closing round waits for."""
    r, away = state.round, absent(state)
    if not (number := missing(state, away)):
        return r.story
    late = (n for n in r.participants if n not in r.ledger.contributions and n not in away)
    return f"waits for what {state.names(late, number)} {'has' if number == 1 else 'have'}"


def collect_deadline(state: State, late: list[NodeId]) -> float:
    """The time, in seconds, from which the round no longer waits for `late`, who were told to finish.

    By what was measured they have two inner steps at their pace, and three times what the others took; but the
    round does not stand still for longer than its grace, nor than a tenth of its inner time, for nothing is lost:
    their work counts in the next one.
    """
    r, rounds, here = state.round, state.config.rounds, state.members.here
    share = min(rounds.grace, MAX_COLLECT_SHARE)
    most = min(rounds.collect, max(MIN_COLLECT_SECONDS, share * state.inner_time))
    steps = [2 / here[n].pace if here[n].pace else (0.0 if here[n].missed else most) for n in late]
    measured = 3 * median(r.answers or (0.0,)) + max(steps)
    return r.asked_at + min(most, max(MIN_COLLECT_SECONDS, measured))


def quorum(state: State) -> int:
    """The number of members that make the round close when they have their inner steps. Who stopped short of them
    is not counted: nothing more will come of it."""
    r = state.round
    stopped = r.ledger.contributions.keys() - r.reached - saving_bytes(state)
    return ceil(state.config.rounds.quorum * (counted(state) - len(stopped)))


def refill(state: State, now: float, out: list[Effect]) -> State:
    """Let members that are there without counting enter a round that has too few, or have it wait."""
    r = state.round
    if not r.participants:
        return start_over(state)
    able = (n for n in trainers(state) if n not in state.members.saving)
    entering = tuple(n for n in able if n not in r.participants)
    there = len(r.participants) - len(absent(state))
    entering = contributors(state, entering, min(len(entering), max(state.config.members.minimum, 1) - there))
    if not entering:
        return with_round(
            state,
            replace(
                state.round,
                reason=too_few(
                    state, len(r.participants) - len(absent(state)), state.config.members.minimum, "minimum"
                ),
            ),
        )
    state, entered = _enter(state, entering, now, out)
    participants = {**r.participants, **entered}
    state = with_round(
        state,
        replace(
            state.round,
            participants={n: participants[n] for n in sorted(participants, key=order)},
            reached_at=None,
            grace=None,
            asked_at=now,
            story=f"{r.story}; {state.names(entering)} entered later" if r.story else "",
        ),
    )
    return (
        with_round(state, replace(state.round, reason=collect_reason(state)))
        if r.phase is Phase.COLLECTING
        else state
    )
