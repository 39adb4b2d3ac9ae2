"""Writes tensors that a node's ranks share to a folder, in the background, and reads them back: through
torch.distributed.checkpoint, one set at a time.

A thread of every local rank copies its shards to host memory, and writes the copy; the optimizer's next step
waits for the copy, but for nothing else (`TensorWriter.copied`). The file of each rank says which rows it has, so
another number of ranks finds its own. The optimizer's moments (`atoll.node.participant.optimizer_checkpoint`) and
what is trained of a round (`atoll.node.participant.round_checkpoint`) take turns in it.
"""

import os
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import Optimizer

from atoll.node import preflight
from atoll.node.participant.flat_vector import local_tensor, trainable
from atoll.node.participant.optimizer_files import OptimizerFiles, Shapes, UnusableMoments
from atoll.node.participant.rank_group import RankGroup

MEMORY_MARGIN = 256 << 20  # bytes of memory that are left when tensors are copied
NO_MEMORY = "there is no memory for a copy of them"
PARAMETER = "parameter"  # the part of a name that says that the tensor is the parameter itself


@dataclass(frozen=True)
class TensorSet:
    """Tensors that are to be written to one folder, and whom to tell what came of it; rank 0's are called."""

    files: OptimizerFiles
    number: int  # of the folder
    state: dict[str, Tensor]
    kind: str  # of the optimizers
    shapes: Shapes  # of the model's parameters
    on_written: Callable[[], None]
    on_failure: Callable[[str], None]  # with the reason
    position: bytes = b""  # is written as well, where it is not empty

    @property
    def size(self) -> int:
        """Bytes of all ranks' tensors."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.state.values())


class TensorWriter:
    """The background thread of one rank. Every rank calls each method at the same time."""

    def __init__(self, ranks: RankGroup, device: torch.device) -> None:
        self._ranks, self._device = ranks, device
        # One rank writes without the others, and is meant to.
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        self.copied = threading.Event()  # clear while tensors are copied: no step may be taken
        self.copied.set()
        self._writers = ranks.another()  # the threads': training has its own
        self._thread = ThreadPoolExecutor(1, "tensors", self._prepare_thread)
        self._writing: Future[None] | None = None
        self._memory: dict[str, Tensor] = {}  # fresh memory each time costs more than the copy itself

    def close(self) -> None:
        """Wait for what is being written, and end the thread."""
        self._thread.shutdown()

    def wait(self) -> None:
        """Wait for what is being written."""
        if self._writing is not None:
            wait([self._writing])

    def start(self, tensors: TensorSet, wanted: bool) -> bool:
        """Begin to write the tensors if rank 0 wants that, and nothing else is being written; say why where
        memory or disk do not allow it. Returns whether it began, the same on every rank."""
        busy = self._writing is not None and not self._writing.done()
        fresh = 0 if busy else sum(local_bytes(t) for key, t in tensors.state.items() if key not in self._memory)
        lacking = fresh > 0 and preflight.available() < fresh + MEMORY_MARGIN
        wanting, busy_ranks, lacking_ranks = self._ranks.total(
            float(wanted and self._ranks.rank == 0), float(busy), float(lacking)
        )
        if not wanting or busy_ranks:
            return False
        if self._ranks.total(float(not self._reserve(tensors, bool(lacking_ranks))))[0]:
            return False
        self.copied.clear()
        self._writing = self._thread.submit(self._write, tensors)
        return True

    def read(self, path: Path, parts: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
        """Load what a folder has into the parameters and the optimizers. Raises `UnusableMoments`, and has then
        changed nothing."""
        reader = FileSystemReader(path)
        try:
            found = zeros_like_stored(parts, reader.read_metadata().state_dict_metadata)
            load(found, storage_reader=reader, **self._among())
        except Exception as error:  # torch raises many kinds for what it did not write
            raise UnusableMoments(f"unreadable: {last_line(error)}") from None
        load_tensors(parts, optimizers, found)

    def _reserve(self, tensors: TensorSet, lacking: bool) -> bool:
        """Rank 0's: there is room."""
        if self._ranks.rank:
            return True
        try:
            if lacking:
                raise MemoryError(NO_MEMORY)
            tensors.files.begin(tensors.number, tensors.size)
        except (OSError, MemoryError) as error:
            tensors.on_failure(str(error))
            return False
        return True

    def _write(self, tensors: TensorSet) -> None:
        """In the thread."""
        first, files, number = self._ranks.rank == 0, tensors.files, tensors.number
        try:
            copy = self._copy(tensors.state)
            self.copied.set()
            save(copy, storage_writer=FileSystemWriter(files.unfinished_path(number)), **self._among())
            if first:
                files.finish(number, tensors.kind, tensors.shapes, tensors.position)
                tensors.on_written()
        except Exception as error:  # of any rank's disk, wrapped by torch
            if first:
                files.discard(number)
                tensors.on_failure(last_line(error))
        finally:
            self.copied.set()
            if preflight.available() < MEMORY_MARGIN:
                self._memory = {}

    def _copy(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """A copy of the tensors in host memory: all ranks have one, or none. Raises `MemoryError`."""
        copy: dict[str, Tensor] = {}
        with suppress(MemoryError, RuntimeError):
            copy = self._staged(state)
        (lacking,) = self._writers.total(float(not copy))
        if lacking:
            raise MemoryError(NO_MEMORY)
        self._memory |= copy
        return copy

    def _staged(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """A copy of the tensors, in the memory of earlier ones where there is any."""
        stager, known = BlockingAsyncStager(), {key: self._memory[key] for key in state if key in self._memory}
        copy = dict(stager.stage({key: tensor for key, tensor in state.items() if key not in known}))
        if known:
            # What it makes itself when told to keep a copy is pinned, which takes a GPU.
            stager.state_dict_cache, stager.cache_staged_state_dict = known, True
            copy |= stager.stage({key: state[key] for key in known})
        return copy

    def _among(self) -> dict[str, Any]:
        """Which ranks write and read together, in DCP's words."""
        return {"process_group": self._writers.group} if self._ranks.size > 1 else {"no_dist": True}

    def _prepare_thread(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        with suppress(OSError, AttributeError):
            os.setpriority(os.PRIO_PROCESS, 0, 10)  # of this thread alone: on Linux priorities are the threads'


def optimizer_tensors(parts: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> dict[str, Tensor]:
    """The optimizers' tensors under `PARAMETER.PART`, such as `norm.weight.exp_avg`."""
    return {
        f"{name}.{part}": tensor
        for name, parameter in trainable(parts).items()
        for optimizer in optimizers
        for part, tensor in optimizer.state.get(parameter, {}).items()
        if isinstance(tensor, Tensor)
    }


def parameter_tensors(parts: Sequence[nn.Module]) -> dict[str, Tensor]:
    """The trainable parameters under such names as `norm.weight.parameter`."""
    return {f"{name}.{PARAMETER}": parameter.data for name, parameter in trainable(parts).items()}


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


@torch.no_grad()
def load_tensors(parts: Sequence[nn.Module], optimizers: Sequence[Optimizer], state: Mapping[str, Tensor]) -> None:
    """Load `state`, tensors named as `optimizer_tensors` and `parameter_tensors` name them, into the parameters
    and the optimizers, on the parameters' devices."""
    parameters = trainable(parts)
    holders = {p: o for o in optimizers for group in o.param_groups for p in group["params"]}
    for key, tensor in state.items():
        name, _, part = key.rpartition(".")
        parameter = parameters[name]
        if part == PARAMETER:
            local_tensor(parameter).copy_(local_tensor(tensor))
        else:
            holders[parameter].state[parameter][part] = tensor.to(parameter.device)


def local_bytes(tensor: Tensor) -> int:
    """Bytes of the tensor that this rank holds."""
    local = local_tensor(tensor)
    return local.numel() * local.element_size()


def last_line(error: Exception) -> str:
    """The last line of an error's message: what was wrong, without the ranks' tracebacks that torch puts before
    it."""
    return (str(error).strip().splitlines() or [repr(error)])[-1]
