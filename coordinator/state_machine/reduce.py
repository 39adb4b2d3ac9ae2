"""The reduce of a round: attempts, who is to blame when one fails, and the commit. Pure.

It ends in a commit when each chunk is sealed and every member holds all of them. When a member is lost, the next
attempt goes on among the others with what is there; sealed chunks that nobody living holds are reduced again.
"""

from collections import Counter
from collections.abc import Collection, Iterable

from atoll.comm.bitmap import bitmap
from atoll.comm.ids import Epoch, Incarnation, NodeId, Round
from atoll.comm.plan import Fence
from atoll.comm.replace import replace
from atoll.comm.rounding import rounded
from atoll.coordinator.causes import slowness
from atoll.coordinator.placement.bandwidth_shares import blend
from atoll.coordinator.state_machine import (
    audit,
    broken_paths,
    conduct,
    credit,
    disputes,
    inquiry,
    lateness,
    replay,
    rollback,
)
from atoll.coordinator.state_machine import leases as data
from atoll.coordinator.state_machine import ledger as book
from atoll.coordinator.state_machine import members as who
from atoll.coordinator.state_machine.changes import fail_attempt, marked, with_member, with_round
from atoll.coordinator.state_machine.chunk_owners import assign_owners, reachable, reducers
from atoll.coordinator.state_machine.claims import with_counted_work, with_timely_claims
from atoll.coordinator.state_machine.credit import CreditBook, Work
from atoll.coordinator.state_machine.delta_scores import charge_outliers
from atoll.coordinator.state_machine.events import (
    ChunksSealed,
    CommitRecord,
    Effect,
    Note,
    OrphansFound,
    ReduceComplete,
)
from atoll.coordinator.state_machine.link_rates import with_seen_rates, witnessed_rates
from atoll.coordinator.state_machine.makers import known_lately
from atoll.coordinator.state_machine.members import REDUCER, MemberState
from atoll.coordinator.state_machine.newcomers import with_exchange
from atoll.coordinator.state_machine.norms import without_false_norms
from atoll.coordinator.state_machine.reduce_levels import choose_levels, describe_choice
from atoll.coordinator.state_machine.rounds import MAX_MISSED_ROUNDS
from atoll.coordinator.state_machine.state import (
    AttemptState,
    Phase,
    RoundState,
    State,
    count,
    order,
)
from atoll.coordinator.state_machine.state_sync import publish
from atoll.coordinator.state_machine.weights import clips, scales

MIN_UNREMARKED_CLIP = 0.1  # factor; a delta that is scaled down by more is noted
IDLE_REDUCER_REASON = (
    "it did not finish in time: it is to own chunks again when it has joined anew, or nobody else can"
)


def open_attempt(state: State, members: tuple[NodeId, ...], now: float, out: list[Effect]) -> State:
    """Open the next attempt and put it in force: it continues the one before without those that were lost."""
    state = with_timely_claims(state, now, out)
    helpers, chunks = reducers(state, members), state.chunks.count
    if state.round.planned_at is None:
        state = with_round(state, replace(state.round, salt=audit.salt(state, (*members, *helpers))))
    elif now > state.round.asked_at:  # else the attempt follows at once on the one before
        state = audit.give_time_anew(state, now)
    if state.round.salt and (void := book.unlooked(state.round.ledger, {*members, *helpers})):
        state = with_round(state, replace(state.round, ledger=book.unseal(state.round.ledger, void)))
    r = state.round
    planned = assign_owners(state, members, helpers, chunks)
    split = None if r.ledger.owners else choose_levels(state, members, planned)
    owners = split.owners if split is not None else ()
    ledger = book.reopen(r.ledger, members, helpers, chunks, lambda n: owners or planned.deal(n))
    reason = f"{len(members)} members reduce" if len(members) > 1 else "1 member reduces"
    predicted = planned.seconds
    if split is not None:
        ledger = book.divide(ledger, split.regions, split.relays)
        state = with_round(state, replace(state.round, levels=split.levels, predictions=split.predictions))
        predicted = split.predicted or predicted
        reason += describe_choice(split)
    if r.planned_at is not None:
        without = sorted(r.participants.keys() - set(members), key=order)
        reason = f"attempt {ledger.attempt} among {count(len(members), 'member')}"
        reason += f", without {state.names(without)}" if without else ""
        out.append(Note(f"round {r.number}: {reason}; {r.story.rpartition('; ')[2]}"))
    for entry, clip in zip(ledger.entries, clips(ledger, state.config), strict=True):
        if clip < MIN_UNREMARKED_CLIP and not any(e.node == entry.node for e in r.ledger.entries):
            sentence = (
                f"the delta of {state.name(entry.node)} is {1 / clip:.3g} times as long as most: it is scaled down"
            )
            out.append(Note(sentence, entry.node))
    state = with_round(
        state, replace(state.round, phase=Phase.REDUCING, reason=reason, planned_at=_first(r.planned_at, now))
    )
    return _put_in_force(state, ledger, predicted, now)


def _scaled(state: State, ledger: book.Ledger) -> dict[NodeId, float]:
    """Whose deltas count less than they say, and how much."""
    found = zip(ledger.entries, scales(ledger, state.config), strict=True)
    return {entry.node: scale for entry, scale in found if scale < 1}


def _put_in_force(state: State, ledger: book.Ledger, predicted: float, now: float) -> State:
    fence = Fence(Incarnation(state.incarnation), Epoch(state.epoch), Round(state.round.number), ledger.attempt)
    members = frozenset(ledger.members)
    held = {n: h for n, h in state.round.completions.items() if n in members and h.fence.attempt >= ledger.newest}
    half_told = ledger.attempt if now < state.round.patient_until else state.round.half_told
    state = with_round(
        state, replace(state.round, ledger=ledger, completions=held, half_told=half_told, held=False)
    )
    expected = lateness.expected(state, predicted)
    patience = lateness.patience(state, expected)
    plan = AttemptState(fence, now, now, predicted=predicted, expected=expected, patience=patience)
    return with_round(state, replace(state.round, plan=plan))


def _first(at: float | None, now: float) -> float:
    return now if at is None else at


def record_seals(state: State, event: ChunksSealed, now: float) -> State:
    """Enter an owner's seals in the ledger."""
    r = state.round
    if event.fence.round != r.number:
        return state
    norms, since, before = (event.norms if state.config.outer.clip else None), event.fence.attempt, r.ledger
    required = r.ledger.required.get(since, b"") if r.salt else b""
    summed = book.enter_sums(r.ledger, event.node, since, event.sums, event.sum_dots)
    ledger = book.seal(summed, event.node, since, event.seals, norms, required, event.dots)
    fresh = [c for c, _, _ in event.seals if c in ledger.sealed and c not in r.ledger.sealed]
    whole = ledger.complete and not r.ledger.complete
    plan, sealed_at = r.plan, now if whole else r.sealed_at
    if plan is not None:
        own = any(c not in ledger.layered for c in fresh)  # else a relay may have been late
        times = plan.sealed_at | {event.node: now} if own else plan.sealed_at
        plan = replace(plan, sealed_at=times, stage_at=now if whole else plan.stage_at)
    r = replace(r, ledger=ledger, plan=plan, sealed_at=sealed_at)
    told = [c for c, *_ in (*event.seals, *event.sums) if book.is_told(ledger, c) and not book.is_told(before, c)]
    state = audit.draw(with_round(state, marked(r, event.node, sealed=now) if fresh else r), told, now)
    heard = (c for c, *_ in event.sums if ledger.sums.get(c) != before.sums.get(c))
    return audit.compare_told(state, heard, now)


def record_orphans(state: State, event: OrphansFound) -> State:
    """Enter which chunks of owners that are gone a member holds. Of what it says that is kept which can be so."""
    r = state.round
    if r.plan is None or r.plan.fence != event.fence or event.node not in r.ledger.members:
        return state
    told = dict(event.here)
    here = tuple((c, told[c]) for c in r.ledger.orphans if told.get(c) == r.ledger.sealed[c].digest)
    orphans = r.plan.orphans | {event.node: replace(event, here=here)}
    return with_round(state, replace(state.round, plan=replace(r.plan, orphans=orphans)))


def record_completion(state: State, event: ReduceComplete, now: float) -> State:
    """Enter that a member has every sealed chunk, and what its links carried."""
    r = state.round
    attempt, ledger = event.fence.attempt, r.ledger
    late = event.fence.round != r.number or (attempt < ledger.attempt and attempt < ledger.newest)
    if late or event.node not in r.ledger.members or event.node not in state.members.here:
        return state
    if event.node in r.wrong and not event.proven and not (r.ledger.complete and event.digest == r.ledger.root):
        return state  # said before it was told the digests
    if event.up or event.down or event.rtts:
        member, here = state.members.here[event.node], state.members.here
        outside = blend(member.outside, event.outside)
        if r.levels > 1:  # less crosses than could
            outside = max(member.outside, event.outside)
        measured = replace(
            member,
            up=blend(member.up, event.up),
            down=blend(member.down, event.down),
            inside=blend(member.inside, event.inside),
            outside=outside,
            measured=member.measured + 1,
            rtts={n: seconds for n, seconds in (member.rtts | dict(event.rtts)).items() if n in here},
        )
        state = with_member(state, measured)
    r = state.round
    plan = None if r.plan is None else replace(r.plan, held_at={event.node: now} | r.plan.held_at)
    r = replace(r, completions=r.completions | {event.node: event}, plan=plan)
    return with_round(state, marked(r, event.node, complete=now))


def commit_or_retry(state: State, now: float, tick: bool, out: list[Effect]) -> State:
    """REDUCING: the attempt is over when all is held, or when it cannot end. Who is far behind the others takes a
    look at all of them: that is done at ticks."""
    r, here = state.round, state.members.here
    plan_, members, ledger = r.plan, r.ledger.members, r.ledger
    assert plan_ is not None
    if r.audits and (audited := audit.advance(state, now, out)) is not state:
        return audited
    gone = [n for n in members if n not in ledger.contributions] if ledger.withdrawn else []
    left = [n for n in members if n in ledger.contributions] if gone else list(members)
    if spared := set[NodeId]() if gone else lateness.spared(state, now):
        left = [n for n in left if n not in spared]
    # before so many have answered, no look at each is worth it
    answered, everywhere = len(r.completions) + len(plan_.missing_chunks) >= len(left) > 0, False
    if answered and ledger.complete and all(n in r.completions or n in plan_.missing_chunks for n in left):
        root = ledger.root
        everywhere = all(n in r.completions and r.completions[n].digest == root for n in left)
        if everywhere and rollback.is_in_doubt(state):
            return with_round(state, replace(r, reason=rollback.wait_reason(state), held=True))
        if everywhere and not r.audits:
            if untold := audit.untold(state):
                return audit.look_into_untold(state, untold, now, out)
            if (checked := without_false_norms(state, now, out)) is not state:
                return checked
            if replay.awaits_chunks(state, now):
                return state
            state = lateness.charge_stragglers(broken_paths.remember(state, out), out)
            state = charge_outliers(state, out)
            if spared:
                story = f"{r.story}; nobody waited for {state.names(sorted(spared, key=order))} to hold it"
                state = with_round(state, replace(state.round, story=story))
            committed = replace(_commit(state, left, now, out), unawaited=frozenset(spared))
            return conduct.settle(committed, len(r.participants), out)
        if not everywhere and not ledger.orphans and not gone:
            return disputes.resolve(state, left, now, out)
    if gone := gone or sorted(ledger.gone, key=order):
        one = len(gone) == 1
        if state.members.saving.issuperset(gone):
            why = "saves bytes" if one else "save bytes"
        else:
            why = "is gone" if one else "are gone"
        return fail_attempt(state, f"{state.names(gone)} {why}", now)
    if len(plan_.orphans) >= len(left) and ledger.orphans and all(n in plan_.orphans for n in left):
        return _adopt(state, now)
    if tick and ledger.complete and not everywhere:
        state = disputes.tell_stragglers(state, lateness.to_be_told(state, now), now)
    if not everywhere and lateness.is_overdue(state, now):
        if ledger.complete and 2 * len(r.completions) < len(members) and not r.wrong.issuperset(members):
            return disputes.tell_digests(state, now, out)
        slow = lateness.waited_for(state)
        late = sorted(slow, key=order)
        # Where others sealed all of theirs, all contributions were there; where not, once more is no accident.
        alone = ledger.attempt > 1 or not slow.issuperset(owner for owner in ledger.owners if owner)
        state = lateness.hold_to_account(state, late, now, out)
        idle = [here[n] for n in late if alone and n in here and here[n].role == REDUCER]
        idled = (replace(m, late=True, reason=IDLE_REDUCER_REASON) for m in idle)
        state = replace(state, members=who.put(state.members, *idled))
        others = [n for n in members if n not in slow]
        if len(others) >= max(state.config.members.minimum, 1) and reachable(state, others):
            for node in slow.intersection(members):
                ledger = book.withdraw(ledger, node)
        ledger = book.flatten(ledger)
        return fail_attempt(
            with_round(state, replace(state.round, ledger=ledger, late=state.round.late.union(late))),
            f"{state.names(late)} did not finish in time",
            now,
        )
    return state


def _adopt(state: State, now: float) -> State:
    """All members told which orphans they hold: holders own them now. Those of nobody, and those of leaves alone,
    which the others cannot ask, are reduced again, by those who have a place in the attempt."""
    r, ledger = state.round, state.round.ledger
    assert r.plan is not None
    leaves = {n for n in ledger.members if state.members.here[n].leaf}
    here = {n: dict(r.plan.orphans[n].here) for n in ledger.members if n not in leaves}
    helpers = [e.node for e in ledger.entries if e.contribution is None and not e.gone]
    if leaves.issuperset(ledger.members) and all(state.members.here[n].leaf for n in helpers):
        return fail_attempt(
            state, "nobody in it can be dialled", now
        )  # a leaf must own nothing: it would for good
    deal_ = assign_owners(state, ledger.members, helpers, len(ledger.owners)).deal
    return _put_in_force(state, book.adopt(ledger, here, deal_), r.plan.predicted, now)


def _commit(state: State, members_: list[NodeId], now: float, out: list[Effect]) -> State:
    state = publish(state, out)
    r, ledger = state.round, state.round.ledger
    assert r.plan is not None and r.closed_at is not None and r.planned_at is not None
    sample, parts = state.config.model.seq_len, book.inclusions(ledger, state.chunks)
    weights = {n: float(int(p.contribution.claimed * sample * p.part)) for n, p in parts.items()}
    held_ = state.leases.by_node
    used = {n: p.samples.get(data.front(held_[n]), 0) for n, p in parts.items() if held_.get(n)}
    here = state.members.here
    missed = {n: min(here[n].missed + 1, MAX_MISSED_ROUNDS) for n in r.participants if n in here}
    missed |= dict.fromkeys((n for n in weights if n in missed), 0)
    turns = {n: here[n].turns + 1 if n in r.slow else 0 for n in r.participants if n in here}
    other = [n for n, rounds in missed.items() if (rounds, turns[n]) != (here[n].missed, here[n].turns)]
    members = who.put(state.members, *(replace(here[n], missed=missed[n], turns=turns[n]) for n in other))
    members = who.put(members, *with_counted_work(members.here, r, weights))
    members = who.put(members, *with_seen_rates(members.here, witnessed_rates(r.completions)))
    members = with_exchange(members, ledger)
    near: dict[int, list[NodeId]] = {}
    for entry, g in zip(ledger.entries, ledger.regions, strict=False):
        near.setdefault(g, []).append(entry.node)
    scaled = _scaled(state, ledger)
    rates = {n: members.here[n].rates for n in members_}
    seconds = {
        "inner": r.closed_at - r.started_at,
        "collect": r.planned_at - r.closed_at,
        "reduce": r.sealed_at - r.planned_at,
        "commit": now - r.sealed_at,
    }
    record = CommitRecord(
        round=r.number,
        epoch=state.epoch,
        attempts=ledger.attempt,
        members=tuple(r.participants),
        contributors=weights,
        tokens=state.tokens + sum(map(int, weights.values())),
        train_loss=rounded(_mean_loss(parts.values()), 24),
        seconds={phase: rounded(spent, 24) for phase, spent in seconds.items()},
        bytes_up={n: r.completions[n].bytes_up for n in members_},
        bytes_down={n: r.completions[n].bytes_down for n in members_},
        reason=r.story,
        sealed_digest=ledger.root.hex(),
        shares={n: rounded(k / len(ledger.owners), 16) for n, k in Counter(o for o in ledger.owners if o).items()},
        predicted=rounded(r.plan.predicted, 24),
        levels=r.levels,
        predictions={plan: rounded(spent, 24) for plan, spent in r.predictions.items()},
        regions=tuple(tuple(near[g]) for g in sorted(near)),
        rates={n: (rounded(up, 8), rounded(down, 8)) for n, (up, down) in rates.items() if up},
        norms={n: rounded(p.contribution.norm, 16) for n, p in parts.items()},
        scales={n: scaled[n] for n in weights if n in scaled},
        samples={n: data.first_samples(held_[n], count) for n, count in used.items()},
        fragment=state.fragment,
        lacking=book.missing_contributors(ledger, parts),
        committed_at=now,
        names={n: state.name(n) for n in sorted({*r.participants, *weights}, key=order)},
        losses={n: rounded(p.contribution.loss, 16) for n, p in parts.items()},
        exchange={n: rounded(r.moments[n].complete - r.planned_at, 8) for n in members_ if n in r.completions},
    )
    known = known_lately(state, {*r.participants, *r.gone, *members_})
    state, pace = rollback.remember(state), slowness.RoundPace(**record.seconds)
    return replace(
        state,
        members=inquiry.with_usual_paces(members, r),
        last_counted=state.last_counted | _last_counted(state, record),
        earlier=state.earlier | _earlier(state, parts),
        committed=r.number,
        digest=b"",
        lost_state=None,
        sealed=ledger.root,
        makers=frozenset(members_),
        known_lately=known,
        fleet=len({*known, *here}),
        losses_at_commit=members.losses - sum(not here[n].trusted_as(MemberState.ACTIVE) for n in members_),
        tokens=record.tokens,
        credit=_credit(state, record),
        leases=data.consume_each(state.leases, used),
        pending=record,
        paces=state.paces if r.held or r.patient_until else slowness.remember(state.paces, pace),
        inquiry=inquiry.begin(state, record, pace, now),
        round=RoundState(
            number=r.number + 1, reason="the next round is about to start", started_at=now, opened_at=r.closed_at
        ),
    )


def _mean_loss(parts: Collection[book.Inclusion]) -> float:
    """The mean over the tokens that were committed of each."""
    weights = [p.part * p.contribution.claimed for p in parts]
    return sum(p.contribution.loss * w for p, w in zip(parts, weights, strict=True)) / sum(weights)


def _credit(state: State, record: CommitRecord) -> CreditBook:
    """The accounts, when this round's tokens are credited to who contributed them."""
    here, departed = state.members.here, state.members.departed
    works = [
        Work(conduct.identity(state, n), n, state.name(n), member.owner if member is not None else "", int(tokens))
        for n, tokens in record.contributors.items()
        for member in [here.get(n) or departed.get(n)]
    ]
    return credit.enter(state.credit, record.round, works, state.past[0].round if state.past else record.round)


def _last_counted(state: State, record: CommitRecord) -> dict[NodeId, tuple[int, bytes]]:
    """For nodes that keep what was not sent: which chunks of this round have nothing of them."""
    if not state.config.outer.feedback:
        return {}
    chunks = len(state.round.ledger.owners)
    without: dict[NodeId, list[int]] = {n: [] for n in record.contributors}
    for chunk, nodes in record.lacking.items():
        for node in nodes:
            without[node].append(chunk)
    return {n: (record.round, bitmap(missing, chunks)) for n, missing in without.items()}


def _earlier(state: State, nodes: Iterable[NodeId]) -> dict[NodeId, tuple[int, ...]]:
    """For nodes that this round has bytes of: the samples that their deltas of other fragments have besides. What
    an earlier life of a node had contributed is not in its vectors any more."""
    count = len(state.fragments)
    if not count:
        return {}
    newest = {e.node: e.contribution.claimed for e in state.round.ledger.entries if e.contribution is not None}
    found = {}
    for node in nodes:
        before = state.earlier.get(node) or (0,) * count
        found[node] = tuple(0 if p == state.fragment else before[p] + newest[node] for p in range(count))
    return found
