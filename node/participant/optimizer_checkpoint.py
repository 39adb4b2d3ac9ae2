"""Lets the inner optimizer's state outlive the trainer: written in the background, read when a trainer starts.

After a round's inner steps, while the round is reduced, a thread of every local rank copies its shards of the
moments to host memory, and writes the copy through torch.distributed.checkpoint
(`OptimizerCheckpoint.save_if_due`); the optimizer's next step waits for the copy, but for nothing else
(`OptimizerCheckpoint.copied`). A trainer that starts takes the newest that is older than the round it is to train
(`OptimizerCheckpoint.restore`): a round that was trained and did not commit is then trained again from what it
began with. The file of each rank says which rows it has, so another number of ranks finds its own.

Where there are none, or none of use, a sentence says why, and the learning rate rises again over some inner steps
(`atoll.node.participant.lr_rewarm`).

DCP's helpers for optimizers are not used: they take a step of a fresh optimizer, which changes the training.
"""

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import Optimizer

from atoll.comm.config.run import InnerConfig
from atoll.node import preflight
from atoll.node.participant.flat_vector import ShardedParameters, local_tensor, trainable
from atoll.node.participant.lr_rewarm import Rewarming
from atoll.node.participant.optimizer_files import OptimizerFiles, UnusableMoments
from atoll.node.participant.rank_group import RankGroup
from atoll.node.trainer_channel import Train

MEMORY_MARGIN = 256 << 20  # bytes of memory that are left when the moments are copied
NO_MEMORY = "there is no memory for a copy of them"


class OptimizerCheckpoint:
    """Writes and reads the inner optimizer's state of one trainer. Every rank calls each method at the same
    time."""

    def __init__(
        self,
        parameters: ShardedParameters,
        optimizers: Sequence[Optimizer],
        ranks: RankGroup,
        inner: InnerConfig,
        files: OptimizerFiles | None,
        every: int,
        announce: Callable[[str], None],
    ) -> None:
        """`files`: None where nothing is written. `every`: rounds from one that is written to the next. `announce`
        takes rank 0's sentences for the daemon's log."""
        self._parts, self._device, self._optimizers = parameters.parts, parameters.device, optimizers
        self._inner, self._ranks = inner, ranks
        self._files, self._every, self._announce = files, every, announce
        self._kind = "+".join(type(optimizer).__name__ for optimizer in optimizers)
        self._shapes = dict(parameters.layout.shapes)
        self.rewarming = Rewarming()  # of the learning rate: at its end, unless the moments were lost
        self.copied = threading.Event()  # clear while the moments are copied: no step may be taken
        self.copied.set()
        self._writers = ranks.another()  # the threads': training has its own
        self._thread = ThreadPoolExecutor(1, "moments", self._prepare_thread)
        self._writing: Future[None] | None = None
        self._stager = BlockingAsyncStager()  # memory that is fresh each time costs more than the copy itself
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
        if not any(map(has_moments, self._optimizers)):
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
            self.rewarming = warming = Rewarming.without_moments(self._inner, order.steps)
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
                self._files.verify(stored, self._kind, self._shapes)
            except UnusableMoments as error:
                wrong = error
        if self._ranks.total(float(wrong is not None))[0]:
            raise wrong or UnusableMoments("unusable")  # rank 0's word is the one that is told
        reader = FileSystemReader(self._files.path(stored))
        try:
            found = zeros_like_stored(self._parts, reader.read_metadata().state_dict_metadata)
            load(found, storage_reader=reader, **self._among())
        except Exception as error:  # torch raises many kinds for what it did not write
            raise UnusableMoments(f"unreadable: {last_line(error)}") from None
        load_tensors(self._parts, self._optimizers, found)

    # Writing

    def save_if_due(self, round_: int) -> None:
        """Have the moments written in the background, if it is time; to be called after the inner steps of
        `round_`, before the next."""
        if self._files is None or not (state := optimizer_tensors(self._parts, self._optimizers)):
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
        self.copied.clear()
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
            self.copied.set()
            writer = FileSystemWriter(files.unfinished_path(round_))
            save(copy, storage_writer=writer, **self._among())
            if first:
                files.finish(round_, self._kind, self._shapes)
                self._newest, self._failing = round_, False
        except Exception as error:  # of any rank's disk, wrapped by torch
            if first:
                files.discard(round_)
                self._failed(round_, last_line(error))
        finally:
            self.copied.set()
            if preflight.available() < MEMORY_MARGIN:
                self._stager = BlockingAsyncStager()

    def _copy(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """A copy of the moments in host memory: all ranks have one, or none. Raises `MemoryError`."""
        copy: dict[str, Tensor] = {}
        with suppress(MemoryError, RuntimeError):
            copy = self._stager.stage(state)
            # What it makes itself when told to keep a copy is pinned, which takes a GPU.
            self._stager.state_dict_cache, self._stager.cache_staged_state_dict = copy, True
        (lacking,) = self._writers.total(float(not copy))
        if lacking:
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

    def _among(self) -> dict[str, Any]:
        """Which ranks write and read together, in DCP's words."""
        return {"process_group": self._writers.group} if self._ranks.size > 1 else {"no_dist": True}

    def _prepare_thread(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        with suppress(OSError, AttributeError):
            os.setpriority(os.PRIO_PROCESS, 0, 10)  # of this thread alone: on Linux priorities are the threads'


def has_moments(optimizer: Optimizer) -> bool:
    """Whether the optimizer keeps anything from step to step: plain SGD does not."""
    return not isinstance(optimizer, torch.optim.SGD) or any(g["momentum"] for g in optimizer.param_groups)


def optimizer_tensors(parts: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> dict[str, Tensor]:
    """The optimizers' tensors under `PARAMETER.PART`, such as `norm.weight.exp_avg`."""
    return {
        f"{name}.{part}": tensor
        for name, parameter in trainable(parts).items()
        for optimizer in optimizers
        for part, tensor in optimizer.state.get(parameter, {}).items()
        if isinstance(tensor, Tensor)
    }


def zeros_like_stored(parts: Sequence[nn.Module], found: Mapping[str, Any]) -> dict[str, Tensor]:
    """Zeros to load what was `found` into, sharded as the parameters are here. Raises `UnusableMoments`."""
    parameters, zeros = trainable(parts), dict[str, Tensor]()
    for key, entry in found.items():
        parameter = parameters.get(key.rpartition(".")[0])
        if not isinstance(entry, TensorStorageMetadata):
            raise UnusableMoments(f"unreadable: {key} is no tensor")
        if parameter is None:  # on another stage of the pipeline; that all are known was checked
            continue
        dtype = entry.properties.dtype
        if entry.size == parameter.shape:
            zeros[key] = torch.zeros_like(parameter.data, dtype=dtype)
        elif not entry.size:
            zeros[key] = torch.zeros((), dtype=dtype)
        else:
            raise UnusableMoments(f"of a model with other shapes: {key} has {tuple(entry.size)}")
    return zeros


def load_tensors(parts: Sequence[nn.Module], optimizers: Sequence[Optimizer], state: Mapping[str, Tensor]) -> None:
    """Load `state`, tensors named as `optimizer_tensors` names them, into the optimizers, on their parameters'
    devices."""
    parameters = trainable(parts)
    holders = {p: o for o in optimizers for group in o.param_groups for p in group["params"]}
    for key, tensor in state.items():
        name, _, part = key.rpartition(".")
        parameter = parameters[name]
        holders[parameter].state[parameter][part] = tensor.to(parameter.device)


def local_bytes(tensor: Tensor) -> int:
    """Bytes of the tensor that this rank holds."""
    local = local_tensor(tensor)
    return local.numel() * local.element_size()


def last_line(error: Exception) -> str:
    """The last line of an error's message: what was wrong, without the ranks' tracebacks that torch puts before
    it."""
    return (str(error).strip().splitlines() or [repr(error)])[-1]
