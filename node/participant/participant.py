"""Take part in a run with a training loop of your own.

    model, optimizer = ...                            any model, any torch optimizer
    with participate(model, optimizer) as run:
        for batch in run.batches():                   dict of (B, T) tensors; or of a dataset of yours
            loss = ...                                forward, in as many pieces as you like
            loss.backward()
            run.step(loss)                            clips, steps the optimizer, clears the gradients

A node starts the script: `atoll node join URL -- python train.py`, or `-- torchrun --standalone --nproc-per-node 8
train.py`. docs/participant.md is for its author.
Between two batches the participant carries out what the run asks for: it loads the shared parameters at the
beginning of a round, hands over what was trained at its end, measures a validation loss, keeps the optimizer's
moments. Learning rate and samples are the run's. The loop ends when the node leaves or the run is finished.

Where an engine steps the optimizer itself, `stepped` takes the place of `step`.
"""

import faulthandler
import os
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, assert_never

from msgspec.structs import replace
from torch import Tensor, nn
from torch.optim import Optimizer

from atoll.comm import log
from atoll.comm.config.run import RunConfig
from atoll.comm.errors import AtollError, ConfigError
from atoll.comm.faults import fault_point
from atoll.node.config import TrainerSpec
from atoll.node.outer.layout import flat_order
from atoll.node.participant.batches import Dataset, RunTokens, Share, collated, moved
from atoll.node.participant.checkpoints import open_checkpoints
from atoll.node.participant.daemon_link import (
    DaemonLink,
    agreed_spec,
    end_with_launcher,
    failures_reported,
    script_place,
)
from atoll.node.participant.duty import Duty, rest
from atoll.node.participant.figures import RankMemory, StepMeter
from atoll.node.participant.flat_vector import ShardedParameters
from atoll.node.participant.health import TrainingHealth
from atoll.node.participant.idle_memory import released_when_idle
from atoll.node.participant.lr_schedule import learning_rate
from atoll.node.participant.optimizer_checkpoint import OptimizerCheckpoint
from atoll.node.participant.optimizer_step import OptimizerStep
from atoll.node.participant.prefetch import BatchPrefetcher
from atoll.node.participant.rank_group import RankGroup
from atoll.node.participant.round_checkpoint import RoundCheckpoint
from atoll.node.participant.step_check import StepCheck
from atoll.node.participant.step_outcome import Step, bounded_loss, targets_of
from atoll.node.participant.training_cursor import TrainingCursor
from atoll.node.participant.vector_io import Diverged, MappedVectors, VectorIO
from atoll.node.participant.watchdog import StepWatchdog
from atoll.node.trainer_channel import (
    FIRST_STEP_SECONDS,
    Attach,
    BadArithmetic,
    Evaluate,
    Evaluated,
    Finish,
    Hello,
    Hold,
    Initialise,
    Initialised,
    LogLine,
    LoopLeft,
    Passage,
    Progress,
    Reached,
    Rests,
    Stop,
    ToTrainer,
    Train,
    Waits,
)

# Yields the samples of each step, and returns the command that ended the training, if one has.
Turns = Generator[list[int], None, ToTrainer | None]

DEADLINE_SHARE = 0.6  # of members.stall: a step that hangs is found here before the daemon finds it


class Participant:
    """A process's part in the run, made by `participate`. Every rank calls each method at the same time."""

    def __init__(
        self,
        spec: TrainerSpec,
        link: DaemonLink,
        ranks: RankGroup,
        parameters: ShardedParameters,
        optimizers: Sequence[Optimizer],
        checkpoint: OptimizerCheckpoint,
        round_checkpoint: RoundCheckpoint,
        share: Share,
        evaluate: Callable[[], float] | None,
        write: Callable[[], Passage | None],
        initialise: Callable[[int], None] | None,
        before_round: Callable[[], None] | None,
        token_flops: float | None,
    ) -> None:
        self._spec, self._link, self._ranks = spec, link, ranks
        self._parameters, self._optimizers, self._checkpoint = parameters, optimizers, checkpoint
        self._round_checkpoint = round_checkpoint
        self._share, self._evaluate, self._write, self._initialise = share, evaluate, write, initialise
        self._before_round = before_round or (lambda: None)
        self._guard = StepCheck(optimizers)
        clip = spec.run.inner.clip
        self._step = OptimizerStep(parameters, optimizers, ranks, clip, self.before_step, self.tell)
        self._io: VectorIO | None = None
        layout = parameters.layout
        self._hello = Hello(os.getpid(), ranks.size, layout.numel, layout.shapes, evaluate is not None)
        self._turns = self._obey()
        self._over = False  # the node leaves, or the run is finished
        self._told = Progress(0, 0, 0.0)  # the latest figures
        self._data: BatchPrefetcher | None = None  # of the run's own data, if batches are made of them
        self._taken: Step | None = None  # of the batch that is out
        self._targets = 1  # tokens of this rank's share of it that are learned; 1 where only the script knows
        self._rate = 0.0
        self._cursor: TrainingCursor | None = None
        self._meter = StepMeter.of(spec.run, parameters.layout.numel, parameters.device, ranks.size, token_flops)
        self._memory = RankMemory(parameters.device)
        self._health = TrainingHealth()
        self._duty = Duty(spec.run.members.stall)
        deadline = DEADLINE_SHARE * spec.run.members.stall
        self._watchdog = StepWatchdog(deadline, deadline + FIRST_STEP_SECONDS)

    # For the training loop

    @property
    def config(self) -> RunConfig:
        """The run's configuration, the same on every node."""
        return self._spec.run

    @property
    def rank(self) -> int:
        """The rank of this process among this node's."""
        return self._ranks.rank

    @property
    def ranks(self) -> int:
        """The number of this node's ranks."""
        return self._ranks.size

    @property
    def learning_rate(self) -> float:
        """The learning rate of the present step, by the run's committed tokens; the optimizer has it already."""
        return self._rate

    @property
    def round(self) -> int:
        """The round that the present step is taken in; 0 before the first."""
        return self._cursor.order.round + self._cursor.ahead if self._cursor is not None else 0

    def batches(
        self, dataset: Dataset | None = None, collate: Callable[[list[Any]], Any] = collated
    ) -> Iterator[Any]:
        """Yield this rank's share of each inner step's batch, until the node leaves or the run is finished.

        `dataset` maps a sample's index to a sample (`__getitem__` and `__len__`, as torch's map-style datasets);
        the run's indices go on for ever and are taken modulo its length. None: the run's own data, a dict of three
        (B, T) int64 tensors on the model's device: `input_ids`; `labels`, the tokens that follow, -100 where none
        is to be learned; `position_ids`. `collate` makes a batch of a list of samples.

        Raises `ConfigError` where the batch cannot be divided among the ranks, and when the next batch is asked
        for before `step` or `stepped` was called for the last one.
        """
        source = dataset if dataset is not None else RunTokens.open(self._spec, self._ranks, self._link)
        if not len(source):
            raise ConfigError("run.batches(dataset) was given a dataset without samples")
        device = self._parameters.device if dataset is None else None
        self._share.of(self.config.inner.batch_size)  # before any work is done
        data = None
        if isinstance(source, RunTokens):
            where = self._ranks, self._share, self._parameters.device
            data = self._data = BatchPrefetcher(source, *where, collate, self.tell, self._report_wait)
        try:
            for indices in self.samples():
                with self._meter.loading():
                    mine = indices[self._share.of(len(indices))]
                    batch = data.take(mine) if data else collate([source[index % len(source)] for index in mine])
                    self._targets = targets_of(batch)
                    batch = moved(batch, device) if device is not None else batch
                yield batch
        finally:
            self.end_prefetch()

    def samples(self) -> Iterator[list[int]]:
        """The indices of the samples of each inner step's batch, of all ranks together: for a loop that loads them
        in its own way. As `batches` otherwise. A loop that was left may be followed by another, which goes on
        where the first one was."""
        return map(list, self._turns)  # who leaves a loop over a map does not close what is below

    def step(self, loss: Tensor | float) -> None:
        """Step the optimizer by the gradients that the batch has left, and clear them. `loss`: mean of this rank's
        share, in nats a token.

        The gradient's norm over all ranks is bounded by the run's `inner.clip`; a step whose gradient is not
        finite is left out, and its samples count for nothing: an infinity or NaN would stay in the moments for the
        rest of the run. The loss of a step is the mean of the ranks'; a rank none of whose labels is learned may
        give NaN, which counts as 0. Where the labels of a batch are -100 on all ranks there is no step to take,
        whatever the loss, and its samples count."""
        self._guard.take("run.step", steps_optimizer=True)
        self._taken = self._step.take(loss, self._targets, self._figures())

    def stepped(self, loss: Tensor | float | None, gradient_norm: float = 0.0, *, skipped: bool = False) -> None:
        """Say that the engine has stepped the optimizer for this batch, with this mean loss; None: this rank knows
        none (of a pipeline, all but the last stage). `gradient_norm`: of the whole gradient, for people to look
        at; 0: not known. `skipped`: it has left the step out, as the gradient was not finite; where one rank says
        so, the batch's samples count for nothing."""
        self._guard.take("run.stepped", steps_optimizer=False)
        self._taken = self._step.note(loss, self._targets, gradient_norm, skipped, self._figures())

    def _figures(self) -> tuple[float, ...]:
        """This rank's part of what `Step` says besides the loss, the norm and whether the step was skipped."""
        due = self._round_checkpoint.due and self._ranks.rank == 0
        behind = self._data is not None and self._data.is_behind
        link = float(self._link.has_command())
        return float(self._targets), link, float(due), float(behind), *self._memory.bytes()

    def tell(self, sentence: str) -> None:
        """Write a sentence into the node's log; on ranks other than the first this does nothing. A script that
        prepares for long before its loop says by it that it does not hang."""
        self._link.send(LogLine(sentence))

    def before_step(self) -> None:
        """Wait until parameters and moments may change: they may be on their way to the disk. `step` does so by
        itself."""
        self._checkpoint.copied.wait()

    def end(self) -> None:
        """Say that the training loop has ended; if by itself, while the run goes on, the node starts the script
        again. `participate` does so by itself."""
        self._watchdog.rest()  # what the script does then is its own affair
        if not self._over:
            self._link.send(LoopLeft())

    def end_prefetch(self) -> None:
        """End the thread that prepares batches. `participate` does so by itself."""
        if self._data is not None:
            self._data.close()

    # The daemon's commands

    def _obey(self) -> Iterator[list[int]]:
        self._link.send(self._hello)  # not before: what the script prepares first may take long
        command = self._next_command()
        while not isinstance(command, Stop):
            command = (yield from self._carry_out(command)) or self._next_command()
        self._watchdog.rest()
        self._checkpoint.end_reading()  # it was told to end
        self._round_checkpoint.end_reading()
        self._over = True

    def _next_command(self) -> ToTrainer:
        with released_when_idle(self._parameters.device):
            return self._link.next_command()

    def _carry_out(self, command: ToTrainer) -> Turns:
        match command:
            case Attach():
                numel = self._parameters.layout.numel
                vectors = MappedVectors.attach(command, numel, self._ranks.is_remote)
                self._round_checkpoint.attach(command.copies)
                self._io = VectorIO(self.config, self._parameters, vectors, self._ranks)
            case Initialise(seed=seed):
                if self._initialise is not None:
                    self._initialise(seed)
                self._vectors.initialise()
                self._link.send(Initialised())
            case Train():
                return (yield from self._train(command))
            case Evaluate(round=number):
                self._measure(number, in_training=False)
            case Finish() | Hold() | Stop():  # its round was ready when it came
                pass
            case _:
                assert_never(command)
        return None

    @property
    def _vectors(self) -> VectorIO:
        assert self._io is not None, "a command before Attach"
        return self._io

    def _measure(self, round_: int, in_training: bool) -> None:
        """Measure the anchor's validation loss and say it; the modules' mode is then as before, and the parameters
        if training goes on with them. Else they are the anchor's, and the next round loads its own."""
        assert self._evaluate is not None, "the daemon asks a trainer that cannot evaluate"
        self.before_step()  # the parameters change
        modes = [part.training for part in self._parameters.parts]
        evaluate, write = self._evaluate, self._write
        loss, passage = self._vectors.at_anchor(lambda: (evaluate(), write()), in_training)
        for part, training in zip(self._parameters.parts, modes, strict=True):
            part.train(training)
        (mean,) = self._ranks.total(bounded_loss(loss) / self._ranks.size)
        self._link.send(Evaluated(round_, mean, passage and passage.bounded()))

    def _train(self, order: Train) -> Turns:
        """Take steps, until told to finish or at the ceiling or the end of the lease, and hand over. With overlap
        go on from there, order after order, until another command comes: that one is returned."""
        self._before_round()
        cursor = self._cursor = TrainingCursor(self.config, order)
        log.about(round=order.round)
        if order.doubted_round:
            self._checkpoint.discard(order.doubted_round)
            self._round_checkpoint.forget()
        self.before_step()
        self._vectors.load(order.resume)
        if (position := self._round_checkpoint.begin(cursor)) is not None:
            self._checkpoint.restored(position.rewarming)
        else:
            self._checkpoint.restore(order)
        self._foresee(cursor)
        self._health.begin()
        self._step.begin()
        for part in self._parameters.parts:
            part.train()
        has_command = self._has_command()
        while True:
            if has_command:
                self._watchdog.rest()
                if (command := self._heed(cursor, self._next_command())) is not None:
                    return command
            if cursor.takes_state or cursor.is_complete or cursor.is_stalled:
                self._watchdog.rest()
            if cursor.takes_state:  # the steps since the hand-over go on top of what the new order begins with
                cursor.state_due = False
                self.before_step()
                self._vectors.take_state(cursor.order)
            if cursor.is_complete:
                self._before_round()  # training may go on ahead
                moved, ready = cursor.moving_steps > 0, cursor.hand_over()
                try:
                    self._link.send(self._vectors.hand_over(ready, moved))
                except Diverged as error:
                    self._give_up(cursor, str(error))
                    return None
                self._checkpoint.save_if_due(ready.round)
                if not ready.ahead:
                    return None
            if cursor.is_stalled:
                self._report_stall(cursor)
                has_command = True
            elif not (has_command := self._rest_if_due(cursor)):
                self._begin_step(cursor)
                yield cursor.next_samples
                has_command = self._end_step(cursor)
                last = self._last
                if not last.is_empty and (wrong := self._health.record(last.loss, last.skipped)):
                    which = f": {self._step.fault}" if last.skipped and self._step.fault else ""
                    self._give_up(cursor, wrong + which)
                    return None
                due = self._last.copies_due > 0 and self._health.is_sound
                self._round_checkpoint.save_if_due(cursor, due, self._checkpoint.rewarming)
            self._report_target(cursor)

    def _has_command(self) -> bool:
        """Whether the daemon has a command, as all ranks agree."""
        (ranks,) = self._ranks.total(float(self._link.has_command()))
        return ranks > 0

    def _rest_if_due(self, cursor: TrainingCursor) -> bool:
        """Rest before the next step as the share of the time asks for in which this trainer may compute; returns
        whether a command came meanwhile. A rest that would look like a hang is for the daemon, which pauses the
        node."""
        if cursor.order.duty >= 1:
            return False
        (owed,) = self._ranks.total(self._duty.owed / self._ranks.size)
        if not owed:
            return False
        self._watchdog.rest()
        if owed > self._duty.longest:
            self._link.send(Rests(owed))
        for _ in rest(min(owed, self._duty.longest), self._link.has_command):
            if self._has_command():
                return True
            self._link.send(replace(self._told, round=self.round, step=cursor.steps))  # it does not hang
        return False

    def _begin_step(self, cursor: TrainingCursor) -> None:
        fault_point("trainer.step")
        self._watchdog.tick()
        factor = self._checkpoint.rewarming.next_factor()
        self._rate = learning_rate(self.config.inner, cursor.tokens) * factor
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self._rate
        self._taken = None
        self._targets = 1
        self._guard.expect()
        self._meter.begin()

    def _foresee(self, cursor: TrainingCursor) -> None:
        if self._data is not None:
            self._data.expect(cursor.coming_samples)

    def _report_wait(self, trouble: str) -> None:
        self._watchdog.rest()  # no step hangs
        where = {"round": self.round, "step": self._cursor.steps if self._cursor is not None else 0}
        self._link.send(replace(self._told, **where, tokens_per_s=0.0, mfu=0.0, data_wait=1.0, trouble=trouble))

    def _end_step(self, cursor: TrainingCursor) -> bool:
        """Count the step; returns whether there is a command."""
        taken = self._last
        if self._data is not None:
            self._data.ranks_behind = taken.ranks_behind > 0
        cursor.count_step(taken.loss, taken.skipped, self._rate, taken.is_empty)
        loss = self._told.loss if taken.is_empty else taken.loss
        speed = self._meter.end()
        self._duty.stepped(self._meter.last, cursor.order.duty)
        if speed is not None:
            self._told = Progress(
                *(self.round, cursor.steps, loss, speed.tokens_per_s, speed.mfu, speed.data_wait),
                *(taken.gradient_norm, self._rate, int(taken.device_bytes), int(taken.host_bytes)),
                trouble=self._data.data.trouble if self._data is not None else "",
            )
            self._link.send(self._told)
        return taken.commands > 0

    @property
    def _last(self) -> Step:
        """What came of the last batch. Raises `ConfigError` if nothing did."""
        self._guard.check_stepped()
        assert self._taken is not None
        return self._taken

    def _give_up(self, cursor: TrainingCursor, wrong: str) -> None:
        """Drop the steps since the order or the hand-over, and the optimizer's moments with them; the next order
        begins from the anchor."""
        self._watchdog.rest()
        self._checkpoint.reset()
        self._round_checkpoint.forget()
        self._link.send(BadArithmetic(cursor.order.round, wrong))

    def _heed(self, cursor: TrainingCursor, command: ToTrainer) -> ToTrainer | None:
        """Carry out what can be between two steps; else return the command."""
        match command:
            case Finish(round=number, rest=rest):
                if number == cursor.order.round and not cursor.ahead:  # else it had handed over when it came
                    cursor.finishing, cursor.rests = True, rest
            case Hold(round=number):
                cursor.rests = cursor.rests or (number == cursor.order.round and cursor.ahead)
            case Train(continues=True) if cursor.ahead:
                cursor.go_on(command)
                self._foresee(cursor)
            case Evaluate(round=number):
                self._measure(number, in_training=True)
            case _:
                return command
        return None

    def _report_stall(self, cursor: TrainingCursor) -> None:
        """Tell the daemon, once an order, that the trainer may not go further ahead."""
        if not cursor.stall_reported:
            cursor.stall_reported = True
            self._link.send(Waits(cursor.order.round))

    def _report_target(self, cursor: TrainingCursor) -> None:
        """Tell the daemon, once an order, that the order's steps are taken."""
        if not (cursor.ahead or cursor.target_reported) and cursor.steps >= cursor.order.steps:
            cursor.target_reported = True
            self._link.send(Reached(cursor.order.round))


@contextmanager
def participate(
    model: nn.Module | Sequence[nn.Module],
    optimizer: Optimizer | Sequence[Optimizer],
    *,
    evaluate: Callable[[], float] | None = None,
    write: Callable[[], Passage | None] = lambda: None,
    initialise: Callable[[int], None] | None = None,
    data_parallel: tuple[int, int] | None = None,
    before_round: Callable[[], None] | None = None,
    token_flops: float | None = None,
) -> Iterator[Participant]:
    """Take part in the run of the node that has started this script; see the example at the top.

    `model`: its parameters may be plain tensors or DTensors of any placement (FSDP2, tensor, expert, pipeline
    parallel); those that require gradients are trained. Of a pipeline: the stages that this rank has. In a script
    of several ranks call this once torch's default process group exists; the first member's parameters, as they
    are now, begin the run, unless it says where it begins.

    `optimizer`: one or several. Their learning rate is set before each step.
    `evaluate`: returns the model's mean loss, nats a token, on this rank's share of validation data; where it is
    None, others measure.
    `write`: returns, for people to read, a text and how the model goes on with it; called after `evaluate`.
    `initialise`: called on the run's first member, with the run's seed, to give the parameters their first values.
    `data_parallel`: (index, number) of this rank's share of a batch; None: (rank, ranks), each rank its own.
    `before_round`: called before each round.
    `token_flops`: floating-point operations of the model for a token, forward and backward, for the model FLOPs
    utilisation; None: those of the config's model, or 6 a parameter where the model is another.

    Exits with a sentence, and tells the daemon, what starting again would not cure: an `AtollError`.
    """
    parts = [model] if isinstance(model, nn.Module) else list(model)
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
    rank = 0
    try:
        ranks = RankGroup.of_world()
        rank = ranks.rank
        spec = agreed_spec(ranks)
        with failures_reported(spec.channel):
            end_with_launcher()
            faulthandler.enable()  # a library that aborts, as NCCL's watchdog does, leaves the stacks in the log
            parameters = ShardedParameters(parts, ranks, lambda shapes: tuple(flat_order(spec.run, shapes)))
            link = DaemonLink.opened(ranks, spec.channel)
        with failures_reported(spec.channel, link):
            share = Share(*(data_parallel or (ranks.rank, ranks.size)))
            copies = open_checkpoints(spec, parameters, optimizers, ranks, lambda line: link.send(LogLine(line)))
            checkpoint, round_checkpoint = copies
            participant = Participant(
                *(spec, link, ranks, parameters, optimizers, checkpoint, round_checkpoint),
                *(share, evaluate, write, initialise, before_round, token_flops),
            )
            try:
                yield participant
                participant.end()
            finally:
                participant.end_prefetch()
                checkpoint.close()  # what is being written is finished
        link.close()
    except AtollError as error:
        log.complain(f"trainer rank {rank}", f"{error}{script_place(error)}")
        sys.exit(error.exit_code)
