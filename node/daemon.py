"""The node daemon: joins a run, keeps a trainer busy, takes part in every reduce, holds the outer state.

The pure machine (`atoll.node.machine`) decides, this shell acts: each effect becomes a call or a task, and what
comes of it goes back as the next event. Never imports torch and never blocks its event loop: arithmetic runs in
one worker thread.
"""

import asyncio
import contextlib
import hashlib
import logging
import secrets
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, assert_never

import msgspec
import numpy as np
import psutil

from atoll.comm.bits import bitmap, places
from atoll.comm.certificates import Pin
from atoll.comm.chunks import Chunks
from atoll.comm.codec import make as make_codec
from atoll.comm.config import RunConfig, from_json
from atoll.comm.digest import digest
from atoll.comm.errors import AtollError, Refused
from atoll.comm.ids import Epoch, Incarnation, NodeId, Round, RunId
from atoll.comm.invite import Invite, join_host_port, split_host_port
from atoll.comm.octets import Octets
from atoll.comm.plan import Plan, PlanMember
from atoll.comm.plane import DataPlane
from atoll.comm.proto import atoll_pb2 as pb
from atoll.comm.rates import some
from atoll.comm.reduce import Seal
from atoll.node import local, machine
from atoll.node.about import About
from atoll.node.beginning import Beginning
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
    Told,
    Train,
    Waits,
)
from atoll.node.channel import Failed as TrainerSaysNo
from atoll.node.config import NodeConfig, TrainerSpec
from atoll.node.control import AWAY, Control, Identity, SessionLost
from atoll.node.data import check_source
from atoll.node.disk import Shares
from atoll.node.durable import Durable, Place
from atoll.node.gap import Gap
from atoll.node.home import Options, claimed, on_signals, remember, remember_life, remembered, sessions
from atoll.node.layout import stretches
from atoll.node.leases import beyond
from atoll.node.mend import mend
from atoll.node.method import adopt_of, feedback_of, rule_of, sealing_of
from atoll.node.outer import OuterState
from atoll.node.part import Part
from atoll.node.recover import Donor, MovedOn, Standing, Target, recover
from atoll.node.residual import Residual
from atoll.node.resources import check_compiler, check_memory
from atoll.node.supervisor import Supervisor
from atoll.node.uploads import Uploads
from atoll.node.vectors import Vectors

log = logging.getLogger("atoll.node")


@dataclass(slots=True)
class Pulse:
    """What the heartbeat says beyond the machine's phase."""

    at: float = 0.0  # seconds; when the trainer last made progress
    step: int = 0
    round: int = 0
    tokens_per_s: float = 0.0
    loss: float = 0.0


class Daemon:
    """One life of a node. `run` returns when the run is finished or the node was told to leave."""

    def __init__(self, invite: Invite, config: NodeConfig, options: Options) -> None:
        self._invite, self._config, self._options = invite, config, options
        self._control = Control(invite)
        self._node = machine.Node()
        self._events: asyncio.Queue[machine.Event] = asyncio.Queue()
        self._pulse = Pulse()
        self._beat = asyncio.Event()  # the phase changed: tell at once
        self._over = asyncio.Event()
        self._joined = self._finished = False
        self._worker = ThreadPoolExecutor(1, "arithmetic")
        self._tasks: asyncio.TaskGroup
        self._layout: Hello | None = None
        self._outer: OuterState | None = None
        self._durable: Durable | None = None
        self._uploads: Uploads | None = None
        self._residual: Residual | None = None  # with error feedback
        self._part: Part
        self._trainer: Hello | None = None  # the one that is up
        self._restored = asyncio.Event()  # what is on the disk was loaded
        self._run_mark = b""
        self._identity: Identity
        self._run: RunConfig
        self._me = NodeId("")
        self.recovering = ""  # progress, for `atoll node status`

    async def run(self) -> None:
        with claimed(self._options.state_dir):
            await self._story()

    async def _story(self) -> None:
        """The story of a node, from join to good-bye."""
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
            if self._residual is not None:
                self._residual.close()
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
        remember_life(self._options.state_dir / "session", self._invite, reply.session)

    def _make_supervisor(self) -> Supervisor:
        cache = self._options.state_dir / "cache"
        cache.mkdir(parents=True, exist_ok=True)
        moments = self._options.state_dir / "inner" / self._run_mark.hex() if self._config.durable else ""
        spec = TrainerSpec(self._run, self._config, "", str(cache), str(moments))
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
            if self._uploads is not None:
                self._uploads.turn = view.upload
            self._plane.offering.to([(NodeId(d.node_id), d.address, Pin(d.pin)) for d in view.serve])
            self._events.put_nowait(machine.ViewArrived(view))

    async def _heartbeats(self, period: float) -> None:
        me = psutil.Process()
        while True:
            self._beat.clear()
            node, pulse = self._node, self._pulse
            training = node.task is not None and node.task.kind in ("train", "ahead")
            still = time.monotonic() - pulse.at
            if node.watched and still > 0.7 * self._run.members.stall:
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
                self._pulse.at = time.monotonic()
                if self._run.init_from:
                    self._spawn(self._begin())
                else:
                    log.info("first member: initialises the model")
                    self._supervisor.send(Initialise(self._run.seed))
            case machine.Train():
                self._train(effect)
            case machine.Evaluate(round_):
                self._pulse.at = time.monotonic()
                self._supervisor.send(Evaluate(round_))
            case machine.FinishTraining(round_):
                self._supervisor.send(Finish(round_))
            case machine.StartReduce(plan):
                self._start_reduce(plan)
            case machine.StopReduce():
                self._part.stop()
            case machine.Apply(view):
                self._spawn(self._apply(view))
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

    def _train(self, effect: machine.Train) -> None:
        order, carried = effect.order, effect.carried
        if effect.on:
            self._pulse.at = time.monotonic()
        else:
            self._pulse = Pulse(time.monotonic(), 0, order.round, loss=self._pulse.loss)
        if self._node.view is not None and (keep := self._part.keep(self._node.view)) is not None:
            self._spawn(self._compute(keep))
        self._part.forget()  # what comes of these steps is encoded anew
        if self._outer is not None and self._outer.gap is not None and not carried:
            self._outer.gap.begun()
        more = f", on top of {carried} samples of before" if carried else ""
        begun = ", some of which it has taken" if effect.on else ""
        log.info(f"round {order.round}: {order.steps} inner steps{begun}{more}")
        lease = beyond([(r.first, r.count) for r in order.lease], carried)
        train = Train(
            order.round,
            order.steps,
            order.floor,
            order.ceiling,
            order.tokens,
            order.fleet,
            lease,
            resume=carried > 0 or effect.kept,
            on=effect.on,
            rebased=effect.rebased,
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
                self._spawn(self._inspect(round_))
            case Ready(round_, steps, loss, samples, norm, ahead):
                self._events.put_nowait(machine.TrainerReady(round_, steps, samples, loss, norm, ahead))
            case Waits(round_):
                self._events.put_nowait(machine.TrainerWaits(round_))
            case Evaluated(round_, loss):
                self._events.put_nowait(machine.TrainerEvaluated(round_, loss))
            case Told(sentence):
                log.info(sentence)
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
            fragments, chunks = stretches(self._run, hello.layout)
            codec = make_codec(self._run.reduce.codec, self._run.reduce.block, self._run.reduce.scales)
            self._codec = codec
            sealing = sealing_of(self._run, *fragments)
            gap = Gap() if self._run.outer.damping else None
            self._outer = OuterState(vectors, chunks, sealing, rule_of(self._run), gap)
            self._node = replace(self._node, in_turns=chunks.parts > 1)
            self._layout = hello
            place = self._place(hello, chunks)
            self._durable = Durable(self._outer, self._plane.peers.buffers.give, place)
            if (feedback := feedback_of(self._run.outer)) is not None:
                where = None if place is None else (place.folder, place.run)
                self._residual = Residual(feedback, vectors, chunks, codec, where)
            self._part = Part(
                self._plane,
                self._outer,
                codec,
                [sealing_of(self._run, fragment) for fragment in fragments],
                hello.layout,
                self._residual,
                _Tell(self),
                self._compute,
                lambda work: self._tasks.create_task(work),
            )
            self._spawn(self._restore(self._durable))
            self._begin_uploads(self._durable)
            log.info(f"the trainer is up: {hello.numel:,} parameters on {hello.ranks} local ranks")
        elif self._layout is not None and self._layout.layout != hello.layout:
            raise Refused("the trainer came back with another model than it had before")
        vectors = self._outer.vectors
        self._supervisor.send(Attach(vectors.path("anchor"), vectors.path("local"), hello.numel))

    def _whose(self, hello: Hello) -> str:
        """Tells vectors of this run and model from others."""
        return f"{self._run_mark.hex()} {layout_digest(hello).hex()} {self._run.reduce.chunk}"

    def _place(self, hello: Hello, chunks: Chunks) -> Place | None:
        """Where the state is kept, if it is."""
        if not self._config.durable:
            return None
        mark, checkpoint = self._run_mark, self._run.checkpoint
        folder = self._options.state_dir / "outer" / mark.hex()
        about = About(self._run, self._config.model)
        every = checkpoint.every * chunks.parts
        limit = Shares.of(self._config.disk * 1e9, hello.numel, self._run.inner.optimizer).outer
        return Place(folder, mark, hello.layout, every, limit, about=about)

    def _begin_uploads(self, durable: Durable) -> None:
        """Where the run has a remote store, for when it is this node's turn."""
        if not self._run.checkpoint.remote or not self._config.durable:
            return
        folder = self._options.state_dir / "outer" / self._run_mark.hex()
        self._uploads = Uploads(folder, self._run.checkpoint, self._plane.peers.spare.take, self._config.files)
        durable.on_snapshot = self._uploads.taken
        self._spawn(self._uploads.run())

    async def _restore(self, durable: Durable) -> None:
        """Begin with what an earlier life left on the disk."""
        outer, began = self._outer, time.monotonic()
        assert outer is not None
        round_, where = await self._compute(durable.restore), "on this node's disk"
        if round_ < 0:
            outer.resume()
            round_, where = outer.round, "still in this node's memory"
        if self._residual is not None:
            self._residual.restore()
            if self._residual.at:
                log.info(f"what the wire had left out after round {self._residual.at} is on this node's disk")
        if round_ >= 0:
            digest_ = await self._compute(outer.settle)
            took = time.monotonic() - began
            log.info(f"the state of round {round_} is {where}: loaded in {took:.1f} s")
            self._events.put_nowait(machine.StateMoved(round_, digest_))
        self._restored.set()

    def _report_layout(self) -> None:
        assert self._layout is not None and self._outer is not None
        layout, sizes = self._layout, self._outer.chunks.fragments
        self._report(0, layout=pb.Layout(numel=layout.numel, digest=layout_digest(layout), fragments=sizes))

    async def _begin(self) -> None:
        """Make state_0 of what the run's config says."""
        outer, hello, url = self._outer, self._layout, self._run.init_from
        assert outer is not None and hello is not None
        log.info(f"first member: the run begins with {url}")

        def progress(share: float) -> None:
            self._pulse = Pulse(time.monotonic(), int(100 * share))

        model = None if self._config.model else self._run.model
        anchor, momentum = outer.vectors.anchor, outer.vectors.momentum
        loading = Beginning(hello.layout, model, anchor, momentum, progress, self._config.files)
        outer.emptied()
        try:
            begun = await self._compute(lambda: loading.load(url, self._run.init_momentum))
        except AtollError as error:
            await self._say_goodbye(str(error))  # at once: it is another's turn
            raise
        log.info(f"state 0 is {begun.what}")
        await self._initialised(begun.momentum)

    async def _initialised(self, momentum: bool = False) -> None:
        assert self._outer is not None
        if self._durable is not None:
            self._durable.doubt()  # it may have one that was made before, and went with all others who had it
        outer = self._outer
        await self._compute(lambda: outer.initialised(momentum))
        await self._settled(alone=True)

    # Reduce

    def _start_reduce(self, wire: pb.Plan) -> None:
        assert self._node.ready is not None
        begun = self._part.begin(plan_of(wire), self._me, self._node.ready)
        if begun and self._durable is not None:
            self._durable.make_room()

    def held(self, plan: Plan, root: bytes) -> None:
        """Every sealed chunk is here."""
        peers = self._plane.peers
        self._events.put_nowait(machine.ReduceHeld((plan.round, plan.attempt), root))
        held = pb.Held(
            digest=root,
            bytes_up=self._part.bytes_up,
            bytes_down=self._part.bytes_down,
            rate_up=peers.up,
            rate_down=peers.down,
            rate_inside=peers.inside,
            rate_outside=peers.outside,
        )
        for node, seconds_ in some(peers.round_trips()).items():
            held.round_trips.add(node_id=node, seconds=seconds_)
        self.report_of(plan, held=held)

    def _report_ready(self, ready: machine.Work) -> None:
        self._part.encode(ready)
        durable = self._durable
        if self._run.outer.clip or (durable is not None and durable.behind(ready.round - 1)):
            self._spawn(self._report_in_time(ready))
        else:
            self._report_as_ready(ready)

    async def _report_in_time(self, ready: machine.Work) -> None:
        """Once the disk has the last round; and where deltas are clipped, with the norm of what was encoded."""
        if self._durable is not None:
            await self._durable.caught_up(ready.round - 1)
        norm = await self._part.norm(ready) if self._run.outer.clip else ready.norm
        if norm is not None and machine.still_ready(self._node, ready):
            self._report_as_ready(replace(ready, norm=norm))

    def _report_as_ready(self, ready: machine.Work) -> None:
        outer = self._outer
        report = pb.Ready(
            steps=ready.steps,
            samples=ready.samples,
            loss=ready.loss,
            delta_norm=ready.norm,
            front=ready.front,
            damping=1.0 if outer is None or outer.gap is None else outer.gap.damping,
            fresh=ready.fresh,
        )
        self._report(ready.round, ready=report)

    # The outer state

    async def _apply(self, view: pb.View) -> None:
        outer, sealed = self._outer, self._part.sealed(view.sealed)
        assert outer is not None
        if sealed is None:
            self._events.put_nowait(machine.MoveFailed(outer.round))
            return
        self._part.stop()
        keep, fragment = self._part.keep(view), outer.turns.fragment(view.committed)

        def work() -> None:
            if keep is not None:
                keep()
            for c, payload in zip(outer.chunks.of(fragment), sealed.chunks, strict=True):
                outer.apply(c, payload)
            outer.pass_over(view.committed)
            if outer.chunks.parts > 1:
                outer.take(fragment, adopt_of(self._run.overlap))

        if self._part.members == 2:
            await self._inspect(view.committed)  # no majority could tell who is right
        await self._compute(work)
        if self._durable is not None:
            self._durable.committed(view.committed, sealed.chunks, sealed.digests)
        self._part.forget()
        await self._settled()

    async def _inspect(self, round_: int) -> None:
        """Look whether what the round exchanges of the state is what it was, and mend it."""
        outer, disk = self._outer, self._durable
        assert outer is not None and disk is not None
        chunks = outer.chunks.of(outer.turns.fragment(round_))
        found = {c: await self._compute(partial(mend, outer, disk, c)) for c in chunks}
        wrong = [c for c, mended in found.items() if mended is not None]
        if wrong:
            whole = all(found[c] for c in wrong)
            how = "mended from the disk" if whole else "the disk cannot mend them"
            log.warning(f"chunks {wrong} of the state of round {outer.round} changed in memory: {how}")
            self._report(0, mended=pb.Mended(round=outer.round, chunks=len(wrong), whole=whole))

    async def _recover(self, order: machine.Recover) -> None:
        outer, view = self._outer, order.view
        assert outer is not None
        self._part.stop()
        keep = self._part.keep(view)
        self._part.forget()
        if keep is not None:
            await self._compute(keep)
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
            took = await recover(self._plane, outer, target, self._worker, self._on_recovery)
        except MovedOn as moved:
            log.info(f"recovering: {moved}; trying again")
            await asyncio.sleep(0.2)  # the next view may name other donors
            self._events.put_nowait(machine.MoveFailed(outer.round))
            return
        size, seconds = self._plane.bytes_down - before, time.monotonic() - started
        self.recovering = ""
        if self._durable is not None:
            for round_, chunks in took.sealed.items():
                payloads = [np.frombuffer(chunk.payload, np.uint8) for chunk in chunks]
                self._durable.committed(round_, payloads, [chunk.digest for chunk in chunks])
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
            "remote_round": self._uploads.newest if self._uploads is not None else -1,
            "remote_trouble": self._uploads.trouble if self._uploads is not None else "",
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
            PlanMember(NodeId(m.node_id), m.address, m.weight, m.gone, m.leaf, m.down, Pin(m.pin), m.scale, m.norm)
            for m in wire.members
        ),
        tuple(wire.owners),
        tuple(wire.since),
        frozenset(places(wire.kept)),
        tuple(wire.regions),
        tuple(tuple(wire.relays[i : i + chunks]) for i in range(0, len(wire.relays), chunks or 1)),
        frozenset(places(wire.layered)),
        wire.length,
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
