"""Simulated members for `atoll bench coordinator`: one process speaks for many nodes, over real gRPC.

They join, watch, send heartbeats, and report what members of a real round report, in about the time in which real
ones would; only the data plane is left out. A view's arrival is noted when it comes, and the view is read a moment
later: one member's reading does not delay what another one measures.
"""

import asyncio
import hashlib
import os
import random
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field

import grpc

from atoll.comm.bitmap import bitmap
from atoll.comm.digest import root
from atoll.comm.proto import atoll_pb2 as pb
from atoll.comm.proto import atoll_pb2_grpc as rpc
from atoll.comm.proto.join_proof import prove_join
from atoll.comm.proto.packed_plan import read_plan
from atoll.comm.proto.report_stream import ReportStream
from atoll.comm.signatures import PrivateKey
from atoll.comm.transport.frames import PROTOCOL

NICENESS = 5  # the members stand for other machines: they take no time from the coordinator
MEMBERS_PER_CONNECTION = 5  # of 16 calls at a time: each has two streams, and a heartbeat on the way
CONCURRENT_JOINS = 16  # joins
READ_DELAY = 0.25  # seconds from a view's arrival until its member acts on it
MIN_REPORT_SPREAD = 1.0  # seconds over which the members' reports of one kind come
CALL_TIMEOUT = 30.0  # seconds
INNER_STEPS = 100  # inner steps of a round
CHUNK_NUMEL = 65_536  # of one chunk


@dataclass(frozen=True, slots=True)
class LoadTask:
    """The work of one load process: whom to join, with how many members, and for how many rounds."""

    address: str  # of the coordinator
    run: str
    token: str
    members: int
    chunks: int  # of the model, all processes' members together own them
    rounds: int  # until so many are committed
    period: float  # seconds from a train order until its inner steps are taken


@dataclass
class LoadResult:
    """The times that one load process saw: seconds of `time.monotonic`, which is the same for all processes."""

    ready: dict[int, list[float]] = field(default_factory=dict)  # round -> when each Ready was sent
    completed: dict[int, list[float]] = field(default_factory=dict)
    planned: dict[int, dict[str, float]] = field(default_factory=dict)  # round -> when each node had the plan
    ordered: dict[int, dict[str, float]] = field(default_factory=dict)  # round -> when each had the train order
    heartbeats: list[float] = field(default_factory=list)  # when they were answered
    reports: list[float] = field(default_factory=list)


def simulate(task: LoadTask, tell: Callable[[object], None]) -> None:
    """Carry out `task`. `tell` hears None when a member has joined, the round that all were ordered to train, a
    sentence when something failed, and the `LoadResult`."""
    os.nice(NICENESS)
    asyncio.run(LoadProcess(task, tell).run())


class LoadProcess:
    """The members of one process."""

    def __init__(self, task: LoadTask, tell: Callable[[object], None]) -> None:
        self.task, self.tell, self.result = task, tell, LoadResult()
        self.gate = asyncio.Semaphore(CONCURRENT_JOINS)
        self._done = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._owned: dict[tuple[int, int], dict[str, list[int]]] = {}
        self._root = b""
        self._frame, self._plan = b"", pb.PackedPlan()

    async def run(self) -> None:
        """Run the members until the order after the last round has reached all of them; then tell the
        `LoadResult`."""
        options = [("grpc.use_local_subchannel_pool", 1)]  # one connection for each channel
        connections = -(-self.task.members // MEMBERS_PER_CONNECTION)
        channels = [grpc.aio.insecure_channel(self.task.address, options) for _ in range(connections)]
        members = [LoadMember(self, channels[i % connections]) for i in range(self.task.members)]
        for member in members:
            self.start(member.live())
        self.start(self._beat(members))
        await self._done.wait()
        for task in self._tasks:
            task.cancel()
        for channel in channels:
            await channel.close()
        self.tell(self.result)

    def start(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            details = error.details() if isinstance(error, grpc.aio.AioRpcError) else str(error)
            self.tell(f"{type(error).__name__}: {details}")

    def ordered(self, node: str, round_: int, at: float) -> None:
        """Take in that a node has the train order of a round."""
        arrivals = self.result.ordered.setdefault(round_, {})
        arrivals[node] = at
        if len(arrivals) == self.task.members:
            self.tell(round_)
            if round_ > self.task.rounds:
                self._done.set()

    def plan(self, view: pb.View) -> pb.PackedPlan | None:
        """The view's plan, if it has one: read once for all members, which share this machine's time."""
        if (frame := view.packed_plan) and frame != self._frame:
            self._frame, self._plan = frame, read_plan(frame)
        return self._plan if frame else None

    def owned(self, packed: pb.PackedPlan) -> dict[str, list[int]]:
        """Each member's chunks: worked out once for all of them."""
        plan = packed.plan
        attempt = plan.round, plan.attempt
        if attempt not in self._owned:
            chunks = defaultdict(list)
            names = packed.nodes
            for chunk, owner in enumerate(plan.owners):
                chunks[names[owner]].append(chunk)
            self._owned = {attempt: chunks}
            self._root = root([digest(c) for c in range(len(plan.owners))])
        return self._owned[attempt]

    @property
    def root(self) -> bytes:
        """The root digest of the sealed chunks of the latest plan."""
        return self._root

    async def _beat(self, members: "list[LoadMember]") -> None:
        """Everybody's heartbeats, spread evenly over the interval."""
        while True:
            begun, joined = time.monotonic(), [m for m in members if m.session]
            interval = joined[0].interval if joined else 0.1
            for i, member in enumerate(joined):
                await asyncio.sleep(begun + interval * i / len(joined) - time.monotonic())
                self.start(member.beat())
            await asyncio.sleep(begun + interval - time.monotonic())


class LoadMember:
    """One node, as far as the coordinator can tell."""

    def __init__(self, load: LoadProcess, channel: grpc.aio.Channel) -> None:
        self._load, self._stub = load, rpc.CoordinatorStub(channel)
        self._watch: grpc.aio.UnaryStreamMultiCallable[pb.WatchRequest, bytes]
        self._watch = channel.unary_stream("/atoll.v1.Coordinator/Watch", pb.WatchRequest.SerializeToString)
        self.session, self.interval, self._node = "", 1.0, ""
        self._round = 0
        self._reports: ReportStream | None = None
        self._done: dict[str, int] = {}  # the round in which it last said something of a kind

    async def live(self) -> None:
        """Join and follow the views until cancelled."""
        load, task = self._load, self._load.task
        request = pb.JoinRequest(
            protocol=PROTOCOL, run=task.run, token=task.token, name="member", address="127.0.0.1:9"
        )
        prove_join(request, PrivateKey.generate())
        async with load.gate:
            reply = await self._stub.Join(request, timeout=CALL_TIMEOUT)
        self.session, self._node, self.interval = reply.session, reply.node_id, reply.heartbeat
        load.tell(None)
        layout = pb.LayoutReported(numel=task.chunks * CHUNK_NUMEL, digest=digest("layout"))
        await self._send(pb.ReportRequest(layout_reported=layout))
        loop = asyncio.get_running_loop()
        async for raw in self._watch(pb.WatchRequest(session=self.session)):
            loop.call_later(READ_DELAY, self._read, raw, time.monotonic())
        load.tell(f"the stream of views of {self._node} ended")

    async def beat(self) -> None:
        """Send one heartbeat."""
        request = pb.HeartbeatRequest(
            session=self.session, phase="inner", round=self._round, inner_step=int(time.monotonic()), loss=2.0
        )
        await self._stub.Heartbeat(request, timeout=CALL_TIMEOUT)
        self._load.result.heartbeats.append(time.monotonic())

    def _read(self, raw: bytes, at: float) -> None:
        view, load = pb.View.FromString(raw), self._load
        train, committed = view.train.round, view.committed
        if view.you == "active" and train and self._first("order", train):
            self._round = train
            load.ordered(self._node, train, at)
            load.start(self._report_steps(load.task.period + self._spread(), train))
        if view.closing and train and self._first("closing", train):
            load.start(self._report_contribution(self._spread(), train, view.train.lease[0].first))
        if (plan := load.plan(view)) and self._first("plan", plan.plan.round):
            load.result.planned.setdefault(plan.plan.round, {})[self._node] = at
            load.start(self._reduce(plan))
        making = view.initialise and not committed
        if (making or view.state_digest or committed) and self._first("state", committed):
            load.start(self._report_state(self._spread(), committed))
        if view.evaluate and self._first("evaluate", committed):
            load.start(self._report_loss(self._spread(), committed))

    def _first(self, what: str, round_: int) -> bool:
        first = self._done.get(what, -1) < round_
        self._done[what] = max(self._done.get(what, -1), round_)
        return first

    def _spread(self) -> float:
        """Seconds by which one member reports later than the first: it ends the inner step that it is in, and
        exchanges take the longer the larger the model."""
        return random.uniform(0.0, max(MIN_REPORT_SPREAD, self._load.task.period / INNER_STEPS))

    async def _reduce(self, packed: pb.PackedPlan) -> None:
        """Seal the chunks that it owns, and a moment later have everybody's."""
        plan = packed.plan
        fence = pb.Fence(incarnation=plan.incarnation, epoch=plan.epoch, round=plan.round, attempt=plan.attempt)
        wait = self._spread()
        if owned := self._load.owned(packed).get(self._node, []):
            self._load.start(self._report_seals(wait, fence, owned, len(packed.nodes)))
        await self._report_complete(wait + 0.1 + self._spread(), fence)

    async def _report_steps(self, delay: float, round_: int) -> None:
        await asyncio.sleep(delay)
        await self._send(pb.ReportRequest(fence=pb.Fence(round=round_), steps_reached=pb.StepsReached()))

    async def _report_contribution(self, delay: float, round_: int, front: int) -> None:
        await asyncio.sleep(delay)
        ready = pb.ContributionReady(steps=INNER_STEPS, samples=INNER_STEPS, loss=2.0, delta_norm=1.0, front=front)
        self._load.result.ready.setdefault(round_, []).append(time.monotonic())
        await self._send(pb.ReportRequest(fence=pb.Fence(round=round_), contribution_ready=ready))

    async def _report_seals(self, delay: float, fence: pb.Fence, chunks: list[int], members: int) -> None:
        """Every member's input is in each of the chunks."""
        await asyncio.sleep(delay)
        inputs = bitmap(range(members), members)
        norms = [0.0] * members
        seals = [pb.Seal(chunk=c, digest=digest(c), inputs=inputs, norms=norms) for c in chunks]
        await self._send(pb.ReportRequest(fence=fence, chunks_sealed=pb.ChunksSealed(seals=seals)))

    async def _report_complete(self, delay: float, fence: pb.Fence) -> None:
        await asyncio.sleep(delay)
        complete = pb.ReduceComplete(digest=self._load.root, bytes_up=1)
        self._load.result.completed.setdefault(fence.round, []).append(time.monotonic())
        await self._send(pb.ReportRequest(fence=fence, reduce_complete=complete))

    async def _report_state(self, delay: float, round_: int) -> None:
        await asyncio.sleep(delay)
        state = pb.StateReported(round=round_, digest=digest("state", round_))
        await self._send(pb.ReportRequest(state_reported=state))

    async def _report_loss(self, delay: float, round_: int) -> None:
        await asyncio.sleep(delay)
        await self._send(pb.ReportRequest(loss_evaluated=pb.LossEvaluated(round=round_, loss=3.0)))

    async def _send(self, request: pb.ReportRequest) -> None:
        request.session = self.session
        if self._reports is None:
            self._reports = ReportStream(self._stub)
        ack = await self._reports.send(request, CALL_TIMEOUT)
        self._load.result.reports.append(time.monotonic())
        if not ack.known:
            self._load.tell(f"{self._node} is no member any more: {ack.reason}")


def digest(*parts: object) -> bytes:
    text = b"".join(part if isinstance(part, bytes) else str(part).encode() for part in parts)
    return hashlib.blake2b(text, digest_size=16).digest()
