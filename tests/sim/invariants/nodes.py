"""What nodes hold and do."""

from collections import Counter
from typing import TYPE_CHECKING

from sim.invariants.violation import hold

from atoll.comm.proto import atoll_pb2 as pb
from atoll.coordinator.state_machine.members import MemberState

if TYPE_CHECKING:
    from sim.node import Node
    from sim.world import World


def active_nodes_have_the_logs_state(world: "World", node: "Node") -> None:
    """The state of every active member is the log's, bit by bit."""
    round_, state = node.state
    states = world.truth.states
    if (
        0 <= round_ < len(states)
        and state != states[round_]
        and node.still
        and node.alive
        and world.durable.digest
    ):
        member = world.durable.members.here.get(node.me)
        if member is not None and member.trusted_as(MemberState.ACTIVE) and member.life == node.control.life:
            told = member.state_round == round_ == world.durable.committed
            hold(not told, f"{node.me} is active with another state {round_} than the log's")


def only_who_can_is_to_evaluate(node: "Node", view: pb.View) -> None:
    """A node whose trainer cannot measure a validation loss, and has said so in this life, is not told to."""
    hold(
        node.host.evaluates or view.you == "joining" or not view.evaluate, f"{node.me} cannot evaluate, and is to"
    )


def states_go_forward(world: "World", node: "Node", round_: int) -> None:
    """A node that had a state never goes back to an older one."""
    hold(round_ >= node.furthest, f"{node.me} goes back from state {node.furthest} to {round_}")
    node.furthest = round_


def sealed_bytes_are_the_logs(world: "World", node: "Node", round_: int, sealed: bytes) -> None:
    """Nodes step with the bytes that were committed, and no others; who is yet to hear that a round is void, with
    those that were."""
    truth = world.truth
    hold(round_ <= len(truth.roots), f"{node.me} applies round {round_} before it is committed")
    committed = {truth.roots[round_ - 1], truth.void_roots.get(round_)}
    hold(sealed in committed, f"{node.me} applies other bytes of round {round_} than were committed")


def carried_work_is_the_front_of_the_lease(world: "World", node: "Node", lease: list[int], carried: int) -> None:
    """What a node believes to carry is what its local vector holds: the front of its lease, once."""
    hold(carried == len(node.local), f"{node.me} carries {carried} samples, its vector has {len(node.local)}")
    hold(node.local == lease[:carried], f"{node.me} carries {node.local}, its lease begins {lease[:carried]}")


def steps_ahead_are_the_next_ones(node: "Node", taken: list[int], samples: list[int]) -> None:
    """What a trainer took steps on while it was ahead is what its next order begins with."""
    hold(taken == samples[: len(taken)], f"{node.me} is ahead on {taken}, its order begins {samples}")


def steps_ahead_are_kept(node: "Node") -> None:
    """A trainer that is ahead starts anew only where what it handed over came to nothing."""
    hold(node.excused, f"{node.me} throws away its steps on {node.trainer.taken}")


def the_state_stands_still_until_it_is_taken(node: "Node", state: tuple[int, bytes]) -> None:
    """Between the order to go on and the step after which the trainer takes the new state, nobody moves it."""
    hold(node.still and node.state == state, f"{node.me} takes {state}, while it has {node.state}")


def only_committed_work_is_dropped(world: "World", node: "Node", samples: list[int], why: str) -> None:
    """A node throws no work away but what was committed."""
    lost = [s for s in samples if s not in world.truth.consumed]
    hold(not lost, f"{node.me} throws away its steps on {lost}: {why}")


def who_saves_bytes_exchanges_nothing(node: "Node") -> None:
    """A node that saves bytes begins neither a reduce nor a recovery."""
    hold(not node.silent, f"{node.me} begins an exchange, and saves bytes")


def who_departs_takes_nothing_along(node: "Node") -> None:
    """A node that leaves after its commit has no steps that are to be committed yet, unless it may take none that
    would bring them into a round. Those that it took ahead, on top of a state that was not the run's, are lost."""
    ahead = () if node.excused else node.trainer.taken
    kept = [s for s in (*node.local, *ahead) if s not in node.world.truth.consumed]
    hold(not kept or node.machine.paused, f"{node.me} leaves with its steps on {kept}")


def every_step_counts_once(world: "World", node: "Node") -> None:
    """Every sample that a node took steps on is committed once or will be, unless the work died with a trainer."""
    twice = Counter(node.steps)
    for sample in node.lost:
        twice[sample] -= 1
    for sample, count in twice.items():
        hold(count <= 1, f"{node.me} took steps on sample {sample} {count} times for nothing")
        kept = count < 1 or sample in world.truth.consumed or sample in node.local
        hold(kept, f"the steps of {node.me} on sample {sample} are neither committed nor kept")
