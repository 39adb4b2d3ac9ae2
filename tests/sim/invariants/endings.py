"""What a run comes to when its faults end."""

from typing import TYPE_CHECKING

from sim.invariants.violation import hold

if TYPE_CHECKING:
    from sim.world import World


def the_run_goes_on(world: "World", rounds: int, seconds: float) -> None:
    """When the faults end, rounds commit again and every living node is active again, by itself."""
    goal = world.durable.committed + rounds
    hold(
        world.until(lambda: world.durable.committed >= goal and not world.unwell(), seconds),
        f"after {seconds:g} s without faults {world.ailing(goal)}",
    )


def the_run_ends(world: "World", seconds: float) -> None:
    """When the faults end, a run of so many rounds commits them all, publishes them, and every node leaves."""
    total = world.config.rounds.total

    def over() -> bool:
        state = world.durable
        return state.committed == total and state.pending is None and all(n.host.sick for n in world.living)

    hold(world.until(over, seconds), f"after {seconds:g} s without faults {world.ailing(total)}")
    hold(world.truth.published == list(range(1, total + 1)), f"published were {world.truth.published} of {total}")
