"""A peer of `atoll bench allreduce`: a real node daemon whose trainer is a stand-in that takes no steps.

The stand-in answers the daemon as a trainer does, and its local vector is the anchor minus a delta that anybody
can make again from the peer's number and the round. It says `Ready` when the bench says go, so that all peers
have their input at the same time. Bench and peer talk in JSON lines over the peer's standard input and output:

    bench                            peer
    PeerSpec             ------->
                         <-------    PeerJoined
                         <-------    PeerReady(k)   state k - 1 stands and was inspected, the delta of round k is
                                                    written
    StartRound(k)        ------->
                         <-------    RoundBegun(k)  the trainer says Ready: nothing is encoded yet
                         <-------    Decoded(k)     the round is committed, its mean is here as fp32
    ApplyStep(k)         ------->                   all have it: now the outer step
    Compare(k) | Leave   ------->
                         <-------    Compared(k)

Times are of CLOCK_MONOTONIC, which all processes of one machine share.
"""

import asyncio
import os
import resource
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from atoll.comm import log
from atoll.comm.chunks import Chunks
from atoll.comm.errors import AtollError
from atoll.comm.invite import Invite, parse
from atoll.comm.proto import atoll_pb2 as pb
from atoll.comm.workers import fix_threads
from atoll.node.bench.early_mean import EarlyMean
from atoll.node.config import NodeConfig
from atoll.node.daemon.daemon import Daemon
from atoll.node.daemon.outer_loop import Emit, OuterLoop, Spawn
from atoll.node.daemon.session import CoordinatorSession
from atoll.node.daemon.state_dir import JoinOptions
from atoll.node.daemon.state_server import StateServer
from atoll.node.daemon.trainer_supervisor import TrainerSupervisor
from atoll.node.outer.shared_vectors import SharedVectors
from atoll.node.trainer_channel import (
    Evaluate,
    Evaluated,
    Finish,
    Hello,
    Initialise,
    Initialised,
    Reached,
    Ready,
    ToDaemon,
    ToTrainer,
    Train,
)

F32 = NDArray[np.float32]
STEP_TIMEOUT = 1.0  # seconds that a peer waits for the others before its outer step
DELTA_STD = 1e-3  # of a delta's elements
TILE_ELEMENTS = 1_048_573  # elements that a delta repeats; a prime, so that no two chunks hold the same


class PeerSpec(msgspec.Struct, tag=True, frozen=True):
    """The first order: what a peer needs to start."""

    number: int  # from 1
    numel: int
    url: str  # to join by
    state_dir: str
    listen: str  # data plane, host:port
    patience: float  # seconds to try for the coordinator
    threads: int  # that encode and merge


class StartRound(msgspec.Struct, tag=True, frozen=True):
    """The order to let the trainer say that it is ready."""

    round: int


class ApplyStep(msgspec.Struct, tag=True, frozen=True):
    """The order to take the outer step: every peer is done with the reduce, and the machine is free."""

    round: int


class Compare(msgspec.Struct, tag=True, frozen=True):
    """The order to compare the decoded mean with the exact one of what arrived."""

    round: int
    weights: dict[int, float]  # of each contributor, by its number
    lacking: dict[int, tuple[int, ...]]  # chunk -> contributors whose part of it did not arrive


class Leave(msgspec.Struct, tag=True, frozen=True):
    """The order to leave the run and end."""


class PeerJoined(msgspec.Struct, tag=True, frozen=True):
    """A report: the peer has joined the run."""

    pid: int
    node: str  # id


class PeerReady(msgspec.Struct, tag=True, frozen=True):
    """A report: the input of a round is there, and what the process has used so far."""

    round: int
    payload: int  # bytes of one encoded vector
    bytes_up: int  # of the data plane, so far
    bytes_down: int
    rss_peak: int  # bytes
    beyond: int  # bytes at the peak, without the flat vectors and what the process had before its first round


class RoundBegun(msgspec.Struct, tag=True, frozen=True):
    """A report: the trainer says that it is ready, and the round's clock runs."""

    round: int
    at: float  # seconds
    cpu: float  # seconds that this process has used so far


class Decoded(msgspec.Struct, tag=True, frozen=True):
    """A report: the mean is there as fp32, and the round's clock stops."""

    round: int
    at: float  # seconds
    cpu: float  # seconds


class Compared(msgspec.Struct, tag=True, frozen=True):
    """A report: the answer to `Compare`."""

    round: int
    rel_err: float  # l2 norm of the difference, over that of the exact mean


ToPeer = PeerSpec | StartRound | ApplyStep | Compare | Leave
ToBench = PeerJoined | PeerReady | RoundBegun | Decoded | Compared
Report = Callable[[ToBench], None]

_to_peer = msgspec.json.Decoder(ToPeer)


# The deltas


def tile(peer: int, round_: int, numel: int, out: F32 | None = None) -> F32:
    """The tile that a peer's delta of a round repeats: (min(TILE_ELEMENTS, numel),), in `out` if that is given."""
    normal = np.empty(min(TILE_ELEMENTS, numel), np.float32) if out is None else out
    np.random.default_rng((peer, round_)).standard_normal(dtype=np.float32, out=normal)
    normal *= np.float32(DELTA_STD)
    return normal


def write_local(anchor: F32, local: F32, repeated: F32) -> None:
    """Write `local = anchor - delta` (numel,), where the delta repeats the tile `repeated`."""
    for start in range(0, anchor.size, repeated.size):
        part = anchor[start : start + repeated.size]
        np.subtract(part, repeated[: part.size], out=local[start : start + repeated.size])


def relative_error(decoded: F32, chunks: Chunks, order: Compare) -> float:
    """The relative l2 error of the decoded mean (numel,) against the fp64 weighted mean of the deltas that
    arrived, chunk by chunk."""
    tiles = {peer: tile(peer, order.round, chunks.numel) for peer in order.weights}
    means: dict[tuple[int, ...], NDArray[np.float64]] = {}
    wrong = whole = 0.0
    for c in range(chunks.count):
        span = chunks.span(c)
        here = tuple(peer for peer in order.weights if peer not in order.lacking.get(c, ()))
        if here not in means:
            total = sum(order.weights[peer] for peer in here)
            means[here] = np.asarray(sum(order.weights[p] / total * tiles[p].astype(np.float64) for p in here))
        exact = means[here].take(np.arange(span.start, span.stop), mode="wrap")
        wrong += float(np.square(decoded[span] - exact).sum())
        whole += float(np.square(exact).sum())
    return float((wrong / whole) ** 0.5)


# The peer


class SyntheticTrainer:
    """A stand-in for a `TrainerSupervisor` that answers the daemon without a process, or a model. It
    uses the daemon's own mapping of the vectors: with a second one their memory would count twice."""

    def __init__(
        self,
        spec: PeerSpec,
        vectors: Callable[[], SharedVectors],
        on_message: Callable[[ToDaemon], None],
        input_ready: Callable[[int], Awaitable[None]],
        report: Report,
    ) -> None:
        self._spec, self._vectors, self.settings = spec, vectors, NodeConfig()
        self._on_message, self._input_ready, self._report = on_message, input_ready, report
        self._inbox: asyncio.Queue[ToTrainer] = asyncio.Queue()
        self._go: asyncio.Queue[int] = asyncio.Queue()
        self._tile = np.empty(min(TILE_ELEMENTS, spec.numel), np.float32)  # not of the memory that a round takes
        self._order: Train | None = None  # that it has answered with `Reached`

    def send(self, message: ToTrainer) -> None:
        """Take a message of the daemon's."""
        self._inbox.put_nowait(message)

    def hang_up(self) -> None:
        """Do nothing: the stand-in waits for the bench, not for a model, and there is nothing to end."""

    def change_settings(self, node: NodeConfig) -> None:
        """Take note of the settings, of which none changes the stand-in."""
        self.settings = node

    def report_ready(self, round_: int) -> None:
        """Report `Ready` in this round."""
        self._go.put_nowait(round_)

    async def run(self) -> None:
        """Answer the daemon until cancelled."""
        numel = self._spec.numel
        self._on_message(Hello(os.getpid(), 1, numel, (("synthetic", (numel,)),)))
        while True:
            await self._answer(await self._inbox.get())

    async def _answer(self, message: ToTrainer) -> None:
        match message:
            case Initialise():
                self._vectors().anchor[:] = 0.0
                self._on_message(Initialised())
            case Train(round_):
                vectors = self._vectors()
                repeated = tile(self._spec.number, round_, self._spec.numel, self._tile)
                await asyncio.to_thread(write_local, vectors.anchor, vectors.local, repeated)
                self._order = message
                self._on_message(Reached(round_))
            case Finish(round_) if self._order is not None and self._order.round == round_:
                samples, self._order = sum(count for _, count in self._order.lease), None
                await self._input_ready(round_)
                while await self._go.get() != round_:
                    pass  # of a round that went on without this peer
                self._report(RoundBegun(round_, time.monotonic(), time.process_time()))
                self._on_message(Ready(round_, 1, 0.0, samples))
            case Evaluate(round_):
                self._on_message(Evaluated(round_, 0.0))
            case _:  # Attach; Finish of a round that it is done with
                pass


class PausingOuterLoop(OuterLoop):
    """An `OuterLoop` that says when it has inspected its state, and asks before it steps."""

    def __init__(
        self,
        stepping: Callable[[int], Awaitable[None]],
        member: CoordinatorSession,
        hello: Hello,
        server: StateServer,
        emit: Emit,
        spawn: Spawn,
    ) -> None:
        super().__init__(member, hello, server, emit, spawn)
        self._stepping = stepping
        self.inspected = asyncio.Event()

    async def inspect(self, round_: int) -> None:
        """Inspect the state, and say when that is done: in training it is done while the trainer goes on, but the
        stand-in does not."""
        self.inspected.clear()
        await super().inspect(round_)
        self.inspected.set()

    async def apply(self, view: pb.View) -> None:
        await self._stepping(view.committed)
        await super().apply(view)


class BenchPeer(Daemon):
    """A node that says when it has decoded a committed mean, before it applies it."""

    def __init__(self, spec: PeerSpec, invite: Invite, report: Report) -> None:
        options = JoinOptions(Path(spec.state_dir), spec.listen, "", str(spec.number), spec.patience)
        # In training the disk is done long before the next reduce; here it would be in its way.
        config = NodeConfig(streams=int(os.environ.get("ATOLL_STREAMS", "0")), durable=False)
        super().__init__(invite, config, options)
        self._spec, self._report = spec, report
        self._mean = EarlyMean(spec.numel)
        self._resident_before: int | None = None  # bytes
        self._steps: asyncio.Queue[int] = asyncio.Queue()
        self.trainer = SyntheticTrainer(spec, self._vectors, self._on_trainer, self._input_ready, report)

    def _make_supervisor(self) -> TrainerSupervisor:
        self._report(PeerJoined(os.getpid(), self._member.me))
        return cast(TrainerSupervisor, self.trainer)

    def _make_outer_loop(self, hello: Hello) -> OuterLoop:
        emit, spawn = self._events.put_nowait, self._spawn
        self._pauses = PausingOuterLoop(self._stepping, self._member, hello, self._server, emit, spawn)
        return self._pauses

    def _vectors(self) -> SharedVectors:
        return self._outer_loop.outer.vectors

    async def _input_ready(self, round_: int) -> None:
        await self._pauses.inspected.wait()
        self._mean.begin(self._outer_loop.codec, self._outer_loop.outer.chunks)
        self._outer_loop.participation.on_sealed = self._mean.put
        up, down = self._member.plane.bytes_up, self._member.plane.bytes_down
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        self._report(PeerReady(round_, self._payload(), up, down, peak, self._beyond(peak)))

    def _beyond(self, peak: int) -> int:
        """Bytes at the peak, without the vectors that are shared with the trainer, and what there was before the
        first round: the decoded mean is, and everything is loaded, but nothing encoded."""
        if self._resident_before is None:
            import_module("atoll.comm.codecs.kernels")
            now, shared = _resident()
            self._resident_before = now - shared
            return 0
        return peak - _resident()[1] - self._resident_before

    async def _stepping(self, round_: int) -> None:
        assert self._outer_loop.participation.reduction is not None
        await self._mean.complete(self._outer_loop.participation.reduction.result.chunks)
        self._report(Decoded(round_, time.monotonic(), time.process_time()))
        with suppress(TimeoutError):  # one of the others may need this state to get to its own
            async with asyncio.timeout(STEP_TIMEOUT):
                while await self._steps.get() != round_:
                    pass  # of a round that this peer did not decode

    def _payload(self) -> int:
        """Bytes of one encoded vector."""
        chunks, codec = self._outer_loop.outer.chunks, self._outer_loop.codec
        return sum(codec.size(chunks.size(c)) for c in range(chunks.count))

    async def carry_out(self, lines: asyncio.StreamReader) -> None:
        """Carry out the bench's orders until it says to leave, or is gone."""
        while line := await lines.readline():
            match _to_peer.decode(line):
                case StartRound(round_):
                    self.trainer.report_ready(round_)
                case ApplyStep(round_):
                    self._steps.put_nowait(round_)
                case Compare() as order:
                    chunks = Chunks(self._spec.numel, self._member.run.reduce.chunk)
                    error = await asyncio.to_thread(relative_error, self._mean.decoded, chunks, order)
                    self._report(Compared(order.round, error))
                case _:
                    break
        self.leave()


def _resident() -> tuple[int, int]:
    """Bytes of this process in memory, and how many of these are shared with others."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    rss, shared = (int(fields[name].split()[0]) * 1024 for name in ("VmRSS", "RssShmem"))
    return rss, shared


async def serve() -> None:
    """Be the peer whose `PeerSpec` is the first line of the standard input, until the bench lets it leave."""
    loop = asyncio.get_running_loop()
    lines = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    spec = _to_peer.decode(await lines.readline())
    assert isinstance(spec, PeerSpec)
    fix_threads(spec.threads)
    peer = BenchPeer(spec, parse(spec.url), report)
    async with asyncio.TaskGroup() as group:
        orders = group.create_task(peer.carry_out(lines))
        await peer.run()
        orders.cancel()


def report(message: ToBench) -> None:
    """Write a report to the standard output."""
    print(msgspec.json.encode(message).decode(), flush=True)


def main() -> None:
    """Run a peer as a process; its errors are one sentence on the standard error."""
    log.setup(log.LogSetup("peer"))
    try:
        asyncio.run(serve())
    except* AtollError as errors:
        print(f"peer: {errors.exceptions[0]}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
