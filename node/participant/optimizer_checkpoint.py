"""Lets the inner optimizer's state outlive the trainer: written in the background, read when a trainer starts.

After a round's inner steps, while the round is reduced, a thread of every local rank copies its shards of the
moments to host memory, and writes the copy through torch.distributed.checkpoint
(`OptimizerCheckpoint.save_if_due`); the optimizer's next step waits for the copy, but for nothing else
(`LearnerState.may_step`). A trainer that starts takes the newest that is older than the round it is to train
(`OptimizerCheckpoint.restore`): a round that was trained and did not commit is then trained again from what it
began with. The file of each rank says which rows it has, so another number of ranks finds its own.

Where there are none, or none of use, a sentence says why, and the learning rate rises again over some inner steps
(`atoll.node.trainer.lr_rewarm`).

DCP's helpers for optimizers are not used: they take a step of a fresh optimizer, which changes the training.
"""

import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from atoll.comm.config.run import OptimizerName
from atoll.node import preflight
from atoll.node.trainer.flat_vector import local_tensor
from atoll.node.trainer.inner_loop import LearnerState
from atoll.node.trainer.lr_rewarm import Rewarming
from atoll.node.trainer.optimizer_files import OptimizerFiles, UnusableMoments
from atoll.node.trainer_channel import Train

MEMORY_MARGIN = 256 << 20  # bytes of memory that are left when the moments are copied
NO_MEMORY = "there is no memory for a copy of them"
RANK_TIMEOUT = timedelta(days=10)  # for the ranks' disks; a rank that dies takes the others with it


class OptimizerCheckpoint:
    """Writes and reads the inner optimizer's state of one trainer. Every rank calls each method at the same
    time."""

    def __init__(
        self, learner: LearnerState, files: OptimizerFiles | None, every: int, announce: Callable[[str], None]
    ) -> None:
        """`files`: None where nothing is written. `every`: rounds from one that is written to the next. `announce`
        takes rank 0's sentences for the daemon's log."""
        self._learner, self._model, self._optimizer = learner, learner.model, learner.optimizer
        self._inner, self._ranks = learner.run.inner, learner.ranks
        self._files, self._every, self._announce = files, every, announce
        self._shapes = {name: tuple(parameter.shape) for name, parameter in self._model.named_parameters()}
        self._group = dist.new_group(
            backend="gloo", timeout=RANK_TIMEOUT
        )  # the writing threads': training has its own
        self._thread = ThreadPoolExecutor(1, "moments", self._prepare_thread)
        self._writing: Future[None] | None = None
        self._stager = BlockingAsyncStager()  # memory that is fresh each time costs more than the copy itself
        self._copied = learner.may_step  # clear while the moments are copied
        self._copied.set()
        self._newest: int | None = None
        self._failing = False
        self._unrestored = True

    def close(self) -> None:
        """Wait for what is being written."""
        self._thread.shutdown()

    # Reading

    def restore(self, order: Train) -> None:
        """Load the newest moments from before the order's round into the optimizer, or have the learning rate rise
        again where none can be used. A run's first round has a warm-up of its own. Only a trainer's first call
        does anything; it must precede the inner steps."""
        if not self._unrestored:
            return
        self._unrestored = False
        if self._inner.optimizer is OptimizerName.SGD:
            return
        reasons = list[str]()
        for stored in self._candidates(order.round):
            try:
                self._load(stored)
            except UnusableMoments as error:
                reasons.append(f"those of round {stored} are {error}")
                continue
            self._newest = stored
            self._tell(f"goes on with the inner optimizer's moments of round {stored}")
            return
        if order.tokens or reasons:
            self._learner.rewarming = warming = Rewarming.without_moments(self._inner, order.steps)
            why = "; ".join(reasons) or "none are kept on this node"
            self._tell(
                f"begins round {order.round} without the inner optimizer's moments ({why}): the learning rate "
                f"rises over {warming.steps} inner steps"
            )

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
                self._files.verify(stored, self._inner.optimizer, self._shapes)
            except UnusableMoments as error:
                wrong = error
        if self._ranks.total(float(wrong is not None))[0]:
            raise wrong or UnusableMoments("unusable")  # rank 0's word is the one that is told
        reader = FileSystemReader(self._files.path(stored))
        try:
            found = zeros_like_stored(self._model, reader.read_metadata().state_dict_metadata)
            load(found, storage_reader=reader, process_group=self._group)
        except Exception as error:  # torch raises many kinds for what it did not write
            raise UnusableMoments(f"unreadable: {last_line(error)}") from None
        load_tensors(self._model, self._optimizer, found)

    # Writing

    def save_if_due(self, round_: int) -> None:
        """Have the moments written in the background, if it is time; to be called after the inner steps of
        `round_`, before the next."""
        if self._files is None or not (state := optimizer_tensors(self._model, self._optimizer)):
            return
        due = self._ranks.rank == 0 and (self._newest is None or round_ - self._newest >= self._every)
        busy = self._writing is not None and not self._writing.done()
        if state.keys() != (self._stager.state_dict_cache or {}).keys() and not busy:
            self._stager = BlockingAsyncStager()
        fresh = self._stager.state_dict_cache is None
        lacking = fresh and preflight.available() < sum(map(local_bytes, state.values())) + MEMORY_MARGIN
        wanted, busy_ranks, lacking_ranks = self._ranks.total(float(due), float(busy), float(lacking))
        if not wanted or busy_ranks:
            return
        if self._ranks.total(float(not self._reserve(self._files, round_, state, bool(lacking_ranks))))[0]:
            return
        self._copied.clear()
        self._writing = self._thread.submit(self._write, self._files, round_, state)

    def _reserve(self, files: OptimizerFiles, round_: int, state: Mapping[str, Tensor], lacking: bool) -> bool:
        """Rank 0's: there is room."""
        if self._ranks.rank:
            return True
        try:
            if lacking:
                raise MemoryError(NO_MEMORY)
            files.begin(round_, sum(tensor.numel() * tensor.element_size() for tensor in state.values()))
        except (OSError, MemoryError) as error:
            self._failed(round_, str(error))
            return False
        return True

    def _write(self, files: OptimizerFiles, round_: int, state: dict[str, Tensor]) -> None:
        """In the thread."""
        first = self._ranks.rank == 0
        try:
            copy = self._copy(state)
            self._copied.set()
            writer = FileSystemWriter(files.unfinished_path(round_))
            save(copy, storage_writer=writer, process_group=self._group)
            if first:
                files.finish(round_, self._inner.optimizer, self._shapes)
                self._newest, self._failing = round_, False
        except Exception as error:  # of any rank's disk, wrapped by torch
            if first:
                files.discard(round_)
                self._failed(round_, last_line(error))
        finally:
            self._copied.set()
            if preflight.available() < MEMORY_MARGIN:
                self._stager = BlockingAsyncStager()

    def _copy(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """A copy of the moments in host memory: all ranks have one, or none. Raises `MemoryError`."""
        copy: dict[str, Tensor] = {}
        with suppress(MemoryError, RuntimeError):
            copy = self._stager.stage(state)
            # What it makes itself when told to keep a copy is pinned, which takes a GPU.
            self._stager.state_dict_cache, self._stager.cache_staged_state_dict = copy, True
        there = torch.tensor(float(bool(copy)))
        dist.all_reduce(there, dist.ReduceOp.MIN, self._group)
        if not there:
            raise MemoryError(NO_MEMORY)
        return copy

    def _failed(self, round_: int, why: str) -> None:
        """Said once for as long as it lasts."""
        if not self._failing:
            self._tell(f"the inner optimizer's moments of round {round_} are not kept on disk: {why}")
        self._failing = True

    def _tell(self, sentence: str) -> None:
        if self._ranks.rank == 0:
            self._announce(sentence)

    def _prepare_thread(self) -> None:
        if self._learner.device.type == "cuda":
            torch.cuda.set_device(self._learner.device)
        with suppress(OSError, AttributeError):
            os.setpriority(os.PRIO_PROCESS, 0, 10)  # of this thread alone: on Linux priorities are the threads'


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer's tensors under `PARAMETER.PART`, such as `norm.weight.exp_avg`."""
    return {
        f"{name}.{part}": tensor
        for name, parameter in model.named_parameters()
        for part, tensor in optimizer.state.get(parameter, {}).items()
    }


def zeros_like_stored(model: nn.Module, found: Mapping[str, Any]) -> dict[str, Tensor]:
    """Zeros to load what was `found` into, sharded as the parameters are here. Raises `UnusableMoments`."""
    parameters, zeros = dict(model.named_parameters()), dict[str, Tensor]()
    for key, entry in found.items():
        parameter = parameters.get(key.rpartition(".")[0])
        if parameter is None or not isinstance(entry, TensorStorageMetadata):
            raise UnusableMoments(f"unreadable: {key} is no parameter's")
        dtype = entry.properties.dtype
        if entry.size == parameter.shape:
            zeros[key] = torch.zeros_like(parameter.data, dtype=dtype)
        elif not entry.size:
            zeros[key] = torch.zeros((), dtype=dtype)
        else:
            raise UnusableMoments(f"of a model with other shapes: {key} has {tuple(entry.size)}")
    return zeros


def load_tensors(model: nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[str, Tensor]) -> None:
    """Load `state`, tensors named as `optimizer_tensors` names them, into the optimizer, on their parameters'
    devices."""
    parameters = dict(model.named_parameters())
    for key, tensor in state.items():
        name, _, part = key.rpartition(".")
        optimizer.state[parameters[name]][part] = tensor.to(parameters[name].device)


def local_bytes(tensor: Tensor) -> int:
    """Bytes of the tensor that this rank holds."""
    local = local_tensor(tensor)
    return local.numel() * local.element_size()


def last_line(error: Exception) -> str:
    """The last line of an error's message: what was wrong, without the ranks' tracebacks that torch puts before
    it."""
    return (str(error).strip().splitlines() or [repr(error)])[-1]
