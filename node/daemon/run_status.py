"""What a node says of the run and of its own part in it: in `atoll node status`, and at its end."""

from typing import Any

from atoll.comm.proto import atoll_pb2 as pb
from atoll.comm.terminal import plural
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


def last_sentence(finished: bool, view: pb.View | None) -> str:
    """The end of a node's log: how it ended, and what the run has of it by the last `view` that came."""
    why = "which is finished" if finished else "as it was told to"
    if view is None:
        return f"the node has left the run, {why}"
    rounds = f"{view.credited_rounds:,} {plural('round', view.credited_rounds)}"
    return f"the node has left the run, {why}: {view.credited_tokens:,} tokens of its work are in it, of {rounds}"
