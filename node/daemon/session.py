"""A node's place in a run, whatever its role: its data plane, its identity, and its session with the coordinator,
joined again when it is lost.
"""

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Self

from atoll.comm.addresses import is_local_host
from atoll.comm.allreduce.input_signer import InputSigner
from atoll.comm.config.run import RunConfig, from_json
from atoll.comm.config.security import PrivateAddresses
from atoll.comm.errors import atoll_error
from atoll.comm.ids import NodeId, RunId
from atoll.comm.invite import Invite, join_host_port, split_host_port
from atoll.comm.peer_names import PORT
from atoll.comm.proto import atoll_pb2 as pb
from atoll.comm.signatures import PrivateKey
from atoll.comm.transport.certificates import Certificate, load_or_make
from atoll.comm.transport.data_plane import DataPlane, StateSource
from atoll.comm.transport.key_ring import RunKey
from atoll.comm.transport.tls import TlsContexts
from atoll.node.config import NodeConfig
from atoll.node.control.checkup import RunSight
from atoll.node.control.client import OUTAGE_SECONDS, ControlClient, NodeIdentity
from atoll.node.control.outbox import SessionLost
from atoll.node.control.reports import Reports
from atoll.node.daemon.state_dir import JoinOptions, load_session, save_next_session, save_session
from atoll.node.gateway.client import GatewayProcess
from atoll.node.state_files import SESSION

log = logging.getLogger("atoll.node")
MEGABIT = 125e3  # bytes
STOPPED = "stopped by its operator"  # the reason of a good-bye


class CoordinatorSession:
    """A node's place in a run: data plane, identity, session. `opened`, then `look` if it is to, `join`,
    `maintain` and `leave`."""

    def __init__(
        self,
        invite: Invite,
        config: NodeConfig,
        options: JoinOptions,
        plane: DataPlane,
        key: PrivateKey,
        gateway: GatewayProcess | None = None,
    ) -> None:
        """`key`: the node's, for its life. `gateway`: the one that finds the coordinator of the invite, which has
        the address that leads there."""
        self.invite, self.key, self.signer = invite, key, InputSigner(key)
        self.config, self.options, self.plane, self._gateway = config, options, plane, gateway
        self._session_file = options.state_dir / SESSION
        self._identity: NodeIdentity
        self._joined = False
        self.private_addresses = False  # what the run names may be in private networks
        self.control = ControlClient(invite)
        # Chosen here, and remembered before the join: if its answer is lost, the next try is the same node's.
        self.control.session = load_session(self._session_file, invite) or secrets.token_hex(16)
        self.reports = Reports(self.control)
        self.me = NodeId("")
        self.address = ""  # at which peers dial this node, as the coordinator tells them
        self.penalty = ""  # what this node may not do for now, until when and why
        self.mark = b""  # of the run: what is kept of it is told from others' by this
        self.run: RunConfig

    @classmethod
    @asynccontextmanager
    async def opened(
        cls, invite: Invite, config: NodeConfig, options: JoinOptions, source: StateSource
    ) -> AsyncIterator[Self]:
        """Peers can dial this node while the context lasts; `source`: what they may fetch. The node's key and
        certificate are those in its state directory."""
        certificate = load_or_make(options.state_dir)
        key = certificate.signing_key()
        async with AsyncExitStack() as opened:
            gateway = None
            if invite.rendezvous:
                gateway = await opened.enter_async_context(GatewayProcess.opened(invite, options.state_dir))
                invite = await gateway.lead_to_coordinator(options.patience)
            plane = await cls._open_plane(invite, config, options, source, certificate, key)
            plane.reach = gateway.reach if gateway is not None else None
            member = cls(invite, config, options, plane, key, gateway)
            try:
                yield member
            except Exception as error:
                await member.leave(str(atoll_error(error) or "it failed"))
                raise
            finally:
                await member.leave(STOPPED)
                await plane.close()
                await member.control.close()

    @staticmethod
    async def _open_plane(
        invite: Invite,
        config: NodeConfig,
        options: JoinOptions,
        source: StateSource,
        certificate: Certificate,
        key: PrivateKey,
    ) -> DataPlane:
        return await DataPlane.start(
            options.listen,
            RunId(invite.run),
            NodeId("?"),
            b"",
            source,
            (config.upload * MEGABIT, config.download * MEGABIT),
            config.streams,
            config.congestion,
            TlsContexts(certificate) if invite.pin else None,
            key,
        )

    async def look(self, role: str = "") -> RunSight | None:
        """What the run is, before this node is a member of it, as `ControlClient.look`."""
        return await self.control.look(role, self.options.patience)

    async def join(self, role: str = "") -> pb.JoinReply:
        """Join the run, or come back to it as the same node; `reducer` is the role of a node without a trainer.
        Raises `Refused`, or `Unreachable` after the options' patience; `ResourceError` if the session cannot be
        saved."""
        host, port = split_host_port(self.plane.address, "--listen")
        listening = "" if host in ("0.0.0.0", "::", "") else host
        options, address = self.options, self.options.advertise or join_host_port(listening, port)
        if self._gateway is not None and not (options.advertise or options.leaf):
            host = await self._gateway.serve_data(join_host_port(listening or "127.0.0.1", port))
            address = join_host_port(host, PORT)
        self._identity = NodeIdentity(options.name, address, options.leaf, role, self.plane.pin, self.key)
        save_session(self._session_file, self.invite, self.control.session, options.name)
        reply = await self.control.join(self._identity, options.patience)
        self._joined = True
        self.run = from_json(reply.config)
        self.plane.peers.compressor.enabled = self.run.reduce.zstd
        await self._bound_addresses()
        self._adopt(reply)
        log.info(f"joined run {reply.run} as {self.me}; peers reach this node at {reply.address}")
        return reply

    async def _bound_addresses(self) -> None:
        """Dial private addresses only where the run's operator says so, or this node has dialled the coordinator
        at one."""
        match self.run.security.private_addresses:
            case PrivateAddresses.AUTO:
                dialled = self.invite.address if self._gateway is None else self._gateway.found
                host, _ = split_host_port(dialled, "the join URL") if dialled else ("", 0)
                self.private_addresses = await asyncio.to_thread(is_local_host, host)
            case asked:
                self.private_addresses = asked is PrivateAddresses.ALLOW
        self.plane.private_addresses = self.private_addresses

    def _adopt(self, reply: pb.JoinReply) -> None:
        """Be the node that the coordinator says this is, now and when it starts again."""
        self.me = NodeId(reply.node_id)
        self.mark, self.address = reply.mark, reply.address
        self.plane.identify(self.me, RunKey(reply.data_key_number, reply.data_key))
        save_next_session(self._session_file, self.invite, reply.session, self.options.name)

    async def maintain(
        self, on_rejoin: Callable[[], None], *duties: Callable[[], Coroutine[Any, Any, None]]
    ) -> None:
        """Carry out `duties` and send reports as long as the session lasts; join again when it is lost, and call
        `on_rejoin`. Returns after the good-bye of this node."""
        while True:
            try:
                async with asyncio.TaskGroup() as session:
                    for duty in (*duties, self.control.send_reports):
                        session.create_task(duty())
            except* SessionLost as lost:
                log.warning(f"the coordinator dropped this node ({lost.exceptions[0]}); it joins again")
            if not self._joined:
                return
            self._adopt(await self.control.join(self._identity, OUTAGE_SECONDS))
            on_rejoin()

    async def views(self) -> AsyncIterator[pb.View]:
        """Views as they come, as `ControlClient.watch` has them; the data plane follows what they say of the
        members."""
        roster, members = self.control.roster, None
        async for view in self.control.watch():
            if roster.members is not members:
                members = roster.members
                self.plane.admit(members, RunKey(roster.number, roster.data_key))
            if view.penalty != self.penalty:
                self.penalty = view.penalty
                log.warning(self.penalty or "this node's chunks and work are taken again")
            yield view

    async def leave(self, reason: str) -> None:
        """Say good-bye to the coordinator, once: first of all, so that nobody waits for what takes its time to
        stop."""
        if self._joined:
            self._joined = False
            await self.control.leave(reason)
