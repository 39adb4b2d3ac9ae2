"""The coordinator process: journal, state machine, control plane, page and sinks, from start to SIGTERM."""

import asyncio
import ctypes
import gc
import logging
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn
from msgspec import to_builtins

from atoll.comm.addresses import is_local_host, is_loopback
from atoll.comm.build_info import full_version
from atoll.comm.config.beginning import beginning
from atoll.comm.config.run import RunConfig, from_json, to_json
from atoll.comm.config.security import PrivateAddresses, TlsMode
from atoll.comm.descriptors import raise_limit
from atoll.comm.digest import digest
from atoll.comm.errors import ConfigError
from atoll.comm.gateway_note import GatewayNote
from atoll.comm.ids import NO_PIN, NodeId, Pin
from atoll.comm.invite import DHT, Invite, join_host_port, split_host_port
from atoll.comm.terminal import say
from atoll.comm.transport.certificates import load_or_make
from atoll.coordinator.door.front_door import BACKLOG, listening_socket
from atoll.coordinator.door.ports import PAGE
from atoll.coordinator.monitor.alarm import Alarm
from atoll.coordinator.monitor.blame import Blame, blame_of
from atoll.coordinator.monitor.http import app
from atoll.coordinator.monitor.replay import PastRun
from atoll.coordinator.monitor.web import web
from atoll.coordinator.monitor.webhook import Webhook
from atoll.coordinator.service import rulings
from atoll.coordinator.service.control_plane import ControlPlane
from atoll.coordinator.service.invites import InviteRecord, checked_roles
from atoll.coordinator.service.journal import Journal
from atoll.coordinator.service.run_records import RecordOptions, RunRecords
from atoll.coordinator.state_machine.events import Effect, Publish
from atoll.coordinator.state_machine.members import VERIFIER
from atoll.coordinator.state_machine.state import CLOSING, Phase
from atoll.coordinator.tracking.tracker import WANDB_ID, Tracker
from atoll.coordinator.tracking.view import save_view

log = logging.getLogger("atoll.coordinator")
MAINTENANCE_INTERVAL = 30.0  # seconds between two looks at the records
VERSION = "version"  # of atoll that served the state directory last
MAX_KEYS_NAMED = 5  # keys that differ which are named
WATCHERS = ("wandb", "figures")  # sections of the config that say who watches the run, and change nothing of it
GARBAGE_INTERVAL = 60.0  # seconds between two full collections, at least
GARBAGE_POLL = 1.0  # seconds between two looks whether a round is being closed
MAX_GARBAGE_POLLS = 240  # looks; then all is collected in any case: a round may wait for members for hours
WANDB_VIEW = "wandb-view"  # the journal's key of the URL
# Seconds that a thread which answers questions may keep the interpreter: the event loop lets go of it at each
# send, and waits as long for it again. Python's own 5 ms would be five seconds for the plans of 1,000 members.
SWITCH_INTERVAL = 0.0005
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8  # of glibc's mallopt(3)
LARGE_BLOCK = 256 << 10  # bytes
NO_THRESHOLD = 1 << 30  # collections of the middle generation; more than a process lives


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """The options of one coordinator process: where it keeps its state, and where it listens."""

    state_dir: Path
    listen: str  # control plane, host:port
    http: str  # page, host:port
    advertise: str  # control plane as nodes dial it; empty: as it listens
    records: RecordOptions = RecordOptions()
    webhook: str = ""  # URL that alerts are posted to; empty: none is


async def serve(config: RunConfig, options: ServerOptions) -> None:
    """Run the service until SIGTERM or SIGINT, and then until the round that is closing is done."""
    raise_limit()
    _keep_heap_small()
    sys.setswitchinterval(SWITCH_INTERVAL)
    gc.freeze()  # what was imported stays: a collection need not look at it again
    journal = Journal(options.state_dir)
    try:
        _same_run(journal, config)
        _no_other_version(journal)
        records = RunRecords(journal, options.state_dir, config.name, options.records)
        http_socket = listening_socket(options.http, "--http")
        store = options.records.store
        async with Tracker(config, journal, options.state_dir, store.place if store else "") as tracker:
            await _serve(config, options, journal, records, http_socket, tracker)
    finally:
        journal.close()


async def _serve(
    config: RunConfig,
    options: ServerOptions,
    journal: Journal,
    records: RunRecords,
    http_socket: socket.socket,
    tracker: Tracker,
) -> None:
    certificate = load_or_make(options.state_dir) if encrypted(config, options) else None
    http_url = f"http://{join_host_port(*http_socket.getsockname()[:2])}"
    webhook = Webhook(options.webhook, config.name, http_url) if options.webhook else None
    alarm = await asyncio.to_thread(Alarm, journal, [tracker.alert, *([webhook.send] if webhook else [])])

    def tell(effect: Effect) -> None:
        if isinstance(effect, Publish):
            records.add(effect.record)
        alarm.tell(effect)
        tracker.tell(effect)

    private = await asyncio.to_thread(private_addresses, config, options)
    plane = ControlPlane(config, journal, tell, certificate, private)
    address = _listen(plane, options)
    records.archive.enter_config(config.name, digest(to_json(config)).hex(), to_json(config))
    incarnation = plane.event_loop.state.incarnation + 1  # that is about to begin
    plane.gateways.describe(GatewayNote(config.name, address, plane.entrance, incarnation))
    journal.set_meta("address", address)
    journal.set_meta("pin", certificate.pin if certificate is not None else NO_PIN)
    site = app(plane.event_loop, records, config.name, alarm.rules)
    # The door ends a connection after a minute: one that is kept alive would be cut in the midst of an answer.
    page = uvicorn.Server(uvicorn.Config(site, log_config=None, lifespan="off", timeout_keep_alive=1))
    journal.set_meta("http", http_url)
    logging.getLogger("uvicorn.error").setLevel(
        logging.ERROR
    )  # a line for whatever strangers send would fill disks
    behind = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    behind.bind(plane.door.open(http_socket, PAGE))
    behind.listen(BACKLOG)
    stop, at_once = _signals()
    log.info(f"run {config.name}: nodes join at {address}, page at {http_url}")
    committed = plane.event_loop.state.committed
    goes_on = "is finished" if plane.event_loop.state.round.phase is Phase.FINISHED else "goes on"
    log.info(f"the run {goes_on} after round {committed}" if committed else f"the run {beginning(config)}")
    log.info("both planes are encrypted" if certificate is not None else "nothing is encrypted (security.tls)")
    stopping = asyncio.create_task(stop.wait())
    parts = [asyncio.create_task(part) for part in (plane.run(), page._serve([behind]))]
    chores = [
        asyncio.create_task(chore)
        for chore in (_collect_garbage(plane), _maintain(records, plane), alarm.run(plane.event_loop))
    ]
    try:
        await asyncio.wait((stopping, *parts), return_when=asyncio.FIRST_COMPLETED)
        if stopping.done():
            await plane.drain(at_once)
    finally:
        log.info("stopping")
        stopping.cancel()
        for chore in chores:
            chore.cancel()
        plane.stop()
        page.should_exit = True
        if webhook is not None:
            await asyncio.to_thread(webhook.close)
        await asyncio.gather(*parts)  # one that failed: show why


def _keep_heap_small() -> None:
    """Have large blocks of memory be the system's again as soon as they are free, where the C library is glibc: an
    answer of commit records takes some 10 MB for a moment, and stays in the heap of the thread that made it."""
    with suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        for option, value in ((M_MMAP_THRESHOLD, LARGE_BLOCK), (M_TRIM_THRESHOLD, LARGE_BLOCK), (M_ARENA_MAX, 2)):
            mallopt(option, value)


async def _collect_garbage(plane: ControlPlane) -> None:
    """Collect all garbage now and then, if possible when no member waits for an answer. With a thousand members
    that takes 0.1 s, and by itself it comes just when a plan or a commit has made many objects."""
    thresholds = gc.get_threshold()
    gc.set_threshold(*thresholds[:2], NO_THRESHOLD)
    try:
        while True:
            await asyncio.sleep(GARBAGE_INTERVAL)
            for _ in range(MAX_GARBAGE_POLLS):
                if plane.event_loop.state.round.phase not in CLOSING:
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


async def _maintain(records: RunRecords, plane: ControlPlane) -> None:
    """Move older records out of the journal, and to the operator's store."""
    while True:
        await asyncio.sleep(MAINTENANCE_INTERVAL)
        accounts = plane.event_loop.state.credit.nodes.values()
        owners = {account.node: account.owner for account in accounts}
        await asyncio.to_thread(records.maintain, owners, plane.event_loop.clock())


def _same_run(journal: Journal, config: RunConfig) -> None:
    """One state directory is one run: the config it began with is the config it keeps, but for who watches it.
    A start that was refused before members could join began none."""
    found = journal.meta("config")
    if found is None or journal.meta("address") is None:
        journal.set_meta("config", to_json(config).decode())
        journal.set_meta("run", config.name)
        return
    kept, given = (to_builtins(c) for c in (from_json(found.encode()), config))
    watched = {section: given[section] for section in WATCHERS}
    if kept | watched == given != kept:
        journal.set_meta("config", to_json(config).decode())
    elif differing := _differing(kept | watched, given):
        more = f", and {len(differing) - MAX_KEYS_NAMED} keys more" if len(differing) > MAX_KEYS_NAMED else ""
        named = ", ".join(differing[:MAX_KEYS_NAMED])
        raise ConfigError(
            f"the state directory belongs to a run with another config ({named}{more}): "
            "start with the file and overrides that it began with, or give another --state-dir"
        )


def _no_other_version(journal: Journal) -> None:
    """What is in no snapshot yet, as a coordinator was killed, its own version alone is sure to take in as it did:
    another might decide otherwise what members have already acted on. Where files of a clone were changed since,
    which may be a run's config alone, it is taken for the same."""
    here, wrote = full_version().replace("-dirty", ""), journal.meta(VERSION)
    if wrote != here and (count := journal.events_since_snapshot):
        which = "another version" if wrote is None else f"version {wrote}"
        raise ConfigError(
            f"{which} of atoll was killed here; its latest events (of which there are {count}) it alone takes in "
            f"as before, and this is {here}: start that one once more, stop it (SIGTERM), then start this"
        )
    if wrote != here:
        journal.set_meta(VERSION, here)


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
    return not all(is_loopback(split_host_port(address, option)[0]) for address, option in where)


def private_addresses(config: RunConfig, options: ServerOptions) -> bool:
    """Whether members may have addresses of private networks: by `security.private_addresses`, and by where nodes
    dial the coordinator."""
    if config.security.private_addresses is not PrivateAddresses.AUTO:
        return config.security.private_addresses is PrivateAddresses.ALLOW
    option = "--advertise" if options.advertise else "--listen"
    host, _ = split_host_port(options.advertise or options.listen, option)
    return host in ("", "0.0.0.0", "::") or is_local_host(host)


def _listen(plane: ControlPlane, options: ServerOptions) -> str:
    """Bind the control plane; return the address that join URLs carry."""
    host, port = split_host_port(options.listen, "--listen")
    bound = plane.listen(join_host_port(host, port))
    if options.advertise:
        split_host_port(options.advertise, "--advertise")
    if not options.advertise and host in ("", "0.0.0.0", "::"):
        log.warning("join URLs name 127.0.0.1, good for this machine only: give --advertise HOST:PORT for others")
    return options.advertise or join_host_port("127.0.0.1" if host in ("", "0.0.0.0") else host, bound)


def serve_past(past: PastRun, http: str, number: int | None) -> None:
    """Serve the page of a past run, as of a round if one is named, until SIGINT or SIGTERM. Raises
    `ResourceError`."""
    sock = listening_socket(http, "--http")
    host, port = sock.getsockname()[:2]
    url = f"http://{join_host_port(host, port)}/" + (f"#/at/{number}" if number else "")
    say(f"run {past.facts().run}, {past.records.series().last:,} rounds: {url}")
    uvicorn.Server(uvicorn.Config(web(past), log_config=None, lifespan="off")).run([sock])


@contextmanager
def opened_journal(state_dir: Path) -> Iterator[Journal]:
    """The journal of the run in `state_dir`; the coordinator may be running. Raises `ConfigError` where no run
    is."""
    if not (state_dir / "journal.sqlite").exists():
        raise ConfigError(f"{state_dir} holds no run: start `atoll coordinator start` with this --state-dir first")
    journal = Journal(state_dir, lock=False)
    try:
        yield journal
    finally:
        journal.close()


def journaled_blame(state_dir: Path, what: str) -> Blame:
    """What the run in `state_dir` knows about a round, a node, or all (`blame_of`). Raises `ConfigError` where no
    run is, `ResourceError` where something cannot be read."""
    with opened_journal(state_dir) as journal:
        run = journal.meta("run") or ""
        return blame_of(RunRecords(journal, state_dir, run), run, what)


def page_url(state_dir: Path) -> str:
    """The URL of the page of the coordinator that has last served the run in `state_dir`. Raises `ConfigError`."""
    with opened_journal(state_dir) as journal:
        if (url := journal.meta("http")) is None:
            raise ConfigError(f"the coordinator in {state_dir} has not come up yet: start it first")
        return url


def invite_url(
    state_dir: Path, name: str, uses: int, expires: float, roles: Sequence[str] = (), dht: Sequence[str] = ()
) -> Invite:
    """A join URL with a fresh token of the run in `state_dir`, for `uses` nodes of these roles (none: of all); the
    coordinator may be running. `dht`: the multiaddrs of gateways, which the URL is to name in the coordinator's
    place. Raises `ConfigError` for a role that the run has no use for, or a run without a certificate to be found
    by."""
    with opened_journal(state_dir) as journal:
        address, run = journal.meta("address"), journal.meta("run")
        if address is None or run is None:
            raise ConfigError(f"the coordinator in {state_dir} has not come up yet: start it first")
        pin = Pin(journal.meta("pin") or NO_PIN)
        if dht and not pin:
            raise ConfigError("the run is not encrypted, and a gateway finds it by its pin: set security.tls=on")
        config = journal.meta("config")
        if VERIFIER in roles and config is not None and not from_json(config.encode()).security.replay:
            raise ConfigError("--role verifier: this run replays nothing (security.replay is 0)")
        address = f"{DHT}{','.join(dht)}" if dht else address
        return Invite(address, run, journal.issue_token(name, uses, expires, checked_roles(roles)), pin)


def invites(state_dir: Path) -> list[InviteRecord]:
    """The invites of the run in `state_dir`."""
    with opened_journal(state_dir) as journal:
        return journal.invites()


def revoke_invites(state_dir: Path, which: str) -> list[InviteRecord]:
    """End what is left of the invites of this name, or of the one with this number; return them as they are then.
    Raises `ConfigError` where there is none."""
    with opened_journal(state_dir) as journal:
        numbers = {i.number for i in journal.invites() if which == i.name or which == str(i.number)}
        if not numbers:
            raise ConfigError(f"there is no invite {which!r}: `atoll invite --list` shows all")
        journal.revoke_invites(numbers, "by the operator")
        return [i for i in journal.invites() if i.number in numbers]


def save_wandb_view(state_dir: Path) -> str:
    """Save the view of the wandb run of the run in `state_dir`; returns its URL. Raises `ConfigError` where there
    is none, and what `save_view` raises."""
    with opened_journal(state_dir) as journal:
        config, run_id = journal.meta("config"), journal.meta(WANDB_ID)
        if config is None or run_id is None:
            raise ConfigError(
                f"the run in {state_dir} has nothing in wandb: start it with wandb.mode=online first"
            )
        url = save_view(from_json(config.encode()), run_id, journal.meta(WANDB_VIEW) or "")
        journal.set_meta(WANDB_VIEW, url)
        return url


def ban_node(state_dir: Path, node: str, reason: str) -> NodeId:
    """Leave word in the run in `state_dir` that a node is out for good (`rulings.ban`)."""
    with opened_journal(state_dir) as journal:
        return rulings.ban(journal, node, reason)


def pardon_node(state_dir: Path, node: str, reason: str) -> NodeId:
    """Leave word in the run in `state_dir` that nothing is held any more against a node (`rulings.pardon`)."""
    with opened_journal(state_dir) as journal:
        return rulings.pardon(journal, node, reason)
