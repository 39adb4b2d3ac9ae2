"""Who names the digest of a state that was committed."""

from audit_world import CHUNKS, AuditWorld, key_of

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


def all_but_the_last_are_out() -> AuditWorld:
    """Their streams broke after a commit, for longer than they had to come back."""
    world = AuditWorld(b"n").run()
    for node in NODES[:-1]:
        world.feed(ev.Expired(node, 1, "it was not heard"))
    return world


def test_who_stays_while_most_are_put_out_does_not_name_the_state_alone() -> None:
    world = all_but_the_last_are_out()
    world.feed(ev.StateReported(NODES[-1], 1, world.state.committed, WRONG))
    assert not world.state.digest
    for node in NODES[:-1]:
        world.feed(ev.Joined(node, 2, str(node), f"{node}:1", "another session", key=key_of(node).public))
        world.feed(ev.Connected(node, 2))
        world.feed(ev.StateReported(node, 2, world.state.committed, RIGHT))
        world.feed(ev.LayoutReported(node, 2, CHUNKS, digest(b"layout")))
    assert world.state.digest == RIGHT
    assert world.state.members.here.keys() == set(NODES[:-1])


def test_who_stays_names_the_state_at_last_where_the_others_do_not_come_back() -> None:
    world = all_but_the_last_are_out()
    world.feed(ev.StateReported(NODES[-1], 1, world.state.committed, RIGHT))
    assert not world.state.digest
    world.now += world.state.config.checkpoint.patience
    world.feed(ev.Tick())
    assert world.state.digest == RIGHT
