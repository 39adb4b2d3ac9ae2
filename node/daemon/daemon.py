"""The node daemon: joins a run, keeps a trainer busy, takes part in every reduce, holds the outer state.

The pure machine (`atoll.node.state_machine`) decides, this shell acts: each effect becomes a call or a task, and
what comes of it goes back as the next event. Never imports torch and never blocks its event loop: arithmetic runs
in one worker thread.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Coroutine
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, assert_never

import psutil

from atoll.comm.errors import AtollError, Refused
from atoll.comm.ids import NodeId, Pin
from atoll.comm.invite import Invite
from atoll.comm.leases import remaining
from atoll.comm.proto import atoll_pb2 as pb
from atoll.node import state_machine
from atoll.node.config import NodeConfig, TrainerSpec
from atoll.node.daemon import control_socket
from atoll.node.daemon.outer_loop import OuterLoop, how_far, on_disk
from atoll.node.daemon.session import CoordinatorSession
from atoll.node.daemon.state_dir import JoinOptions, claimed, on_signals
from atoll.node.daemon.state_server import StateServer
from atoll.node.daemon.trainer_supervisor import TrainerSupervisor
from atoll.node.data import check_source
from atoll.node.preflight import check_compiler, check_congestion, check_memory
from atoll.node.trainer_channel import (
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
from atoll.node.trainer_channel import Failed as TrainerSaysNo

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

    def __init__(self, invite: Invite, config: NodeConfig, options: JoinOptions) -> None:
        self._invite, self._config, self._options = invite, config, options
        self._node = state_machine.Node()
        self._events: asyncio.Queue[state_machine.Event] = asyncio.Queue()
        self._pulse = Pulse()
        self._beat = asyncio.Event()  # the phase changed: tell at once
        self._over = asyncio.Event()
        self._finished = False  # the run is
        self._heartbeat = 0.0  # seconds between two
        self._tasks: asyncio.TaskGroup
        self._member: CoordinatorSession
        self._shelf = StateServer()
        self._kept: OuterLoop | None = None  # from the trainer's first hello on
        self._trainer: Hello | None = None  # the one that is up
        self._beginning: asyncio.Task[None] | None = None  # makes state_0
        self._restored = asyncio.Event()  # what is on the disk was loaded

    async def run(self) -> None:
        with claimed(self._options.state_dir):
            await self._story()

    async def _story(self) -> None:
        """The story of a node, from join to good-bye."""
        opened = CoordinatorSession.opened(self._invite, self._config, self._options, self._shelf)
        try:
            async with opened as self._member:
                try:
                    self._heartbeat = (await self._member.join()).heartbeat
                    self._check()
                    self._supervisor = self._make_supervisor()
                    with on_signals(self._over.set):
                        async with control_socket.serve(self._options.state_dir, self.status, self.leave):
                            await self._live()
                except* AtollError as errors:
                    await self._member.leave(str(errors.exceptions[0]))
                    raise
        finally:
            if self._kept is not None:
                await self._kept.close()

    def _check(self) -> None:
        """That this machine can do what the run asks of it."""
        run = self._member.run
        check_source(run, self._config)
        check_congestion(self._config.congestion)
        check_memory(run, self._config.device == "cuda")
        if self._config.compile:
            check_compiler()

    def _make_supervisor(self) -> TrainerSupervisor:
        cache = self._options.state_dir / "cache"
        cache.mkdir(parents=True, exist_ok=True)
        moments = self._options.state_dir / "inner" / self._member.mark.hex() if self._config.durable else ""
        spec = TrainerSpec(self._member.run, self._config, "", str(cache), str(moments))
        return TrainerSupervisor(spec, self._options.state_dir, self._on_trainer, self._on_trainer_down)

    async def _live(self) -> None:
        """Everything a member does at the same time, until the run or the node is over."""
        rejoined = partial(self._events.put_nowait, state_machine.Rejoined())
        session = self._member.keep(rejoined, self._watch, self._heartbeats)
        try:
            async with asyncio.TaskGroup() as self._tasks:
                for work in (self._decide(), self._supervisor.run(), session):
                    self._tasks.create_task(work)
                await self._over.wait()
                await self._member.leave("the run is finished" if self._finished else "stopped by its operator")
                raise _Over  # cancels whatever is still under way
        except* _Over:
            pass

    # The session with the coordinator

    async def _watch(self) -> None:
        draining = False
        async for view in self._member.control.watch():
            if view.draining and not draining:
                log.info("the coordinator stops for a while: training goes on until it is back")
            draining = view.draining
            if self._kept is not None:
                self._kept.told(view)
            self._member.plane.offering.to([(NodeId(d.node_id), d.address, Pin(d.pin)) for d in view.serve])
            self._events.put_nowait(state_machine.ViewArrived(view))

    async def _heartbeats(self) -> None:
        """What this node does, every few seconds and when that changes."""
        me, member = psutil.Process(), self._member
        while True:
            self._beat.clear()
            node, pulse = self._node, self._pulse
            training = node.task is not None and node.task.kind in ("train", "ahead")
            still = time.monotonic() - pulse.at
            if node.watched and still > 0.7 * self._member.run.members.stall:
                log.warning(f"the trainer made no progress for {still:.0f} s: it is ended")
                pulse.at = time.monotonic()
                self._supervisor.hang_up()
            beat = pb.HeartbeatRequest(
                phase=node.phase,
                round=pulse.round,
                inner_step=pulse.step,
                tokens_per_s=pulse.tokens_per_s if training else 0.0,
                loss=pulse.loss,
                bytes_up=member.plane.bytes_up,
                bytes_down=member.plane.bytes_down,
                rss_bytes=me.memory_info().rss,
                progress=self._recovering,
                trouble=self._kept.trouble if self._kept is not None else "",
            )
            await member.control.heartbeat(beat)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._heartbeat):  # wait_for may lose a cancellation
                    await self._beat.wait()

    # The machine and its effects

    async def _decide(self) -> None:
        while True:
            event = await self._events.get()
            before = self._node.phase
            self._node, effects = state_machine.step(self._node, event)
            self._member.reports.view = self._node.view
            for effect in effects:
                self._act(effect)
            if self._node.phase != before:
                self._beat.set()

    def _act(self, effect: state_machine.Effect) -> None:
        match effect:
            case state_machine.Initialise():
                self._pulse.at = time.monotonic()
                if self._member.run.init_from:
                    if self._beginning is None or self._beginning.done():  # else the trainer died meanwhile
                        self._beginning = self._spawn(self._begin())
                else:
                    log.info("first member: initialises the model")
                    self._supervisor.send(Initialise(self._member.run.seed))
            case state_machine.Train():
                self._train(effect)
            case state_machine.Evaluate(round_):
                self._pulse.at = time.monotonic()
                self._supervisor.send(Evaluate(round_))
            case state_machine.FinishTraining(round_):
                self._supervisor.send(Finish(round_))
            case state_machine.StartReduce(plan):
                assert self._node.ready is not None
                self._keeper.reduce(plan, self._member.me, self._node.ready)
            case state_machine.Prove(view):
                self._keeper.part.prove(view.plan.round, view.ledger)
            case state_machine.StopReduce():
                self._keeper.part.stop()
            case state_machine.Apply(view):
                self._spawn(self._keeper.apply(view))
            case state_machine.Recover():
                self._spawn(self._keeper.recover(effect))
            case state_machine.FallBack():
                self._spawn(self._keeper.fall_back())
            case state_machine.Renumber(round_):
                self._spawn(self._keeper.renumber(round_))
            case state_machine.ReportLayout():
                keeper = self._keeper
                numel, sizes = keeper.hello.numel, keeper.outer.chunks.fragments
                layout = pb.LayoutReported(numel=numel, digest=keeper.layout_digest, fragments=sizes)
                self._member.reports.of_round(0, layout_reported=layout)
            case state_machine.ReportState(round_, digest):
                self._member.reports.of_round(0, state_reported=pb.StateReported(round=round_, digest=digest))
            case state_machine.ReportReached(round_):
                self._member.reports.of_round(round_, steps_reached=pb.StepsReached())
            case state_machine.ReportReady(ready):
                self._keeper.ready(ready, lambda: state_machine.still_ready(self._node, ready))
            case state_machine.ReportEvaluated(round_, loss):
                self._member.reports.of_round(round_, loss_evaluated=pb.LossEvaluated(round=round_, loss=loss))
            case state_machine.RunFinished():
                if not self._finished:
                    log.info("the run is finished")
                self._finished = True
                self._over.set()
            case _:
                assert_never(effect)

    def _train(self, effect: state_machine.Train) -> None:
        order, carried = effect.order, effect.carried
        if effect.on:
            self._pulse.at = time.monotonic()
        else:
            self._pulse = Pulse(time.monotonic(), 0, order.round, loss=self._pulse.loss)
        kept = effect.kept or (effect.on and self._node.in_turns)
        self._keeper.train_anew(self._node.view, owed=carried > 0 or kept)
        more = f", on top of {carried} samples of before" if carried else ""
        begun = ", some of which it has taken" if effect.on else ""
        log.info(f"round {order.round}: {order.steps} inner steps{begun}{more}")
        lease = remaining([(r.first, r.count) for r in order.lease], carried)
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

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        return self._tasks.create_task(work)

    # The trainer

    def _on_trainer(self, message: ToDaemon) -> None:
        match message:
            case Hello():
                self._attach(message)
                self._spawn(self._trainer_is_up(message))
            case Initialised():
                self._spawn(self._keeper.initialised())
            case Progress(round_, step, loss, tokens_per_s):
                self._pulse = Pulse(time.monotonic(), step, round_, tokens_per_s, loss)
            case Reached(round_):
                self._events.put_nowait(state_machine.TrainerReached(round_))
                self._spawn(self._keeper.inspect(round_))
            case Ready(round_, steps, loss, samples, norm, ahead):
                self._events.put_nowait(state_machine.TrainerReady(round_, steps, samples, loss, norm, ahead))
            case Waits(round_):
                self._events.put_nowait(state_machine.TrainerWaits(round_))
            case Evaluated(round_, loss):
                self._events.put_nowait(state_machine.TrainerEvaluated(round_, loss))
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
            self._events.put_nowait(state_machine.TrainerUp())

    def _on_trainer_down(self) -> None:
        self._trainer = None
        self._events.put_nowait(state_machine.TrainerDown())

    def _attach(self, hello: Hello) -> None:
        """Give the trainer its vectors; allocate them at its first hello."""
        if self._kept is None:
            self._kept = self._make_keeper(hello)
            self._node = replace(self._node, in_turns=self._kept.outer.chunks.fragment_count > 1)
            self._spawn(self._restore(self._kept))
            log.info(f"the trainer is up: {hello.numel:,} parameters on {hello.ranks} local ranks")
        elif self._kept.hello.layout != hello.layout:
            raise Refused("the trainer came back with another model than it had before")
        vectors = self._kept.outer.vectors
        self._supervisor.send(Attach(vectors.path("anchor"), vectors.path("local"), hello.numel))

    # What it keeps of the run

    @property
    def _keeper(self) -> OuterLoop:
        assert self._kept is not None, "the machine moves no state before the trainer's first hello"
        return self._kept

    def _make_keeper(self, hello: Hello) -> OuterLoop:
        return OuterLoop(self._member, hello, self._shelf, self._events.put_nowait, self._spawn)

    async def _restore(self, keeper: OuterLoop) -> None:
        await keeper.restore()
        self._restored.set()

    async def _begin(self) -> None:
        """Make state_0 of what the run's config says."""

        def progress(share: float) -> None:
            self._pulse = Pulse(time.monotonic(), int(100 * share))

        try:
            await self._keeper.begin(progress)
        except AtollError as error:
            await self._member.leave(str(error))  # at once: it is another's turn
            raise

    @property
    def _recovering(self) -> str:
        """How far that is, in words."""
        standing = self._kept.recovering if self._kept is not None else None
        return "" if standing is None else str(standing)

    # For `atoll node status`

    def status(self) -> dict[str, Any]:
        view, node, kept = self._node.view, self._node, self._kept
        return {
            "node_id": self._member.me,
            "name": self._options.name,
            "run": self._invite.run,
            "phase": node.phase,
            "round": max(node.round, 0),
            "inner_step": self._pulse.step,
            "tokens_per_s": self._pulse.tokens_per_s,
            "loss": self._pulse.loss,
            "recovering": self._recovering,
            "recovery": how_far(kept.recovering) if kept is not None else None,
            "recovery_trouble": kept.stranded if kept is not None else "",
            "coordinator_away_s": self._member.control.away,
            "run_phase": view.phase if view is not None else "",
            "run_reason": view.reason if view is not None else "",
            "bytes_up": self._member.plane.bytes_up,
            "bytes_down": self._member.plane.bytes_down,
            **on_disk(kept),
        }

    def leave(self) -> None:
        self._over.set()


async def live(invite: Invite, config: NodeConfig, options: JoinOptions) -> None:
    """A node's life in this event loop."""
    await Daemon(invite, config, options).run()


class _Over(Exception):
    """The run is finished, or the node was told to leave."""
