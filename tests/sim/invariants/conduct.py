"""What is held against members, and whom it may keep out."""

from typing import TYPE_CHECKING

from sim.invariants.violation import hold

from atoll.comm.evidence import Consequence
from atoll.comm.strikes import FALSE_STATEMENTS
from atoll.coordinator.service.journaled_machine import Batch

if TYPE_CHECKING:
    from sim.world import World

KEPT_OUT = (Consequence.NO_CONTRIBUTOR, Consequence.EVICTED)  # by strikes


def decisions_are_made_once_and_of_liars(world: "World", batch: Batch) -> None:
    """Decisions are numbered in order. Whoever did not lie is never banned, and whatever went wrong with it, with
    others or with the network, its strikes keep it neither out of the run nor out of the rounds."""
    for _, decision in batch.decisions:
        number = len(world.truth.decisions) + 1
        hold(decision.number == number, f"decision {decision.number} is made instead of {number}")
        world.truth.decisions.append(decision)
        host = world.hosts.get(world.truth.hosts.get(decision.node, ""))
        lied = host is not None and (host.liar or bool(host.habit))
        said = f"{decision.node} ({decision.consequence}, weight {decision.weight}): {decision.evidence}"
        hold(lied or decision.consequence is not Consequence.BANNED, f"banned is {said}, which never lied")
        hold(lied or decision.consequence not in KEPT_OUT, f"kept out is {said}, which never lied")
        hold(
            lied or decision.evidence.offence not in FALSE_STATEMENTS, f"called a liar is {said}, which never lied"
        )


def the_journal_has_every_decision(world: "World") -> None:
    """What was decided is in the journal, once and in order, however often the coordinator was started again."""
    kept = [decision for _, decision in world.service.journal.decisions()]
    hold(kept == world.truth.decisions, f"the journal has {kept}, decided were {world.truth.decisions}")
