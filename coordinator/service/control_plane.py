"""The control plane of a run: state machine, streams and gRPC server wired together, from start to hand-over."""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable

import grpc

from atoll.comm.config.run import RunConfig
from atoll.comm.transport.certificates import NAME, Certificate
from atoll.coordinator.door.front_door import FrontDoor, listening_socket
from atoll.coordinator.door.ports import CONTROL
from atoll.coordinator.service.checkup import CheckupService
from atoll.coordinator.service.data_keys import DataKeys
from atoll.coordinator.service.event_loop import EventLoop
from atoll.coordinator.service.health import Health, ServiceProbe
from atoll.coordinator.service.journal import Journal
from atoll.coordinator.service.metrics import Metrics
from atoll.coordinator.service.rpc import SERVICE_NAME, CoordinatorService, host_of_address
from atoll.coordinator.service.run_gateways import RunGateways
from atoll.coordinator.service.view_streams import ViewStreams
from atoll.coordinator.state_machine.events import Effect
from atoll.coordinator.state_machine.state import CLOSING

log = logging.getLogger("atoll.coordinator")
DRAIN_TIMEOUT = 30.0  # seconds that a stopping coordinator waits for the round that is closing
LAST_VIEWS_TIMEOUT = 1.0  # seconds for the last views to leave
LAST_ANSWERS_TIMEOUT = 0.5  # seconds for the last answers to leave
MAX_CALLS = 50_000  # at a time, streams included
# Calls on one connection at a time: a member has its streams of views and of reports, and a heartbeat.
MAX_STREAMS = 16
UNLIMITED_MS = 2**31 - 1
MAX_DOOR_SILENCE = 3.0  # seconds without a word from the door's process after which it lets no calls in
CHANNEL_OPTIONS = {
    "grpc.max_concurrent_streams": MAX_STREAMS,
    "grpc.max_metadata_size": 8 << 10,  # bytes
    "grpc.max_receive_message_length": 4 << 20,  # bytes; the seals of 100,000 chunks
    # Bytes of a stream that are taken in before its reader wants them. Left to gRPC they follow what seems to be
    # on the way, which who sends decides: streams that wait for their turn would hold gigabytes.
    "grpc.http2.lookahead_bytes": 4 << 20,
    "grpc.http2.bdp_probe": 0,
    "grpc.max_send_message_length": 16 << 20,  # bytes; a plan is the longest: who owns each chunk
    "grpc.max_connection_age_ms": UNLIMITED_MS,  # a stream lives as long as its node
    "grpc.max_connection_idle_ms": UNLIMITED_MS,
    "grpc.server.max_pending_requests": MAX_CALLS,  # else those beyond 1000 at a time are cancelled
    "grpc.server.max_pending_requests_hard_limit": MAX_CALLS,
    "grpc.keepalive_time_ms": 10_000,
    "grpc.keepalive_timeout_ms": 5_000,
    "grpc.keepalive_permit_without_calls": 1,
    "grpc.http2.min_recv_ping_interval_without_data_ms": 5_000,
}


class ControlPlane:
    """The gRPC server of a run with all that it serves from; `run` it, `drain` it, `stop` it."""

    def __init__(
        self,
        config: RunConfig,
        journal: Journal,
        tell: Callable[[Effect], None],
        certificate: Certificate | None = None,
        private_addresses: bool = True,
    ) -> None:
        """Rebuild the run from its journal. `tell` is called with every effect once it is durable. Without a
        certificate nothing is encrypted. `private_addresses`: members may have such ones."""
        self.metrics, self.door = Metrics(), FrontDoor()
        self.event_loop = EventLoop(config, journal, self.metrics, tell, self._show_health)
        keys = DataKeys(_secret(journal))
        self.views = ViewStreams(self.event_loop, self.metrics, keys.key)
        self.event_loop.on_change.append(self.views.notify)
        self._certificate, tls = certificate, certificate is not None
        self.gateways = RunGateways(
            journal.directory, private_addresses, lambda: self.event_loop.state.members.here, time.monotonic
        )
        self._service = service = CoordinatorService(
            *(
                self.event_loop,
                self.views,
                journal,
                self.metrics,
                self.door,
                config.name,
                keys,
                self.gateways,
                tls,
            ),
            private_addresses,
        )
        self.health = Health(SERVICE_NAME, service.guard)
        self._server = grpc.aio.server(maximum_concurrent_rpcs=MAX_CALLS, options=list(CHANNEL_OPTIONS.items()))
        checkup = CheckupService(service, self.event_loop, self.door, self.gateways, private_addresses, tls)
        handlers = (service.handler(), checkup.handler(), *self.health.handlers())
        self._server.add_generic_rpc_handlers(handlers)
        self.event_loop.on_change.append(self._revoke_departed)
        self._seen_changes = -1  # of the members, when `_revoke_departed` last looked
        self._probed = ""  # where the service listens behind the door
        self.entrance = ""  # path of the socket at which a gateway of this machine comes in

    def listen(self, address: str) -> int:
        """Bind `address`, host:port; return the port. Raises `ResourceError`."""
        sock = listening_socket(address, "--listen")
        path = self.door.open(sock, CONTROL)
        self.entrance = self.door.open_to_gateway(path, CONTROL)
        self._probed = f"unix:{path}"
        if (own := self._certificate) is not None:
            credentials = grpc.ssl_server_credentials([(own.key, own.body)])
            self._server.add_secure_port(self._probed, credentials)
        else:
            self._server.add_insecure_port(self._probed)
        return int(sock.getsockname()[1])

    async def run(self) -> None:
        """Serve until `stop`; raises what the journal says when it is damaged."""
        await self._show_health(True)
        await self._server.start()
        dispatch = asyncio.create_task(self.views.run())
        events = asyncio.create_task(self.event_loop.run())
        members = self.event_loop.state.members
        self.door.know(
            tuple({host_of_address(m.address) for m in (*members.departed.values(), *members.here.values())})
        )
        probe = ServiceProbe(self._channel())
        self.event_loop.refusing = lambda: probe.refused or self.door.silence > MAX_DOOR_SILENCE
        guards = [asyncio.create_task(part.run()) for part in (self.door, probe, self.gateways)]
        try:
            await asyncio.wait((dispatch, events, *guards), return_when=asyncio.FIRST_COMPLETED)
            for task in guards:
                if task.done():
                    await task
            for task in (dispatch, events):
                if task.done():
                    await task  # one that failed: show why
        finally:
            self.event_loop.stop()  # first: the streams that end now are nobody's fault
            self.views.end()
            self._service.report_streams.end()
            await self._server.stop(LAST_ANSWERS_TIMEOUT)
            for task in (dispatch, events, *guards):
                task.cancel()
            await asyncio.gather(dispatch, events, *guards, return_exceptions=True)
            self.door.close()

    async def drain(self, at_once: asyncio.Event) -> None:
        """Tell everybody that the coordinator will be away for a while, and let a round that is closing finish:
        taken over from the journal it would only last longer. Ends at once when `at_once` is set."""
        loop, number = self.event_loop, self.event_loop.state.round.number
        loop.draining = True
        self.views.notify()
        self.health.draining = True
        if loop.state.round.phase in CLOSING and not loop.trouble:
            log.info(
                f"stopping when round {number} is done, in {DRAIN_TIMEOUT:g} s at most; "
                "a second signal stops at once"
            )
            over = loop.wait_until(lambda s: s.round.number > number or s.round.phase not in CLOSING)
            done = asyncio.create_task(over)
            hurry = asyncio.create_task(at_once.wait())
            await asyncio.wait((done, hurry), timeout=DRAIN_TIMEOUT, return_when=asyncio.FIRST_COMPLETED)
            done.cancel()
            hurry.cancel()
        await self.views.wait_sent(LAST_VIEWS_TIMEOUT)

    def stop(self) -> None:
        """Let `run` end."""
        self.event_loop.stop()

    async def _show_health(self, serving: bool) -> None:
        self.health.serving = serving

    def _channel(self) -> grpc.aio.Channel:
        """A channel to the service itself, past the door."""
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.ssl_target_name_override", NAME)]
        if (own := self._certificate) is None:
            return grpc.aio.insecure_channel(self._probed, options=options[:1])
        return grpc.aio.secure_channel(self._probed, grpc.ssl_channel_credentials(own.body), options=options)

    def _revoke_departed(self) -> None:
        """Tell the door who is no member any more."""
        members = self.event_loop.state.members
        if members.changes != self._seen_changes:
            self._seen_changes = members.changes
            for node in self.door.nodes - members.here.keys():
                self.door.revoke(node)


def _secret(journal: Journal) -> bytes:
    """The run's secret, from which the keys of its data plane follow: made once."""
    secret = journal.meta("secret") or secrets.token_hex(32)
    journal.set_meta("secret", secret)
    return bytes.fromhex(secret)
