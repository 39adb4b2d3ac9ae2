"""The copies that a trainer keeps in the node's own folder, and where: the moments after a round, and copies of
the round at hand, which share the volunteer's disk and one thread that writes."""

from collections.abc import Callable, Sequence
from pathlib import Path

from torch.optim import Optimizer

from atoll.node.checkpoint.disk_budget import DiskBudget
from atoll.node.config import TrainerSpec
from atoll.node.outer.layout import fragments_and_chunks
from atoll.node.participant.flat_vector import ShardedParameters
from atoll.node.participant.optimizer_checkpoint import OptimizerCheckpoint
from atoll.node.participant.optimizer_files import ROUND, OptimizerFiles
from atoll.node.participant.rank_group import RankGroup
from atoll.node.participant.round_checkpoint import RoundCheckpoint
from atoll.node.participant.round_copies import RoundCopies
from atoll.node.participant.tensor_writer import TensorWriter
from atoll.node.participant.training_tensors import TrainingTensors


def open_checkpoints(
    spec: TrainerSpec,
    parameters: ShardedParameters,
    optimizers: Sequence[Optimizer],
    ranks: RankGroup,
    announce: Callable[[str], None],
) -> tuple[OptimizerCheckpoint, RoundCheckpoint]:
    """The inner optimizer's state, and what is trained of a round, on disk. `announce` takes sentences for the
    daemon's log. Every rank must call it; `OptimizerCheckpoint.close` ends both."""
    run, layout = spec.run, parameters.layout
    limit = DiskBudget.divide(spec.node.disk * 1e9, layout.numel, run.inner.optimizer).inner
    machines = len(set(ranks.hosts))  # of several, each would keep a part of them, of no use without the others
    folder = Path(spec.moments) if spec.moments and machines == 1 else None
    of_rounds = OptimizerFiles(folder, limit, prefix=ROUND) if folder is not None else None
    copies = RoundCopies(ranks, of_rounds) if of_rounds is not None else None
    files = OptimizerFiles(folder, limit, expendable=of_rounds) if folder is not None else None
    writer, tensors = TensorWriter(ranks, parameters.device), TrainingTensors(parameters, optimizers, ranks)
    fragments, _ = fragments_and_chunks(run, layout.shapes)
    every = run.checkpoint.every * len(fragments)
    return (
        OptimizerCheckpoint(tensors, ranks, run.inner, writer, files, every, announce),
        RoundCheckpoint(tensors, ranks, writer, copies, spec.node.copy_interval, len(fragments), announce),
    )
