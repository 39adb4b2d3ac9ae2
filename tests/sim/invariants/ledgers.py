"""The ledger of a round."""

from dataclasses import replace
from typing import TYPE_CHECKING

from sim.invariants.violation import hold

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
        hold(c.front == state.leases.by_node[node][0][0], f"the work of {node} is of another lease")
        ready = ev.ContributionReady(node, here[node].life, r.number, replace(c, life=0, earlier=0))
        hold(ready in truth.said, f"{node} never said that it is ready with {c.samples} samples")
    for node, held in r.completions.items():
        right = held.fence.round == r.number and (node not in here or held.life == here[node].life)
        hold(held in truth.said and right, f"{node} never said that it holds {held.fence}")
        newest = max(r.ledger.since, default=0)
        hold(held.fence.attempt >= newest, f"{node} holds {held.fence}, but chunks have owners since {newest}")
    if r.plan is not None:
        for orphans in r.plan.orphans.values():
            right = orphans in truth.said and orphans.fence == r.plan.fence
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
        hold(owner == first, f"chunk {c} of {r.number}/{since} is owned by {first} and by {owner}")


def seals_are_their_owners(world: "World", before: State, after: State) -> None:
    """A chunk is sealed as its owner said first, since it owns it; and stays so, unless nobody holds it."""
    was, is_, k = before.round.ledger, after.round.ledger, after.round.number
    for c, seal in is_.sealed.items():
        if c not in was.sealed:
            owner, since = was.owners[c], was.since[c]
            first = None if owner is None else world.truth.seals.get((owner, k, since, c))
            foretold = owner and (owner, k, since, c, seal.digest, seal.inputs) in world.truth.foretold
            right = (seal.digest, seal.inputs) == first or foretold
            hold(bool(right), f"chunk {c} of {k}/{since} is sealed otherwise than {owner} did first")
        else:
            hold(was.sealed[c] == seal, f"chunk {c} of round {k} is sealed anew")
    for c in was.sealed.keys() - is_.sealed.keys():
        hold(not is_.owners or is_.since[c] > was.since[c], f"chunk {c} of round {k} is not sealed any more")


def orphans_go_to_who_holds_them(world: "World", before: State, after: State) -> None:
    """A sealed chunk gets another owner only if that told the ledger's digest of it, and is reopened only when
    all members that can be dialled told that they do not have it."""
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
        elif c not in is_.sealed:
            leaves = {n for n in is_.members if before.members.here[n].leaf}
            nobody = all(n in said and (n in leaves or said[n].get(c) != digest) for n in is_.members)
            hold(nobody, f"chunk {c} of round {k} is reopened, though members told {said}")
