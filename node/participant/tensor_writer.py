"""Writes tensors that a node's ranks share to a folder, in the background, and reads them back: through
torch.distributed.checkpoint, one set at a time.

A thread of every local rank copies its shards to host memory, and writes the copy; the optimizer's next step
waits for the copy, but for nothing else (`TensorWriter.copied`). The file of each rank says which rows it has, so
another number of ranks finds its own. The optimizer's moments (`atoll.node.participant.optimizer_checkpoint`) and
what is trained of a round (`atoll.node.participant.round_checkpoint`) take turns in it. A rank that has none of
the tensors, such as a stage of a pipeline that is frozen, takes part all the same.
"""

import os
import sys
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from atoll.node import preflight
from atoll.node.participant.flat_vector import local_tensor
from atoll.node.participant.optimizer_files import OptimizerFiles, Shapes, UnusableMoments
from atoll.node.participant.rank_group import RankGroup
from atoll.node.participant.training_tensors import TrainingTensors

MEMORY_MARGIN = 256 << 20  # bytes of memory that are left when tensors are copied
NO_MEMORY = "there is no memory for a copy of them"
MAX_SETS = 2  # that are being written, or wait for it


@dataclass(frozen=True)
class TensorSet:
    """Tensors that are to be written to one folder, and whom to tell what came of it; rank 0's are called."""

    files: OptimizerFiles
    number: int  # of the folder
    state: dict[str, Tensor]  # of this rank; it may have none
    kind: str  # of the optimizers
    shapes: Shapes  # of the model's parameters
    on_written: Callable[[], None]
    on_failure: Callable[[str], None]  # with the reason
    position: bytes = b""  # is written as well, where it is not empty
    unstorable: str = ""  # why this rank's cannot be written; empty: they can

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
        self._uncopied, self._lock = 0, threading.Lock()  # sets that are not copied yet
        self._writers = ranks.another()  # the threads': training has its own
        self._thread = ThreadPoolExecutor(1, "tensors", self._prepare_thread)
        self._writing: list[Future[None]] = []  # of each set that is not written yet
        self._memory: dict[str, Tensor] = {}  # fresh memory each time costs more than the copy itself

    def close(self) -> None:
        """Wait for what is being written, and end the thread."""
        self._thread.shutdown()

    def wait(self) -> None:
        """Wait for what is being written."""
        wait(self._writing)

    def start(self, tensors: TensorSet, wanted: bool, queue: bool = False) -> bool:
        """Begin to write the tensors if rank 0 wants that, and nothing else is being written; say why where
        memory or disk do not allow it, or a rank has what cannot be written. `queue`: begin when what is being
        written is; the next step waits for both. Returns whether it begins, the same on every rank."""
        self._writing = [writing for writing in self._writing if not writing.done()]
        busy = len(self._writing) >= (MAX_SETS if queue else 1)
        fresh = sum(local_bytes(t) for key, t in tensors.state.items() if key not in self._memory)
        lacking = fresh > 0 and not self._writing and preflight.available() < fresh + MEMORY_MARGIN
        wanting, busy_ranks, lacking_ranks, unstorable_ranks, count = self._ranks.total(
            float(wanted and self._ranks.rank == 0),
            float(busy),
            float(lacking),
            float(bool(tensors.unstorable)),
            float(len(tensors.state)),
        )
        if not wanting or busy_ranks or not (count or unstorable_ranks):
            return False
        why = NO_MEMORY if lacking_ranks else ""
        if unstorable_ranks:
            why = tensors.unstorable or "another rank has state that could not be restored"
        if self._ranks.total(float(not self._reserve(tensors, why)))[0]:
            return False
        with self._lock:
            self._uncopied += 1
            self.copied.clear()
        # Apple's GPU takes the commands of one thread: there the loop's copies, before it goes on.
        copy = self._attempted(tensors.state) if self._device.type == "mps" else None
        self._writing.append(self._thread.submit(self._write, tensors, copy))
        return True

    def read(self, path: Path, tensors: TrainingTensors) -> None:
        """Load what a folder has into the parameters and the optimizers. Raises `UnusableMoments` on all ranks,
        and has then changed nothing."""
        reader, found = FileSystemReader(path), dict[str, Tensor]()

        def prepare() -> None:
            found.update(tensors.zeros_like_stored(reader.read_metadata().state_dict_metadata))

        self._together(prepare)  # else one would wait for ever for those who cannot read
        self._together(lambda: load(found, storage_reader=reader, **self._among()))
        tensors.load(found)

    def _together(self, do: Callable[[], None]) -> None:
        """Do it on all ranks. Raises `UnusableMoments` on all where one of them cannot."""
        wrong: UnusableMoments | None = None
        try:
            do()
        except UnusableMoments as error:
            wrong = error
        except Exception as error:  # torch raises many kinds for what it did not write
            wrong = UnusableMoments(f"unreadable: {last_line(error)}")
        if self._ranks.total(float(wrong is not None))[0]:
            raise wrong or UnusableMoments("unreadable on another rank") from None

    def _reserve(self, tensors: TensorSet, why: str) -> bool:
        """Rank 0's: there is room. `why` not; empty: nothing else is in the way."""
        if self._ranks.rank:
            return True
        try:
            if why:
                raise MemoryError(why)
            tensors.files.begin(tensors.number, tensors.size)
        except (OSError, MemoryError) as error:
            tensors.on_failure(str(error))
            return False
        return True

    def _write(self, tensors: TensorSet, copy: dict[str, Tensor] | None) -> None:
        """In the thread. `copy`: of the tensors, if there is one already."""
        first, files, number = self._ranks.rank == 0, tensors.files, tensors.number
        try:
            try:
                copy = self._copy(tensors.state, copy)
            finally:
                self._end_copy()
            save(copy, storage_writer=FileSystemWriter(files.unfinished_path(number)), **self._among())
            if first:
                files.finish(number, tensors.kind, tensors.shapes, tensors.position)
                tensors.on_written()
        except Exception as error:  # of any rank's disk, wrapped by torch
            if first:
                files.discard(number)
                tensors.on_failure(last_line(error))
        finally:
            if preflight.available() < MEMORY_MARGIN:
                self._memory = {}

    def _end_copy(self) -> None:
        """In the thread: steps may go on, unless another set waits to be copied."""
        with self._lock:
            self._uncopied -= 1
            if not self._uncopied:
                self.copied.set()

    def _copy(self, state: dict[str, Tensor], copy: dict[str, Tensor] | None) -> dict[str, Tensor]:
        """A copy of the tensors in host memory: all ranks have one, or none. Raises `MemoryError`."""
        if copy is None and self._device.type != "mps":
            copy = self._attempted(state)
        (lacking,) = self._writers.total(float(copy is None))
        if lacking or copy is None:
            raise MemoryError(NO_MEMORY)
        self._memory |= copy
        return copy

    def _attempted(self, state: dict[str, Tensor]) -> dict[str, Tensor] | None:
        """A copy of the tensors, of which a rank may have none; None where memory does not suffice."""
        with suppress(MemoryError, RuntimeError):
            return self._copied_one_by_one(state) if self._device.type == "mps" else self._staged(state)
        return None

    def _copied_one_by_one(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """A copy of plain tensors, each there when it is returned; torch's stager goes on before its are."""
        for key, tensor in state.items():
            if key in self._memory:
                self._memory[key].copy_(tensor)
        return {
            key: self._memory[key] if key in self._memory else t.to("cpu", copy=True) for key, t in state.items()
        }

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
        if sys.platform == "linux":  # where priorities are the threads'
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, 0, 10)


def local_bytes(tensor: Tensor) -> int:
    """Bytes of the tensor that this rank holds."""
    local = local_tensor(tensor)
    return local.numel() * local.element_size()


def last_line(error: Exception) -> str:
    """The last line of an error's message: what was wrong, without the ranks' tracebacks that torch puts before
    it."""
    return (str(error).strip().splitlines() or [repr(error)])[-1]
