"""The ledger of a round."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from sim.invariants.violation import hold
from sim.truth import norm

from atoll.comm.replace import replace
from atoll.coordinator.state_machine import events as ev
from atoll.coordinator.state_machine.state import State

if TYPE_CHECKING:
    from sim.world import World


def check_ledger(world: "World", before: State, after: State) -> None:
    the_ledger_has_what_members_said(world, after)
    attempts_continue(world, after)
    if before.round.number == after.round.number:
        seals_are_their_owners(world, before, after)
        orphans_go_to_who_holds_them(world, before, after)


def the_ledger_has_what_members_said(world: "World", state: State) -> None:
    """Contributions and held bytes are of this round, as they were told."""
    truth, r = world.truth, state.round
    here = state.members.here
    for node, c in r.ledger.contributions.items():
        if c.untimely:
            truth.hurried.add(node)
        hold(c.front == state.leases.by_node[node][0][0], f"the work of {node} is of another lease")
        seen = truth.framed.get(r.number) or (node, r.number) in truth.outsized or r.looks
        told = replace(c, norm=norm(node, c.samples)) if seen else c  # it may count by what others saw
        ready = ev.ContributionReady(node, here[node].life, r.number, replace(told, life=0, earlier=0, untimely=0))
        hold(ready in truth.said, f"{node} never said that it is ready with {c.samples} samples")
    for node, held in r.completions.items():
        right = held.fence.round == r.number and (node not in here or held.life == here[node].life)
        hold(held in truth.said and right, f"{node} never said that it holds {held.fence}")
        newest = max(r.ledger.since, default=0)
        hold(held.fence.attempt >= newest, f"{node} holds {held.fence}, but chunks have owners since {newest}")
    if r.plan is not None:
        for orphans in r.plan.orphans.values():
            right = orphans.fence == r.plan.fence and (orphans in truth.said or _told(orphans, truth.said))
            hold(right, f"{orphans.node} did not tell its orphans of {r.plan.fence}")
        for node, chunks in r.plan.missing_chunks.items():
            said = node in here and ev.ChunksMissing(node, here[node].life, r.plan.fence, chunks) in truth.said
            hold(said, f"{node} did not say what it lacks of {r.plan.fence}")


def attempts_continue(world: "World", state: State) -> None:
    """Places are given once, who is gone stays gone, and a chunk has one owner since an attempt."""
    truth, r, ledger = world.truth, state.round, state.round.ledger
    known = truth.entries.get(r.number, ())
    if not ledger.entries:  # if there were some, everybody was away, and the round begins anew
        truth.entries[r.number], truth.began[r.number] = (), ledger.attempt + 1
        return
    hold(len(ledger.entries) >= len(known), f"round {r.number} had {len(known)} places")
    for old, new in zip(known, ledger.entries, strict=False):
        same = (old.node, old.contribution) == (new.node, new.contribution) and new.gone >= old.gone
        hold(same, f"a place of {old.node} in round {r.number} is now of {new.node}")
    truth.entries[r.number] = ledger.entries
    alive = [e.node for e in ledger.entries if not e.gone]
    hold(len(set(alive)) == len(alive), f"a member has two places: {alive}")
    for c, (owner, since) in enumerate(zip(ledger.owners, ledger.since, strict=True)):
        first = truth.owners.setdefault((r.number, since, c), owner)
        hold(owner in (first, None), f"chunk {c} of {r.number}/{since} is owned by {first} and by {owner}")


def seals_are_their_owners(world: "World", before: State, after: State) -> None:
    """A chunk is sealed as its owner said first, since it owns it; and stays so, unless nobody holds it."""
    was, is_, k = before.round.ledger, after.round.ledger, after.round.number
    for c, seal in is_.sealed.items():
        if c not in was.sealed:
            owner, since = was.owners[c], was.since[c]
            first = None if owner is None else world.truth.seals.get((owner, k, since, c))
            inputs = seal.inputs.rstrip(b"\0")  # there may be more places by now
            foretold = owner and (owner, k, since, c, seal.digest, inputs) in world.truth.foretold
            right = (seal.digest, inputs) == first or foretold
            hold(bool(right), f"chunk {c} of {k}/{since} is sealed otherwise than {owner} did first")
        else:
            hold(was.sealed[c] == seal, f"chunk {c} of round {k} is sealed anew")
    for c in was.sealed.keys() - is_.sealed.keys():
        reopened = not is_.owners or is_.since[c] > was.since[c] or c in is_.reassigned
        hold(reopened, f"chunk {c} of round {k} is not sealed any more")


def _too_long(before: State, after: State) -> bool:
    """Whether what somebody sealed was taken back, as it is too long and cannot be audited."""
    return bool(after.round.outsized) and after.round.distrusted != before.round.distrusted


def orphans_go_to_who_holds_them(world: "World", before: State, after: State) -> None:
    """A sealed chunk gets another owner only if that told the ledger's digest of it, and is reopened only when
    all members that can be dialled told that they do not have it, or with others over a norm found to be false,
    or over what is too long."""
    was, is_, k = before.round.ledger, after.round.ledger, after.round.number
    plan = before.round.plan
    if plan is None or not was.orphans or not is_.owners or is_.attempt != was.attempt + 1:
        return
    told = [e for e in world.truth.said if isinstance(e, ev.OrphansFound) and e.fence == plan.fence]
    said = {e.node: dict(e.here) for e in told}
    for c in was.orphans:
        owner, digest = is_.owners[c], was.sealed[c].digest
        if c in is_.sealed and owner is not None:
            right = said.get(owner, {}).get(c) == digest
            hold(right, f"chunk {c} of round {k} is given to {owner}, which told {said}")
        elif c not in is_.sealed and not _norms_judged(before, after) and not _too_long(before, after):
            leaves = {n for n in is_.members if before.members.here[n].leaf}
            nobody = all(n in said and (n in leaves or said[n].get(c) != digest) for n in is_.members)
            hold(nobody, f"chunk {c} of round {k} is reopened, though members told {said}")


def _norms_judged(before: State, after: State) -> bool:
    """Whether a false norm was found between two states: others are to look, its node is left out, or counts with
    what was seen."""
    was, is_ = before.round, after.round
    norms, longer = ({n: c.norm for n, c in r.ledger.contributions.items()} for r in (was, is_))
    raised = any(norm > norms[n] for n, norm in longer.items() if n in norms)
    return raised or is_.looks != was.looks or is_.withdrawn != was.withdrawn


def _told(orphans: ev.OrphansFound, said: Iterable[object]) -> bool:
    """Whether all of this was said at once, and perhaps more, of chunks that are not as the ledger has them."""
    same = (s for s in said if isinstance(s, ev.OrphansFound) and replace(s, here=orphans.here) == orphans)
    return any(set(orphans.here) <= set(s.here) for s in same)
