"""Who names the digest of a state that was committed."""

from audit_world import AuditWorld

from atoll.comm.digest import digest
from atoll.comm.ids import NodeId
from atoll.coordinator.state_machine import events as ev

RIGHT, WRONG = digest(b"what the reduce came to"), digest(b"a model of its own")
NODES = [NodeId(f"n{i}") for i in range(1, 9)]


def all_streams_break_after_a_commit() -> AuditWorld:
    world = AuditWorld(b"n").run()
    for node in NODES:
        world.feed(ev.Disconnected(node, 1))
    return world


def back(world: AuditWorld, node: NodeId, state: bytes) -> None:
    world.feed(ev.Connected(node, 1))
    world.feed(ev.StateReported(node, 1, world.state.committed, state))


def test_who_is_back_first_after_all_streams_broke_does_not_name_the_state_alone() -> None:
    world = all_streams_break_after_a_commit()
    back(world, NODES[-1], WRONG)
    assert not world.state.digest
    for node in NODES[:-1]:
        back(world, node, RIGHT)
    assert world.state.digest == RIGHT
    assert world.state.members.here.keys() == set(NODES[:-1])


def test_who_stays_away_is_not_waited_for_once_it_is_put_out() -> None:
    world = all_streams_break_after_a_commit()
    for node in NODES[:3]:
        back(world, node, RIGHT)
    for node in NODES[3:]:
        assert not world.state.digest
        world.feed(ev.Expired(node, 1, "it was not heard"))
        if len(world.state.members.here) < 6:
            break
    assert world.state.digest == RIGHT
