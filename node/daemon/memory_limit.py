"""The limit that a node's owner sets on its memory: what it takes, what it would need at least, and what follows
where it takes more.

Nothing is refused by the system: a limit on address space would hit CUDA and mapped files, which take none of it.
What it takes is looked at now and then. A trainer on a CPU starts again with half as many sequences at once, when
it has handed over what it has; where that is no part of it, or there is but one, the node leaves the run and says
so.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import replace

import psutil

from atoll.comm.config.run import RunConfig
from atoll.comm.errors import ResourceError
from atoll.node.config import Device, NodeConfig
from atoll.node.daemon.trainer_supervisor import TrainerSupervisor
from atoll.node.memory import GIGABYTE, node_bytes
from atoll.node.outer.shared_vectors import SharedVectors
from atoll.node.preflight import demand_allowed_memory

log = logging.getLogger("atoll.node")
HAND_OVER_SECONDS = 10.0  # that a trainer has to hand over what it has before it is ended
LOOK_INTERVAL = 0.2  # seconds between two looks whether it has


class MemoryLimit:
    """One node's memory."""

    def __init__(self, run: RunConfig, supervisor: TrainerSupervisor) -> None:
        self._run, self._supervisor = run, supervisor
        self.vectors: SharedVectors | None = None  # from the trainer's first hello on
        self.micro_batch = 0  # sequences that each rank of the trainer computes at once; 0: it has not said

    def demand_fit(self, limits: NodeConfig) -> None:
        """Raise `ResourceError` where the run's model does not fit into the memory that these settings allow."""
        own = 0 if self._run.decoder or self.vectors is None else self.vectors.anchor.size
        if self._run.decoder or own:
            demand_allowed_memory(self._run, replace(self._supervisor.settings, memory=limits.memory), own)

    def bytes(self) -> int:
        """The bytes that this node takes, beside GPUs' memory; not for an event loop."""
        vectors = self.vectors
        folders = [vectors.folder] if vectors is not None and vectors.in_memory else []
        return node_bytes(psutil.Process(), folders)

    async def shrink(self, is_stepping: Callable[[], bool]) -> None:
        """Have the node take less, which has been told to pause; `is_stepping`: its trainer has not handed over
        yet. Raises `ResourceError` where it cannot take less."""
        settings = self._supervisor.settings
        used = await asyncio.to_thread(self.bytes)
        said = f"the node takes {used / GIGABYTE:.1f} GB of memory, and memory={settings.memory:g} allows less"
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(HAND_OVER_SECONDS):
                while is_stepping():
                    await asyncio.sleep(LOOK_INTERVAL)
        if settings.device is not Device.CPU or self.micro_batch < 2:
            raise ResourceError(f"{said}: allow more (memory=), or join a run with a smaller model")
        half = self.micro_batch // 2
        log.warning(f"{said}: the trainer starts again with micro-batches of {half}, after {self.micro_batch}")
        self._supervisor.start_again(replace(settings, micro_batch=half))
