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
from atoll.coordinator.service.rpc import NAME, CoordinatorService
from atoll.coordinator.service.view_streams import ViewStreams
from atoll.coordinator.state_machine.events import Effect
from atoll.coordinator.state_machine.state import Phase

log = logging.getLogger("atoll.coordinator")
DRAIN = 30.0  # seconds that a stopping coordinator waits for the round that is closing
TELL = 1.0  # seconds for the last views to leave
STOP = 0.5  # seconds for the last answers to leave
CLOSING = (Phase.COLLECTING, Phase.REDUCING)
MOST_CALLS = 50_000  # at a time, streams included
FOREVER = 2**31 - 1
CHANNEL = {
    "grpc.so_reuseport": 0,
    "grpc.max_receive_message_length": 4 << 20,  # bytes; the seals of 100,000 chunks
    "grpc.max_send_message_length": 16 << 20,  # bytes; a plan is the longest: who owns each chunk
    "grpc.max_connection_age_ms": FOREVER,  # a stream lives as long as its node
    "grpc.max_connection_idle_ms": FOREVER,
    "grpc.server.max_pending_requests": MOST_CALLS,  # else those beyond 1000 at a time are cancelled
    "grpc.server.max_pending_requests_hard_limit": MOST_CALLS,
    "grpc.keepalive_time_ms": 10_000,
    "grpc.keepalive_timeout_ms": 5_000,
    "grpc.keepalive_permit_without_calls": 1,
    "grpc.http2.min_recv_ping_interval_without_data_ms": 5_000,
}


class ControlPlane:
    def __init__(
        self,
        config: RunConfig,
        journal: Journal,
        tell: Callable[[Effect], None],
        certificate: Certificate | None = None,
    ) -> None:
        """Rebuild the run from its journal. `tell` hears of every effect. Without a certificate nothing is
        encrypted."""
        self.metrics, self.health = Metrics(), health.aio.HealthServicer()
        self.kernel = EventLoop(config, journal, self.metrics, tell, self._show_health)
        self.views = ViewStreams(self.kernel, self.metrics)
        self.kernel.on_change.append(self.views.changed)
        self._certificate, tls = certificate, certificate is not None
        service = CoordinatorService(
            self.kernel, self.views, journal, self.metrics, config.name, _data_key(journal), tls
        )
        self._server = grpc.aio.server(maximum_concurrent_rpcs=MOST_CALLS, options=list(CHANNEL.items()))
        self._server.add_generic_rpc_handlers((service.handler(),))
        health_pb2_grpc.add_HealthServicer_to_server(self.health, self._server)
        enable_server_reflection((NAME, health.SERVICE_NAME, REFLECTION), self._server)

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
        events = asyncio.create_task(self.kernel.run())
        try:
            await asyncio.wait((dispatch, events), return_when=asyncio.FIRST_COMPLETED)
            for task in (dispatch, events):
                if task.done():
                    await task  # one that failed: show why
        finally:
            self.kernel.stop()  # first: the streams that end now are nobody's fault
            self.views.end()
            await self._server.stop(STOP)
            for task in (dispatch, events):
                task.cancel()
            await asyncio.gather(dispatch, events, return_exceptions=True)

    async def drain(self, at_once: asyncio.Event) -> None:
        """Tell everybody that the coordinator will be away for a while, and let a round that is closing finish:
        taken over from the journal it would only last longer. Ends at once when `at_once` is set."""
        kernel, number = self.kernel, self.kernel.state.round.number
        kernel.draining = True
        self.views.changed()
        await self.health.enter_graceful_shutdown()
        if kernel.state.round.phase in CLOSING and not kernel.trouble:
            log.info(
                f"stopping when round {number} is done, in {DRAIN:g} s at most; a second signal stops at once"
            )
            over = kernel.until(lambda s: s.round.number > number or s.round.phase not in CLOSING)
            done = asyncio.create_task(over)
            hurry = asyncio.create_task(at_once.wait())
            await asyncio.wait((done, hurry), timeout=DRAIN, return_when=asyncio.FIRST_COMPLETED)
            done.cancel()
            hurry.cancel()
        await self.views.told(TELL)

    def stop(self) -> None:
        """Let `run` end."""
        self.kernel.stop()

    async def _show_health(self, serving: bool) -> None:
        status = HealthCheckResponse.SERVING if serving else HealthCheckResponse.NOT_SERVING
        for name in ("", NAME):
            await self.health.set(name, status)


def _data_key(journal: Journal) -> bytes:
    key = journal.meta("data_key") or secrets.token_hex(32)
    journal.set_meta("data_key", key)
    return bytes.fromhex(key)
