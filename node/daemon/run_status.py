"""The part of `atoll node status` that is about the run and what this node has in it."""

from typing import Any

from atoll.comm.proto import atoll_pb2 as pb
from atoll.node.daemon.outer_loop import OuterLoop
from atoll.node.daemon.session import CoordinatorSession


def of_the_run(view: pb.View | None, member: CoordinatorSession, outer_loop: OuterLoop | None) -> dict[str, Any]:
    """How far the run's round is, and what came of this node's work, for `atoll node status`; nothing before the
    coordinator's first word."""
    if view is None:
        return {}
    reduction = outer_loop.participation.reduction if outer_loop is not None else None
    exchange = dict(zip(("chunks", "of"), reduction.progress, strict=True)) if reduction is not None else None
    return {
        "training_round": view.train.round,  # 0: nothing to train
        "steps": view.train.steps,
        "steps_at_most": view.train.ceiling,
        "committed": view.committed,
        "run_tokens": view.tokens,
        "members": len(member.control.roster.members),
        "exchange": exchange,  # sealed chunks that are here; None: there is no exchange
        "credited_tokens": view.credited_tokens,
        "credited_rounds": view.credited_rounds,
    }
