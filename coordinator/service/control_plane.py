"""The control plane of a run: state machine, streams and gRPC server wired together, from start to hand-over."""

import asyncio
import logging
import secrets
from collections.abc import Callable

import grpc
from grpc_health.v1 import health, health_pb2_grpc
from grpc_health.v1.health_pb2 import HealthCheckResponse
from grpc_reflection.v1alpha.reflection import SERVICE_NAME as REFLECTION
from grpc_reflection.v1alpha.reflection import enable_server_reflection

from atoll.comm.config.run import RunConfig
from atoll.comm.errors import ResourceError
from atoll.comm.transport.certificates import Certificate
from atoll.coordinator.service.event_loop import EventLoop
from atoll.coordinator.service.journal import Journal
from atoll.coordinator.service.metrics import Metrics
from atoll.coordinator.service.rpc import SERVICE_NAME, CoordinatorService
from atoll.coordinator.service.view_streams import ViewStreams
from atoll.coordinator.state_machine.events import Effect
from atoll.coordinator.state_machine.state import Phase

log = logging.getLogger("atoll.coordinator")
DRAIN_TIMEOUT = 30.0  # seconds that a stopping coordinator waits for the round that is closing
LAST_VIEWS_TIMEOUT = 1.0  # seconds for the last views to leave
LAST_ANSWERS_TIMEOUT = 0.5  # seconds for the last answers to leave
CLOSING_PHASES = (Phase.COLLECTING, Phase.REDUCING)
MAX_CALLS = 50_000  # at a time, streams included
UNLIMITED_MS = 2**31 - 1
CHANNEL_OPTIONS = {
    "grpc.so_reuseport": 0,
    "grpc.max_receive_message_length": 4 << 20,  # bytes; the seals of 100,000 chunks
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
    ) -> None:
        """Rebuild the run from its journal. `tell` is called with every effect once it is durable. Without a
        certificate nothing is encrypted."""
        self.metrics, self.health = Metrics(), health.aio.HealthServicer()
        self.event_loop = EventLoop(config, journal, self.metrics, tell, self._show_health)
        self.views = ViewStreams(self.event_loop, self.metrics)
        self.event_loop.on_change.append(self.views.notify)
        self._certificate, tls = certificate, certificate is not None
        service = CoordinatorService(
            self.event_loop, self.views, journal, self.metrics, config.name, _data_key(journal), tls
        )
        self._server = grpc.aio.server(maximum_concurrent_rpcs=MAX_CALLS, options=list(CHANNEL_OPTIONS.items()))
        self._server.add_generic_rpc_handlers((service.handler(),))
        health_pb2_grpc.add_HealthServicer_to_server(self.health, self._server)
        enable_server_reflection((SERVICE_NAME, health.SERVICE_NAME, REFLECTION), self._server)

    def listen(self, address: str) -> int:
        """Bind `address`, host:port; return the port. Raises `ResourceError`."""
        try:
            if (own := self._certificate) is not None:
                credentials = grpc.ssl_server_credentials([(own.key, own.body)])
                return self._server.add_secure_port(address, credentials)
            return self._server.add_insecure_port(address)
        except RuntimeError as error:
            raise ResourceError(f"cannot listen on {address}: {error}") from None

    async def run(self) -> None:
        """Serve until `stop`; raises what the journal says when it is damaged."""
        await self._show_health(True)
        await self._server.start()
        dispatch = asyncio.create_task(self.views.run())
        events = asyncio.create_task(self.event_loop.run())
        try:
            await asyncio.wait((dispatch, events), return_when=asyncio.FIRST_COMPLETED)
            for task in (dispatch, events):
                if task.done():
                    await task  # one that failed: show why
        finally:
            self.event_loop.stop()  # first: the streams that end now are nobody's fault
            self.views.end()
            await self._server.stop(LAST_ANSWERS_TIMEOUT)
            for task in (dispatch, events):
                task.cancel()
            await asyncio.gather(dispatch, events, return_exceptions=True)

    async def drain(self, at_once: asyncio.Event) -> None:
        """Tell everybody that the coordinator will be away for a while, and let a round that is closing finish:
        taken over from the journal it would only last longer. Ends at once when `at_once` is set."""
        loop, number = self.event_loop, self.event_loop.state.round.number
        loop.draining = True
        self.views.notify()
        await self.health.enter_graceful_shutdown()
        if loop.state.round.phase in CLOSING_PHASES and not loop.trouble:
            log.info(
                f"stopping when round {number} is done, in {DRAIN_TIMEOUT:g} s at most; "
                "a second signal stops at once"
            )
            over = loop.wait_until(lambda s: s.round.number > number or s.round.phase not in CLOSING_PHASES)
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
        status = HealthCheckResponse.SERVING if serving else HealthCheckResponse.NOT_SERVING
        for name in ("", SERVICE_NAME):
            await self.health.set(name, status)


def _data_key(journal: Journal) -> bytes:
    key = journal.meta("data_key") or secrets.token_hex(32)
    journal.set_meta("data_key", key)
    return bytes.fromhex(key)
