"""The node daemon: joins a run, keeps a trainer busy, takes part in every reduce, holds the outer state.

The pure machine (`atoll.node.state_machine`) decides, this shell acts: each effect becomes a call or a task, and
what comes of it goes back as the next event; nothing but `step` changes the machine's state. Never imports torch
and never blocks its event loop: arithmetic runs in one worker thread.
"""

import asyncio
import contextlib
import dataclasses
import logging
import shlex
import time
from collections.abc import Coroutine, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Any, assert_never

import psutil
from msgspec.structs import replace

from atoll.comm import log as logs
from atoll.comm.codecs.factory import codec_of
from atoll.comm.codecs.warm_up import warm_up_in_thread
from atoll.comm.config.beginning import beginning
from atoll.comm.cores import take_part
from atoll.comm.errors import AtollError, Refused
from atoll.comm.incidents import IncidentKind
from atoll.comm.invite import Invite
from atoll.comm.leases import remaining
from atoll.comm.proto import atoll_pb2 as pb
from atoll.comm.xdg import cache_dir
from atoll.node.config import NodeConfig, TrainerSpec, threads_of
from atoll.node.control.round_book import RoundBook
from atoll.node.daemon import control_socket
from atoll.node.daemon.audits import offers
from atoll.node.daemon.entrance import check_room, enter
from atoll.node.daemon.join_checks import look_around
from atoll.node.daemon.manners import Manners
from atoll.node.daemon.memory_limit import MemoryLimit
from atoll.node.daemon.metrics_page import metrics_page
from atoll.node.daemon.outer_loop import OuterLoop, how_far, on_disk
from atoll.node.daemon.phase_clock import PhaseClock
from atoll.node.daemon.pulse import Pulse
from atoll.node.daemon.run_status import last_sentence, of_the_run
from atoll.node.daemon.session import MEGABIT, STOPPED, CoordinatorSession
from atoll.node.daemon.state_dir import (
    ENTER_SECONDS,
    JoinOptions,
    ends_before,
    exclusive,
    on_signals,
    save_ending,
)
from atoll.node.daemon.state_server import StateServer
from atoll.node.daemon.trainer_supervisor import TrainerSupervisor
from atoll.node.manners.limits import KEYS
from atoll.node.state_machine import effects as ef
from atoll.node.state_machine import events as ev
from atoll.node.state_machine.state import Ahead, At, State, Training
from atoll.node.state_machine.step import step
from atoll.node.trainer_channel import (
    FIRST_STEP_SECONDS,
    BadArithmetic,
    Evaluate,
    Evaluated,
    Finish,
    Hello,
    Hold,
    Initialise,
    Initialised,
    LogLine,
    LoopLeft,
    MicroBatch,
    Preparing,
    Progress,
    Reached,
    Ready,
    Rests,
    ToDaemon,
    Train,
    Waits,
)
from atoll.node.trainer_channel import Failed as TrainerSaysNo

log = logging.getLogger("atoll.node")
POLITE_SECONDS = 14.0  # for which a node that is told to end waits for what it has trained to be committed
MAX_AWAY_SECONDS = 2.0  # of the coordinator, after which it does not
SIGNAL_INTERVAL = 0.2  # seconds between two looks whether a node that was told to end may


class Daemon:
    """One life of a node. `run` returns when the run is finished or the node was told to leave."""

    def __init__(self, invite: Invite, config: NodeConfig, options: JoinOptions) -> None:
        self._manners = Manners(config, options.state_dir)
        self._invite, self._config, self._options = invite, self._manners.config, options
        self._state = State()
        self._events: asyncio.Queue[ev.Event] = asyncio.Queue()
        self._pulse = Pulse()
        self._phases = PhaseClock(time.monotonic(), self._state.phase)
        self._beat = asyncio.Event()  # the phase changed: tell at once
        self._over = asyncio.Event()
        self._takes_part = False  # it has joined, and was not told to end before
        self._ending = False  # the process was told to end
        self._finished = False  # the run is
        self._heartbeat = 0.0  # seconds between two
        self._tasks: asyncio.TaskGroup
        self._member: CoordinatorSession
        self._server = StateServer()
        self._loop: OuterLoop | None = None  # from the trainer's first hello on
        self._trainer: Hello | None = None  # the one that is up
        self._preparing = ""  # what the one that is there does before it takes orders, in words
        self._has_stepped = False  # it has taken an inner step
        self._loading: asyncio.Task[None] | None = None  # of state 0, from where the run says
        self._restored = asyncio.Event()  # what is on the disk was loaded
        self._compiled = asyncio.Event()  # what the run's codec calls
        self._memory: MemoryLimit
        self._failure: AtollError | None = None  # why it is to end, where it would else go on

    async def run(self) -> None:
        with exclusive(self._options.state_dir), take_part(), on_signals(self._interrupt):
            await self._story()

    async def _story(self) -> None:
        """The story of a node, from join to good-bye."""
        try:
            async with AsyncExitStack() as opened:
                if await ends_before(self._over, self._enter(opened), ENTER_SECONDS):
                    self._takes_part = True
                    verbs = self._manners.verbs | {"finish": self._finish}
                    serving = control_socket.serve(self._options.state_dir, self.status, self.leave, verbs)
                    with metrics_page(self._options.metrics, self.status):
                        async with serving:
                            await self._live()
        finally:
            if self._loop is not None:
                await self._loop.close()
        if self._takes_part:
            sentence = last_sentence(self._finished, self._state.view)
            log.info(sentence)
            save_ending(self._options.state_dir, sentence)

    async def _enter(self, opened: AsyncExitStack) -> None:
        session = CoordinatorSession.opened(self._invite, self._config, self._options, self._server)
        self._member = await opened.enter_async_context(session)
        reply, self._config = await enter(self._member, self._config)
        if sentence := self._manners.unobservable:
            log.warning(sentence)
        self._heartbeat, self._state = reply.heartbeat, State(stall=self._member.run.members.stall)
        self._supervisor = self._make_supervisor()
        self._memory = MemoryLimit(self._member.run, self._supervisor)

    def _make_supervisor(self) -> TrainerSupervisor:
        cache = cache_dir(self._options.state_dir)
        cache.mkdir(parents=True, exist_ok=True)
        moments = self._options.state_dir / "inner" / self._member.mark.hex() if self._config.durable else ""
        command = self._options.command
        lan = self._member.private_addresses
        how = replace(logs.beside("trainer"), file="")
        spec = TrainerSpec(self._member.run, self._config, "", str(cache), str(moments), command, lan, how)
        about = self._on_trainer, self._on_trainer_down, self._on_trainer_death
        return TrainerSupervisor(spec, self._options.state_dir, *about)

    async def _live(self) -> None:
        """Everything a member does at the same time, until the run or the node is over."""
        rejoined = partial(self._events.put_nowait, ev.Rejoined())
        self._manners.attach(self._member.exchanged, self._events.put_nowait, self._obey)
        memory, manners = self._memory, self._manners
        manners.watch_memory(memory.demand_fit, memory.bytes, lambda: self._spawn(self._take_less_memory()))
        session = self._member.maintain(rejoined, self._watch, self._heartbeats)
        try:
            async with asyncio.TaskGroup() as self._tasks:
                for work in (
                    self._decide(),
                    self._supervisor.run(),
                    session,
                    self._compile(),
                    self._manners.run(),
                ):
                    self._tasks.create_task(work)
                if self._config.relay:
                    relaying = self._member.relay_for_others(lambda: self._config, lambda: manners.saves_bytes)
                    self._spawn(relaying)
                if self._options.checks:
                    self._spawn(look_around(self._member, rates=not self._manners.counts_bytes))
                await self._over.wait()
                if self._failure is not None:
                    await self._leave_with(self._failure)
                await self._member.leave("the run is finished" if self._finished else STOPPED)
                raise _Over  # cancels whatever is still under way
        except* _Over:
            pass

    # The session with the coordinator

    async def _watch(self) -> None:
        draining = False
        if self._loop is not None:
            self._loop.audits.stop()  # it may be in a new session
        async for view in self._member.views():
            if view.draining and not draining:
                log.info("the coordinator stops for a while: training goes on until it is back")
            draining = view.draining
            if self._loop is not None:
                self._loop.follow(view)
            self._follow_offers(view)
            self._events.put_nowait(ev.ViewArrived(view))

    def _follow_offers(self, view: pb.View | None = None) -> None:
        """Dial, as a leaf, whom the latest view names; nobody while bytes are saved."""
        view = view or self._state.view
        self._member.plane.offering.offer_to(offers(view) if view and not self._state.saves_bytes else ())

    def _hush(self) -> None:
        """Bytes are saved from now on: nobody is to wait for what this node would give."""
        self._follow_offers()
        self._member.plane.hush()
        if self._loop is not None:
            self._loop.audits.stop()

    async def _heartbeats(self) -> None:
        """What this node does, every few seconds and when that changes."""
        me, member = psutil.Process(), self._member
        while True:
            self._beat.clear()
            # At once: by the time it came out of the queue the trainer might have had another order.
            patience = 0.0 if self._has_stepped else FIRST_STEP_SECONDS
            self._advance(ev.TrainerSilent(time.monotonic() - self._pulse.at - patience))
            state, progress = self._state, self._figures()
            beat = pb.HeartbeatRequest(
                phase=state.phase,
                round=progress.round,
                inner_step=progress.step,
                tokens_per_s=progress.tokens_per_s,
                mfu=progress.mfu,
                data_wait=progress.data_wait,
                loss=progress.loss,
                gradient_norm=progress.gradient_norm,
                learning_rate=progress.learning_rate,
                device_bytes=progress.device_bytes,
                trainer_rss_bytes=progress.host_bytes,
                bytes_up=member.plane.bytes_up,
                bytes_down=member.plane.bytes_down,
                rss_bytes=me.memory_info().rss,
                progress=self._recovering or self._preparing,
                trouble=self._trouble,
                pause=self._manners.reason or 0,
                saves_bytes=state.exchanges_nothing,
            )
            if unanswered := self._phases.beat(time.monotonic()):
                beat.unanswered.CopyFrom(pb.PhaseSeconds(**unanswered))
            self._phases.heard(await member.control.heartbeat(beat))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._heartbeat):  # wait_for may lose a cancellation
                    await self._beat.wait()

    # The machine and its effects

    async def _decide(self) -> None:
        while True:
            self._advance(await self._events.get())

    def _advance(self, event: ev.Event) -> None:
        """Take the event in, and carry out what the machine asks for."""
        if isinstance(event, ev.StateMoved) and (pause := self._manners.round_is(event.round)) is not None:
            self._advance(pause)
        if isinstance(event, ev.PauseChanged):
            self._book.paused(event.paused, time.monotonic())
            if event.paused:
                self._member.accountant.record(IncidentKind.PAUSED, value=self._manners.reason or 0)
        before = self._state.phase, self._state.exchanges_nothing
        self._state, effects = step(self._state, event)
        self._member.reports.view = self._state.view
        for effect in effects:
            self._act(effect)
        if self._loop is not None:
            self._loop.replays.follow(self._state)
        if isinstance(event, ev.PauseChanged):
            self._hush() if event.saves_bytes else self._follow_offers()
        if self._state.phase != before[0]:
            self._phases.enter(self._state.phase, time.monotonic())
        if (self._state.phase, self._state.exchanges_nothing) != before or isinstance(event, ev.PauseChanged):
            self._beat.set()

    def _act(self, effect: ef.Effect) -> None:
        reports = self._member.reports
        match effect:
            case ef.OrderInitialisation(witness):
                self._initialise(witness)
            case ef.OrderTraining():
                self._train(effect)
            case ef.OrderEvaluation(round_):
                self._pulse.at = time.monotonic()
                self._supervisor.send(Evaluate(round_))
            case ef.FinishTraining(round_, rest):
                self._supervisor.send(Finish(round_, rest))
            case ef.HoldTraining(round_):
                self._supervisor.send(Hold(round_))
            case ef.EndTrainer(seconds):
                log.warning(f"the trainer made no progress for {seconds:.0f} s: it is ended")
                self._member.accountant.record(IncidentKind.TRAINER_HUNG, value=seconds)
                self._pulse.at = time.monotonic()
                self._supervisor.hang_up()
            case ef.LeaveRun(sentence):
                self._spawn(self._leave_with(AtollError(sentence)))
            case ef.Encode(work):
                self._outer_loop.begin_encoding(work)
            case ef.StartReduce(plan, work):
                self._outer_loop.start_reduce(plan, work)
            case ef.VerifySeals(view):
                self._outer_loop.verify_seals(view)
            case ef.StopReduce():
                self._outer_loop.stop_reduce()
            case ef.Apply(view):
                self._spawn(self._outer_loop.apply(view))
            case ef.Recover():
                self._spawn(self._outer_loop.recover(effect))
            case ef.StopRecovery():
                self._outer_loop.stop_recovery()
            case ef.FallBack(before):
                self._spawn(self._outer_loop.fall_back(before))
            case ef.Renumber(view):
                self._spawn(self._outer_loop.renumber(view))
            case ef.ReportLayout(layout):
                reports.layout(layout)
            case ef.ReportState(round_, digest):
                reports.state(round_, digest)
            case ef.ReportReached(round_):
                reports.steps_reached(round_)
            case ef.ReportReady(round_, contribution):
                reports.contribution(round_, contribution)
            case ef.ReportEvaluated(Evaluated(round_, loss, passage)):
                wrote = (passage.prompt, passage.text) if passage is not None else ()
                reports.loss(round_, loss, *wrote)
            case ef.Depart():
                self._over.set()
            case ef.RunFinished():
                if not self._finished:
                    log.info("the run is finished")
                self._finished = True
                self._over.set()
            case _:
                assert_never(effect)

    def _initialise(self, witness: bool) -> None:
        self._pulse.at = time.monotonic()
        if not self._member.run.init_from:
            who = "as another member does" if witness else "first member"
            log.info(f"{who}: the run {beginning(self._member.run)}")
            self._supervisor.send(Initialise(self._member.run.seed))
        elif self._loading is None or self._loading.done():  # else the trainer died meanwhile
            self._loading = self._spawn(self._load(witness))

    def _train(self, effect: ef.OrderTraining) -> None:
        order, carried = effect.view.train, effect.carried
        if effect.continues:
            self._pulse.at = time.monotonic()
        else:
            at_start = replace(self._pulse.progress, round=order.round, step=0)
            self._pulse = Pulse(time.monotonic(), at_start, self._pulse.said_at)
        self._outer_loop.begin_training(effect)
        more = f", on top of {carried} samples of before" if carried else ""
        begun = ", some of which it has taken" if effect.continues else ""
        self._book.ordered(order.round, time.monotonic(), effect.continues)
        log.info(f"round {order.round}: {order.steps} inner steps{begun}{more}")
        train = Train(
            order.round,
            order.steps,
            order.floor,
            order.ceiling,
            order.tokens,
            order.fleet,
            lease=remaining([(r.first, r.count) for r in order.lease], carried),
            resume=effect.resume,
            continues=effect.continues,
            rebased=effect.rebased,
            state=at.digest.hex() if isinstance(at := self._state.outer, At) else "",
            doubted_round=effect.doubted_round,
            duty=self._config.gpu_duty,
        )
        self._supervisor.send(train)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        return self._tasks.create_task(work)

    # The trainer

    def _on_trainer(self, message: ToDaemon) -> None:
        match message:
            case Preparing(sentence):
                self._preparing = sentence or "its trainer prepares"
            case Hello():
                self._preparing = ""
                self._attach(message)
                self._spawn(self._announce_trainer(message))
            case Initialised():
                self._spawn(self._outer_loop.initialised())
            case Progress():
                if (
                    message.step and not self._pulse.progress.step
                ):  # else a short round were over before it is heard
                    self._beat.set()
                self._has_stepped |= message.step > 0  # one that waits for its data says so, too
                self._pulse = Pulse(now := time.monotonic(), message, now)
                self._book.progress(message.round, message.step, message.data_wait, now)
            case Reached(round_):
                self._events.put_nowait(message)
                self._spawn(self._outer_loop.inspect(round_))
            case Ready() | Waits() | Evaluated():
                if isinstance(message, Ready):
                    self._book.handed_over(time.monotonic())
                self._events.put_nowait(message)
            case LoopLeft():  # the supervisor starts it again
                pass
            case Rests(seconds):
                self._manners.rest(seconds)
            case MicroBatch(size):
                self._memory.micro_batch = size
            case BadArithmetic(round_, sentence):
                log.warning(f"{sentence}: nothing of its order of round {round_} is used, it begins anew")
                self._book.handed_over(time.monotonic())
                self._member.accountant.record(IncidentKind.WORK_DROPPED)
                self._events.put_nowait(message)
            case LogLine(sentence):
                log.info(sentence)
            case TrainerSaysNo(sentence):
                raise AtollError(sentence)
            case _:
                assert_never(message)

    async def _compile(self) -> None:
        """While the trainer loads, and the heartbeats say that this node lives."""
        await warm_up_in_thread(codec_of(self._member.run), log.info)
        self._compiled.set()

    async def _announce_trainer(self, hello: Hello) -> None:
        """The machine hears of it when it knows what the disk has brought back, and its peers need not wait for a
        compiler."""
        self._trainer = hello
        await self._restored.wait()
        await self._compiled.wait()
        if self._trainer is hello:
            self._events.put_nowait(ev.TrainerUp(self._outer_loop.layout))

    def _on_trainer_death(self, kind: IncidentKind, code: int) -> None:
        self._member.accountant.record(kind, value=code)

    @property
    def _book(self) -> RoundBook:
        return self._member.accountant.book

    def _on_trainer_down(self) -> None:
        self._trainer, self._preparing = None, ""
        self._events.put_nowait(ev.TrainerDown())
        self._manners.shrunk()

    async def _take_less_memory(self) -> None:
        """The node takes more memory than it may, and pauses."""
        try:
            await self._memory.shrink(lambda: self._state.is_stepping)
        except AtollError as error:
            self._failure = error
            self._end_politely()

    def _attach(self, hello: Hello) -> None:
        """Give the trainer its vectors; allocate them at its first hello."""
        self._has_stepped = False
        if self._loop is None:
            self._loop = self._make_outer_loop(hello)
            self._spawn(self._restore(self._loop))
            ranks = f"{hello.ranks} local rank{'' if hello.ranks == 1 else 's'}"
            log.info(f"the trainer is up: {hello.numel:,} parameters on {ranks}")
        elif self._loop.hello.layout != hello.layout:
            raise Refused("the trainer came back with another model than it had before")
        self._loop.hello = hello  # another number of ranks, perhaps, or one that cannot evaluate
        self._memory.vectors = self._loop.outer.vectors
        self._supervisor.send(self._loop.attachment)

    # The outer loop

    @property
    def _outer_loop(self) -> OuterLoop:
        assert self._loop is not None, "the machine moves no state before the trainer's first hello"
        return self._loop

    def _make_outer_loop(self, hello: Hello) -> OuterLoop:
        run, state_dir = self._member.run, self._options.state_dir
        if self._options.command or not run.decoder:  # only its trainer knows the model, which it has in memory
            check_room(run, self._config, state_dir, n_params=hello.numel)
        made = OuterLoop(self._member, hello, self._server, self._events.put_nowait, self._spawn)
        self._member.accountant.conditions = lambda: made.durable.incidents
        return made

    async def _restore(self, outer_loop: OuterLoop) -> None:
        await outer_loop.restore()
        self._restored.set()

    async def _load(self, witness: bool) -> None:
        """Make state 0 of what the run's config says; a `witness` that cannot leaves it to others."""

        def progress(share: float) -> None:
            self._pulse = Pulse(time.monotonic(), Progress(0, int(100 * share), 0.0))

        try:
            await self._outer_loop.load_initial(progress)
        except AtollError as error:
            if not witness:
                await self._leave_with(error)  # it is another's turn
            log.warning(f"cannot make the run's state 0 to compare it with another member's: {error}")
            self._events.put_nowait(ev.MoveFailed(-1))

    async def _leave_with(self, error: AtollError) -> None:
        """Good-bye first: a script may take long to end, and the coordinator would miss the node meanwhile."""
        await self._member.leave(str(error))
        raise error

    def _figures(self) -> Progress:
        return self._pulse.figures(isinstance(self._state.trainer, Training | Ahead), time.monotonic())

    @property
    def _recovering(self) -> str:
        """The progress of a recovery that is under way, in words."""
        recovery = self._loop.recovering if self._loop is not None else None
        return "" if recovery is None else str(recovery)

    @property
    def _trouble(self) -> str:
        """What does not work, in words that may be shown to others."""
        others = self._loop.trouble if self._loop is not None else ""
        return "; ".join(filter(None, (self._state.trouble, self._pulse.progress.trouble, others)))

    # For `atoll node status`

    def status(self) -> dict[str, Any]:
        """The node's state, connections and progress, for `atoll node status`."""
        view, state, outer_loop = self._state.view, self._state, self._loop
        threads, why = threads_of(self._config)
        progress = self._figures()
        return {
            "node_id": self._member.me,
            "name": self._options.name,
            "run": self._invite.run,
            "state": state.phase,
            "reason": self._parting
            or self._manners.words
            or self._recovering
            or self._preparing
            or (view.reason if view is not None else "waits for the coordinator"),
            "command": shlex.join(self._options.command),
            "phase": state.phase,
            "round": max(state.round, 0),
            "inner_step": progress.step,
            "tokens_per_s": progress.tokens_per_s,
            "mfu": progress.mfu or None,
            "data_wait": progress.data_wait,
            "loss": progress.loss,
            "gradient_norm": progress.gradient_norm,
            "learning_rate": progress.learning_rate,
            "device_bytes": progress.device_bytes,
            "trainer_rss_bytes": progress.host_bytes,
            "recovering": self._recovering,
            "recovery": how_far(outer_loop.recovering) if outer_loop is not None else None,
            "recovery_trouble": outer_loop.stranded if outer_loop is not None else "",
            "phase_seconds": self._phases.seconds(time.monotonic()),
            "coordinator_away_s": self._member.control.away,
            "coordinator_search": self._member.search.words,
            "penalty": self._member.penalty,
            "run_phase": view.phase if view is not None else "",
            "run_reason": view.reason if view is not None else "",
            "bytes_up": self._member.plane.bytes_up,
            "bytes_down": self._member.plane.bytes_down,
            "peers": len({peer for peer, _ in self._member.plane.peers.links()}),
            "trouble": self._trouble,
            "threads": threads,
            "threads_reason": why,
            **self._manners.status(),
            **on_disk(outer_loop),
            **of_the_run(view, self._member, outer_loop),
        }

    # What the owner wants

    def leave(self) -> None:
        self._over.set()

    def _finish(self, arguments: Sequence[str]) -> dict[str, Any]:
        """Leave once what is trained is committed: for the control socket."""
        self._advance(ev.PartingAsked())
        return {"reason": self._parting}

    @property
    def _parting(self) -> str:
        """What a node that is to leave waits for, in words; empty: it stays."""
        if (parting := self._state.parting) is None:
            return ""
        return "it leaves" if parting.done else "it leaves once what it has trained is committed"

    def _interrupt(self) -> None:
        """The first time, do what politeness asks for: the steps that were taken may be committed in a moment."""
        if not self._takes_part:
            log.info("told to stop before it took part")
            self._over.set()
        elif self._over.is_set():
            self._supervisor.hurry()
        elif self._ending:
            self._over.set()
        else:
            self._end_politely()

    def _end_politely(self) -> None:
        """Leave once what is trained is committed, if that comes soon."""
        self._ending = True
        within = f"within {POLITE_SECONDS:g} s; told to stop again, at once"
        log.info(f"leaves once what it has trained is committed, {within}")
        self._manners.leave_soon()
        self._events.put_nowait(ev.PartingAsked())
        self._end_if_due(time.monotonic() + POLITE_SECONDS)

    def _end_if_due(self, deadline: float) -> None:
        """Go without a commit that does not come, or nobody is there to make."""
        if time.monotonic() > deadline or self._member.control.away > MAX_AWAY_SECONDS:
            self._over.set()
        elif not self._over.is_set():
            asyncio.get_running_loop().call_later(SIGNAL_INTERVAL, self._end_if_due, deadline)

    def _obey(self, config: NodeConfig) -> None:
        """Follow the owner's limits, as they are now."""
        limits = {key: getattr(config, key) for key in KEYS}
        self._config = dataclasses.replace(self._config, **limits)
        plane, manners = self._member.plane, self._manners
        plane.limit(config.upload * MEGABIT, config.download * MEGABIT)
        plane.budget(manners.room if manners.counts_bytes else None)
        self._supervisor.change_settings(dataclasses.replace(self._supervisor.settings, **limits))


class _Over(Exception):
    """The run is finished, or the node was told to leave."""
