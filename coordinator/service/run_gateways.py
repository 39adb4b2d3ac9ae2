"""The gateways by which the members of a run can be reached who cannot be dialled: the operator's, and relays that
members offer.

    operator's   those in the notes of gateways beside the coordinator (`gateway_note`): always told, and first
    members'     a member with `relay=true` says in its heartbeats where its gateway relays. That is where its
                 calls come from, or where peers dial it, and the coordinator has found libp2p there within the
                 last minutes: one member can send the others to itself alone, and to nothing that is not there.
                 The oldest MAX_RELAYS are told, of different networks; those behind them take the place of who
                 goes.

A relay sees who sends how much to whom, and may drop it; what passes is TLS from end to end, and gateways try one
last through which nothing came. `RelayOffers` decides and is pure; `RunGateways` dials, reads and writes.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

from atoll.comm.addresses import may_dial, same_host
from atoll.comm.errors import AtollError
from atoll.comm.gateway_note import GatewayNote, read_gateways, write_note
from atoll.comm.ids import NodeId
from atoll.comm.peer_names import host_and_port_of_multiaddr
from atoll.comm.strangers import network_of

log = logging.getLogger("atoll.coordinator")
MAX_RELAYS = 4  # of members, that are told
MAX_OFFERS = 64  # that are looked at
NETWORK_BITS = 24  # of an IPv4 address: from one network one relay is told
LOOK_SECONDS = 60.0  # between two looks at a relay that was there
LOOK_AGAIN_SECONDS = 10.0  # after one in vain
LOST_AFTER = 3  # looks in vain, of one that was there
DIAL_SECONDS = 5.0  # for libp2p to show itself
POLL_SECONDS = 1.0
GREETING = b"\x13/multistream/1.0.0\n"  # what libp2p says first to who connects


@dataclass
class _Offer:
    multiaddr: str
    due: float  # seconds, of the next look
    looked: bool = False  # and it was there
    failures: int = 0  # looks in vain, since


class RelayOffers:
    """The relays that members offer, and which of them are told."""

    def __init__(self, private: bool) -> None:
        """`private`: they may be in private networks."""
        self._private = private
        self._offers = dict[NodeId, _Offer]()  # the oldest first

    def offer(self, node: NodeId, multiaddr: str, hosts: Collection[str], now: float) -> str:
        """Take in what a member says at `now` (seconds): it relays at this multiaddr; empty: nowhere. `hosts`:
        where it is for certain. Returns why not, in words; empty: it is looked at, and then told."""
        if not multiaddr:
            self._offers.pop(node, None)
            return ""
        if (before := self._offers.get(node)) is not None and before.multiaddr == multiaddr:
            return ""
        if why := self._refusal(multiaddr, hosts):
            self._offers.pop(node, None)
            return why
        if len(self._offers) >= MAX_OFFERS and node not in self._offers:
            return f"{MAX_OFFERS} members offer one already"
        self._offers[node] = _Offer(multiaddr, now)
        return ""

    def _refusal(self, multiaddr: str, hosts: Collection[str]) -> str:
        try:
            host, _ = host_and_port_of_multiaddr(multiaddr)
            ip_address(host)
        except ValueError:
            return f"{multiaddr[:80]!r} is no multiaddr with an IP address"
        if not any(same_host(host, other) for other in hosts):
            return f"{host} is not where it comes from, nor where peers dial it"
        return (
            "" if may_dial(host, self._private) else f"{host} is in a private network, and the run is a public one"
        )

    def keep(self, here: Collection[NodeId]) -> None:
        """Forget who is no member any more."""
        for node in [node for node in self._offers if node not in here]:
            del self._offers[node]

    def due(self, now: float) -> list[str]:
        """The multiaddrs to look at, at `now`; each is told `looked`."""
        found = [offer for offer in self._offers.values() if offer.due <= now]
        for offer in found:
            offer.due = now + LOOK_SECONDS
        return [offer.multiaddr for offer in found]

    def looked(self, multiaddr: str, there: bool, now: float) -> None:
        """Take in whether libp2p was found there."""
        for offer in self._offers.values():
            if offer.multiaddr == multiaddr:
                offer.failures = 0 if there else offer.failures + 1
                offer.looked = there or (offer.looked and offer.failures < LOST_AFTER)
                offer.due = now + (LOOK_SECONDS if there else LOOK_AGAIN_SECONDS)

    def told(self) -> tuple[str, ...]:
        """The relays that members are told."""
        found = dict[str, str]()  # by network
        for offer in self._offers.values():
            if offer.looked:
                host, _ = host_and_port_of_multiaddr(offer.multiaddr)
                found.setdefault(network_of(host, NETWORK_BITS), offer.multiaddr)
        return tuple(found.values())[:MAX_RELAYS]


class RunGateways:
    """The gateways of one run, as its members are told them. `run` it."""

    def __init__(
        self, state_dir: Path, private: bool, here: Callable[[], Collection[NodeId]], clock: Callable[[], float]
    ) -> None:
        """`private`: relays may be in private networks; `here`: the members; `clock`: seconds."""
        self._state_dir, self._here, self._clock = state_dir, here, clock
        self._offers = RelayOffers(private)
        self._operators: tuple[str, ...] = ()
        self._refused = dict[NodeId, str]()  # what was said of each, last
        self._note: GatewayNote | None = None  # for the gateway beside this coordinator
        self._written: GatewayNote | None = None

    @property
    def told(self) -> tuple[str, ...]:
        """Their multiaddrs, the best first."""
        return tuple(dict.fromkeys((*self._operators, *self._offers.told())))

    def describe(self, note: GatewayNote) -> None:
        """Leave this note to the gateway beside the coordinator, with the relays that there are."""
        self._note = note

    def offer(self, node: NodeId, multiaddr: str, hosts: Sequence[str]) -> None:
        """Take in where a member relays, as it says in a heartbeat; empty: nowhere."""
        why = self._offers.offer(node, multiaddr, hosts, self._clock())
        if why and self._refused.get(node) != why:
            log.info(f"the relay of {node} is told nobody: {why}")
        if why:
            self._refused[node] = why
        else:
            self._refused.pop(node, None)

    async def run(self) -> None:
        """Look at relays and notes until cancelled."""
        async with asyncio.TaskGroup() as looks:
            while True:
                self._offers.keep(self._here())
                self._refused = {node: why for node, why in self._refused.items() if node in self._here()}
                for multiaddr in self._offers.due(self._clock()):
                    looks.create_task(self._look(multiaddr))
                self._operators = await asyncio.to_thread(read_gateways, self._state_dir)
                await self._write()
                await asyncio.sleep(POLL_SECONDS)

    async def _look(self, multiaddr: str) -> None:
        self._offers.looked(multiaddr, await is_libp2p(*host_and_port_of_multiaddr(multiaddr)), self._clock())

    async def _write(self) -> None:
        if self._note is None:
            return
        note = GatewayNote(
            self._note.run, self._note.address, self._note.entrance, self._note.incarnation, self._offers.told()
        )
        if note != self._written:
            try:
                await asyncio.to_thread(write_note, self._state_dir, note)
            except AtollError as error:
                if self._written is None:
                    raise
                log.warning(str(error))
            self._written = note


async def is_libp2p(host: str, port: int) -> bool:
    """Whether libp2p shows itself at this IP address and port, within DIAL_SECONDS."""
    try:
        async with asyncio.timeout(DIAL_SECONDS):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                return await reader.readexactly(len(GREETING)) == GREETING
            finally:
                writer.transport.abort()
                with suppress(OSError):
                    await writer.wait_closed()
    except (OSError, EOFError, TimeoutError):
        return False
