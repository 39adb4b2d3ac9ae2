"""Lateness in a reduce: how long an attempt may take, and who is held to account when it took longer. Pure.

An attempt may take ten times what its plan predicts, and time for the arithmetic of a slow machine; where nothing
is predicted, and at most, `rounds.reduce_timeout`. Each further attempt of a round may take twice as long: what is
slow for everybody is no member's fault, and must end in a commit. A prediction knows nothing of a member whose
link was never measured: for one against whom nothing is held, an attempt takes its `rounds.reduce_timeout`.

Who is late is remembered over rounds (`conduct.charge`), as far as it is certain that it is that member: others
did the same in time, and the coordinator hears it. Called by `reduce.commit_or_retry`.
"""

from collections.abc import Collection

from atoll.comm.ids import NodeId
from atoll.coordinator.state_machine.conduct import Evidence, Offence, charge, consequence
from atoll.coordinator.state_machine.events import Effect
from atoll.coordinator.state_machine.state import State, count, order

MIN_TIMEOUT_SECONDS = 30.0  # of an attempt: processes pause, links stand still for a moment
SECONDS_PER_ELEMENT = 1e-7  # of the flat vector: encoding, merging and decoding on a slow and busy machine
PREDICTION_FACTOR = 10.0  # times the predicted seconds
MAX_DOUBLINGS = 10


def reduce_timeout(state: State) -> float:
    """Seconds that the attempt in force may take. Only while there is one."""
    r, most = state.round, state.config.rounds.reduce_timeout
    assert r.plan is not None
    if not r.plan.predicted:
        return most
    one = MIN_TIMEOUT_SECONDS + SECONDS_PER_ELEMENT * state.chunks.numel + PREDICTION_FACTOR * r.plan.predicted
    return min(most, one * 2.0 ** min(r.ledger.attempt - 1, MAX_DOUBLINGS))


def is_overdue(state: State, now: float) -> bool:
    """Whether the attempt in force has taken longer, by `now` in seconds, than it may."""
    r, here = state.round, state.members.here
    assert r.plan is not None
    elapsed = now - r.plan.opened_at
    if elapsed <= reduce_timeout(state):
        return False
    if elapsed > state.config.rounds.reduce_timeout:
        return True
    return not any(n in here and not here[n].up and consequence(state, n) is None for n in r.ledger.members)


def hold_to_account(state: State, late: Collection[NodeId], now: float, out: list[Effect]) -> State:
    """Charge those for whom an attempt waited in vain: owners that did not seal, or members that did not say that
    they hold everything, where at least half of them did: so what they needed was there. Who is suspected is not
    charged: its connection is at fault."""
    r = state.round
    assert r.plan is not None
    sealing, waited = bool(r.ledger.unsealed), f"{now - r.plan.opened_at:.0f}"
    due = {owner for owner in r.ledger.owners if owner is not None} if sealing else r.ledger.members
    if 2 * len(late) > len(due):
        return state
    facts = (("attempt", str(r.ledger.attempt)), ("seconds", waited), ("predicted", f"{r.plan.predicted:.3g}"))
    for node in sorted(late, key=order):
        if not state.members.trusted(node):
            continue
        if sealing:
            unsealed = sum(r.ledger.owners[c] == node for c in r.ledger.unsealed)
            sentence = f"it did not seal {count(unsealed, 'chunk')} of its own in {waited} s, as others did"
        else:
            sentence = f"it did not say within {waited} s that it holds the sealed chunks, as others did"
        offence = Offence.LATE if sealing else Offence.SILENT
        state = charge(state, node, Evidence(r.number, offence, sentence, facts), out)
    return state
