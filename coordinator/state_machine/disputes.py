"""Sealed chunks that a member holds otherwise than the ledger says, or cannot have as it does: who goes. Pure.

A chunk's digest in the ledger and its bytes come from the same owner. Where they differ somebody lies, or has
broken memory; but who sends forged bytes and who says falsely that they were looks alike, so one report proves
nothing:

    told       whoever holds other bytes is told the ledger's digests, and all are where time is up and most lack
               chunks. It gives up what differs and asks one after the other for it; who gave it something else is
               named, and nothing more comes of that
    settled    every member holds what the ledger says, or lacks chunks for which it asked everybody in vain. They
               ask once more, in another attempt: what anybody still holds is proven now, so who is honest gives
               the right bytes, and takes them
    verdict    an owner that lacks what it sealed itself goes by its own word. Else of those that lack a chunk and
               those that hold it the fewer go: a lone liar stands alone. Of as many, as where there are but two,
               who was away least often goes, so that it is the other's turn the next time; first who holds the
               chunk, as it is then reduced again and nothing is committed on the word of one side
    straggler  who is far behind most is told, too, and no more comes of that: most hold everything, and what it
               cannot get from them is a matter of its links
    late       who alone has a chunk, of whom nobody says that it gave something else: it is left out of the round

One goes at a time, and what it sealed is reduced again where nobody has it. It may come back at once; where it
contradicted itself, or alone all others, that is held against it (`conduct`).
"""

from collections.abc import Collection

from atoll.comm.ids import NodeId
from atoll.comm.replace import replace
from atoll.coordinator.state_machine import ledger as book
from atoll.coordinator.state_machine.changes import fail_attempt, remove, with_round
from atoll.coordinator.state_machine.conduct import Evidence, Offence, charge
from atoll.coordinator.state_machine.events import ChunkForged, ChunksMissing, Effect, Note
from atoll.coordinator.state_machine.members import MemberState
from atoll.coordinator.state_machine.state import State, order


def record_forgery(state: State, event: ChunkForged, out: list[Effect]) -> State:
    """A member names who gave it other bytes than the ledger's."""
    r, pair = state.round, (event.node, event.peer)
    known = {e.node for e in r.ledger.entries if not e.gone}
    if r.plan is None or r.plan.fence != event.fence or not known.issuperset(pair) or pair in r.plan.forged:
        return state
    sentence = f"chunk {event.chunk} as {state.name(event.peer)} gave it is not what the ledger says"
    out.append(Note(f"round {r.number}: {state.name(event.node)} says: {sentence}", event.node))
    plan = replace(r.plan, forged=r.plan.forged | {pair})
    return with_round(state, replace(r, plan=plan, forgers=r.forgers | {event.peer}, spoiled=(*r.spoiled, pair)))


def record_missing_chunks(state: State, event: ChunksMissing) -> State:
    """A member that was told the digests got these chunks from nobody. Now all are told: others may wait for one
    that its owner has given up. Of a straggler nothing follows: most have the chunks, and it cannot reach them."""
    r, node = state.round, event.node
    if node in r.stragglers and not r.wrong.issuperset(r.ledger.members):
        return state
    chunks = tuple(c for c in event.chunks if c < len(r.ledger.owners))
    late = r.plan is None or r.plan.fence != event.fence or not r.ledger.complete
    if late or r.plan is None or node not in r.wrong or node not in r.ledger.members or not chunks:
        return state
    plan = replace(r.plan, missing_chunks=r.plan.missing_chunks | {node: chunks})
    return with_round(state, replace(state.round, plan=plan, wrong=r.wrong.union(r.ledger.members)))


def tell_digests(state: State, now: float, out: list[Effect]) -> State:
    """Tell all members the ledger's digests, so that they say what they lack, and give the attempt its time once
    more: everything is sealed, most do not hold it in time, and somebody may keep what it sealed to itself."""
    r = state.round
    assert r.plan is not None
    out.append(Note(f"round {r.number}: all is sealed, and most members lack chunks: they are told the digests"))
    plan = replace(r.plan, stage_at=now)
    return with_round(state, replace(state.round, plan=plan, wrong=r.wrong.union(r.ledger.members)))


def tell_stragglers(state: State, nodes: Collection[NodeId], now: float) -> State:
    """Tell the few that do not hold everything yet the ledger's digests: so they ask all others for what they
    lack."""
    r = state.round
    if r.wrong.issuperset(nodes):
        return state
    told = dict.fromkeys(nodes, now) | r.stragglers
    return with_round(state, replace(r, stragglers=told, wrong=r.wrong.union(nodes)))


def resolve(state: State, members: list[NodeId], now: float, out: list[Effect]) -> State:
    """Every member told what it holds, or lacks, and not all hold what the ledger says."""
    r = state.round
    assert r.plan is not None
    root = r.ledger.root
    right = {n: h for n, h in r.completions.items() if h.digest == root}
    wrong = [n for n in members if n in r.completions and n not in right]
    if liars := [n for n in wrong if r.completions[n].proven]:
        reason = f"its sealed bytes in round {r.number} are not the ledger's, whose digests it was told"
        state = with_round(state, replace(state.round, completions=right))
        for liar in liars:
            state = _evict(state, liar, reason, True, out)
        return state
    if wrong:
        for node in wrong:
            sentence = f"{state.name(node)} holds other sealed bytes than the ledger says: it is told which"
            out.append(Note(f"round {r.number}: {sentence}", node))
        return with_round(state, replace(state.round, completions=right, wrong=r.wrong.union(wrong)))
    lack = [n for n in members if n not in right]
    why = f"{state.names(lack)} got sealed chunks from nobody as the ledger has them"
    # only its region was asked
    layered = any(c in r.ledger.layered for n in lack for c in r.plan.missing_chunks[n])
    if layered or not r.settled.issuperset(members):
        ledger = book.flatten(r.ledger) if layered else r.ledger
        settled = frozenset() if layered else frozenset(members)
        return fail_attempt(with_round(state, replace(state.round, ledger=ledger, settled=settled)), why, now)
    node, reason, alone = _culprit(state, members, lack)
    if alone and node not in lack and node not in r.forgers:  # perhaps it is only slow
        late = Evidence(r.number, Offence.LATE, f"it gives a chunk that it holds to nobody: {reason}")
        state = charge(state, node, late, out)
        return with_round(state, replace(state.round, ledger=book.withdraw(r.ledger, node)))
    return _evict(state, node, f"{reason}, in round {r.number}", alone, out)


def _evict(state: State, node: NodeId, reason: str, certain: bool, out: list[Effect]) -> State:
    """`certain`: it contradicts itself, or alone all others; then it is also held against it."""
    if certain:
        state = charge(state, node, Evidence(state.round.number, Offence.FALSE_CLAIM, reason), out)
    return remove(state, node, MemberState.EVICTED, reason, out) if node in state.members.here else state


def _culprit(state: State, members: list[NodeId], lack: list[NodeId]) -> tuple[NodeId, str, bool]:
    """Who goes, why, and whether it alone says so, of three at least."""
    r, here = state.round, state.members.here
    assert r.plan is not None
    owners, lacks = r.ledger.owners, {n: r.plan.missing_chunks[n] for n in lack}

    def longest(nodes: list[NodeId]) -> NodeId:
        return min(nodes, key=lambda n: (here[n].life, n in lacks, order(n)))

    if own := [n for n in lack if any(owners[c] == n for c in lacks[n])]:
        node = longest(own)
        return node, f"it lacks chunk {next(c for c in lacks[node] if owners[c] == node)}, which it sealed", True
    c = min(c for chunks in lacks.values() for c in chunks)
    without = [n for n in lack if c in lacks[n]]
    able = [n for n in members if not here[n].leaf and n not in without]
    with_it = list(dict.fromkeys((*able, *(o for o in owners[c : c + 1] if o is not None and o in here))))
    few, many = sorted((without, with_it), key=len)
    if len(few) == len(many):
        node = longest(few + many)
        others = many if node in few else few
        return node, f"it and {state.names(others)} say different things of chunk {c}", False
    alone = len(few) == 1 < len(many)
    if few is with_it:
        told = f"{state.names(without)} got chunk {c} from it otherwise than the ledger has it"
        return longest(few), told, alone
    return longest(few), f"it says that nobody gives it chunk {c}, which {state.names(with_it)} have", alone
