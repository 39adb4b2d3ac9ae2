"""What nodes are shown of the run."""

from math import inf
from typing import TYPE_CHECKING

from sim.invariants.violation import hold

from atoll.comm.ids import NodeId
from atoll.comm.proto import atoll_pb2 as pb
from atoll.coordinator.service.view import common_view, node_view
from atoll.coordinator.state_machine.state import State
from atoll.node.control.roster import Roster

if TYPE_CHECKING:
    from sim.node import Node
    from sim.service import Service

REASON_DELAY = 2.5  # seconds after which a reason must be shown


def streams_show_the_state(service: "Service", state: State) -> None:
    """After a dispatch the latest view of every stream says what its node must know of the state; only reasons,
    and that a report was taken, may come later. A stream has ended if and only if its node or its life has."""
    fresh, late = common_view(state), False
    for node, stream in service.dispatch.streams.items():
        member = state.members.here.get(node)
        over = member is None or member.life != stream.life
        hold(stream.ended == over, f"the stream of {node}.{stream.life} {'goes on' if over else 'ends'}: {member}")
        if member is not None and over:
            continue
        assert stream.latest is not None
        common, shown = stream.latest.common, stream.latest.mine
        due = node_view(state, fresh, node)
        taken = due._replace(ready=shown.ready and due.ready, reached=shown.reached and due.reached)
        hold(shown == taken, f"{node} is shown {shown}, and not {due}")
        hold(common.facts == fresh.facts, f"{node} is shown other facts than the state's")
        hold(not due.lease or common.train == fresh.train, f"{node} is shown another order than the state's")
        hold(not due.planned or common.fence == fresh.fence, f"{node} is shown {common.fence}, not {fresh.fence}")
        hold(common.roster.members == fresh.roster.members, f"{node} is shown other members than there are")
        late = late or common.head != fresh.head
    service.late_since = min(service.late_since, service.now) if late else inf


def reasons_are_shown_soon(service: "Service") -> None:
    """Why the round is where it is everybody is shown, though it may be a little later."""
    waits = service.now - max(service.late_since, service.back_at)
    hold(waits < REASON_DELAY, f"for {waits:.1f} s nobody is shown that {service.state.round.reason}")


def who_has_a_stream_is_connected(service: "Service") -> None:
    """A member whose stream of views is open counts as connected, whatever became of its earlier ones."""
    for node, stream in service.streams.items():
        member = service.state.members.here.get(node)
        if stream.reading and member is not None and member.life == stream.life:
            hold(member.connected, f"{node}.{stream.life} has a stream, and is said not to be connected")


def nodes_are_told_of_views_that_they_lack(service: "Service", node: NodeId, version: int) -> None:
    """The version that a heartbeat is answered is the one on the node's stream, or, where it has none, a newer one
    than any that it was sent."""
    stream = service.dispatch.streams.get(node)
    if stream is None:
        hold(version > service.sent.get(node, 0), f"{node} has no stream, and is told that it has all views")
    elif stream.latest is not None:
        hold(version == stream.latest.version, f"{node} is told of view {version}, not {stream.latest.version}")


def rosters_are_the_views(node: "Node", view: pb.View, roster: Roster) -> None:
    """Whom a node accepts, pieced together from a stream's views, are the members that the latest one was of."""
    due = node.world.truth.rosters[view.incarnation, view.version]
    hold(roster.members == due, f"{node.me} accepts {sorted(roster.members)}, and there are {sorted(due)}")


def a_stream_takes_no_other_with_it(stream: object, forgotten: object) -> None:
    """When a stream's call is over, a later one of the node goes on."""
    hold(stream is forgotten, "a later stream of the node is forgotten instead")
