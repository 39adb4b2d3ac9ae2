"""The gradient of a rank's share of a batch, computed in micro-batches that fit into memory.

The plan is chosen before training begins (`GradientAccumulator.choose`, by `atoll.node.trainer.micro_batch`).
Where memory runs out later, a node of one rank takes a smaller one and computes the batch again. Of several ranks
the others wait for the one that has run out: it keeps the smaller plan in the node's cache and ends, and the
daemon starts the trainer again. So does a rank alone whose torch cannot forget the step that broke off.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from atoll.comm.config.run import RunConfig
from atoll.node.config import Checkpointing, NodeConfig
from atoll.node.memory import free_for_node
from atoll.node.participant.batches import Batch, RunTokens, Share, learned, pieces
from atoll.node.participant.daemon_link import is_out_of_memory
from atoll.node.participant.flat_vector import local_tensor
from atoll.node.participant.rank_group import RankGroup
from atoll.node.preflight import BYTES_FLAT, MOMENT_BYTES, available
from atoll.node.trainer.checkpointing import ActivationCheckpointing
from atoll.node.trainer.loss import accumulate, placed, validation_loss
from atoll.node.trainer.micro_batch import (
    SMALL_SHARE_TOKENS,
    Cost,
    MicroBatchStore,
    Record,
    StepPlan,
    after_death,
    least_memory,
    levels_of,
    search,
    smaller,
)
from atoll.node.trainer.model import blocks_of
from atoll.node.trainer.stop_signals import on_stop
from atoll.node.trainer.unfinished_step import can_forget, forget_step

T = TypeVar("T")
TIMED_PASSES = 3  # of which the fastest counts
LONG_PASS_SECONDS = 10.0  # the time of a first pass that is not repeated
GATHERED_SHARE = 4  # gradients that are not shared out may take one in so many bytes of memory


class MicroBatchTooLarge(Exception):
    """A rank has run out of memory, and all must start again: a smaller plan is kept for them."""


class GradientAccumulator:
    """Computes gradients and validation losses of one rank. Every rank calls each method at the same time."""

    def __init__(
        self,
        model: nn.Module,
        run: RunConfig,
        node: NodeConfig,
        ranks: RankGroup,
        device: torch.device,
        store: MicroBatchStore,
    ) -> None:
        settings = ranks.gather((node.micro_batch, node.checkpointing), tuple[int, Checkpointing])[0]
        self._node = node = replace(node, micro_batch=settings[0], checkpointing=settings[1])
        self._model, self._run, self._ranks, self._device, self._store = model, run, ranks, device, store
        self._share = Share(ranks.rank, ranks.size)
        blocks = blocks_of(model)
        self._checkpointing = ActivationCheckpointing(blocks)
        self._levels = levels_of(node.checkpointing, bool(blocks))
        # One rank has nothing to reduce, and FSDP2 keeps no gradients where they cannot be forgotten.
        self._reduce_each = ranks.size == 1 or not _gathered_gradients_fit(model, ranks, device)
        self._goes_on = ranks.size == 1 and can_forget(model)  # where memory runs out; else it starts again
        self._plan = StepPlan(1, self._levels[0])
        self._compile_seconds = 0.0  # of a search, in passes that compile first
        self.tell: Callable[[str], None] = _nothing  # takes sentences for the daemon's log
        self.on_plan: Callable[[StepPlan], None] = _nothing  # called with a plan that takes another's place

    @property
    def plan(self) -> StepPlan:
        """The way in which the gradient of a share is computed."""
        return self._plan

    def choose(self) -> str:
        """Decide on a plan, by measuring where none is known; before training. Returns a sentence on it, empty
        where there was nothing to decide. Raises `MicroBatchTooLarge`, and `MemoryError` where nothing fits."""
        batch = self._share.of(self._run.inner.batch_size)
        share = batch.stop - batch.start
        record = self._known()
        if record.plan is None and (plan := self._given(share)) is not None:
            record = Record(plan)
        measured = record.plan is None
        if measured:
            with self._undone(), self._moments() as moments, on_stop(self._store.take_back):
                record = search(share, self._levels, self._measuring(share, moments, record.stops))
            self._write(record)
        assert record.plan is not None
        self._take(record.plan)
        if not record.reason:
            return ""
        source = "" if measured else ", as found earlier"
        return f"computes {share} sequences a step in {record.plan}{source}: {record.reason}"

    def add(self, batch: Batch) -> Tensor:
        """Add the gradient of this rank's share of a batch to the parameters' gradients; return its loss. The mean
        of the ranks' losses, and of their gradients, is that over all learned tokens of the batch. What was added
        before is lost where memory runs out."""
        (total,) = self._ranks.total(float(learned(batch)))
        batch, targets = placed(batch, self._device), total / self._ranks.size
        return self._within_memory(lambda size: accumulate(self._model, batch, size, self._reduce_each, targets))

    def validation_loss(self, data: RunTokens) -> float:
        """The mean loss over all learned tokens of the run's validation batches, the same on every rank."""
        model, run, ranks, device = self._model, self._run, self._ranks, self._device
        return self._within_memory(lambda size: validation_loss(model, run, data, ranks, device, size))

    # Running out of memory

    def _within_memory(self, compute: Callable[[int], T]) -> T:
        while True:
            try:
                return compute(self._plan.size)
            except (MemoryError, RuntimeError) as error:
                below = smaller(self._plan, self._levels)
                if below is None or not is_out_of_memory(error):
                    raise
                said = str(error).partition(". ")[0]
            # Only now: what was computed lives as long as the error's traceback.
            self._give_up(below, said)

    def _give_up(self, below: StepPlan, said: str) -> None:
        """Go on with `below`, or begin again with it."""
        sentence = f"ran out of memory in {self._plan} ({said})"
        self._store.write(Record(below, sentence))
        if not self._goes_on:
            raise MicroBatchTooLarge(f"{sentence}: starts again with {below}")
        forget_step(self._model, self._device)
        self._take(below)
        self.on_plan(below)
        self.tell(f"{sentence}: goes on with {below}")

    def _take(self, plan: StepPlan) -> None:
        self._plan = plan
        self._checkpointing.set(plan.level)

    # The choice

    def _known(self) -> Record:
        """The node's record, the same for all ranks. Of several machines each has its own: the one that takes the
        least memory holds."""
        found = [after_death(r, self._levels) for r in self._ranks.gather(self._store.read(), Record)]
        record = min(found, key=lambda record: least_memory(record.plan))
        if self._ranks.is_first_on_host and record != self._store.read():
            self._store.write(record)
        return record

    def _given(self, share: int) -> StepPlan | None:
        """A plan that needs no measuring: the one that the node's settings name, or a small share at once."""
        if self._node.micro_batch:
            return StepPlan(min(self._node.micro_batch, share), self._levels[0])
        tokens = share * self._run.model.seq_len
        is_small = self._device.type == "cpu" and tokens <= SMALL_SHARE_TOKENS
        return StepPlan(share, self._levels[0]) if is_small or share == 1 and len(self._levels) == 1 else None

    def _write(self, record: Record) -> None:
        """Have rank 0 write the record, before anything else is done on any rank."""
        if self._ranks.rank == 0:
            self._store.write(record)
        self._ranks.barrier()

    def _measuring(self, share: int, moments: int, stops: int) -> Callable[[StepPlan], Cost | None]:
        """Measures plans for this share. `moments`: bytes that the optimizer's state will take in host memory;
        `stops`: of earlier searches."""
        began, size, neighbours = time.monotonic(), self._ranks.size, ranks_here(self._ranks)

        def measure(plan: StepPlan) -> Cost | None:
            self._write(Record(attempt=plan, stops=stops))
            self._take(plan)
            before = resident_bytes("VmRSS")
            forget_peak()
            seconds = self._seconds(plan, min(2 * plan.size, share))  # of two: there are gradients already
            growth = max(0.0, resident_bytes("VmHWM") - before) if self._device.type == "cpu" else 0.0
            forget_step(self._model, self._device)
            if seconds is None:
                return None
            elapsed = time.monotonic() - began - self._compile_seconds
            growth, free, *means = self._ranks.total(
                growth, self._free() / neighbours - moments, seconds / size, elapsed / size
            )
            return Cost(means[0], growth, free, means[1])

        return measure

    def _free(self) -> float:
        """Bytes of memory for this machine's ranks: where the owner allows so much, without what the daemon is to
        share with them."""
        if not self._node.memory:
            return available()
        return free_for_node(self._node) - BYTES_FLAT * sum(p.numel() for p in self._model.parameters())

    @contextmanager
    def _moments(self) -> Iterator[int]:
        """Take the memory of a GPU that the optimizer's state will take; return the bytes that it will take of the
        host's."""
        parameters = [p for p in self._model.parameters() if p.requires_grad]
        size = MOMENT_BYTES[self._run.inner.optimizer] * sum(local_tensor(p).numel() for p in parameters)
        on_gpu = self._device.type == "cuda"
        taken = torch.empty(size if on_gpu else 0, dtype=torch.uint8, device=self._device)
        yield 0 if on_gpu else size
        del taken

    def _seconds(self, plan: StepPlan, count: int) -> float | None:
        """Seconds that a sequence takes, in a batch of `count`; None where memory does not suffice."""
        try:
            batch = self._made_up(count)
            one = pieces(batch, plan.size)[0]
            if self._node.compile:
                self._compile_seconds += self._pass(one, plan)
            first = self._pass(one, plan)
            (mean,) = self._ranks.total(first / self._ranks.size)
            if mean > LONG_PASS_SECONDS:
                return first / plan.size
            return min(self._pass(batch, plan) for _ in range(TIMED_PASSES)) / count
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            if not self._goes_on:
                if (below := smaller(plan, self._levels)) is None:
                    raise
                self._store.write(Record(below, f"{plan} did not fit into memory"))
                raise MicroBatchTooLarge(f"{plan} did not fit into memory: starts again with {below}") from None
            return None

    def _made_up(self, count: int) -> Batch:
        """A batch of `count` samples of random tokens."""
        length, vocabulary = self._run.model.seq_len, self._run.model.vocab_size
        sequences = torch.randint(vocabulary, (count, length + 1), device=self._device)
        positions = torch.arange(length, device=self._device).repeat(count, 1)
        labels = sequences[:, 1:].contiguous()
        return {"input_ids": sequences[:, :-1].contiguous(), "labels": labels, "position_ids": positions}

    def _pass(self, batch: Batch, plan: StepPlan) -> float:
        began = time.perf_counter()
        loss = accumulate(self._model, batch, plan.size, self._reduce_each)
        loss.item()  # of a GPU: when it is done
        return time.perf_counter() - began

    @contextmanager
    def _undone(self) -> Iterator[None]:
        """Give parameters values that have none yet, and leave as it was what a forward pass may change."""
        buffers = [(buffer, buffer.clone()) for buffer in self._model.buffers()]
        if self._node.compile:
            compile_blocks(self._model, dynamic=None)  # not for each size anew
        with torch.random.fork_rng([self._device] if self._device.type == "cuda" else []), torch.no_grad():
            for parameter in [] if self._node.model or self._run.model.plugin else self._model.parameters():
                local_tensor(parameter).uniform_(-0.02, 0.02)
            with torch.enable_grad():
                yield
        for buffer, before in buffers:
            buffer.copy_(before)
        if self._node.compile:
            torch.compiler.reset()
            compile_blocks(self._model, dynamic=False)


def compile_blocks(model: nn.Module, dynamic: bool | None) -> None:
    """Have each block compiled at its first use; or the whole model, if it does not name its blocks."""
    for block in blocks_of(model) or [model]:
        block.compile(dynamic=dynamic)


def _gathered_gradients_fit(model: nn.Module, ranks: RankGroup, device: torch.device) -> bool:
    """Whether each rank can hold the gradients of the whole model, fp32, as it does when they are reduced only
    once for several micro-batches. All ranks agree."""
    if not isinstance(model, FSDPModule):
        return True
    have = torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else available() / ranks_here(ranks)
    need = 4 * sum(parameter.numel() for parameter in model.parameters())
    (fitting,) = ranks.total(float(GATHERED_SHARE * need <= have))
    return fitting == ranks.size


def ranks_here(ranks: RankGroup) -> int:
    """The number of ranks on this machine."""
    return ranks.hosts.count(ranks.hosts[ranks.rank])


def resident_bytes(key: str) -> int:
    """The resident memory of this process, VmRSS, or its peak, VmHWM; 0 where the system does not say."""
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            name, _, value = line.partition(":")
            if name == key:
                return int(value.split()[0]) << 10
    return 0


def forget_peak() -> None:
    """Begin the peak of this process's resident memory anew."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _nothing(said: object) -> None:
    pass
