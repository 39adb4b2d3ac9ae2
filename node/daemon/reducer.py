"""A node without a trainer: it owns chunks of the others' reduces, and holds no state.

Where no member can be dialled, each of them dials this one: on the coordinator's host, say.
"""

import asyncio
import logging

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
from atoll.node.config import NodeConfig
from atoll.node.control.reports import plan_of
from atoll.node.daemon import control_socket
from atoll.node.daemon.audits import Audits
from atoll.node.daemon.join_checks import look_around
from atoll.node.daemon.metrics_page import metrics_page
from atoll.node.daemon.session import CoordinatorSession
from atoll.node.daemon.state_dir import JoinOptions, exclusive, on_signals
from atoll.node.outer.method import seal_format

log = logging.getLogger("atoll.node")


class Reducer:
    """One life of a node that only owns chunks. `run` returns when the run is finished or the node was told to
    leave."""

    def __init__(self, invite: Invite, config: NodeConfig, options: JoinOptions) -> None:
        self._invite, self._config, self._options = invite, config, options
        self._over = asyncio.Event()
        self._finished = False  # the run is
        self._reduction: Reduction | None = None
        self._task: asyncio.Task[None] | None = None
        self._reduced = 0
        self._waiting_plan: tuple[Plan, int] | None = None  # with its elements; came before the kernels were there
        self._compiled = False
        self._heartbeat = 0.0  # seconds between two
        self._member: CoordinatorSession

    async def run(self) -> None:
        with exclusive(self._options.state_dir), take_part():
            await self._story()

    async def _story(self) -> None:
        """From join to good-bye."""
        async with CoordinatorSession.opened(
            self._invite, self._config, self._options, NothingToFetch()
        ) as self._member:
            try:
                self._heartbeat = (await self._member.join("reducer")).heartbeat
                with on_signals(self._over.set), metrics_page(self._options.metrics, self.status):
                    async with control_socket.serve(self._options.state_dir, self.status, self._over.set):
                        await self._live()
                await self._member.leave("the run is finished" if self._finished else "stopped by its operator")
            finally:
                self._stop()

    async def _live(self) -> None:
        """The session with the coordinator until the run, or this node, is over."""
        looking = asyncio.create_task(self._look())
        compiling = asyncio.create_task(self._compile())
        session = asyncio.create_task(self._member.maintain(self._stop, self._watch, self._beat))
        over = asyncio.create_task(self._over.wait())
        try:
            await asyncio.wait((session, over), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (over, session, compiling, looking):
                task.cancel()
            ended = await asyncio.gather(session, compiling, looking, return_exceptions=True)
        for error in ended:
            if error is not None and not isinstance(error, asyncio.CancelledError):
                raise error

    async def _look(self) -> None:
        if self._options.checks:
            await look_around(self._member)

    async def _compile(self) -> None:
        """Make the kernels once, while views come in: a member that opens no stream is taken for dead. A node that
        cannot make them ends with the error, as it would be of no use."""
        try:
            await warm_up_in_thread(codec_of(self._member.run), log.info)
        except Exception:
            self._over.set()
            raise
        self._compiled = True
        if self._waiting_plan is not None:
            self._follow(*self._waiting_plan)

    async def _watch(self) -> None:
        audits = Audits(self._member.reports, asyncio.create_task, self._auditor)
        try:
            await self._follow_views(audits)
        finally:
            audits.stop()

    async def _follow_views(self, audits: Audits) -> None:
        async for view in self._member.views():
            if view.finished:
                self._finished = True
                self._over.set()
            self._waiting_plan = (plan_of(view.plan), view.plan.numel) if view.HasField("plan") else None
            if self._waiting_plan is not None:
                if self._compiled:
                    self._follow(*self._waiting_plan)
                    audits.follow(view)
            elif self._reduction is not None and self._reduction.round <= view.committed:
                self._stop()

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

    def _stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
        self._reduction = self._task = None

    async def _beat(self) -> None:
        me = psutil.Process()
        while True:
            beat = pb.HeartbeatRequest(
                phase="sync" if self._reduction is not None else "waiting",
                bytes_up=self._member.plane.bytes_up,
                bytes_down=self._member.plane.bytes_down,
                rss_bytes=me.memory_info().rss,
            )
            await self._member.control.heartbeat(beat)
            await asyncio.sleep(self._heartbeat)

    # For `atoll node status`

    def status(self) -> dict[str, object]:
        """The reducer's state and traffic, for `atoll node status`."""
        return {
            "node_id": self._member.me,
            "name": self._options.name,
            "run": self._invite.run,
            "phase": "sync" if self._reduction is not None else "waiting",
            "round": self._reduction.round if self._reduction is not None else 0,
            "penalty": self._member.penalty,
            "rounds_reduced": self._reduced,
            "bytes_up": self._member.plane.bytes_up,
            "bytes_down": self._member.plane.bytes_down,
        }


class NothingToFetch:
    """The data plane's source of a node that has neither state nor sealed chunks."""

    async def sealed(self, round: Round, chunk: int) -> Octets | None:
        return None

    async def state(self, round: Round, chunk: int) -> Octets | None:
        return None

    async def digests(self, round: Round) -> None:
        return None
