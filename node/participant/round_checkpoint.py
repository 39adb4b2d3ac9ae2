"""Lets what is trained of a round outlive the trainer: a crash costs the steps since the last copy, not the round.

While a round's inner steps are taken, from time to time (`NodeConfig.copy_interval`), parameters, moments and the
position in the round are written in the background (`RoundCheckpoint.save_if_due`, through
`atoll.node.participant.tensor_writer`), to memory or to the disk (`atoll.node.participant.round_copies`). The step
at hand waits for the copy in the trainer's own memory only, and where writing takes long there are fewer copies:
at most a fifth of the time something is written.

A trainer that starts and is told to train the same round, on a lease with the same front, from the same state,
goes on from there (`RoundCheckpoint.begin`); what does not match is deleted. The moments of the round before stay
where they are, for one that is trained again from its beginning.

Nothing is kept of work that nobody could go on with:

- Steps on top of what an earlier round left out, or of other fragments': the local vector may be half written when
  a trainer dies, and the node begins from the anchor.
- Steps ahead of a commit: what they go on top of is not known yet.
- Steps while the arithmetic is in doubt (`atoll.node.participant.health`).
"""

import time
from collections.abc import Callable
from pathlib import Path

import msgspec
from torch import Tensor

from atoll.comm.decode_errors import DECODE_ERRORS
from atoll.node.participant.lr_rewarm import Rewarming
from atoll.node.participant.optimizer_files import OptimizerFiles, UnusableMoments
from atoll.node.participant.rank_group import RankGroup
from atoll.node.participant.round_copies import RoundCopies
from atoll.node.participant.tensor_writer import TensorSet, TensorWriter
from atoll.node.participant.training_cursor import TrainingCursor
from atoll.node.participant.training_tensors import TrainingTensors, Unstorable
from atoll.node.trainer_channel import Train

PAUSE_FACTOR = 4.0  # times as long as the last copy took to write nothing is written
RETRY_SECONDS = 5.0  # until another try where something else is being written, or there is no room; or `interval`


class RoundPosition(msgspec.Struct, frozen=True):
    """The position of a trainer in an order: which order it is, and how far its steps have come."""

    round: int
    front: int  # first sample of the order's lease
    state: str  # digest of the state whose anchor it began from
    steps: int
    skipped_steps: int
    moving_steps: int
    loss_sum: float
    rise_steps: int = 0  # over which the learning rate rises, of a trainer that began without moments
    risen_steps: int = 0  # of them, those that are taken
    empty_steps: int = 0

    @property
    def rewarming(self) -> Rewarming:
        """The learning rate's rise, as far as it was."""
        return Rewarming(self.rise_steps, self.risen_steps)

    def is_of(self, order: Train) -> bool:
        """Whether the order begins where this one's did."""
        return (self.round, self.front, self.state) == (order.round, order.lease[0][0], order.state)


class RoundCheckpoint:
    """Writes and reads what one trainer has of a round. Every rank calls each method at the same time."""

    def __init__(
        self,
        tensors: TrainingTensors,
        ranks: RankGroup,
        writer: TensorWriter,
        copies: RoundCopies | None,
        interval: float,
        fragments: int,
        announce: Callable[[str], None],
    ) -> None:
        """`copies`: None where nothing is written. `interval`: seconds between two copies at least; 0: none are
        made. `fragments` that take turns; 1: rounds are of the whole model. `announce` takes rank 0's sentences
        for the daemon's log."""
        self._tensors, self._ranks = tensors, ranks
        self._writer, self._copies, self._interval = writer, copies, interval
        self._fragments, self._announce = fragments, announce
        self._next_at = 0.0  # seconds; when the next copy is due
        self._number = 0  # of the last copy
        self._failing = False
        self._unrestored = True

    def attach(self, folder: str) -> None:
        """Write copies to that folder in memory where there is room; empty: there is none."""
        if self._copies is not None and folder:
            self._copies.attach(Path(folder))

    # Reading

    def begin(self, cursor: TrainingCursor) -> RoundPosition | None:
        """Begin with an order: put into the parameters, the optimizers and the cursor what an earlier trainer had
        of it; returns its position, None if there was nothing. Only a trainer's first call looks."""
        self._next_at = max(self._next_at, time.monotonic() + self._interval)
        if not self._unrestored or self._copies is None:
            return None
        self._unrestored = False
        self._number, files = self._copies.newest()
        found = self._find(files, cursor) if self._number and self._ranks.rank == 0 else None
        text = self._ranks.broadcast(msgspec.json.encode(found))
        position = msgspec.json.decode(text, type=RoundPosition | None)
        if position is None:
            return None
        try:
            self._writer.read(files.path(self._number), self._tensors)
        except UnusableMoments as error:
            self._tell(f"what is kept of round {position.round} is {error}: it is trained from its beginning")
            self.forget()
            return None
        cursor.steps, cursor.loss_sum = position.steps, position.loss_sum
        cursor.skipped_steps, cursor.moving_steps = position.skipped_steps, position.moving_steps
        cursor.empty_steps = position.empty_steps
        self._tell(
            f"goes on with round {position.round} behind inner step {position.steps}, which is "
            f"{self._copies.where(files)}"
        )
        return position

    def end_reading(self) -> None:
        """Say that this trainer did not die of the copy with which it began, if it did."""
        if self._copies is not None and self._ranks.rank == 0:
            self._copies.end_reading()

    def _find(self, files: OptimizerFiles, cursor: TrainingCursor) -> RoundPosition | None:
        """Rank 0's: the position of the newest copy if it is of this order; else all are deleted."""
        try:
            files.verify(self._number, self._tensors.kind, self._tensors.shapes)
            position = msgspec.json.decode(files.position(self._number), type=RoundPosition)
            if self._keeps(cursor.order) and position.is_of(cursor.order) and position.steps <= cursor.steps_left:
                files.begin_reading(self._number)
                return position
        except (UnusableMoments, *DECODE_ERRORS) as error:
            self._tell(f"what is kept of a round is {error}: it is not used")
        assert self._copies is not None
        self._copies.clear()
        return None

    # Writing

    @property
    def due(self) -> bool:
        """Whether it is time for a copy; what rank 0 says counts."""
        return self._copies is not None and self._interval > 0 and time.monotonic() >= self._next_at

    def save_if_due(self, cursor: TrainingCursor, due: bool, rewarming: Rewarming) -> None:
        """Have a copy written in the background; to be called after a step, before the next. `due`: the ranks
        agree that it is time. `rewarming`: of the learning rate."""
        if not due or self._copies is None or not self._keeps(cursor.order):
            return
        if cursor.ahead or cursor.state_due or cursor.is_complete or not cursor.steps:
            return
        order, began, copies = cursor.order, time.monotonic(), self._copies
        position = RoundPosition(
            round=order.round,
            front=order.lease[0][0],
            state=order.state,
            steps=cursor.steps,
            skipped_steps=cursor.skipped_steps,
            empty_steps=cursor.empty_steps,
            moving_steps=cursor.moving_steps,
            loss_sum=cursor.loss_sum,
            rise_steps=rewarming.steps,
            risen_steps=rewarming.steps_taken,
        )
        state, unstorable = dict[str, Tensor](), ""
        try:
            state = self._tensors.optimizer_state() | self._tensors.parameter_state()
        except Unstorable as error:
            unstorable = str(error)

        size = sum(tensor.numel() * tensor.element_size() for tensor in state.values())
        self._next_at = began + min(self._interval, RETRY_SECONDS)
        if (files := copies.choose(size)) is None:
            return

        def written() -> None:
            copies.keep_only(files)
            took = time.monotonic() - began
            self._next_at = max(self._next_at, time.monotonic() + PAUSE_FACTOR * took)
            self._failing = False

        tensors = TensorSet(
            files=files,
            number=self._number + 1,
            state=state,
            kind=self._tensors.kind,
            shapes=self._tensors.shapes,
            on_written=written,
            on_failure=lambda why: self._failed(order.round, why),
            position=msgspec.json.encode(position),
            unstorable=unstorable,
        )
        if self._writer.start(tensors, True):
            self._number += 1
            self._next_at = max(self._next_at, began + self._interval)
            copies.begun(files, size)

    def forget(self) -> None:
        """Delete what is kept."""
        self._writer.wait()
        if self._copies is not None and self._ranks.rank == 0:
            self._copies.clear()

    def _keeps(self, order: Train) -> bool:
        """Whether a trainer that dies may be told to begin where this order began."""
        fresh = not order.resume and (not order.continues or self._fragments == 1)
        return fresh and bool(order.state) and bool(order.lease)

    def _failed(self, round_: int, why: str) -> None:
        """Said once for as long as it lasts."""
        if not self._failing:
            self._tell(f"what is trained of round {round_} is not kept, a crash would cost it: {why}")
        self._failing = True

    def _tell(self, sentence: str) -> None:
        if self._ranks.rank == 0:
            self._announce(sentence)
