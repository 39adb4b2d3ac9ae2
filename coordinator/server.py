"""The coordinator process: journal, state machine, control plane, page and tracker, from start to SIGTERM."""

import asyncio
import logging
import secrets
import signal
import socket
from dataclasses import dataclass
from pathlib import Path

import grpc
import uvicorn

from atoll.comm.config import RunConfig, to_json
from atoll.comm.errors import ConfigError, ResourceError
from atoll.comm.invite import Invite, join_host_port, split_host_port
from atoll.comm.proto import atoll_pb2_grpc as rpc
from atoll.coordinator.http import app
from atoll.coordinator.journal import Journal
from atoll.coordinator.kernel import Kernel
from atoll.coordinator.service import Service
from atoll.coordinator.tracker import Tracker

log = logging.getLogger("atoll.coordinator")
MESSAGE_LIMIT = 16 << 20  # bytes; a view of a large model's sealed digests is the longest


@dataclass(frozen=True, slots=True)
class Options:
    state_dir: Path
    listen: str  # control plane, host:port
    http: str  # page, host:port
    advertise: str  # control plane as nodes dial it; empty: as it listens


async def serve(config: RunConfig, options: Options) -> None:
    """Run the service until SIGTERM or SIGINT."""
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
    kernel = Kernel(config, journal, (tracker.tell,))
    service = Service(kernel, journal, config.name, _data_key(journal))
    server, address = await _control_plane(service, options)
    journal.set_meta("address", address)
    page = uvicorn.Server(
        uvicorn.Config(app(kernel, journal, service.vitals, config.name), log_config=None, lifespan="off")
    )
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    host, port = http_socket.getsockname()[:2]
    http_url = f"http://{join_host_port(host, port)}"
    journal.set_meta("http", http_url)
    log.info(f"run {config.name}: nodes join at {address}, page at {http_url}")
    background = [asyncio.create_task(kernel.run()), asyncio.create_task(page._serve([http_socket]))]
    stopping = asyncio.create_task(stop.wait())
    try:
        await server.start()
        done, _ = await asyncio.wait([*background, stopping], return_when=asyncio.FIRST_COMPLETED)
        for task in done - {stopping}:
            task.result()  # a part that ended by itself failed: show why
    finally:
        log.info("stopping")
        page.should_exit = True
        for task in (*background, stopping):  # first: the streams that break now are nobody's fault
            task.cancel()
        await server.stop(0.5)
        await asyncio.gather(*background, stopping, return_exceptions=True)


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


async def _control_plane(service: Service, options: Options) -> tuple[grpc.aio.Server, str]:
    """The gRPC server, bound but not started, and the address that join URLs carry."""
    host, port = split_host_port(options.listen, "--listen")
    server = grpc.aio.server(
        options=[
            ("grpc.so_reuseport", 0),
            ("grpc.max_receive_message_length", MESSAGE_LIMIT),
            ("grpc.max_send_message_length", MESSAGE_LIMIT),
            ("grpc.keepalive_time_ms", 10_000),
            ("grpc.keepalive_timeout_ms", 5_000),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
        ]
    )
    rpc.add_CoordinatorServicer_to_server(service, server)
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
