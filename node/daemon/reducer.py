"""A node without a trainer: it owns chunks of the others' reduces, and holds no state.

Where no member can be dialled, each of them dials this one: on the coordinator's host, say. It obeys its owner
like any node (`manners`): paused, it finishes the reduce at hand, and gets no chunks of the next ones; to save
bytes it leaves the one at hand, too. Limits that only a trainer could obey it refuses.
"""

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any

import psutil

from atoll.comm.allreduce.auditor import Auditor
from atoll.comm.allreduce.reduction import Reduction
from atoll.comm.byte_view import Octets
from atoll.comm.chunks import Chunks
from atoll.comm.codecs.factory import codec_of
from atoll.comm.codecs.warm_up import warm_up_in_thread
from atoll.comm.cores import take_part
from atoll.comm.errors import AtollError
from atoll.comm.ids import Round
from atoll.comm.invite import Invite
from atoll.comm.plan import Plan
from atoll.comm.proto import atoll_pb2 as pb
from atoll.comm.terminal import plural
from atoll.node.config import NodeConfig
from atoll.node.control.reports import plan_of
from atoll.node.daemon import control_socket
from atoll.node.daemon.audits import Audits
from atoll.node.daemon.join_checks import look_around
from atoll.node.daemon.manners import Manners
from atoll.node.daemon.metrics_page import metrics_page
from atoll.node.daemon.session import MEGABIT, STOPPED, CoordinatorSession
from atoll.node.daemon.state_dir import (
    ENTER_SECONDS,
    JoinOptions,
    ends_before,
    exclusive,
    on_signals,
    save_ending,
)
from atoll.node.manners.limits import KEYS, TRAINER_KEYS, check_without_trainer
from atoll.node.outer.method import seal_format
from atoll.node.state_machine import events as ev

log = logging.getLogger("atoll.node")
POLITE_SECONDS = 14.0  # for which a reducer that is told to end finishes the reduce at hand


class Reducer:
    """One life of a node that only owns chunks. `run` returns when the run is finished or the node was told to
    leave."""

    def __init__(self, invite: Invite, config: NodeConfig, options: JoinOptions) -> None:
        check_without_trainer(config)
        keys = tuple(key for key in KEYS if key not in TRAINER_KEYS)
        self._manners = Manners(config, options.state_dir, keys)
        self._invite, self._config, self._options = invite, self._manners.config, options
        self._over = asyncio.Event()
        self._beat_due = asyncio.Event()  # what the heartbeat says changed: tell at once
        self._takes_part = False  # it has joined, and was not told to end before
        self._parting = False  # it is to leave once no reduce is under way
        self._left = False  # it left a reduce to save bytes, which the coordinator may not have heard yet
        self._finished = False  # the run is
        self._reduction: Reduction | None = None
        self._task: asyncio.Task[None] | None = None
        self._reduced = 0
        self._waiting_plan: tuple[Plan, int] | None = None  # with its elements; came before the kernels were there
        self._compiled = False
        self._heartbeat = 0.0  # seconds between two
        self._audits: Audits | None = None  # of the session at hand
        self._member: CoordinatorSession

    async def run(self) -> None:
        with exclusive(self._options.state_dir), take_part(), on_signals(self._interrupt):
            await self._story()

    async def _story(self) -> None:
        """From join to good-bye, and a last line in the log."""
        async with AsyncExitStack() as opened:
            if not await ends_before(self._over, self._enter(opened), ENTER_SECONDS):
                return
            try:
                self._takes_part = True
                self._manners.attach(self._member.exchanged, self._pause, self._obey)
                verbs = self._manners.verbs | {"finish": self._finish}
                with metrics_page(self._options.metrics, self.status):
                    async with control_socket.serve(self._options.state_dir, self.status, self._over.set, verbs):
                        await self._live()
                await self._member.leave("the run is finished" if self._finished else STOPPED)
            finally:
                self._stop()
        why = "which is finished" if self._finished else "as it was told to"
        rounds = f"{self._reduced:,} {plural('round', self._reduced)}"
        sentence = f"the node has left the run, {why}: it took part in the exchange of {rounds}"
        log.info(sentence)
        save_ending(self._options.state_dir, sentence)

    async def _enter(self, opened: AsyncExitStack) -> None:
        session = CoordinatorSession.opened(self._invite, self._config, self._options, NothingToFetch())
        self._member = await opened.enter_async_context(session)
        self._heartbeat = (await self._member.join("reducer")).heartbeat
        if sentence := self._manners.unobservable:
            log.warning(sentence)

    async def _live(self) -> None:
        """The session with the coordinator until the run, or this node, is over."""
        looking = asyncio.create_task(self._look())
        relaying = asyncio.create_task(self._relay())
        compiling = asyncio.create_task(self._compile())
        session = asyncio.create_task(self._member.maintain(self._begin_anew, self._watch, self._beat))
        obeying = asyncio.create_task(self._manners.run())
        over = asyncio.create_task(self._over.wait())
        try:
            await asyncio.wait((session, over), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (over, session, compiling, looking, relaying, obeying):
                task.cancel()
            ended = await asyncio.gather(session, compiling, looking, relaying, obeying, return_exceptions=True)
        for error in ended:
            if error is not None and not isinstance(error, asyncio.CancelledError):
                raise error

    async def _look(self) -> None:
        if self._options.checks:
            await look_around(self._member, rates=not self._manners.counts_bytes)

    async def _relay(self) -> None:
        if self._config.relay:
            await self._member.relay_for_others(lambda: self._config, lambda: self._manners.saves_bytes)

    async def _compile(self) -> None:
        """Make the kernels once, while views come in: a member that opens no stream is taken for dead. A node that
        cannot make them ends with the error, as it would be of no use."""
        try:
            await warm_up_in_thread(codec_of(self._member.run), log.info)
        except Exception:
            self._over.set()
            raise
        self._compiled = True
        if self._waiting_plan is not None and not self._exchanges_nothing:
            self._follow(*self._waiting_plan)

    async def _watch(self) -> None:
        audits = self._audits = Audits(self._member.reports, asyncio.create_task, self._auditor)
        try:
            async for view in self._member.views():
                self._see(view, audits)
        finally:
            audits.stop()

    def _see(self, view: pb.View, audits: Audits) -> None:
        if view.finished:
            self._finished = True
            self._over.set()
        if (pause := self._manners.round_is(view.committed)) is not None:
            self._pause(pause)
        self._waiting_plan = (plan_of(view.plan), view.plan.numel) if view.HasField("plan") else None
        self._left = self._left and not view.saves_bytes
        if self._waiting_plan is None:
            if self._reduction is not None and self._reduction.round <= view.committed:
                self._stop()
            self._depart_if_idle()
        elif self._compiled and not self._exchanges_nothing:
            self._follow(*self._waiting_plan)
            audits.follow(view)

    def _follow(self, plan: Plan, numel: int) -> None:
        try:
            if self._reduction is not None and self._reduction.round == plan.round:
                if plan.fence > self._reduction.plan.fence:
                    self._reduction.replan(plan)
                return
            self._stop()
            run = self._member.run
            codec, sealing = codec_of(run), seal_format(run)
            chunks = Chunks(numel, run.reduce.chunk)
            self._reduction = Reduction(
                *(self._member.plane.peers, self._member.me, None, codec, chunks, plan, self._member.reports),
                sealing,
                signer=self._member.signer,
            )
            self._task = asyncio.create_task(self._reduce(self._reduction))
            self._reduced += 1
        except (AtollError, ValueError) as error:
            log.warning(f"round {plan.round}: {error}")

    def _auditor(self, plan: Plan) -> Auditor:
        assert self._waiting_plan is not None  # of the view that names this node
        run, (_, numel) = self._member.run, self._waiting_plan
        chunks = Chunks(numel, run.reduce.chunk)
        return Auditor(self._member.plane, self._member.me, codec_of(run), chunks, seal_format(run))

    async def _reduce(self, reduction: Reduction) -> None:
        try:
            await reduction.run()
        except AtollError as error:
            log.warning(f"round {reduction.round}: {error}")  # the coordinator's clock decides
        except Exception:
            log.exception(f"round {reduction.round}: a fault of this node")

    def _begin_anew(self) -> None:
        """In a new session the coordinator counts on nothing that was before."""
        self._stop()
        self._left = False

    def _stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
        self._reduction = self._task = None

    async def _beat(self) -> None:
        me = psutil.Process()
        while True:
            self._beat_due.clear()
            beat = pb.HeartbeatRequest(
                phase=self._phase,
                bytes_up=self._member.plane.bytes_up,
                bytes_down=self._member.plane.bytes_down,
                rss_bytes=me.memory_info().rss,
                pause=self._manners.reason or 0,
                saves_bytes=self._exchanges_nothing,
            )
            await self._member.control.heartbeat(beat)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._heartbeat):
                    await self._beat_due.wait()

    # What its owner wants

    @property
    def _exchanges_nothing(self) -> bool:
        return self._manners.saves_bytes or self._left

    def _pause(self, event: ev.Event) -> None:
        """The manners say that it pauses, or no longer."""
        self._beat_due.set()
        if self._manners.saves_bytes:
            self._left = self._left or self._reduction is not None
            self._stop()
            self._member.plane.hush()
            if self._audits is not None:
                self._audits.stop()
        self._depart_if_idle()

    def _obey(self, config: NodeConfig) -> None:
        plane, manners = self._member.plane, self._manners
        plane.limit(config.upload * MEGABIT, config.download * MEGABIT)
        plane.budget(manners.room if manners.counts_bytes else None)

    def _finish(self, arguments: Sequence[str]) -> dict[str, Any]:
        """Leave once no reduce is under way: for the control socket."""
        self._parting = True
        self._manners.leave_soon()
        self._depart_if_idle()
        return {"reason": self._manners.words}

    def _depart_if_idle(self) -> None:
        if self._parting and self._reduction is None:
            self._over.set()

    def _interrupt(self) -> None:
        """The first time, finish the reduce at hand, which would else begin anew without this node."""
        if self._parting or not self._takes_part:
            self._over.set()
        else:
            self._finish(())
            asyncio.get_running_loop().call_later(POLITE_SECONDS, self._over.set)

    # For `atoll node status`

    @property
    def _phase(self) -> str:
        if self._reduction is not None:
            return "sync"
        return "paused" if self._manners.reason is not None else "waiting"

    def status(self) -> dict[str, object]:
        """The reducer's state and traffic, for `atoll node status`."""
        return {
            "node_id": self._member.me,
            "name": self._options.name,
            "run": self._invite.run,
            "state": self._phase,
            "reason": self._manners.words,
            "phase": self._phase,
            "round": self._reduction.round if self._reduction is not None else 0,
            "coordinator_away_s": self._member.control.away,
            "coordinator_search": self._member.search.words,
            "penalty": self._member.penalty,
            "rounds_reduced": self._reduced,
            "bytes_up": self._member.plane.bytes_up,
            "bytes_down": self._member.plane.bytes_down,
            **self._manners.status(),
        }


class NothingToFetch:
    """The data plane's source of a node that has neither state nor sealed chunks."""

    async def sealed(self, round: Round, chunk: int) -> Octets | None:
        return None

    async def state(self, round: Round, chunk: int) -> Octets | None:
        return None

    async def digests(self, round: Round) -> None:
        return None
