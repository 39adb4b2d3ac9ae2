"""What is held against members."""

from typing import TYPE_CHECKING

from sim.invariants.violation import hold

from atoll.coordinator.state_machine.conduct import Consequence, Offence
from atoll.coordinator.state_machine.events import Decision

if TYPE_CHECKING:
    from sim.world import World


def only_who_lied_of_a_norm_is_charged_with_it(world: "World", decision: Decision) -> None:
    """Whoever told the norm of its delta is charged with a false one only upon the word of two who lie, or its
    own."""
    evidence, truth = decision.evidence, world.truth
    if evidence.offence is not Offence.FALSE_NORM or decision.consequence is Consequence.PARDONED:
        return
    framed = truth.framed.get(evidence.round, set())
    lied = (decision.node, evidence.round) in truth.outsized or decision.node in framed or len(framed) > 1
    hold(lied, f"{decision.node} is charged in round {evidence.round}: {evidence.sentence}")


def who_saves_bytes_is_not_waited_for(world: "World", decision: Decision) -> None:
    """Nobody is charged with what it did not do while it said that it saves bytes, but for saying so again and
    again in the middle of exchanges."""
    evidence, late = decision.evidence, (Offence.LATE, Offence.SILENT)
    if evidence.offence in late and decision.node in world.durable.members.saving:
        before = [d for d in world.truth.decisions if d.node == decision.node]
        hold("again" in evidence.sentence, f"{decision.node} is charged: {evidence.sentence} ({before})")


def only_whose_delta_was_turned_is_an_outlier(world: "World", decision: Decision) -> None:
    """Whose delta was like the others' is held to be an outlier only upon the word of two who lie."""
    evidence, truth = decision.evidence, world.truth
    if evidence.offence is not Offence.OUTLIER or decision.consequence is Consequence.PARDONED:
        return
    turned = (decision.node, evidence.round) in truth.turned or len(truth.slandered.get(evidence.round, ())) > 1
    hold(turned, f"{decision.node} is charged in round {evidence.round}: {evidence.sentence}")
