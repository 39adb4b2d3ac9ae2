"""What the page's snapshot and the metrics both show of a run as it stands."""

from atoll.comm.ids import NodeId
from atoll.coordinator.monitor.recorded import NodeFacts
from atoll.coordinator.service.event_loop import EventLoop
from atoll.coordinator.state_machine.members import Member
from atoll.coordinator.state_machine.state import State

MAX_GONE = 50  # members that are gone and listed
GONE_MEMORY = 86_400.0  # seconds that a member that is gone is listed


def last_val_loss(loop: EventLoop) -> float | None:
    """The latest validation loss, nats a token; None: none was measured yet."""
    pending = loop.state.pending
    if pending is not None and pending.val_loss is not None:
        return pending.val_loss
    return loop.last_val_loss if loop.last_val_loss is not None else loop.state.initial_val_loss


def facts_of_nodes(state: State) -> dict[NodeId, NodeFacts]:
    """What is known of members, and of those that are gone and contributed once."""
    once = {a.node: NodeFacts(owner=a.owner, name=a.name) for a in state.credit.nodes.values()}
    known = (*state.members.departed.values(), *state.members.here.values())
    return once | {m.node: NodeFacts(m.role or "trainer", m.owner, m.version, m.name) for m in known}


def listed(state: State, now: float) -> list[Member]:
    """The members, and of those that are gone the latest of the last day."""
    gone = [m for m in list(state.members.departed.values())[-MAX_GONE:] if now - m.heard_at < GONE_MEMORY]
    return [*state.members.here.values(), *gone]
