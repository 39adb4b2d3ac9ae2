"""What a coordinator says of this machine: the run, the time, whether peers can dial this machine, how fast its
link is, and so how long an exchange will take here.

Nothing is changed: no session begins, no invite is used up. What is opened for peers to dial is closed again.
"""

import asyncio
import ssl
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from pathlib import Path

from atoll.comm.addresses import is_own_network
from atoll.comm.config.round_time import exchange_seconds, exchanged_bytes
from atoll.comm.config.run import RunConfig
from atoll.comm.errors import AtollError, Refused, RefusedForNow, Unreachable
from atoll.comm.extras import lacking
from atoll.comm.ids import NO_PIN, Pin
from atoll.comm.invite import Invite, join_host_port, split_host_port
from atoll.comm.proto import checkup_pb2 as cp
from atoll.comm.terminal import plural
from atoll.comm.transport.certificates import load_or_make
from atoll.node.checks.check import Check, failed
from atoll.node.config import NodeConfig
from atoll.node.control.checkup import Busy, CheckupClient, RunSight

MEGABIT = 125e3  # bytes
CLOCK_NOTED = 3.0  # seconds of a clock's error that a gateway does not bear
CLOCK_REFUSED = 900.0  # seconds of it with which stores refuse what was signed
BUSY_PAUSES = (1.0, 3.0)  # seconds after a dial-back that had no place, until it is asked for again
LEAF = "give --leaf"
FORWARD = "let the port through the firewall, or forward one and give --listen and --advertise; or give --leaf"


@dataclass(frozen=True, slots=True)
class Listening:
    """The options by which peers are to reach a node."""

    listen: str = "0.0.0.0:0"  # host:port
    advertise: str = ""  # host:port that peers dial; empty: as it listens, host seen by the coordinator
    leaf: bool = False  # nobody can dial it

    def address(self, port: int) -> str:
        """The address to be dialled of one that listens at this port; a host left out is the one that is seen."""
        host, _ = split_host_port(self.listen, "--listen")
        return self.advertise or join_host_port("" if host in ("0.0.0.0", "::", "") else host, port)


def coordinator_check(invite: Invite, sight: RunSight) -> Check:
    """That the coordinator answered."""
    how = "with the URL's certificate" if invite.pin else "not encrypted"
    return Check("coordinator", True, f"{invite.address} answers in {1e3 * sight.seconds:.0f} ms, {how}")


def invite_check(sight: RunSight) -> Check:
    """That the coordinator would let this node in."""
    if sight.penalty:
        remedy = "try again later" if sight.penalty_passes else "ask the operator"
        kind = RefusedForNow if sight.penalty_passes else Refused
        return Check("invite", False, sight.penalty, remedy, kind.exit_code)
    run = f"run {sight.run.name}, with {sight.members} {plural('member', sight.members)} now"
    if sight.finished:
        return Check("invite", True, f"for {run}; it is finished, and trains no more")
    if sight.joined:
        return Check("invite", True, f"not needed any more, used up or not: this node has joined {run}")
    return Check("invite", True, f"good for {run}")


def clock_check(sight: RunSight) -> Check:
    """That the clock is about right: rounds and leases do not go by it, but what stores are asked is signed with
    the time, and a gateway's records have it."""
    ahead = sight.clock_ahead
    doubt = abs(ahead) - sight.seconds / 2
    words = f"{abs(ahead):.1f} s {'ahead of' if ahead > 0 else 'behind'} the coordinator's"
    if doubt > CLOCK_REFUSED:
        return Check("clock", False, words, "set it (timedatectl set-ntp true): stores refuse what is signed so")
    if doubt > CLOCK_NOTED:
        return Check(
            "clock", True, words, f"a gateway needs it within {CLOCK_NOTED:g} s: timedatectl set-ntp true"
        )
    return Check("clock", True, words)


class Unreached(Check):
    """The coordinator has dialled this machine, and did not reach it."""


async def reach_check(client: CheckupClient, address: str, pin: Pin) -> Check:
    """Whether the coordinator can dial this machine's data plane, which listens now; `Unreached`: it tried in
    vain. `address`: as it is to be dialled."""
    try:
        reply = await _dialled_back(client, address, pin)
    except Unreachable as error:
        return Check("reach", True, f"not known: {error}")
    except Refused as error:
        return Check("reach", False, str(error), LEAF)
    if reply.outcome == cp.REACHED:
        note = "of a private network: peers elsewhere cannot dial it" if _is_private(reply.address) else ""
        return Check("reach", True, f"the coordinator dialled this machine at {reply.address}", note)
    how = "nobody answers" if reply.outcome == cp.TIMED_OUT else "it is refused, or another answers"
    return Unreached("reach", False, f"peers cannot dial this machine at {reply.address}: {how}", FORWARD)


def reached_otherwise(check: Check, sight: RunSight) -> Check:
    """The check of a machine's reach, where its node would do without being dialled: the run has gateways."""
    if not isinstance(check, Unreached) or not sight.gateways:
        return check
    if missing := lacking("a gateway", "hivemind"):
        return Check("reach", True, f"{check.found}; its node will be a leaf, and dial the others", missing)
    return Check("reach", True, f"{check.found}; the run's gateways will pass on what is for its node")


async def _dialled_back(client: CheckupClient, address: str, pin: Pin) -> cp.DialBackReply:
    """The answer to a dial-back, asked for again while others are being dialled."""
    for pause in BUSY_PAUSES:
        try:
            return await client.dial_back(address, pin)
        except Busy:
            await asyncio.sleep(pause)
    return await client.dial_back(address, pin)


async def reach_check_alone(client: CheckupClient, invite: Invite, listening: Listening) -> Check:
    """The same for a machine without a data plane: for a moment somebody listens where it would."""
    if listening.leaf:
        return Check("reach", True, "not asked (--leaf): this machine dials the others")
    try:
        async with _listener(listening, bool(invite.pin)) as (port, pin):
            return await reach_check(client, listening.address(port), pin)
    except OSError as error:
        why = f"nothing can listen at {listening.listen} ({error.strerror or error})"
        return Check("reach", False, why, "stop what does (a node of this machine?), or give another --listen")


@dataclass(frozen=True, slots=True)
class Rates:
    """Bytes a second of this machine's link; 0: not known."""

    up: float
    down: float
    words: str


async def measured(client: CheckupClient, config: NodeConfig) -> Rates:
    """The rates to and from the coordinator: as they are, or as this machine's settings cap them. Raises `Busy`,
    `Refused`, `Unreachable`."""
    up = config.upload * MEGABIT or await client.rate_up()
    down = config.download * MEGABIT or await client.rate_down()
    each = (("up", up, config.upload), ("down", down, config.download))
    words = (f"{_mbit(rate)} {which}{' (as set)' if cap else ''}" for which, rate, cap in each)
    return Rates(up, down, ", ".join(words))


async def rate_checks(
    client: CheckupClient, run: RunConfig, members: int, config: NodeConfig
) -> AsyncIterator[Check]:
    """How fast the link to the coordinator is, and how long an exchange will take over it. `members`: that take
    part, this one among them."""
    try:
        rates = await measured(client, config)
    except (Busy, Refused, Unreachable) as error:
        yield Check("rates", True, f"not measured: {error}")
        return
    yield Check("rates", True, f"{rates.words}, to and from the coordinator")
    for check in exchange_checks(run, members, rates):
        yield check


def exchange_checks(run: RunConfig, members: int, rates: Rates) -> Iterator[Check]:
    """How long the exchange of a round will take here; nothing where that is not known."""
    if not (rates.up and rates.down and run.decoder):
        return
    members = max(members, run.members.start, 2)
    size, seconds = exchanged_bytes(run, members), exchange_seconds(run, members, rates.up, rates.down)
    words = f"{size / 1e6:.1f} MB each way after {run.round_steps:g} inner steps, {_span(seconds)} here"
    yield Check("exchange", True, f"{words}, with {members} members")


async def sight_of(client: CheckupClient) -> RunSight | Check:
    """What the coordinator tells of the run; a check that failed where it tells nothing."""
    try:
        return await client.look()
    except Refused as error:
        return failed("invite", error)
    except AtollError as error:
        return failed("coordinator", error)


def unreachable(error: AtollError) -> Check:
    """That no coordinator answers, or another than the URL's."""
    remedy = "is it running, and is its port open to this machine?" if isinstance(error, Unreachable) else ""
    return Check("coordinator", False, str(error), remedy, error.exit_code)


@asynccontextmanager
async def _listener(listening: Listening, encrypted: bool) -> AsyncIterator[tuple[int, Pin]]:
    """Somebody at the port where the data plane would be, and the pin of what is shown there. Raises `OSError`."""
    context, pin = None, NO_PIN
    if encrypted:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        with tempfile.TemporaryDirectory(prefix="atoll-") as folder:
            certificate = await asyncio.to_thread(load_or_make, Path(folder))
            context.load_cert_chain(certificate.path)
        pin = certificate.pin
    host, port = split_host_port(listening.listen, "--listen")

    def meet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    server = await asyncio.start_server(meet, host or None, port, ssl=context)
    with closing(server):
        yield server.sockets[0].getsockname()[1], pin


def _is_private(address: str) -> bool:
    try:
        return is_own_network(split_host_port(address, "the address")[0])
    except (ValueError, AtollError):  # a name
        return False


def _mbit(rate: float) -> str:
    return f"{rate / MEGABIT:,.1f} Mbit/s" if rate else "unknown"


def _span(seconds: float) -> str:
    if seconds < 1:
        return "less than a second"
    return f"about {seconds:.0f} s" if seconds < 120 else f"about {seconds / 60:.0f} min"
