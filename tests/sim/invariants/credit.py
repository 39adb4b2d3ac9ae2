"""Who is credited for what was committed."""

from collections import defaultdict
from typing import TYPE_CHECKING

from sim.invariants.violation import hold

from atoll.coordinator.service.journaled_machine import Batch
from atoll.coordinator.state_machine import events as ev

if TYPE_CHECKING:
    from sim.world import World


def credit_is_for_what_was_committed(world: "World", batch: Batch) -> None:
    """Each key, and each owner, has the tokens and the rounds that came of it in commits that are not void,
    however often its node, the others and the coordinator went and came back; together they have the run's."""
    truth, book = world.truth, batch.state.credit
    joins = (event for _, event in batch.entries if isinstance(event, ev.Joined))
    truth.joined |= {event.node: (event.key.hex(), event.owner) for event in joins}
    nodes, owners = (defaultdict[str, list[tuple[int, int]]](list) for _ in range(2))  # (round, tokens)
    for round_, parts in truth.credited.items():
        for node, tokens in parts.items():
            for name, parts_of in zip(truth.joined[node], (nodes, owners), strict=True):
                parts_of[name].append((round_, tokens))
    for kind, found, right in (("key", book.nodes, nodes), ("owner", book.owners, owners)):
        have = {name: (account.tokens, account.rounds) for name, account in found.items()}
        due = {
            name: (sum(tokens for _, tokens in parts), len({round_ for round_, _ in parts}))
            for name, parts in right.items()
            if any(tokens for _, tokens in parts)
        }
        hold(have == due, f"each {kind} is due {due}, and has {have}")
        total = sum(account.tokens for account in found.values())
        hold(total == batch.state.tokens, f"by {kind} {total} of {batch.state.tokens} tokens are credited")
