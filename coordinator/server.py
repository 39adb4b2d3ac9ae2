"""The coordinator process: journal, state machine, control plane, page and wandb, from start to SIGTERM."""

import asyncio
import gc
import logging
import signal
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import uvicorn
from msgspec import to_builtins

from atoll.comm.config.run import RunConfig, TlsMode, from_json, to_json
from atoll.comm.errors import ConfigError, ResourceError
from atoll.comm.ids import NO_PIN, Pin
from atoll.comm.invite import Invite, join_host_port, split_host_port
from atoll.comm.transport.certificates import load_or_make
from atoll.coordinator.monitor.http import app
from atoll.coordinator.monitor.wandb_logger import WandbLogger
from atoll.coordinator.service.control_plane import ControlPlane
from atoll.coordinator.service.journal import Journal
from atoll.coordinator.state_machine.events import CommitRecord, Effect
from atoll.coordinator.state_machine.state import Phase

log = logging.getLogger("atoll.coordinator")
RECORDS_PER_READ = 50  # commit records that are read at a time
MAX_KEYS_NAMED = 5  # keys that differ which are named
GARBAGE_INTERVAL = 60.0  # seconds between two full collections, at least
GARBAGE_POLL = 1.0  # seconds between two looks whether a round is being closed
MAX_GARBAGE_POLLS = 240  # looks; then all is collected in any case: a round may wait for members for hours
NO_THRESHOLD = 1 << 30  # collections of the middle generation; more than a process lives


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """The options of one coordinator process: where it keeps its state, and where it listens."""

    state_dir: Path
    listen: str  # control plane, host:port
    http: str  # page, host:port
    advertise: str  # control plane as nodes dial it; empty: as it listens


async def serve(config: RunConfig, options: ServerOptions) -> None:
    """Run the service until SIGTERM or SIGINT, and then until the round that is closing is done."""
    gc.freeze()  # what was imported stays: a collection need not look at it again
    journal = Journal(options.state_dir)
    try:
        _same_run(journal, config)
        http_socket = _bind(options.http, "--http")
        tracker = WandbLogger(config, options.state_dir, _past(journal))
        try:
            await _serve(config, options, journal, http_socket, tracker)
        finally:
            await asyncio.to_thread(tracker.close)
    finally:
        journal.close()


async def _serve(
    config: RunConfig, options: ServerOptions, journal: Journal, http_socket: socket.socket, tracker: WandbLogger
) -> None:
    certificate = load_or_make(options.state_dir) if encrypted(config, options) else None

    def tell(effect: Effect) -> None:
        tracker.tell(effect, plane.event_loop.telemetry.at_work)

    plane = ControlPlane(config, journal, tell, certificate)
    address = _listen(plane, options)
    journal.set_meta("address", address)
    journal.set_meta("pin", certificate.pin if certificate is not None else NO_PIN)
    page = uvicorn.Server(
        uvicorn.Config(app(plane.event_loop, journal, config.name), log_config=None, lifespan="off")
    )
    host, port = http_socket.getsockname()[:2]
    http_url = f"http://{join_host_port(host, port)}"
    journal.set_meta("http", http_url)
    stop, at_once = _signals()
    log.info(f"run {config.name}: nodes join at {address}, page at {http_url}")
    log.info("both planes are encrypted" if certificate is not None else "nothing is encrypted (security.tls)")
    stopping = asyncio.create_task(stop.wait())
    parts = [asyncio.create_task(part) for part in (plane.run(), page._serve([http_socket]))]
    collecting = asyncio.create_task(_collect_garbage(plane))
    try:
        await asyncio.wait((stopping, *parts), return_when=asyncio.FIRST_COMPLETED)
        if stopping.done():
            await plane.drain(at_once)
    finally:
        log.info("stopping")
        stopping.cancel()
        collecting.cancel()
        plane.stop()
        page.should_exit = True
        await asyncio.gather(*parts)  # one that failed: show why


async def _collect_garbage(plane: ControlPlane) -> None:
    """Collect all garbage now and then, if possible when no member waits for an answer. With a thousand members
    that takes 0.1 s, and by itself it comes just when a plan or a commit has made many objects."""
    thresholds = gc.get_threshold()
    gc.set_threshold(*thresholds[:2], NO_THRESHOLD)
    try:
        while True:
            await asyncio.sleep(GARBAGE_INTERVAL)
            for _ in range(MAX_GARBAGE_POLLS):
                if plane.event_loop.state.round.phase not in (Phase.COLLECTING, Phase.REDUCING):
                    break
                await asyncio.sleep(GARBAGE_POLL)
            gc.collect()
    finally:
        gc.set_threshold(*thresholds)


def _signals() -> tuple[asyncio.Event, asyncio.Event]:
    """Set by the first and by the second SIGTERM or SIGINT."""
    first, second = asyncio.Event(), asyncio.Event()

    def received() -> None:
        (second if first.is_set() else first).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, received)
    return first, second


def _past(journal: Journal) -> Iterator[CommitRecord]:
    """Every commit record so far, a few at a time."""
    since = 0
    while page := journal.rounds(since, RECORDS_PER_READ):
        yield from page
        since = page[-1].round


def _same_run(journal: Journal, config: RunConfig) -> None:
    """One state directory is one run: the config it began with is the config it keeps."""
    found = journal.meta("config")
    if found is None:
        journal.set_meta("config", to_json(config).decode())
        journal.set_meta("run", config.name)
    elif differing := _differing(to_builtins(from_json(found.encode())), to_builtins(config)):
        more = f", and {len(differing) - MAX_KEYS_NAMED} keys more" if len(differing) > MAX_KEYS_NAMED else ""
        named = ", ".join(differing[:MAX_KEYS_NAMED])
        raise ConfigError(
            f"the state directory belongs to a run with another config ({named}{more}): "
            "start with the file and overrides that it began with, or give another --state-dir"
        )


def _differing(kept: dict[str, Any], given: dict[str, Any], above: str = "") -> list[str]:
    """The keys whose values differ, with both."""
    found = list[str]()
    for key, value in kept.items():
        if isinstance(value, dict):
            found += _differing(value, given[key], f"{above}{key}.")
        elif value != given[key]:
            found.append(f"{above}{key} is {value!r} there and {given[key]!r} here")
    return found


def encrypted(config: RunConfig, options: ServerOptions) -> bool:
    """Whether the run's connections are encrypted: by `security.tls`, and by where nodes come from."""
    if config.security.tls is not TlsMode.AUTO:
        return config.security.tls is TlsMode.ON
    where = [(options.listen, "--listen")]
    if options.advertise:
        where.append((options.advertise, "--advertise"))
    return not all(_loopback(split_host_port(address, option)[0]) for address, option in where)


def _loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _listen(plane: ControlPlane, options: ServerOptions) -> str:
    """Bind the control plane; return the address that join URLs carry."""
    host, port = split_host_port(options.listen, "--listen")
    _bind(options.listen, "--listen", probe=True).close()
    bound = plane.listen(join_host_port(host, port))
    if options.advertise:
        split_host_port(options.advertise, "--advertise")
    if not options.advertise and host in ("", "0.0.0.0", "::"):
        log.warning("join URLs name 127.0.0.1, good for this machine only: give --advertise HOST:PORT for others")
    return options.advertise or join_host_port("127.0.0.1" if host in ("", "0.0.0.0") else host, bound)


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


def page_url(state_dir: Path) -> str:
    """The URL of the page of the coordinator that has last served the run in `state_dir`. Raises `ConfigError`."""
    if not (state_dir / "journal.sqlite").exists():
        raise ConfigError(f"{state_dir} holds no run: start `atoll coordinator start` with this --state-dir first")
    journal = Journal(state_dir, lock=False)
    try:
        if (url := journal.meta("http")) is None:
            raise ConfigError(f"the coordinator in {state_dir} has not come up yet: start it first")
        return url
    finally:
        journal.close()


def invite_url(state_dir: Path, name: str, uses: int, expires: float) -> Invite:
    """A join URL with a fresh token of the run in `state_dir`; the coordinator may be running."""
    if not (state_dir / "journal.sqlite").exists():
        raise ConfigError(f"{state_dir} holds no run: start `atoll coordinator start` with this --state-dir first")
    journal = Journal(state_dir, lock=False)
    try:
        address, run = journal.meta("address"), journal.meta("run")
        if address is None or run is None:
            raise ConfigError(f"the coordinator in {state_dir} has not come up yet: start it first")
        pin = Pin(journal.meta("pin") or NO_PIN)
        return Invite(address, run, journal.issue_token(name, uses, expires), pin)
    finally:
        journal.close()
