"""Members that tell what they hold of a state that was committed, and the streams that break meanwhile."""

from audit_world import CHUNKS, AuditWorld, key_of, ready

from atoll.comm.config.run import RunConfig
from atoll.comm.digest import digest
from atoll.comm.ids import NodeId
from atoll.comm.replace import replace
from atoll.coordinator.state_machine import events as ev
from atoll.coordinator.state_machine.state import Phase

RIGHT, WRONG = digest(b"what the reduce came to"), digest(b"a model of its own")
BEFORE = digest(b"1")  # as `AuditWorld` has it
NODES = [NodeId(f"n{i}") for i in range(1, 9)]


def out_but(world: AuditWorld, *stay: NodeId) -> AuditWorld:
    """The others' streams broke after a commit, for longer than they had to come back."""
    for node in NODES:
        if node not in stay:
            world.feed(ev.Expired(node, 1, "it was not heard"))
    return world


def joins(world: AuditWorld, node: NodeId, round_: int, state: bytes) -> None:
    """It is back with what its disk has."""
    world.feed(ev.Joined(node, 2, str(node), f"{node}:1", "another session", key=key_of(node).public))
    world.feed(ev.Connected(node, 2))
    world.feed(ev.StateReported(node, 2, round_, state))
    world.feed(ev.LayoutReported(node, 2, CHUNKS, digest(b"layout")))


def tells(world: AuditWorld, node: NodeId, state: bytes) -> None:
    world.feed(ev.StateReported(node, 1, world.state.committed, state))


def wait(world: AuditWorld, seconds: float) -> None:
    for _ in range(int(seconds)):
        world.now += 1.0
        world.feed(ev.Tick())


def all_that_is_due(world: AuditWorld, seconds: float) -> None:
    """Those that are here do all that the run waits for."""
    for _ in range(int(seconds)):
        for event in list(world.due()):
            world.feed(event)
        wait(world, 1)


def two_tell_wrong(*makers: NodeId, config: RunConfig | None = None) -> AuditWorld:
    """The second round is committed by these, and all others stood by."""
    world = made_by(*makers, config=config)
    for node in NODES[6:]:
        tells(world, node, WRONG)
    return world


def told_first() -> AuditWorld:
    """The first round is committed, and all have said what it came to."""
    world = AuditWorld(b"n").run()
    for node in NODES:
        tells(world, node, BEFORE)
    return world


def made_by(*makers: NodeId, config: RunConfig | None = None) -> AuditWorld:
    """The second round is committed by these, who have said nothing of it, and all others stood by."""
    world = AuditWorld(b"n").run()
    config = config or world.state.config
    rounds = replace(config.rounds, quorum=len(makers) / len(NODES))
    world.state = replace(world.state, config=replace(config, rounds=rounds))
    for node in NODES:
        world.feed(ev.StateReported(node, 1, 1, BEFORE))
    commit_next(world, *makers)
    return world


def commit_next(world: AuditWorld, *makers: NodeId) -> None:
    """The next round is committed by these alone."""
    number = world.state.round.number
    for node in makers:
        world.feed(ev.StepsReached(node, 1, number))
    for _ in range(40):
        there = world.state.round.ledger.contributions
        for node in makers if world.state.round.phase is not Phase.REDUCING else ():
            if node not in there:
                world.feed(ready(world.state, node))
        all_that_is_due(world, 1)
        if world.state.committed == number:
            break
    assert world.state.makers == set(makers)


def last_round() -> AuditWorld:
    """A run that ends with the round that is played."""
    world = AuditWorld(b"n").run().go_on()
    config = world.state.config
    rounds, members = replace(config.rounds, total=2), replace(config.members, stall=300.0)
    world.state = replace(world.state, config=replace(config, rounds=rounds, members=members))
    return world
