"""Lets the inner optimizer's state outlive the trainer: written in the background, read when a trainer starts.

After a round's inner steps, while the round is reduced, each rank's shards of the moments are written
(`OptimizerCheckpoint.save_if_due`, through `atoll.node.participant.tensor_writer`). A trainer that starts takes
the newest that is older than the round it is to train (`OptimizerCheckpoint.restore`): a round that was trained
and did not commit is then trained again from what it began with.

Where there are none, or none of use, a sentence says why, and the learning rate rises again over some inner steps
(`atoll.node.participant.lr_rewarm`).

DCP's helpers for optimizers are not used: they take a step of a fresh optimizer, which changes the training.
"""

import threading
from collections.abc import Callable

import torch
from torch.optim import Optimizer

from atoll.comm.config.run import InnerConfig
from atoll.node.participant.lr_rewarm import Rewarming
from atoll.node.participant.optimizer_files import OptimizerFiles, UnusableMoments
from atoll.node.participant.rank_group import RankGroup
from atoll.node.participant.tensor_writer import TensorSet, TensorWriter
from atoll.node.participant.training_tensors import TrainingTensors, Unstorable
from atoll.node.trainer_channel import Train


class OptimizerCheckpoint:
    """Writes and reads the inner optimizer's state of one trainer. Every rank calls each method at the same
    time."""

    def __init__(
        self,
        tensors: TrainingTensors,
        ranks: RankGroup,
        inner: InnerConfig,
        writer: TensorWriter,
        files: OptimizerFiles | None,
        every: int,
        announce: Callable[[str], None],
    ) -> None:
        """`files`: None where nothing is written. `every`: rounds from one that is written to the next. `announce`
        takes rank 0's sentences for the daemon's log."""
        self._tensors, self._inner, self._ranks, self._writer = tensors, inner, ranks, writer
        self._files, self._every, self._announce = files, every, announce
        self.rewarming = Rewarming()  # of the learning rate: at its end, unless the moments were lost
        self._newest: int | None = None
        self._read: int | None = None  # the round whose moments this trainer began with, until it is through one
        self._failing = False
        self._unrestored = self._unread = True

    def close(self) -> None:
        """Wait for what is being written."""
        self._writer.close()

    @property
    def copied(self) -> threading.Event:
        """Clear while the moments are copied: no step may be taken."""
        return self._writer.copied

    # Reading

    def restore(self, order: Train) -> None:
        """Load the newest moments from before the order's round into the optimizer, or have the learning rate rise
        again where none can be used. A run's first round has a warm-up of its own. Only a trainer's first call,
        and the first after a `reset`, does anything; it must precede the inner steps."""
        if not self._unrestored:
            return
        self._unrestored = False
        if not self._ranks.total(float(any(map(has_moments, self._tensors.optimizers))))[0]:
            return
        reasons = list[str]()
        for stored in self._candidates(order.round):
            try:
                self._load(stored)
            except UnusableMoments as error:
                reasons.append(f"those of round {stored} are {error}")
                continue
            self._newest = stored
            self._unread = False
            self._tell(f"goes on with the inner optimizer's moments of round {stored}")
            return
        if order.tokens or reasons:
            self.rewarming = warming = Rewarming.without_moments(self._inner, order.steps)
            why = "; ".join(reasons) or "none are kept on this node"
            self._tell(
                f"begins round {order.round} without the inner optimizer's moments ({why}): the learning rate "
                f"rises over {warming.steps} inner steps"
            )

    def restored(self, rewarming: Rewarming) -> None:
        """Say that the optimizer has its moments: they came with a copy of the round at hand, at which the
        learning rate was so far on its rise."""
        self._unrestored, self.rewarming = False, rewarming
        self._newest = next(iter(self._files.rounds), None) if self._files is not None else None

    def reset(self) -> None:
        """Drop the moments, which may have what is wrong with the parameters: `restore` is to be called again."""
        self._writer.wait()
        self._tensors.reset()
        self._unrestored = True

    def discard(self, round_: int) -> None:
        """Drop the moments, and delete those after that round and later ones: `restore` is to be called again."""
        self.reset()
        if self._files is not None and self._ranks.rank == 0:
            self._files.delete_from(round_)
        self._newest = None

    def end_reading(self) -> None:
        """Say that this trainer did not die of the moments with which it began."""
        if self._files is not None and self._read is not None and self._ranks.rank == 0:
            self._files.end_reading(self._read)
        self._read = None

    def _candidates(self, round_: int) -> list[int]:
        """Rounds before `round_`, the newest first; rank 0 has looked."""
        found = [stored for stored in self._files.rounds if stored < round_] if self._files else []
        count = int(self._ranks.total(len(found) if self._ranks.rank == 0 else 0)[0])
        mine = found[:count] if self._ranks.rank == 0 else []
        return [int(stored) for stored in self._ranks.total(*mine, *([0] * (count - len(mine))))]

    def _load(self, stored: int) -> None:
        """Raises `UnusableMoments`, on all ranks."""
        assert self._files is not None
        wrong: UnusableMoments | None = None
        if self._ranks.rank == 0:
            try:
                self._files.verify(stored, self._tensors.kind, self._tensors.shapes)
                if self._unread:  # later this trainer's own arithmetic was bad, and it lives
                    self._files.begin_reading(stored)
                    self._read = stored
            except UnusableMoments as error:
                wrong = error
        if self._ranks.total(float(wrong is not None))[0]:
            raise wrong or UnusableMoments("unusable")  # rank 0's word is the one that is told
        self._writer.read(self._files.path(stored), self._tensors)

    # Writing

    def save_if_due(self, round_: int) -> None:
        """Have the moments written in the background, if it is time; to be called after the inner steps of
        `round_`, before the next."""
        self.end_reading()
        if self._files is None:
            return
        state, unstorable = dict[str, torch.Tensor](), ""
        try:
            state = self._tensors.optimizer_state()
        except Unstorable as error:
            unstorable = str(error)
        due = self._newest is None or round_ - self._newest >= self._every

        def written() -> None:
            self._newest, self._failing = round_, False

        tensors = TensorSet(
            files=self._files,
            number=round_,
            state=state,
            kind=self._tensors.kind,
            shapes=self._tensors.shapes,
            on_written=written,
            on_failure=lambda why: self._failed(round_, why),
            unstorable=unstorable,
        )
        # These are the moments after the round for now only: they wait for a copy that is being written.
        self._writer.start(tensors, due, queue=True)

    def _failed(self, round_: int, why: str) -> None:
        """Said once for as long as it lasts."""
        if not self._failing:
            self._tell(f"the inner optimizer's moments of round {round_} are not kept on disk: {why}")
        self._failing = True

    def _tell(self, sentence: str) -> None:
        if self._ranks.rank == 0:
            self._announce(sentence)


def has_moments(optimizer: Optimizer) -> bool:
    """Whether the optimizer keeps anything from step to step: plain SGD does not."""
    return not isinstance(optimizer, torch.optim.SGD) or any(g["momentum"] for g in optimizer.param_groups)
