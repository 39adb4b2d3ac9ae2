"""The coordinator process: journal, state machine, control plane, page and tracker, from start to SIGTERM."""

import asyncio
import logging
import secrets
import signal
import socket
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import grpc
import uvicorn
from grpc_health.v1 import health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from grpc_health.v1.health import SERVICE_NAME as HEALTH
from grpc_health.v1.health_pb2 import HealthCheckResponse
from grpc_reflection.v1alpha.reflection import SERVICE_NAME as REFLECTION
from grpc_reflection.v1alpha.reflection import enable_server_reflection

from atoll.comm.config import RunConfig, to_json
from atoll.comm.errors import ConfigError, ResourceError
from atoll.comm.invite import Invite, join_host_port, split_host_port
from atoll.coordinator.http import app
from atoll.coordinator.journal import Journal
from atoll.coordinator.kernel import Kernel
from atoll.coordinator.metrics import Metrics
from atoll.coordinator.service import NAME, Service
from atoll.coordinator.state import Phase
from atoll.coordinator.tracker import Tracker
from atoll.coordinator.views import Views

INT_MAX = 2**31 - 1
log = logging.getLogger("atoll.coordinator")
DRAIN = 30.0  # seconds that a stopping coordinator waits for the round that is closing
TELL = 1.0  # seconds for the last views to leave
CLOSING = (Phase.COLLECTING, Phase.REDUCING)
MOST_CALLS = 50_000  # at a time, streams included
CHANNEL = {
    "grpc.so_reuseport": 0,
    "grpc.max_receive_message_length": 4 << 20,  # bytes; the seals of 100,000 chunks
    "grpc.max_send_message_length": 16 << 20,  # bytes; a plan is the longest: who owns each chunk
    "grpc.max_connection_age_ms": INT_MAX,  # a stream lives as long as its node
    "grpc.max_connection_idle_ms": INT_MAX,
    "grpc.server.max_pending_requests": MOST_CALLS,  # C-core turns away what is more than 1000 at a time
    "grpc.server.max_pending_requests_hard_limit": MOST_CALLS,
    "grpc.keepalive_time_ms": 10_000,
    "grpc.keepalive_timeout_ms": 5_000,
    "grpc.keepalive_permit_without_calls": 1,
    "grpc.http2.min_recv_ping_interval_without_data_ms": 5_000,
}


@dataclass(frozen=True, slots=True)
class Options:
    state_dir: Path
    listen: str  # control plane, host:port
    http: str  # page, host:port
    advertise: str  # control plane as nodes dial it; empty: as it listens


async def serve(config: RunConfig, options: Options) -> None:
    """Run the service until SIGTERM or SIGINT, and then until the round that is closing is done."""
    journal = Journal(options.state_dir)
    try:
        _pin(journal, config)
        http_socket = _bind(options.http, "--http")
        tracker = Tracker(config, options.state_dir, journal.rounds())
        try:
            await _serve(config, options, journal, http_socket, tracker)
        finally:
            await asyncio.to_thread(tracker.close)
    finally:
        journal.close()


async def _serve(
    config: RunConfig, options: Options, journal: Journal, http_socket: socket.socket, tracker: Tracker
) -> None:
    metrics, health = Metrics(), HealthServicer()
    kernel = Kernel(config, journal, metrics, tracker.tell, partial(_show_health, health))
    views = Views(lambda: kernel.state, metrics)
    kernel.on_change.append(views.changed)
    service = Service(kernel, views, journal, metrics, config.name, _data_key(journal))
    server, address = await control_plane(service, health, options)
    journal.set_meta("address", address)
    page = uvicorn.Server(
        uvicorn.Config(app(kernel, journal, metrics, config.name), log_config=None, lifespan="off")
    )
    host, port = http_socket.getsockname()[:2]
    http_url = f"http://{join_host_port(host, port)}"
    journal.set_meta("http", http_url)
    log.info(f"run {config.name}: nodes join at {address}, page at {http_url}")
    stop, at_once = _signals()
    background = [
        asyncio.create_task(part) for part in (kernel.run(), views.run(), page._serve([http_socket]), stop.wait())
    ]
    try:
        await server.start()
        done, _ = await asyncio.wait(background, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            await task  # a part that ended by itself failed: show why
        await drain(kernel, views, service, health, at_once)
        kernel.stop()
        await background[0]
    finally:
        log.info("stopping")
        kernel.stop()  # first: the streams that end now are nobody's fault
        views.end()
        page.should_exit = True
        await server.stop(0.5)
        for task in background:
            task.cancel()
        await asyncio.gather(*background, return_exceptions=True)


async def drain(
    kernel: Kernel, views: Views, service: Service, health: HealthServicer, at_once: asyncio.Event
) -> None:
    """Tell everybody that the coordinator will be away for a while, and let a round that is closing finish: who
    takes over from the journal would only make it slower. Ends at once when `at_once` is set."""
    service.draining = True
    await health.enter_graceful_shutdown()
    told = asyncio.create_task(views.drain(TELL))
    if kernel.state.round.phase in CLOSING:
        number = kernel.state.round.number
        log.info(f"stopping when round {number} is done, in {DRAIN:g} s at most; a second signal stops at once")
        done = asyncio.create_task(kernel.until(lambda state: state.round.number > number))
        hurry = asyncio.create_task(at_once.wait())
        await asyncio.wait((done, hurry), timeout=DRAIN, return_when=asyncio.FIRST_COMPLETED)
        done.cancel()
        hurry.cancel()
    await told


def _signals() -> tuple[asyncio.Event, asyncio.Event]:
    """Set by the first and by the second SIGTERM or SIGINT."""
    first, second = asyncio.Event(), asyncio.Event()

    def received() -> None:
        (second if first.is_set() else first).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, received)
    return first, second


async def _show_health(health: HealthServicer, serving: bool) -> None:
    status = HealthCheckResponse.SERVING if serving else HealthCheckResponse.NOT_SERVING
    for name in ("", NAME):
        await health.set(name, status)


def _pin(journal: Journal, config: RunConfig) -> None:
    """One state directory is one run: the config it began with is the config it keeps."""
    mine, found = to_json(config).decode(), journal.meta("config")
    if found is None:
        journal.set_meta("config", mine)
        journal.set_meta("run", config.name)
    elif found != mine:
        raise ConfigError(
            "the state directory belongs to a run with another config: "
            "start with the file and overrides that it began with, or give another --state-dir"
        )


def _data_key(journal: Journal) -> bytes:
    key = journal.meta("data_key") or secrets.token_hex(32)
    journal.set_meta("data_key", key)
    return bytes.fromhex(key)


async def control_plane(service: Service, health: HealthServicer, options: Options) -> tuple[grpc.aio.Server, str]:
    """The gRPC server, bound but not started, and the address that join URLs carry."""
    host, port = split_host_port(options.listen, "--listen")
    server = grpc.aio.server(maximum_concurrent_rpcs=MOST_CALLS, options=list(CHANNEL.items()))
    server.add_generic_rpc_handlers((service.handler(),))
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    enable_server_reflection((NAME, HEALTH, REFLECTION), server)
    await _show_health(health, True)
    _bind(options.listen, "--listen", probe=True).close()
    try:
        bound = server.add_insecure_port(join_host_port(host, port))
    except RuntimeError as error:
        raise ResourceError(f"cannot listen on {options.listen}: {error}") from None
    if options.advertise:
        split_host_port(options.advertise, "--advertise")
    if not options.advertise and host in ("", "0.0.0.0", "::"):
        log.warning("join URLs name 127.0.0.1, good for this machine only: give --advertise HOST:PORT for others")
    return server, options.advertise or join_host_port("127.0.0.1" if host in ("", "0.0.0.0") else host, bound)


def _bind(address: str, option: str, probe: bool = False) -> socket.socket:
    host, port = split_host_port(address, option)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
        if not probe:
            sock.listen(128)
    except OSError as error:
        sock.close()
        why = "is in use" if error.errno == 98 else f"cannot be used ({error.strerror})"
        raise ResourceError(
            f"port {port} on {host or 'all addresses'} {why}: give another with {option}"
        ) from None
    return sock


def invite_url(state_dir: Path, name: str, uses: int, expires: float) -> Invite:
    """A join URL with a fresh token of the run in `state_dir`; the coordinator may be running."""
    if not (state_dir / "journal.sqlite").exists():
        raise ConfigError(f"{state_dir} holds no run: start `atoll coordinator start` with this --state-dir first")
    journal = Journal(state_dir, lock=False)
    try:
        address, run = journal.meta("address"), journal.meta("run")
        if address is None or run is None:
            raise ConfigError(f"the coordinator in {state_dir} has not come up yet: start it first")
        return Invite(address, run, journal.issue_token(name, uses, expires))
    finally:
        journal.close()
