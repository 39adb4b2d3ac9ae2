"""Members that exchange nothing with peers for now, to save their owners' bytes, as they say. Pure.

Such a member is a part of no attempt: it owns nothing, what it contributes is not taken, nobody fetches from it,
and it is waited for in nothing. In the middle of an exchange it leaves the attempt, which the others go on with as
after a death: what arrived of it counts. Between two attempts, too, it drops what it has of them, at no charge.
The state that it holds it keeps: where nobody else has the newest one, that is lost until the member gives it
again (`rollback`, which waits for it as for one that is away).

Nobody else can see whether its bytes are gone, and leaving costs the others an attempt. So who leaves an exchange
is believed at no charge once in `EXCHANGE_MEMORY_ROUNDS` committed rounds, and owns nothing in them, which spares
its bytes and makes the next time cheap; who leaves another one within them is charged as one that did not answer.
So is who says good-bye in the middle of exchanges and comes back (`conduct.leave_exchange`).
"""

from atoll.comm.ids import NodeId
from atoll.comm.replace import replace
from atoll.coordinator.causes.observations import Standing
from atoll.coordinator.state_machine import ledger as book
from atoll.coordinator.state_machine import members as who
from atoll.coordinator.state_machine.changes import with_round
from atoll.coordinator.state_machine.conduct import leave_exchange
from atoll.coordinator.state_machine.events import Effect, Note, Paused
from atoll.coordinator.state_machine.state import State, exchanges


def record_pause(state: State, event: Paused, now: float, out: list[Effect]) -> State:
    """Enter that a member takes no steps, as it says; and that it exchanges nothing, if it says that, too."""
    node, before = event.node, state.members.here[event.node]
    name = state.name(node)
    if not before.paused:
        why = "it gets no chunks" if before.role == who.REDUCER else "no round waits for its steps"
        out.append(Note(f"{name} is paused: {why}", node))
    if event.saves_bytes > before.saves_bytes:
        out.append(Note(f"{name} saves bytes: it exchanges nothing with its peers", node))
    state = replace(state, members=who.pause(state.members, node, event.saves_bytes, now))
    return _leave_exchange(state, node, out) if event.saves_bytes > before.saves_bytes else state


def _leave_exchange(state: State, node: NodeId, out: list[Effect]) -> State:
    """Take the member out of the round's exchange, if it has a part in it, also between two attempts: what it was
    sent and what it sealed is not there any more."""
    if all(e.gone or e.node != node for e in state.round.ledger.entries):
        return state
    if exchanges(state, node):  # else no attempt is in force that it could cost
        state = leave_exchange(state, node, "it left the exchange to save bytes", out)
        state = with_round(state, replace(state.round, gone=state.round.gone | {node: Standing.SAVING}))
    return with_round(state, replace(state.round, ledger=book.leave(state.round.ledger, node)))
