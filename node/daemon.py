"""The node daemon: joins a run, keeps a trainer busy, takes part in every reduce, holds the outer state.

The pure machine (`atoll.node.machine`) decides, this shell acts: each effect becomes a call or a task, and what
comes of it goes back as the next event. Never imports torch and never blocks its event loop: arithmetic runs in
one worker thread.
"""

import asyncio
import contextlib
import hashlib
import logging
import math
import secrets
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, assert_never

import msgspec
import numpy as np
import psutil

from atoll.comm.bits import bitmap, places
from atoll.comm.certificates import Pin, own
from atoll.comm.chunks import Chunks
from atoll.comm.codec import NonFinite
from atoll.comm.codec import make as make_codec
from atoll.comm.config import RunConfig, from_json
from atoll.comm.digest import digest
from atoll.comm.encoding import DeltaEncoder, EncodedVector, encoded_size
from atoll.comm.errors import AtollError, Refused, ResourceError
from atoll.comm.ids import Epoch, Incarnation, NodeId, Round, RunId
from atoll.comm.invite import Invite, join_host_port, split_host_port
from atoll.comm.octets import U8, Octets
from atoll.comm.plan import BadPlan, Plan, PlanMember
from atoll.comm.plane import DataPlane
from atoll.comm.proto import atoll_pb2 as pb
from atoll.comm.rates import some
from atoll.comm.reduce import Reduction, Seal
from atoll.comm.tls import Sessions
from atoll.node import local, machine
from atoll.node.about import About
from atoll.node.channel import (
    Attach,
    Evaluate,
    Evaluated,
    Finish,
    Hello,
    Initialise,
    Initialised,
    Progress,
    Reached,
    Ready,
    ToDaemon,
    Train,
)
from atoll.node.channel import Failed as TrainerSaysNo
from atoll.node.config import NodeConfig, TrainerSpec
from atoll.node.control import AWAY, Control, Identity, SessionLost
from atoll.node.data import check_source
from atoll.node.durable import Durable, Place
from atoll.node.mend import mend
from atoll.node.method import rule_of
from atoll.node.outer import OuterState
from atoll.node.recover import Donor, MovedOn, Standing, Target, recover
from atoll.node.resources import check_compiler, check_memory
from atoll.node.supervisor import Supervisor
from atoll.node.vectors import Vectors, clear_stale

log = logging.getLogger("atoll.node")


@dataclass(frozen=True, slots=True)
class Options:
    state_dir: Path
    listen: str  # data plane, host:port
    advertise: str  # data plane as peers dial it; empty: as it listens, host seen by the coordinator
    name: str
    patience: float  # seconds to wait for a coordinator that does not answer at first
    leaf: bool = False  # nobody can dial this node


@dataclass(slots=True)
class Pulse:
    """What the heartbeat says beyond the machine's phase."""

    at: float = 0.0  # seconds; when the trainer last made progress
    step: int = 0
    round: int = 0
    tokens_per_s: float = 0.0
    loss: float = 0.0


@dataclass(slots=True)
class RoundBuffers:
    """The encoded delta of the round at hand."""

    encoded: EncodedVector | None = None  # or being encoded
    encoded_for: tuple[int, int] = (-1, -1)  # (round, front of the lease)
    encoding: asyncio.Task[None] | None = None
    up: int = 0  # the data plane's counters when the round's first attempt began
    down: int = 0


@dataclass(slots=True)
class Reducing:
    """The reduce under way."""

    round: int
    task: asyncio.Task[None] | None = None
    reduction: Reduction | None = None  # None: it is about to begin


class Daemon:
    """One life of a node. `run` returns when the run is finished or the node was told to leave."""

    def __init__(self, invite: Invite, config: NodeConfig, options: Options) -> None:
        self._invite, self._config, self._options = invite, config, options
        self._control = Control(invite)
        self._node = machine.Node()
        self._events: asyncio.Queue[machine.Event] = asyncio.Queue()
        self._pulse, self._round = Pulse(), RoundBuffers()
        self._beat = asyncio.Event()  # the phase changed: tell at once
        self._over = asyncio.Event()
        self._joined = self._finished = False
        self._encoding_space: U8 | None = None
        self._worker = ThreadPoolExecutor(1, "arithmetic")
        self._reducing: Reducing | None = None
        self._plan: Plan  # the latest one
        self._tasks: asyncio.TaskGroup
        self._layout: Hello | None = None
        self._outer: OuterState | None = None
        self._durable: Durable | None = None
        self._trainer: Hello | None = None  # the one that is up
        self._restored = asyncio.Event()  # what is on the disk was loaded
        self._run_mark = b""
        self._identity: Identity
        self._run: RunConfig
        self._me = NodeId("")
        self.recovering = ""  # progress, for `atoll node status`

    async def run(self) -> None:
        """The story of a node, from join to good-bye."""
        claim(self._options.state_dir)
        shelf = _Shelf(self)
        config = self._config
        caps = config.upload * 125e3, config.download * 125e3
        plane = await DataPlane.start(
            self._options.listen,
            RunId(self._invite.run),
            NodeId("?"),
            b"",
            shelf,
            caps,
            config.streams,
            config.congestion,
            sessions(self._invite, self._options),
        )
        self._plane = plane
        try:
            reply = await self._join()
            check_source(self._run, self._config)
            check_memory(self._run, self._config.device == "cuda")
            if self._config.compile:
                check_compiler()
            self._supervisor = self._make_supervisor()
            with on_signals(self._over.set):
                async with local.serve(self._options.state_dir, self.status, self.leave):
                    await self._live(reply.heartbeat)
        except* AtollError as errors:
            await self._say_goodbye(str(errors.exceptions[0]))
            raise
        finally:
            await self._say_goodbye("it failed")
            await plane.close()
            await self._control.close()
            self._worker.shutdown(wait=False, cancel_futures=True)
            if self._durable is not None:
                await self._durable.close()
            if self._outer is not None:
                self._outer.vectors.close()

    async def _join(self) -> pb.JoinReply:
        host, port = split_host_port(self._plane.address, "--listen")
        listening = "" if host in ("0.0.0.0", "::", "") else host
        address = self._options.advertise or join_host_port(listening, port)
        self._identity = Identity(self._options.name, address, self._options.leaf, pin=self._plane.pin)
        memory = self._options.state_dir / "session"
        # Chosen here and remembered first: if the answer is lost, the next try is the same node's.
        self._control.session = remembered(memory, self._invite) or secrets.token_hex(16)
        remember(memory, self._invite, self._control.session)
        reply = await self._control.join(self._identity, self._options.patience)
        self._run = from_json(reply.config)
        self._plane.peers.squeeze.on = self._run.reduce.zstd
        self._admitted(reply)
        self._joined = True
        log.info(f"joined run {reply.run} as {self._me}; peers reach this node at {reply.address}")
        return reply

    def _admitted(self, reply: pb.JoinReply) -> None:
        """Be the node that the coordinator says this is, now and when it starts again."""
        self._me = NodeId(reply.node_id)
        self._run_mark = digest(b"run" + reply.data_key)
        self._plane.identify(self._me, reply.data_key)
        remember(self._options.state_dir / "session", self._invite, reply.session)

    def _make_supervisor(self) -> Supervisor:
        cache = self._options.state_dir / "cache"
        cache.mkdir(parents=True, exist_ok=True)
        spec = TrainerSpec(self._run, self._config, "", str(cache))
        return Supervisor(spec, self._options.state_dir, self._on_trainer, self._on_trainer_down)

    async def _live(self, heartbeat: float) -> None:
        """Everything a member does at the same time, until the run or the node is over."""
        try:
            async with asyncio.TaskGroup() as self._tasks:
                for work in (self._decide(), self._supervisor.run(), self._keep_session(heartbeat)):
                    self._tasks.create_task(work)
                await self._over.wait()
                await self._say_goodbye("the run is finished" if self._finished else "stopped by its operator")
                raise _Over  # cancels whatever is still under way
        except* _Over:
            pass

    async def _say_goodbye(self, reason: str) -> None:
        """Leave, once: first of all, so that nobody waits for what takes its time to stop."""
        if self._joined:
            self._joined = False
            await self._control.leave(reason)

    # The session with the coordinator

    async def _keep_session(self, heartbeat: float) -> None:
        """Views in, reports and heartbeats out; a lost session is joined again."""
        while True:
            try:
                async with asyncio.TaskGroup() as session:
                    session.create_task(self._watch())
                    session.create_task(self._control.send_reports())
                    session.create_task(self._heartbeats(heartbeat))
            except* SessionLost as lost:
                log.warning(f"the coordinator dropped this node ({lost.exceptions[0]}); it joins again")
            if self._over.is_set():
                return  # it was this node's own good-bye that ended the session
            await self._rejoin()

    async def _rejoin(self) -> None:
        self._admitted(await self._control.join(self._identity, AWAY))
        self._events.put_nowait(machine.Rejoined())

    async def _watch(self) -> None:
        draining = False
        async for view in self._control.watch():
            if view.draining and not draining:
                log.info("the coordinator stops for a while: training goes on until it is back")
            draining = view.draining
            if self._durable is not None:
                self._durable.keeps = view.keeps
            self._events.put_nowait(machine.ViewArrived(view))

    async def _heartbeats(self, period: float) -> None:
        me = psutil.Process()
        while True:
            self._beat.clear()
            node, pulse = self._node, self._pulse
            training = node.task is not None and node.task.kind == "train"
            still = time.monotonic() - pulse.at
            if node.task is not None and still > 0.7 * self._run.members.stall:
                log.warning(f"the trainer made no progress for {still:.0f} s: it is ended")
                pulse.at = time.monotonic()
                self._supervisor.hang_up()
            beat = pb.HeartbeatRequest(
                phase=node.phase,
                round=pulse.round,
                inner_step=pulse.step,
                tokens_per_s=pulse.tokens_per_s if training else 0.0,
                loss=pulse.loss,
                bytes_up=self._plane.bytes_up,
                bytes_down=self._plane.bytes_down,
                rss_bytes=me.memory_info().rss,
            )
            await self._control.heartbeat(beat)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(period):  # wait_for may lose a cancellation
                    await self._beat.wait()

    # The machine and its effects

    async def _decide(self) -> None:
        while True:
            event = await self._events.get()
            before = self._node.phase
            self._node, effects = machine.step(self._node, event)
            for effect in effects:
                self._act(effect)
            if self._node.phase != before:
                self._beat.set()

    def _act(self, effect: machine.Effect) -> None:
        match effect:
            case machine.Initialise():
                log.info("first member: initialises the model")
                self._pulse.at = time.monotonic()
                self._supervisor.send(Initialise(self._run.seed))
            case machine.Train(order, carried):
                self._train(order, carried)
            case machine.Evaluate(round_):
                self._pulse.at = time.monotonic()
                self._supervisor.send(Evaluate(round_))
            case machine.FinishTraining(round_):
                self._supervisor.send(Finish(round_))
            case machine.StartReduce(plan):
                self._start_reduce(plan)
            case machine.StopReduce():
                self._stop_reduce()
            case machine.Apply(round_, root):
                self._spawn(self._apply(round_, root))
            case machine.Recover():
                self._spawn(self._recover(effect))
            case machine.Renumber(round_):
                self._spawn(self._renumber(round_))
            case machine.ReportLayout():
                self._report_layout()
            case machine.ReportState(round_, digest):
                self._report(0, state_at=pb.StateAt(round=round_, digest=digest))
            case machine.ReportReached(round_):
                self._report(round_, reached=pb.Reached())
            case machine.ReportReady(ready):
                self._report_ready(ready)
            case machine.ReportEvaluated(round_, loss):
                self._report(round_, evaluated=pb.Evaluated(round=round_, loss=loss))
            case machine.RunFinished():
                if not self._finished:
                    log.info("the run is finished")
                self._finished = True
                self._over.set()
            case _:
                assert_never(effect)

    def _train(self, order: pb.Train, carried: int) -> None:
        self._pulse = Pulse(time.monotonic(), 0, order.round, loss=self._pulse.loss)
        self._new_round(RoundBuffers())  # what comes of these steps is encoded anew
        more = f", on top of {carried} samples of before" if carried else ""
        log.info(f"round {order.round}: {order.steps} inner steps{more}")
        lease = beyond([(r.first, r.count) for r in order.lease], carried)
        train = Train(
            order.round,
            order.steps,
            order.floor,
            order.ceiling,
            order.tokens,
            order.fleet,
            lease,
            resume=carried > 0,
        )
        self._supervisor.send(train)

    def _spawn(self, work: Any) -> None:
        self._tasks.create_task(work)

    def _report(self, round_: int, **report: Any) -> None:
        """Tell the coordinator something of a round."""
        view = self._node.view
        fence = pb.Fence(
            incarnation=view.incarnation if view is not None else 0,
            epoch=view.epoch if view is not None else 0,
            round=round_,
        )
        self._control.report(pb.ReportRequest(fence=fence, **report))

    def report_of(self, plan: Plan, attempt: int | None = None, more: bool = False, **report: Any) -> None:
        """Tell the coordinator something of an attempt, the plan's unless told."""
        attempt = plan.attempt if attempt is None else attempt
        fence = pb.Fence(incarnation=plan.incarnation, epoch=plan.epoch, round=plan.round, attempt=attempt)
        self._control.report(pb.ReportRequest(fence=fence, **report), more)

    # The trainer

    def _on_trainer(self, message: ToDaemon) -> None:
        match message:
            case Hello():
                self._attach(message)
                self._spawn(self._trainer_is_up(message))
            case Initialised():
                self._spawn(self._initialised())
            case Progress(round_, step, loss, tokens_per_s):
                self._pulse = Pulse(time.monotonic(), step, round_, tokens_per_s, loss)
            case Reached(round_):
                self._events.put_nowait(machine.TrainerReached(round_))
                self._spawn(self._inspect())
            case Ready(round_, steps, loss, samples, norm):
                self._events.put_nowait(machine.TrainerReady(round_, steps, samples, loss, norm))
            case Evaluated(round_, loss):
                self._events.put_nowait(machine.TrainerEvaluated(round_, loss))
            case TrainerSaysNo(sentence):
                raise AtollError(sentence)
            case _:
                assert_never(message)

    async def _trainer_is_up(self, hello: Hello) -> None:
        """The machine hears of it when it knows what the disk has brought back."""
        self._trainer = hello
        await self._restored.wait()
        if self._trainer is hello:
            self._events.put_nowait(machine.TrainerUp())

    def _on_trainer_down(self) -> None:
        self._trainer = None
        self._events.put_nowait(machine.TrainerDown())

    def _attach(self, hello: Hello) -> None:
        """Give the trainer its vectors; allocate them at its first hello."""
        if self._outer is None:
            vectors = Vectors.create(hello.numel, self._options.state_dir, whose=self._whose(hello))
            chunks = Chunks(hello.numel, self._run.reduce.chunk)
            codec = make_codec(self._run.reduce.codec, self._run.reduce.block, self._run.reduce.scales)
            self._codec = codec
            self._outer = OuterState(vectors, chunks, codec, rule_of(self._run.outer))
            self._layout = hello
            self._durable = Durable(self._outer, self._plane.peers.buffers.give, self._place(hello))
            self._spawn(self._restore(self._durable))
            log.info(f"the trainer is up: {hello.numel:,} parameters on {hello.ranks} local ranks")
        elif self._layout is not None and self._layout.layout != hello.layout:
            raise Refused("the trainer came back with another model than it had before")
        vectors = self._outer.vectors
        self._supervisor.send(Attach(vectors.path("anchor"), vectors.path("local"), hello.numel))

    def _whose(self, hello: Hello) -> str:
        """Tells vectors of this run and model from others."""
        return f"{self._run_mark.hex()} {layout_digest(hello).hex()} {self._run.reduce.chunk}"

    def _place(self, hello: Hello) -> Place | None:
        """Where the state is kept, if it is."""
        if not self._config.durable:
            return None
        mark, checkpoint = self._run_mark, self._run.checkpoint
        folder = self._options.state_dir / "outer" / mark.hex()
        about = About(self._run, self._config.model)
        return Place(folder, mark, hello.layout, checkpoint.every, self._config.disk * 1e9, about=about)

    async def _restore(self, durable: Durable) -> None:
        """Begin with what an earlier life left on the disk."""
        outer, began = self._outer, time.monotonic()
        assert outer is not None
        round_, where = await self._compute(durable.restore), "on this node's disk"
        if round_ < 0:
            outer.resume()
            round_, where = outer.round, "still in this node's memory"
        if round_ >= 0:
            digest_ = await self._compute(outer.settle)
            took = time.monotonic() - began
            log.info(f"the state of round {round_} is {where}: loaded in {took:.1f} s")
            self._events.put_nowait(machine.StateMoved(round_, digest_))
        self._restored.set()

    def _report_layout(self) -> None:
        assert self._layout is not None
        self._report(0, layout=pb.Layout(numel=self._layout.numel, digest=layout_digest(self._layout)))

    async def _initialised(self) -> None:
        assert self._outer is not None
        if self._durable is not None:
            self._durable.doubt()  # it may have one that was made before, and went with all others who had it
        await self._compute(self._outer.initialised)
        await self._settled(alone=True)

    # Reduce

    def _start_reduce(self, wire: pb.Plan) -> None:
        assert self._node.ready is not None
        self._plan = plan_of(wire)
        if self._reducing is not None and self._reducing.round == self._plan.round:
            self._follow(self._plan)
        else:
            self._stop_reduce()
            if self._durable is not None:
                self._durable.make_room()
            self._reducing = Reducing(self._plan.round)
            self._reducing.task = self._tasks.create_task(self._reduce(self._node.ready))

    def _stop_reduce(self) -> None:
        if self._reducing is not None and self._reducing.task is not None:
            self._reducing.task.cancel()
        self._reducing = None

    def _follow(self, plan: Plan) -> None:
        """Go on under a newer plan, once the reduce has begun."""
        reducing = self._reducing
        if reducing is not None and reducing.reduction is not None:
            try:
                reducing.reduction.replan(plan)
            except BadPlan as error:
                log.warning(str(error))  # the coordinator's clock decides

    async def _reduce(self, ready: machine.Work) -> None:
        """This node's part in the reduce of a round, until it is committed or the node is out of it."""
        reducing = self._reducing
        assert self._outer is not None and reducing is not None
        encoded = self._encoded(ready)
        chunks = self._outer.chunks
        try:
            reducing.reduction = Reduction(
                self._plane.peers, self._me, encoded, self._codec, chunks, self._plan, _Tell(self)
            )
            await reducing.reduction.run()
        except AtollError as error:
            log.warning(f"round {reducing.round}: {error}")  # nobody to blame: the coordinator's clock decides

    def held(self, plan: Plan, root: bytes) -> None:
        """Every sealed chunk is here."""
        peers = self._plane.peers
        self._events.put_nowait(machine.ReduceHeld((plan.round, plan.attempt), root))
        held = pb.Held(
            digest=root,
            bytes_up=self._plane.bytes_up - self._round.up,
            bytes_down=self._plane.bytes_down - self._round.down,
            rate_up=peers.up,
            rate_down=peers.down,
            rate_inside=peers.inside,
            rate_outside=peers.outside,
        )
        for node, seconds_ in some(peers.round_trips()).items():
            held.round_trips.add(node_id=node, seconds=seconds_)
        self.report_of(plan, held=held)

    def _encoded(self, ready: machine.Work) -> EncodedVector:
        """The round's delta, encoded once whatever the number of attempts; from now on, if it was not begun."""
        assert self._outer is not None
        key = (ready.round, ready.front)
        if self._round.encoded is None or self._round.encoded_for != key:
            vectors, chunks = self._outer.vectors, self._outer.chunks
            if self._encoding_space is None:
                self._encoding_space = np.empty(encoded_size(self._codec, chunks), np.uint8)
            encoder = DeltaEncoder(vectors.anchor, vectors.local, self._codec, chunks, self._encoding_space)
            self._new_round(RoundBuffers(encoder.encoded, key, None, self._plane.bytes_up, self._plane.bytes_down))
            self._round.encoding = self._tasks.create_task(self._encode(encoder))
        assert self._round.encoded is not None
        return self._round.encoded

    async def _encode(self, encoder: DeltaEncoder) -> None:
        try:
            await encoder.run(self._compute)
        except NonFinite as error:
            raise NonFinite(f"training diverged: {error} in {self._parameter(error.element)}") from None

    def _new_round(self, buffers: RoundBuffers) -> None:
        """What was encoded is of no more use. The worker is at most in the middle of a few chunks of it, and does
        whatever else it is told to, as to move the anchor, after that."""
        if self._round.encoding is not None:
            self._round.encoding.cancel()
        self._round = buffers

    def _parameter(self, element: int) -> str:
        """The name of the parameter that this element of the flat vector belongs to."""
        assert self._layout is not None
        for name, shape in self._layout.layout:
            element -= math.prod(shape)
            if element < 0:
                return name
        return "no parameter"

    def _report_ready(self, ready: machine.Work) -> None:
        self._encoded(ready)
        durable = self._durable
        if durable is not None and durable.behind(ready.round - 1):
            self._spawn(self._report_when_written(durable, ready))
        else:
            self._report_as_ready(ready)

    async def _report_when_written(self, durable: Durable, ready: machine.Work) -> None:
        await durable.caught_up(ready.round - 1)
        self._report_as_ready(ready)

    def _report_as_ready(self, ready: machine.Work) -> None:
        report = pb.Ready(
            steps=ready.steps,
            samples=ready.samples,
            loss=ready.loss,
            delta_norm=ready.norm,
            front=ready.front,
        )
        self._report(ready.round, ready=report)

    # The outer state

    async def _apply(self, round_: int, root: bytes) -> None:
        outer, reducing = self._outer, self._reducing
        assert outer is not None
        if reducing is None or reducing.reduction is None or not reducing.reduction.holds(root):
            self._events.put_nowait(machine.MoveFailed(outer.round))
            return
        sealed = reducing.reduction.result
        self._stop_reduce()

        def work() -> None:
            for c, payload in enumerate(sealed.chunks):
                outer.apply(c, payload)

        if sum(not m.gone for m in self._plan.members) == 2:
            await self._inspect()  # no majority could tell who is right
        await self._compute(work)
        if self._durable is not None:
            self._durable.committed(round_, sealed.chunks, sealed.digests)
        self._new_round(RoundBuffers())
        await self._settled()

    async def _inspect(self) -> None:
        """Look whether the state is what it was, and mend it."""
        outer, disk = self._outer, self._durable
        assert outer is not None and disk is not None
        found = [await self._compute(partial(mend, outer, disk, c)) for c in range(outer.chunks.count)]
        wrong = [c for c, mended in enumerate(found) if mended is not None]
        if wrong:
            whole = all(found[c] for c in wrong)
            how = "mended from the disk" if whole else "the disk cannot mend them"
            log.warning(f"chunks {wrong} of the state of round {outer.round} changed in memory: {how}")
            self._report(0, mended=pb.Mended(round=outer.round, chunks=len(wrong), whole=whole))

    async def _recover(self, order: machine.Recover) -> None:
        outer, view = self._outer, order.view
        assert outer is not None
        self._stop_reduce()
        self._new_round(RoundBuffers())
        if order.differs:
            log.warning(f"its state of round {view.committed} is not the run's: fetches the chunks that differ")
            outer.distrust()
            if self._durable is not None:
                self._durable.doubt()
        if order.rebase:
            await self._compute(outer.set_aside)
        donors = tuple(Donor(NodeId(d.node_id), d.address, Pin(d.pin)) for d in view.donors)
        target = Target(Round(view.committed), view.state_digest, donors)
        started, before = time.monotonic(), self._plane.bytes_down
        try:
            took = await recover(self._plane, outer, self._codec, target, self._worker, self._on_recovery)
        except MovedOn as moved:
            log.info(f"recovering: {moved}; trying again")
            await asyncio.sleep(0.2)  # the next view may name other donors
            self._events.put_nowait(machine.MoveFailed(outer.round))
            return
        size, seconds = self._plane.bytes_down - before, time.monotonic() - started
        self.recovering = ""
        log.info(
            f"has the state of round {view.committed}: fetched {took.fetched} of {took.of} chunks, "
            f"{size / 1e6:.2f} MB in {seconds:.2f} s"
        )
        await self._settled()

    def _on_recovery(self, standing: Standing) -> None:
        self.recovering = str(standing)

    async def _renumber(self, round_: int) -> None:
        outer = self._outer
        assert outer is not None and self._durable is not None
        log.info(
            f"the rounds after {outer.round} up to {round_} are void: goes on from the state of {outer.round}"
        )
        self._durable.renumbered(outer.round)
        await self._compute(lambda: outer.renumber(round_))
        await self._settled(alone=True)

    async def _settled(self, alone: bool = False) -> None:
        """`alone`: no peer had this state before."""
        outer, view = self._outer, self._node.view
        assert outer is not None
        digest_ = await self._compute(outer.settle)
        if self._durable is not None:
            self._durable.settled(outer.round, view.tokens if view is not None else 0, alone)
        self._events.put_nowait(machine.StateMoved(outer.round, digest_))

    async def _compute(self, work: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._worker, work)

    # For `atoll node status`

    def status(self) -> dict[str, Any]:
        view, node = self._node.view, self._node
        return {
            "node_id": self._me,
            "name": self._options.name,
            "run": self._invite.run,
            "phase": node.phase,
            "round": max(node.round, 0),
            "inner_step": self._pulse.step,
            "tokens_per_s": self._pulse.tokens_per_s,
            "loss": self._pulse.loss,
            "recovering": self.recovering if node.moving else "",
            "run_phase": view.phase if view is not None else "",
            "run_reason": view.reason if view is not None else "",
            "bytes_up": self._plane.bytes_up,
            "bytes_down": self._plane.bytes_down,
            "disk_round": self._durable.proven if self._durable is not None else -1,
            "disk_bytes": self._durable.size if self._durable is not None else 0,
            "disk_trouble": self._durable.trouble if self._durable is not None else "",
        }

    def leave(self) -> None:
        self._over.set()


async def live(invite: Invite, config: NodeConfig, options: Options) -> None:
    """A node's life in this event loop."""
    await Daemon(invite, config, options).run()


class _Tell:
    """What a reduce tells the coordinator (`atoll.comm.reduce.Outcome`)."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon

    def sealed(self, plan: Plan, seal: Seal, more: bool) -> None:
        self._daemon.report_of(plan, seal.since, more, seals=pb.Seals(seals=[seal_of(plan, seal)]))

    def orphans(self, plan: Plan, here: tuple[tuple[int, bytes], ...]) -> None:
        entries = [pb.Seal(chunk=c, digest=digest) for c, digest in here]
        self._daemon.report_of(plan, orphans=pb.Orphans(here=entries))

    def lost(self, plan: Plan, node: NodeId, sentence: str) -> None:
        log.warning(f"round {plan.round}, attempt {plan.attempt}: {node}: {sentence}")
        self._daemon.report_of(plan, unreachable=pb.Unreachable(node_id=node, reason=sentence[:200]))

    def held(self, plan: Plan, root: bytes) -> None:
        self._daemon.held(plan, root)


def layout_digest(hello: Hello) -> bytes:
    return hashlib.blake2b(msgspec.json.encode(hello.layout), digest_size=16).digest()


def seal_of(plan: Plan, seal: Seal) -> pb.Seal:
    return pb.Seal(chunk=seal.chunk, digest=seal.digest, inputs=bitmap(seal.inputs, len(plan.members)))


def plan_of(wire: pb.Plan) -> Plan:
    """The plan as it travels, decoded."""
    chunks = len(wire.owners)
    return Plan(
        Incarnation(wire.incarnation),
        Epoch(wire.epoch),
        Round(wire.round),
        wire.attempt,
        tuple(
            PlanMember(NodeId(m.node_id), m.address, m.weight, m.gone, m.leaf, m.down, Pin(m.pin))
            for m in wire.members
        ),
        tuple(wire.owners),
        tuple(wire.since),
        frozenset(places(wire.kept)),
        tuple(wire.regions),
        tuple(tuple(wire.relays[i : i + chunks]) for i in range(0, len(wire.relays), chunks or 1)),
        frozenset(places(wire.layered)),
    )


class _Over(Exception):
    """The run is finished, or the node was told to leave."""


class _Shelf:
    """What peers may fetch; empty until the trainer has told how large the model is."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon

    async def sealed(self, round: Round, chunk: int) -> Octets | None:
        durable = self._daemon._durable
        return None if durable is None else await durable.sealed(round, chunk)

    def state(self, round: Round, chunk: int) -> bytes | None:
        outer = self._daemon._outer
        return None if outer is None else outer.state(round, chunk)

    def digests(self, round: Round) -> Any:
        outer = self._daemon._outer
        return None if outer is None else outer.digests(round)


def claim(state_dir: Path) -> None:
    """Make sure that this daemon is the only one in its state directory, and clear what a dead one left."""
    try:
        state_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ResourceError(f"cannot use the state directory {state_dir}: {error.strerror}") from None
    local.refuse_second(state_dir)
    clear_stale(state_dir)


def sessions(invite: Invite, options: Options) -> Sessions | None:
    """The data plane's TLS, with the certificate in the state directory; None where the run is not encrypted."""
    return Sessions(own(options.state_dir)) if invite.pin else None


def remember(memory: Path, invite: Invite, session: str) -> None:
    """So that a daemon started again comes back as the same node, without another token."""
    memory.touch(mode=0o600)
    memory.write_text(f"{invite.address} {invite.run}\n{session}\n")


def remembered(memory: Path, invite: Invite) -> str:
    """The session of an earlier life in this run; empty if there was none."""
    try:
        whose, session = memory.read_text().splitlines()
    except (OSError, ValueError):
        return ""
    return session if whose == f"{invite.address} {invite.run}" else ""


def beyond(lease: list[tuple[int, int]], used: int) -> tuple[tuple[int, int], ...]:
    """What is left of the lease behind its first `used` samples."""
    rest = []
    for first, count in lease:
        skipped = min(used, count)
        if count > skipped:
            rest.append((first + skipped, count - skipped))
        used -= skipped
    return tuple(rest)


@contextlib.contextmanager
def on_signals(stop: Callable[[], None]) -> Any:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    try:
        yield
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
