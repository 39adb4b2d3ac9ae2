"""One round of a fragment, put together from the pieces: what a method does, in its order.

    offer     each member: how far it went, and what the wire left out before    feedback
    merge     what arrived becomes one delta, by the members' shares             weights, clip, merge
    step      the anchor moves by it                                             schedule, rule
    commit    those that were counted: what the wire left out of theirs          feedback
    adopt     they take the new anchor; the others keep what they trained        overlap

`exchange` is all of it where everybody stands still meanwhile. Real nodes and simulated ones do the same, chunk by
chunk and each in its own time.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from atoll.outer_opt.arrays import Array
from atoll.outer_opt.feedback import ErrorFeedback
from atoll.outer_opt.merge import Merge
from atoll.outer_opt.overlap import Adopt, replace
from atoll.outer_opt.rule import Rule


@dataclass
class RoundMember:
    """One member's vectors, and its share of the mean."""

    local: Array  # (n,) its parameters
    residual: Array  # (n,) what the wire left out of its deltas, with feedback
    offered: Array  # (n,) what it encoded in this round
    share: float = 0.0  # of the mean (`weights.shares`); 0: the round leaves it out


def offer(member: RoundMember, anchor: Array, feedback: ErrorFeedback | None, scratch: Array) -> None:
    """Write what the member encodes into `offered` (n,): anchor - local, and beta times its residual with
    feedback."""
    delta = scratch if feedback else member.offered
    delta[...] = anchor
    delta -= member.local
    if feedback:
        feedback.offer(member.residual, delta, member.offered)


def exchange(
    anchor: Array,
    momentum: Array,
    members: Sequence[RoundMember],
    merge: Merge,
    rule: Rule,
    left_out: Adopt,
    feedback: ErrorFeedback | None,
    wire: Callable[[Array], Array],  # a new array: what the others decode of this one
    room: tuple[Array, Array, Array],  # (n,) each, overwritten
) -> None:
    """Move `anchor` and `momentum` (n,) and the members by one round, in place: DiLoCo (arXiv 2311.08105,
    algorithm 1, lines 3 and 8 to 14) with the merge, rule, feedback and wire that are given."""
    merged, old, scratch = room
    for member in members:
        offer(member, anchor, feedback, scratch)
    arrived = [wire(member.offered) for member in members]
    merge(arrived, [member.share for member in members], merged, scratch)
    old[...] = anchor
    rule.step(anchor, momentum, wire(merged), scratch)
    for member, decoded in zip(members, arrived, strict=True):
        if not member.share:
            left_out(member.local, anchor, old, scratch)
            continue
        if feedback:
            feedback.commit(member.residual, member.offered, decoded)
        replace(member.local, anchor, member.local, scratch)
