"""A node's place in a run, whatever its role: its data plane, its identity, and its session with the coordinator,
joined again when it is lost.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any, Self

from atoll.comm import log as logs
from atoll.comm.addresses import is_local_host
from atoll.comm.allreduce.input_signer import InputSigner
from atoll.comm.config.run import RunConfig, from_json
from atoll.comm.config.security import PrivateAddresses
from atoll.comm.errors import Unreachable, atoll_error
from atoll.comm.extras import MissingPackage
from atoll.comm.ids import NodeId, RunId
from atoll.comm.invite import Invite, join_host_port, split_host_port
from atoll.comm.peer_names import PORT
from atoll.comm.proto import atoll_pb2 as pb
from atoll.comm.signatures import PrivateKey
from atoll.comm.transport.certificates import Certificate, load_or_make
from atoll.comm.transport.data_plane import DataPlane
from atoll.comm.transport.fetch_server import StateSource
from atoll.comm.transport.key_ring import RunKey
from atoll.comm.transport.tls import TlsContexts
from atoll.node.config import NodeConfig
from atoll.node.control.checkup import RunSight
from atoll.node.control.client import OUTAGE_SECONDS, ControlClient, NodeIdentity
from atoll.node.control.outbox import SessionLost
from atoll.node.control.reports import Reports
from atoll.node.control.round_account import Accountant
from atoll.node.daemon.coordinator_search import CoordinatorSearch
from atoll.node.daemon.node_gateway import NodeGateway
from atoll.node.daemon.relay_share import RelayShare
from atoll.node.daemon.state_dir import JoinOptions, load_session, save_next_session, save_session
from atoll.node.state_files import SESSION

log = logging.getLogger("atoll.node")
MEGABIT = 125e3  # bytes
STOPPED = "stopped by its owner"  # the reason of a good-bye
SHARE_INTERVAL = 1.0  # seconds between two looks at what a relay passes on


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
        gateway: NodeGateway,
    ) -> None:
        """`key`: the node's, for its life. `invite`: with the address that led to the coordinator at first."""
        self.invite, self.key, self.signer = invite, key, InputSigner(key)
        self.config, self.options, self.plane, self.gateway = config, options, plane, gateway
        self._session_file = options.state_dir / SESSION
        self._identity: NodeIdentity
        self._moved = asyncio.Event()  # others reach this node another way: it joins again
        self._joined = False
        self.private_addresses = False  # what the run names may be in private networks
        self.control = ControlClient(invite)
        self.search = CoordinatorSearch(self.control, gateway)
        # Chosen here, and remembered before the join: if its answer is lost, the next try is the same node's.
        before = load_session(self._session_file, invite)
        self.control.session, self.control.admitted = before or secrets.token_hex(16), bool(before)
        self.reports = Reports(self.control)
        self.accountant = Accountant(
            plane.peers.estimator.tallies, self.control.clock, self.control.longest_outage
        )
        self.accountant.limits = lambda: plane.limits
        self.reports.remember = self.accountant.record
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
            gateway = NodeGateway(invite, config, options, opened)
            invite = await gateway.lead_to_coordinator()
            plane = await cls._open_plane(invite, config, options, source, certificate, key)
            plane.reach = gateway.reach
            member = cls(invite, config, options, plane, key, gateway)
            try:
                async with member.search.under_way():
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
        options, (host, port) = self.options, self._listening
        address = options.advertise or join_host_port(host, port)
        if self.gateway.found is not None and not (options.advertise or options.leaf):
            address = join_host_port(await self.gateway.serve(self._local), PORT)
        self._identity = NodeIdentity(options.name, address, options.leaf, role, self.plane.pin, self.key)
        save_session(self._session_file, self.invite, self.control.session, options.name)
        self.control.on_gateways = self.gateway.learn
        reply = await self.control.join(self._identity, options.patience)
        self._joined = True
        self.run = from_json(reply.config)
        self.plane.peers.compressor.enabled = self.run.reduce.zstd
        await self._bound_addresses()
        self._adopt(reply)
        log.info(f"joined run {reply.run} as {self.me}; peers reach this node at {reply.address}")
        return reply

    @property
    def _listening(self) -> tuple[str, int]:
        """Host and port where the data plane listens; the host is empty where that is at all of this machine's."""
        host, port = split_host_port(self.plane.address, "--listen")
        return "" if host in ("0.0.0.0", "::", "") else host, port

    @property
    def _local(self) -> str:
        """The data plane's "host:port" on this machine."""
        host, port = self._listening
        return join_host_port(host or "127.0.0.1", port)

    def exchanged(self) -> int:
        """Bytes that went up and down in this life, those passed on for others included."""
        return self.plane.bytes_up + self.plane.bytes_down + 2 * self.gateway.relayed

    async def relay_for_others(self, config: Callable[[], NodeConfig], idle: Callable[[], bool]) -> None:
        """Pass on what members send each other, within the owner's settings as they are; `idle`: nothing is to be
        passed on now. Ends where this node cannot, which is said."""
        gateway, share = self.gateway, RelayShare(config().relay_rate * MEGABIT)
        await gateway.offer_relay(self.address)
        self.control.relay = gateway.relay
        while gateway.relay:
            settings = config()
            shares = share.divide(settings.upload * MEGABIT, gateway.relayed, asyncio.get_running_loop().time())
            gateway.relay_within(0 if idle() else settings.relay_streams, shares.relay)
            self.plane.limit(shares.exchange, settings.download * MEGABIT)
            await asyncio.sleep(SHARE_INTERVAL)

    async def find_another_way(self) -> str:
        """Let others reach this node, which nobody can dial, through a gateway of the run; it joins again so.
        Where that cannot be, it is a leaf from now on. Returns what becomes of it, in words; empty: nothing, for
        the run has no gateway, or the node's owner said how it is reached."""
        options, gateway = self.options, self.gateway
        if options.leaf or options.advertise or gateway.found is not None or not gateway.run_gateways:
            return ""
        try:
            if not self.invite.pin:
                raise Unreachable("what is not encrypted goes through no gateway")
            address = join_host_port(await gateway.serve_by_relay(self._local), PORT)
            identity, words = replace(self._identity, address=address), "the run's gateways pass on what is for it"
        except (MissingPackage, Unreachable) as error:
            if self._identity.role:  # of no use where nobody reaches it, and no leaf may have one
                return f"the run's gateways could pass on what is for it: {error}"
            identity, words = replace(self._identity, leaf=True), f"it is a leaf, and dials the others: {error}"
        self._identity = identity
        self._moved.set()
        return words

    async def _bound_addresses(self) -> None:
        """Dial private addresses only where the run's operator says so, or this node has dialled the coordinator
        at one."""
        match self.run.security.private_addresses:
            case PrivateAddresses.AUTO:
                found = self.gateway.found
                dialled = self.invite.address if found is None else found
                host, _ = split_host_port(dialled, "the join URL") if dialled else ("", 0)
                self.private_addresses = await asyncio.to_thread(is_local_host, host)
            case asked:
                self.private_addresses = asked is PrivateAddresses.ALLOW
        self.plane.private_addresses = self.private_addresses

    def _adopt(self, reply: pb.JoinReply) -> None:
        """Be the node that the coordinator says this is, now and when it starts again."""
        self.me = NodeId(reply.node_id)
        logs.about(run=reply.run, node=self.me)
        self.mark, self.address = reply.mark, reply.address
        self.gateway.learn(reply.gateways)
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
                    for duty in (*duties, self.control.send_reports, self._await_move):
                        session.create_task(duty())
            except* SessionLost as lost:
                log.warning(f"the coordinator dropped this node ({lost.exceptions[0]}); it joins again")
            except* _Moved:
                log.info("it joins again: others reach it another way now")
            if not self._joined:
                return
            self._adopt(await self.control.join(self._identity, OUTAGE_SECONDS))
            on_rejoin()

    async def _await_move(self) -> None:
        await self._moved.wait()
        self._moved.clear()
        raise _Moved

    async def views(self) -> AsyncIterator[pb.View]:
        """Views as they come, as `ControlClient.watch` has them; the data plane follows what they say of the
        members."""
        roster, members = self.control.roster, None
        async for view in self.control.watch():
            logs.about(round=view.committed + 1)
            if roster.members is not members:
                members = roster.members
                self.plane.admit(roster.keys, RunKey(roster.number, roster.data_key))
            self.accountant.book.committed(view.committed, time.monotonic())
            if view.account and (told := self.accountant.answer(view.account, self.control.session)) is not None:
                self.reports.account(view.account, told)
            if view.penalty != self.penalty:
                self.penalty = view.penalty
                log.warning(self.penalty or "this node's chunks and work are taken again")
            yield view

    async def leave(self, reason: str) -> None:
        """Say good-bye to the coordinator, once: first of all, so that nobody waits for what takes its time to
        stop."""
        if self._joined:
            self._joined = False
            await self.control.leave(reason, self.accountant.incidents())


class _Moved(Exception):
    """Others reach this node another way than when it joined."""
