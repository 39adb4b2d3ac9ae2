"""The position of a trainer on its way through its orders, and what is due next. Without torch, clock and I/O.

With overlap a trainer does not stand still while what it handed over travels:

    steps of round k | Ready(k) | ahead, `delay` steps or more | take state k | steps of round k+1 | Ready(k+1)
                                    told to Train on: round k is committed, and the state is here

It takes the state after `overlap.delay` steps. When it was not told by then, it goes on, and takes it as soon as
it is; it stops when it has all the steps that a round may have.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from atoll.comm.config.run import RunConfig
from atoll.comm.leases import samples, size
from atoll.node.trainer_channel import Ready, Train


@dataclass
class TrainingCursor:
    """A trainer's position on its way through an order's lease.

    `ahead` says which of two: it takes the order's steps, or has handed them over and goes on with the next
    round's.
    """

    run: RunConfig
    order: Train
    steps: int = 0  # since the last Ready, or since the order
    earlier_steps: int = 0  # of the order, before these: it is ahead of the order that it has
    skipped_steps: int = 0  # of `steps`, those that were left out
    empty_steps: int = 0  # of the others, those without a token to learn
    moving_steps: int = 0  # of the others, those at a learning rate above zero
    loss_sum: float = 0.0  # over `steps` but those that were left out, or empty
    ahead: bool = False  # the order's work is handed over
    state_due: bool = False  # the new order says where to put `steps`, and that was not done yet
    target_reported: bool = False  # the daemon was told that the order's steps are taken
    finishing: bool = False  # the daemon said to finish
    rests: bool = False  # the daemon said to take no steps ahead, or no more of them
    stall_reported: bool = False  # the daemon was told that nothing is done until the next order

    @property
    def delay(self) -> int:
        """Steps beyond the order's after which its state is taken at the earliest; 0: it does not go beyond."""
        return self.run.delay(self.order.round)

    @property
    def steps_left(self) -> int:
        """Steps for which there are samples."""
        return size(self.order.lease) // self.run.inner.batch_size - self.earlier_steps - self.steps

    @property
    def is_stalled(self) -> bool:
        """Whether the order is handed over and the trainer as far ahead of it as it may be, or out of samples."""
        limit = max(self.delay, self.order.ceiling)
        return self.ahead and (self.rests or self.steps >= limit or self.steps_left <= 0)

    @property
    def is_complete(self) -> bool:
        """Whether the order's work is to be handed over now."""
        return not self.ahead and (self.steps >= self.fewest_steps or self.steps_left <= 0)

    @property
    def fewest_steps(self) -> int:
        """The steps with which the order's work is handed over."""
        if not self.finishing:
            return self.order.ceiling
        return 0 if self.rests else self.order.floor

    @property
    def takes_state(self) -> bool:
        """Whether the new state is to be taken now: after `overlap.delay` steps, or before an earlier
        hand-over."""
        return self.state_due and (self.is_complete or self.steps >= self.run.overlap.delay)

    @property
    def next_samples(self) -> list[int]:
        """Sample indices of the next step's batch."""
        batch_size = self.run.inner.batch_size
        return samples(self.order.lease, (self.earlier_steps + self.steps) * batch_size, batch_size)

    def coming_samples(self) -> Iterator[list[int]]:
        """Sample indices of the batches of the next steps, one after the other, as the order has them now."""
        batch_size, lease = self.run.inner.batch_size, self.order.lease
        first = self.earlier_steps + self.steps
        return (samples(lease, k * batch_size, batch_size) for k in range(first, size(lease) // batch_size))

    @property
    def tokens(self) -> int:
        """The clock of the learning rate: the run's committed tokens, interpolated within the round."""
        step_tokens = self.run.inner.batch_size * self.run.model.seq_len
        return self.order.tokens + (self.earlier_steps + self.steps) * step_tokens * self.order.fleet

    def count_step(self, loss: float, skipped: bool, learning_rate: float, is_empty: bool = False) -> None:
        """Enter a step, and its loss in nats a token. `skipped`: it was left out, its batch is consumed.
        `is_empty`: its batch had no token to learn, and counts as trained: to do it again would change nothing."""
        self.steps += 1
        if is_empty:
            self.empty_steps += 1
            return
        if skipped:
            self.skipped_steps += 1
            return
        self.loss_sum += loss
        self.moving_steps += learning_rate > 0

    def hand_over(self) -> Ready:
        """Close the order's steps and return the `Ready` that tells of them. From now on the cursor is ahead;
        `Ready.ahead` says whether there is overlap, and anything to train on."""
        ready = Ready(
            self.order.round,
            self.steps,
            self.loss_sum / max(self.steps - self.skipped_steps - self.empty_steps, 1),
            self.steps * self.run.inner.batch_size,
            ahead=self.delay > 0 and self.steps > 0 and self.steps_left > 0 and not self.rests,
            skipped=self.skipped_steps * self.run.inner.batch_size,
        )
        self.earlier_steps, self.steps, self.loss_sum = self.earlier_steps + self.steps, 0, 0.0
        self.skipped_steps = self.empty_steps = self.moving_steps = 0
        self.ahead = True
        return ready

    def go_on(self, order: Train) -> None:
        """Continue with `order`: the steps since the hand-over are its first."""
        self.order, self.earlier_steps, self.ahead, self.state_due = order, 0, False, True
        self.target_reported = self.finishing = self.rests = self.stall_reported = False
