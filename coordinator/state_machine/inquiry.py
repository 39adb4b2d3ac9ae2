"""The inquiry into a round that was slow, or in which something failed: who is asked for an account of it, for how
long, and the verdict. Pure.

    committed --slow, or something failed--> open: those who were there are asked, in their views
      |                                        |  all have answered, or time is up
      | as usual                               v
      +--------------------------> record   closed: the verdict is noted
                                               |  the record is complete, or the next round is committed
                                               v
                                            record, with the verdict

The record of the round waits for the answers as it does for digests and the validation loss; nothing else does. A
state that differs is found after the commit: then the verdict is given anew. What members tell counts for nothing
but the verdict (`atoll.coordinator.causes`), and nobody is charged for that.
"""

from atoll.comm.ids import NodeId
from atoll.comm.incidents import is_notable
from atoll.comm.replace import replace
from atoll.coordinator.causes.explanation import Verdict
from atoll.coordinator.causes.observations import GONE, MemberSeen, Observations, Standing
from atoll.coordinator.causes.slowness import RoundPace, is_slow, usual
from atoll.coordinator.causes.verdict import verdict
from atoll.coordinator.state_machine import members as who
from atoll.coordinator.state_machine.events import CommitRecord, Effect, Event, Note, RoundAccounted, TrainersSeen
from atoll.coordinator.state_machine.members import REDUCER, Member, Members
from atoll.coordinator.state_machine.state import Inquiry, Moments, RoundState, State, order

ANSWER_SECONDS = 4.0  # for which members are waited for
MAX_ASKED = 64  # members
SLOW_PACE = 0.8  # times its usual pace: a member whose steps a round closed without is looked at
PACE_WEIGHT = 0.25  # of a member's latest pace in its usual one


def begin(state: State, record: CommitRecord, pace: RoundPace, now: float) -> Inquiry | None:
    """The inquiry into the round that is about to be committed with this record; None: it was as usual. `state`:
    the state before the commit."""
    r = state.round
    if not (is_slow(pace, record.predicted, state.paces) or _failed(state, record)):
        return None
    seen = Observations(
        r.number,
        dict(record.seconds),
        usual(state.paces),
        record.predicted,
        record.attempts,
        r.story.rpartition("; ")[2] if record.attempts > 1 else "",
        _members_seen(state, record, now),
        r.lost,
        r.spoiled,
        r.late,
        changed=r.changed,
        restarts=r.restarts,
        stalled=r.stalled,
    )
    here = state.members.here
    unheard = frozenset(n for n, m in seen.members.items() if m.contributed is None and not m.rests and n in here)
    return Inquiry(seen, _asked(state, seen), until=now + ANSWER_SECONDS, unheard=unheard)


def _failed(state: State, record: CommitRecord) -> bool:
    """Whether something failed in the round, or somebody was waited for in vain."""
    r, here = state.round, state.members.here
    if r.gone or r.lost or r.wrong or r.forgers or r.restarts or r.stalled or r.changed or record.attempts > 1:
        return True
    if any(is_notable(told.incidents) for told in r.completions.values()):
        return True
    for node in r.participants:
        member = here[node]
        if member.suspected is not None or not member.connected:
            return True
        slow = 0 < member.pace < SLOW_PACE * member.usual_pace
        rested = member.rests and node not in r.idled
        if not rested and (node not in record.contributors or (node not in r.reached and slow)):
            return True
    return False


def _members_seen(state: State, record: CommitRecord, now: float) -> dict[NodeId, MemberSeen]:
    r, members = state.round, state.members
    helpers = [e.node for e in r.ledger.entries if e.contribution is None and not e.gone]
    found = {}
    for node in sorted({*r.participants, *r.gone, *helpers}, key=order):
        member = members.here.get(node) or members.departed.get(node)
        if member is not None:
            found[node] = _member_seen(state, record, member, now)
    return found


def _member_seen(state: State, record: CommitRecord, member: Member, now: float) -> MemberSeen:
    r, node = state.round, member.node
    at = r.moments.get(node, Moments())
    closed, planned = r.closed_at or now, r.planned_at or now
    contribution = r.ledger.contributions.get(node)
    entered = r.participants.get(node, r.started_at)
    waited = node in r.idled or r.gone.get(node) is Standing.STALLED  # for its steps, in vain
    measured = (at.reached or at.contributed) and not r.restarts
    ended = r.gone.get(node, Standing.SAVING) is not Standing.SAVING  # its life that took part
    return MemberSeen(
        member.name,
        _standing(state, member),
        life=member.life - (ended and node in state.members.here),
        reached=at.reached - r.started_at if at.reached else None,
        contributed=max(at.contributed - closed, 0.0) if at.contributed else None,
        sealed=at.sealed - planned if at.sealed else None,
        complete=at.complete - planned if at.complete else None,
        counted=node in record.contributors or member.role == REDUCER,
        steps=contribution.steps if contribution is not None else 0,
        pace=member.pace if measured else 0.0,
        usual=member.usual_pace,
        incidents=r.farewells.get(node, 0),
        rests=(member.rests and not waited) or member.role == REDUCER or entered > r.started_at,
    )


def _standing(state: State, member: Member) -> Standing:
    r = state.round
    if member.node in r.gone:
        return r.gone[member.node]
    if not member.connected:
        return Standing.BROKE
    return Standing.HERE if member.suspected is None else Standing.SILENT


def _asked(state: State, seen: Observations) -> frozenset[NodeId]:
    """Who is asked: of many, those of whom something was seen, and those that spoke of them, before all others."""
    here = state.members.here
    able = [n for n in seen.members if n in here and here[n].connected]
    if len(able) > MAX_ASKED:
        odd = {n for n, m in seen.members.items() if m.standing is not Standing.HERE or not m.counted}
        odd |= {n for pair in (*seen.broken, *seen.forged) for n in pair}
        odd |= {n for n, told in state.round.completions.items() if told.incidents}
        last = sorted(able, key=lambda n: -(seen.members[n].complete or 0.0))
        able = sorted(last, key=lambda n: n not in odd)[:MAX_ASKED]
    return frozenset(able)


def with_usual_paces(members: Members, r: RoundState) -> Members:
    """The members of a round that is committed, with what was found of their paces."""
    there = (members.here[n] for n in r.participants if n in members.here and n in r.moments)
    return who.put(members, *(replace(m, usual_pace=_usual(m)) for m in there if m.pace))


def _usual(member: Member) -> float:
    was = member.usual_pace
    return was + PACE_WEIGHT * (member.pace - was) if was else member.pace


def is_open(state: State) -> bool:
    """Whether the record of the last commit waits for members to account for the round."""
    return state.inquiry is not None and not state.inquiry.closed


def record(state: State, event: RoundAccounted) -> State:
    """Enter a member's account, if it was asked for it."""
    asked = state.inquiry
    if asked is None or asked.closed or event.round != asked.seen.round or event.node not in asked.asked:
        return state
    return replace(state, inquiry=replace(asked, accounts=asked.accounts | {event.node: event.account}))


def judge(state: State, now: float) -> list[Event]:
    """What heartbeats, which the journal has no part in, tell of members that brought nothing to the round, by
    `now` in seconds. The shell asks at every tick and submits the answer."""
    asked = state.inquiry
    if asked is None or not asked.unheard:
        return []
    here, round_ = state.members.here, asked.seen.round
    told = (here[n] for n in sorted(asked.unheard, key=order) if n in here)
    steps = ((m.node, m.step[1] if m.step[0] == round_ else 0, max(now - m.moved_at, 0.0)) for m in told)
    return [TrainersSeen(round_, tuple(steps))]


def hear(state: State, event: TrainersSeen) -> State:
    """Enter what heartbeats told."""
    asked = state.inquiry
    if asked is None or event.round != asked.seen.round or not asked.unheard:
        return state
    members, inner = dict(asked.seen.members), asked.seen.seconds.get("inner", 0.0)
    for node, steps, still in event.told:
        if node in members:
            pace = steps / inner if inner and steps else 0.0
            members[node] = replace(members[node], steps=steps, still=still, pace=members[node].pace or pace)
    return replace(state, inquiry=replace(asked, seen=replace(asked.seen, members=members), unheard=frozenset()))


def advance(state: State, now: float, out: list[Effect]) -> State:
    """Close the inquiry when all have answered who can, or time is up, and say what came of it."""
    asked = state.inquiry
    if asked is None or asked.closed:
        return state
    here = state.members.here
    awaited = (n for n in asked.asked if n not in asked.accounts and state.members.trusted(n))
    if now < asked.until and (asked.unheard or next(awaited, None) is not None):
        return state
    seen = replace(asked.seen, members={n: _as_it_is(m, here.get(n)) for n, m in asked.seen.members.items()})
    return replace(state, inquiry=_named(state, replace(asked, seen=seen, closed=True), out))


def _as_it_is(seen: MemberSeen, member: Member | None) -> MemberSeen:
    """What was seen of a member at the commit, as it is known now: whose connection was broken may be back."""
    if member is None or member.suspected is not None or not member.connected or seen.standing not in GONE:
        return seen
    return replace(seen, back=True) if seen.life != member.life else replace(seen, standing=Standing.AWAY)


def with_digests(state: State) -> State:
    """The state with what the digests of the new state say in the inquiry: whose is another. Where the round was
    as usual until then, that alone is a reason for one."""
    pending = state.pending
    if pending is None or pending.digests_equal is not False or not pending.state_digest:
        return state
    odd = frozenset(n for n, d in pending.digests.items() if d != pending.state_digest)
    asked = state.inquiry
    if asked is None:
        members = {n: MemberSeen(pending.names.get(n, str(n))) for n in pending.members}
        asked = Inquiry(Observations(pending.round, dict(pending.seconds), members=members), closed=True)
    return replace(state, inquiry=replace(asked, seen=replace(asked.seen, differed=odd)))


def end(state: State, out: list[Effect]) -> tuple[State, Verdict | None]:
    """The state without the inquiry, and its verdict, for the record that is about to be published."""
    if state.inquiry is None:
        return replace(state, blamed=("", "", "")) if any(state.blamed) else state, None
    found = _named(state, state.inquiry, out).named
    return replace(state, inquiry=None, blamed=_about(found)), found


def _named(state: State, asked: Inquiry, out: list[Effect]) -> Inquiry:
    """The inquiry with its verdict, which is noted where it is news: what lasts, and costs no time, is noted
    once."""
    seen = asked.seen
    found = verdict(replace(seen, accounts=asked.accounts))
    lasts = found is not None and not found.seconds and _about(found) == state.blamed
    if found is None or lasts or _about(found) == _about(asked.named):
        return replace(asked, named=found)
    took = f" took {seen.total:.1f} s, usually {seen.usual_total:.1f}" if found.slower else ""
    member = NodeId(found.culprit) if found.culprit in seen.members else None
    out.append(Note(f"round {seen.round}{took}: {found.sentence} ({found.kind})", member, seen.round, found))
    return replace(asked, named=found)


def _about(found: Verdict | None) -> tuple[str, str, str]:
    return ("", "", "") if found is None else (found.kind, found.culprit, found.peer)
