"""A node without a trainer: it owns chunks of the others' reduces, and holds no state.

Where no member can be dialled, each of them dials this one: on the coordinator's host, say.
"""

import asyncio
import logging
import secrets

import psutil

from atoll.comm.chunks import Chunks
from atoll.comm.codec import make as make_codec
from atoll.comm.config import RunConfig, from_json
from atoll.comm.errors import AtollError
from atoll.comm.ids import NodeId, Round, RunId
from atoll.comm.invite import Invite, join_host_port, split_host_port
from atoll.comm.octets import Octets
from atoll.comm.plan import Plan
from atoll.comm.plane import DataPlane
from atoll.comm.proto import atoll_pb2 as pb
from atoll.comm.reduce import Reduction, Seal
from atoll.node import local
from atoll.node.config import NodeConfig
from atoll.node.control import AWAY, Control, Identity, SessionLost
from atoll.node.daemon import plan_of, seal_of
from atoll.node.home import Options, claimed, on_signals, remember, remember_life, remembered, sessions
from atoll.node.method import sealing_of

log = logging.getLogger("atoll.node")


class Reducer:
    """One life of such a node. `run` returns when the run is finished or the node was told to leave."""

    def __init__(self, invite: Invite, config: NodeConfig, options: Options) -> None:
        self._invite, self._config, self._options = invite, config, options
        self._control = Control(invite)
        self._over = asyncio.Event()
        self._finished = False  # the run is
        self._reduction: Reduction | None = None
        self._task: asyncio.Task[None] | None = None
        self._reduced = 0
        self._plane: DataPlane
        self._run: RunConfig
        self._me = NodeId("")

    async def run(self) -> None:
        with claimed(self._options.state_dir):
            await self._story()

    async def _story(self) -> None:
        """From join to good-bye."""
        run = RunId(self._invite.run)
        config = self._config
        caps = config.upload * 125e3, config.download * 125e3
        self._plane = await DataPlane.start(
            self._options.listen,
            run,
            NodeId("?"),
            b"",
            _Nothing(),
            caps,
            config.streams,
            config.congestion,
            sessions(self._invite, self._options),
        )
        try:
            period = await self._join()
            with on_signals(self._over.set):
                async with local.serve(self._options.state_dir, self.status, self._over.set):
                    await self._live(period)
            await self._control.leave("the run is finished" if self._finished else "stopped by its operator")
        finally:
            self._stop()
            await self._plane.close()
            await self._control.close()

    async def _join(self) -> float:
        host, port = split_host_port(self._plane.address, "--listen")
        listening = "" if host in ("0.0.0.0", "::", "") else host
        address = self._options.advertise or join_host_port(listening, port)
        self._identity = Identity(self._options.name, address, role="reducer", pin=self._plane.pin)
        memory = self._options.state_dir / "session"
        self._control.session = remembered(memory, self._invite) or secrets.token_hex(16)
        remember(memory, self._invite, self._control.session)
        reply = await self._control.join(self._identity, self._options.patience)
        self._run = from_json(reply.config)
        self._plane.peers.squeeze.on = self._run.reduce.zstd
        self._admitted(reply)
        log.info(f"joined run {reply.run} as {self._me}, a reducer; peers reach it at {reply.address}")
        return reply.heartbeat

    def _admitted(self, reply: pb.JoinReply) -> None:
        self._me = NodeId(reply.node_id)
        self._plane.identify(self._me, reply.data_key)
        remember_life(self._options.state_dir / "session", self._invite, reply.session)

    async def _live(self, period: float) -> None:
        """The session with the coordinator until the run, or this node, is over."""
        session = asyncio.create_task(self._keep_session(period))
        over = asyncio.create_task(self._over.wait())
        try:
            await asyncio.wait((session, over), return_when=asyncio.FIRST_COMPLETED)
        finally:
            over.cancel()
            session.cancel()
            ended = (await asyncio.gather(session, return_exceptions=True))[0]
        if ended is not None and not isinstance(ended, asyncio.CancelledError):
            raise ended

    async def _keep_session(self, period: float) -> None:
        """A lost session is joined again."""
        while True:
            try:
                async with asyncio.TaskGroup() as session:
                    for part in (self._watch(), self._control.send_reports(), self._beat(period)):
                        session.create_task(part)
            except* SessionLost as lost:
                log.warning(f"the coordinator dropped this node ({lost.exceptions[0]}); it joins again")
            self._stop()
            self._admitted(await self._control.join(self._identity, AWAY))

    async def _watch(self) -> None:
        async for view in self._control.watch():
            if view.finished:
                self._finished = True
                self._over.set()
            elif view.HasField("plan"):
                self._follow(plan_of(view.plan), view.plan.numel)
            elif self._reduction is not None and self._reduction.round <= view.committed:
                self._stop()

    def _follow(self, plan: Plan, numel: int) -> None:
        try:
            if self._reduction is not None and self._reduction.round == plan.round:
                if plan.fence > self._reduction.plan.fence:
                    self._reduction.replan(plan)
                return
            self._stop()
            reduce = self._run.reduce
            codec = make_codec(reduce.codec, reduce.block, reduce.scales)
            chunks = Chunks(numel, reduce.chunk)
            sealing = sealing_of(self._run)
            self._reduction = Reduction(self._plane.peers, self._me, None, codec, chunks, plan, self, sealing)
            self._task = asyncio.create_task(self._reduce(self._reduction))
            self._reduced += 1
        except (AtollError, ValueError) as error:
            log.warning(f"round {plan.round}: {error}")

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

    async def _beat(self, period: float) -> None:
        me = psutil.Process()
        while True:
            beat = pb.HeartbeatRequest(
                phase="sync" if self._reduction is not None else "waiting",
                bytes_up=self._plane.bytes_up,
                bytes_down=self._plane.bytes_down,
                rss_bytes=me.memory_info().rss,
            )
            await self._control.heartbeat(beat)
            await asyncio.sleep(period)

    # What a reduce tells (atoll.comm.reduce.Outcome)

    def sealed(self, plan: Plan, seal: Seal, more: bool) -> None:
        self._report(plan, seal.since, more, seals=pb.Seals(seals=[seal_of(plan, seal)]))

    def orphans(self, plan: Plan, here: tuple[tuple[int, bytes], ...]) -> None:
        pass  # only who contributes holds sealed chunks

    def lost(self, plan: Plan, node: NodeId, sentence: str) -> None:
        log.warning(f"round {plan.round}, attempt {plan.attempt}: {node}: {sentence}")
        self._report(plan, plan.attempt, unreachable=pb.Unreachable(node_id=node, reason=sentence[:200]))

    def held(self, plan: Plan, root: bytes) -> None:
        pass

    def _report(self, plan: Plan, attempt: int, more: bool = False, **report: object) -> None:
        fence = pb.Fence(incarnation=plan.incarnation, epoch=plan.epoch, round=plan.round, attempt=attempt)
        self._control.report(pb.ReportRequest(fence=fence, **report), more)  # type: ignore[arg-type]

    # For `atoll node status`

    def status(self) -> dict[str, object]:
        return {
            "node_id": self._me,
            "name": self._options.name,
            "run": self._invite.run,
            "phase": "sync" if self._reduction is not None else "waiting",
            "round": self._reduction.round if self._reduction is not None else 0,
            "rounds_reduced": self._reduced,
            "bytes_up": self._plane.bytes_up,
            "bytes_down": self._plane.bytes_down,
        }


async def reduce_only(invite: Invite, config: NodeConfig, options: Options) -> None:
    """A reducer's life in this event loop."""
    await Reducer(invite, config, options).run()


class _Nothing:
    """It has nothing that peers may fetch."""

    async def sealed(self, round: Round, chunk: int) -> Octets | None:
        return None

    def state(self, round: Round, chunk: int) -> Octets | None:
        return None

    def digests(self, round: Round) -> None:
        return None
