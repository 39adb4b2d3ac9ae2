"""A node's state on a disk that outlives it: `Node` is one of its lives, `sealed` what every round commits."""

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import numpy as np

from atoll.comm.allreduce.sealing import mean_of
from atoll.comm.byte_view import U8
from atoll.comm.chunks import Chunks
from atoll.comm.codecs.factory import make_codec
from atoll.comm.config.run import CodecName
from atoll.comm.digest import digest
from atoll.node.checkpoint import snapshots
from atoll.node.checkpoint.checkpoint_files import CheckpointLocation
from atoll.node.checkpoint.checkpointer import Checkpointer
from atoll.node.checkpoint.snapshots import Snapshot
from atoll.node.outer.shared_vectors import SharedVectors
from atoll.node.outer.state import OuterState
from atoll.outer_opt.nesterov import Nesterov
from atoll.outer_opt.schedule import Ramp

NUMEL, CHUNKS = 5000, Chunks(5000, 1024)
LAYOUT = (("a", (50, 60)), ("b", (2000,)))
CODEC = make_codec(CodecName.INT8, 256)
RUN = b"r" * 16
PLENTY = 1 << 40  # bytes
RULE = Ramp(Nesterov(0.7, 0.9), warmup=4)  # what comes back must take each round's own step
WHOLE = snapshots.snapshot_size(RUN, LAYOUT, CHUNKS)


def sealed(round_: int) -> tuple[list[U8], list[bytes]]:
    """The same bytes for everybody that commits the round, and their digests."""
    delta = np.random.default_rng(round_).standard_normal(NUMEL, dtype=np.float32)
    payloads = [np.empty(CODEC.size(CHUNKS.size(c)), np.uint8) for c in range(CHUNKS.count)]
    for c, payload in enumerate(payloads):
        CODEC.encode(delta[CHUNKS.span(c)], payload)
    return payloads, [digest(payload) for payload in payloads]


class Node:
    """One life of a node's state, on a disk that outlives it."""

    def __init__(self, folder: Path, vectors: SharedVectors | None = None, **place: Any) -> None:
        """`vectors`: what an earlier life left in memory."""
        vectors = vectors or SharedVectors.create(NUMEL, folder, folder / "shm")
        self.outer = OuterState(vectors, CHUNKS, mean_of(CODEC), RULE)
        self.free_buffers: list[U8] = []
        self.folder = folder / "disk"
        fields: dict[str, Any] = {"every": 3, "layout": LAYOUT, "run": RUN, "room": lambda _: PLENTY} | place
        self.disk = Checkpointer(self.outer, self.free_buffers.append, CheckpointLocation(self.folder, **fields))

    @property
    def snapshots(self) -> list[Snapshot]:
        files = self.disk._files
        return [] if files is None else files.snapshots.newest_first

    @property
    def logged(self) -> tuple[int, ...]:
        return self.disk._log_writer.logged

    @property
    def queued(self) -> tuple[int, ...]:
        return self.disk._log_writer.queued

    @property
    def writing(self) -> "asyncio.Task[None] | None":
        return self.disk._log_writer.task

    @property
    def taking(self) -> "asyncio.Task[None] | None":
        return self.disk._snapshot_writer.task if self.disk._snapshot_writer is not None else None

    def begin(self) -> None:
        self.outer.vectors.anchor[:] = np.random.default_rng(0).standard_normal(NUMEL, dtype=np.float32)
        self.outer.initialise()
        self.disk.finalized(0, 0, sole_copy=True)

    async def initialise(self) -> None:
        self.begin()
        await self.disk.wait_idle()

    def apply(self, round_: int) -> None:
        for c, payload in enumerate(sealed(round_)[0]):
            self.outer.apply(c, payload)
        self.disk.record_round(round_, *sealed(round_))

    async def commit(self, *rounds: int) -> None:
        for round_ in rounds:
            self.apply(round_)
            self.outer.finalize()
            self.disk.finalized(round_, 10 * round_)
            await self.disk.wait_idle()

    def state(self) -> bytes:
        return self.outer.vectors.anchor.tobytes() + self.outer.vectors.momentum.tobytes()


def run(body: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(60):
            await body

    asyncio.run(bounded())


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)
