"""Peers that recover from each other: an outer state, a disk and a data plane each, over sockets on loopback."""

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from atoll.comm.allreduce.sealing import mean_of
from atoll.comm.byte_view import Octets
from atoll.comm.chunks import Chunks
from atoll.comm.codecs.codec import Codec
from atoll.comm.codecs.factory import make_codec
from atoll.comm.config.run import CodecName
from atoll.comm.digest import digest
from atoll.comm.ids import NodeId, Round, RunId
from atoll.comm.transport.data_plane import DataPlane
from atoll.node.checkpoint.checkpoint_files import CheckpointLocation
from atoll.node.checkpoint.checkpointer import Checkpointer
from atoll.node.daemon.state_server import StateServer
from atoll.node.outer.shared_vectors import SharedVectors
from atoll.node.outer.state import OuterState
from atoll.node.recovery.recovery import Donor, RecoveryProgress, RecoveryStats, Target, recover
from atoll.outer_opt.nesterov import Nesterov
from atoll.outer_opt.schedule import Constant

NUMEL, CHUNKS = 5000, Chunks(5000, 1024)
CODEC = make_codec(CodecName.INT8, 256)
KEY = b"k" * 32


class Peer(StateServer):
    """A node's outer state, disk and data plane, whose shelf it is."""

    def __init__(self, folder: Path, name: str, chunks: Chunks = CHUNKS, codec: Codec = CODEC) -> None:
        super().__init__()
        self.name, self.chunks, self.codec = NodeId(name), chunks, codec
        vectors = SharedVectors.create(chunks.numel, folder, folder / "shm", name)
        self.outer = OuterState(vectors, chunks, mean_of(codec), Constant(Nesterov(0.7, 0.9)))
        place = CheckpointLocation(folder / "disk", bytes(16), (("all", (chunks.numel,)),), 4)
        self.disk = Checkpointer(self.outer, lambda buffer: None, place)
        self.fill(self.outer, self.disk)

    async def up(self, rate: float = 0) -> None:
        """`rate`: bytes a second that it sends at most."""
        self.plane = await DataPlane.start("127.0.0.1:0", RunId("r"), self.name, KEY, self, (rate, 0))

    async def down(self) -> None:
        await self.plane.close()
        await self.disk.close()
        self.outer.vectors.close()

    @property
    def donor(self) -> Donor:
        return Donor(self.name, self.plane.address, name=f"{self.name}'s name")

    def initialise(self) -> bytes:
        self.outer.vectors.anchor[:] = np.random.default_rng(0).standard_normal(
            self.chunks.numel, dtype=np.float32
        )
        self.outer.initialise()
        return self.outer.finalize()

    async def commit(self, round_: int) -> bytes:
        """Apply the sealed bytes of a round: the same for everybody that commits it."""
        delta = np.random.default_rng(round_).standard_normal(self.chunks.numel, dtype=np.float32)
        payloads = []
        for c in self.chunks.fragment_range(self.outer.fragment_schedule.fragment(round_)):
            out = np.empty(self.codec.size(self.chunks.size(c)), np.uint8)
            self.codec.encode(delta[self.chunks.span(c)], out)
            payloads.append(out)
            self.outer.apply(c, payloads[-1])
        self.outer.advance_unchanged(round_)
        self.disk.record_round(round_, payloads, [digest(payload) for payload in payloads])
        await self.disk.wait_idle()
        root = self.outer.finalize()
        self.settled()
        return root

    def bits(self) -> bytes:
        return self.outer.vectors.anchor.tobytes() + self.outer.vectors.momentum.tobytes()


def with_peers(
    folder: Path, *names: str, chunks: Chunks = CHUNKS, codec: Codec = CODEC
) -> Callable[[Callable[..., Awaitable[None]]], None]:
    """Run a test with that many peers up."""

    def run(test: Callable[..., Awaitable[None]]) -> None:
        async def main() -> None:
            peers = [Peer(folder / name, name, chunks, codec) for name in names]
            for peer in peers:
                await peer.up()
            try:
                await test(*peers)
            finally:
                for peer in peers:
                    await peer.down()

        asyncio.run(main())

    return run


async def bring(
    joiner: Peer,
    round_: int,
    digest: bytes,
    *donors: Peer,
    on_progress: Callable[[RecoveryProgress], None] = lambda _: None,
) -> RecoveryStats:
    target = Target(Round(round_), digest, tuple(d.donor for d in donors))
    with ThreadPoolExecutor(1) as worker:
        return await recover(joiner.outer, target, joiner.plane, worker, on_progress)


def served(peer: Peer) -> list[int]:
    """The chunks of its state that are asked of a donor, from now on."""
    asked: list[int] = []
    state = peer.state

    async def told(round: Round, chunk: int) -> Octets | None:
        asked.append(chunk)
        return await state(round, chunk)

    peer.state = told  # type: ignore[method-assign]
    return asked
