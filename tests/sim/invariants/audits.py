"""Audits: whom they convict."""

from typing import TYPE_CHECKING

from sim.invariants.violation import hold

from atoll.comm.strikes import FALSE_STATEMENTS, PROVEN
from atoll.coordinator.service.journaled_machine import Batch

if TYPE_CHECKING:
    from sim.world import World


def only_liars_are_convicted(world: "World", batch: Batch) -> None:
    """Whoever was never to lie is neither banned, nor said to have said what is not."""
    for _, decision in batch.decisions:
        if decision.evidence.offence in PROVEN | FALSE_STATEMENTS:
            hosts = [host for host in world.hosts.values() if host.key.hex() == decision.key]
            lied = any(host.liar for host in hosts) or not hosts
            hold(lied, f"{decision.node} never lied: {decision.evidence}")
