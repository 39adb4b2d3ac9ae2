"""Where each sample is."""

from typing import TYPE_CHECKING

from sim.invariants.violation import hold

from atoll.coordinator.service.journaled_machine import Batch
from atoll.coordinator.state_machine import events as ev
from atoll.coordinator.state_machine.members import MemberState
from atoll.coordinator.state_machine.state import State

if TYPE_CHECKING:
    from sim.world import World


def who_left_takes_what_may_be_committed(world: "World", before: State, batch: Batch) -> None:
    """Samples of who left for good are leased again, unless they are in sealed chunks or may be."""
    here, k = before.members.here, before.round.number
    for _, event in batch.entries:
        if isinstance(event, ev.Leaving) and event.node in here and event.life == here[event.node].life:
            for entry in world.truth.entries.get(k, ()):
                if entry.node == event.node and entry.contribution is not None:
                    life = event.node, entry.contribution.life
                    world.truth.withheld.update(world.truth.contributed[life, k])


def every_sample_has_one_place(world: "World", state: State) -> None:
    """Every sample given out so far is consumed, free, or in one lease, and who left for good has none."""
    leases, consumed = state.leases, world.truth.consumed | world.truth.withheld
    end, size = 0, 0
    for first, count in sorted([*leases.free, *(r for lease in leases.by_node.values() for r in lease)]):
        hold(first >= end and count > 0, f"sample {first} is in two leases, or a lease is empty: {leases}")
        hold(consumed.isdisjoint(range(first, first + count)), f"{first}..{first + count - 1} was consumed before")
        end, size = first + count, size + count
    hold(end <= leases.next, f"samples beyond {leases.next} are leased")
    lost = leases.next - size - len(consumed)
    hold(lost == 0, f"{lost} samples are neither consumed, free nor leased")
    for node in leases.by_node:
        member = state.members.departed.get(node)
        left = member is not None and member.state is MemberState.LEFT
        hold(not left, f"{node} left with the lease {leases.by_node[node]}")
