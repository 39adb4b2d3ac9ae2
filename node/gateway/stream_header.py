"""The first bytes of a stream between two gateways: what it is for; and what a gateway lets others reach. Pure.

    magic     4 bytes
    purpose   1 byte: OPEN asks for a service of the gateway itself, RELAY for one of a peer that it holds a
              connection to, HOLD asks to be such a peer; PASS is what a relay makes of a RELAY for that peer
    service   1 byte
    length    1 byte, of the peer's id behind it: of RELAY alone

The other side answers with one byte. After YES the bytes are the service's, as they are; a HOLD's are signs of
life, behind 2 bytes of the relay's: the port at which it tells who connects as what it sees it, 0: it does not.
"""

from collections import Counter
from dataclasses import dataclass, replace
from enum import IntEnum

from atoll.comm.peer_names import is_peer
from atoll.comm.rate_limits import RateLimit
from atoll.comm.strangers import StrangerLimits, Strangers

MAGIC = b"AGS1"
PREFIX_BYTES = 7


class Purpose(IntEnum):
    """What a stream is for."""

    OPEN = 1
    RELAY = 2
    HOLD = 3
    PASS = 4


class Service(IntEnum):
    """What can be reached through a gateway: nothing else of its machine can."""

    NONE = 0  # of a HOLD
    DATA = 1  # the data plane of its node
    COORDINATOR = 2
    PUNCH = 3  # a connection without a relay to the data plane of the node: agreed upon through one


class Answer(IntEnum):
    """What a gateway says to a stream."""

    YES = 1
    NOT_SERVED = 2  # there is no such service at this gateway
    NOT_HELD = 3  # the peer is not connected to this relay
    NO_RELAY = 4  # this gateway relays nothing
    FULL = 5  # it relays as much as it may
    SILENT = 6  # the service, or the peer, did not take the connection


SENTENCES = {
    Answer.YES: "it agrees",
    Answer.NOT_SERVED: "its gateway does not serve that",
    Answer.NOT_HELD: "it is not connected to that relay",
    Answer.NO_RELAY: "that gateway is no relay",
    Answer.FULL: "that relay is full",
    Answer.SILENT: "what is behind its gateway does not answer",
}


class BadHeader(Exception):
    """The bytes are no header, or no answer."""


@dataclass(frozen=True, slots=True)
class StreamHeader:
    """What a stream is for."""

    purpose: Purpose
    service: Service = Service.NONE
    peer: bytes = b""  # of a RELAY: whose the service is


def write_header(header: StreamHeader) -> bytes:
    """The header's bytes."""
    return MAGIC + bytes([header.purpose, header.service, len(header.peer)]) + header.peer


def length_behind(prefix: bytes) -> int:
    """The number of bytes that follow a header's first PREFIX_BYTES: 64 at most. Raises `BadHeader`."""
    if len(prefix) != PREFIX_BYTES or prefix[:4] != MAGIC:
        raise BadHeader("it is no header of this software")
    if prefix[6] > 64:
        raise BadHeader("it names a peer that is too long")
    return prefix[6]


def read_header(data: bytes) -> StreamHeader:
    """The header in these bytes. Raises `BadHeader`."""
    if len(data) != PREFIX_BYTES + length_behind(data[:PREFIX_BYTES]):
        raise BadHeader("its length is not what it says")
    try:
        purpose, service = Purpose(data[4]), Service(data[5])
    except ValueError as error:
        raise BadHeader(str(error)) from None
    peer = data[PREFIX_BYTES:]
    if (purpose is Purpose.RELAY) != bool(peer) or (peer and not is_peer(peer)):
        raise BadHeader("a peer is to be named where another's service is asked for, and there alone")
    if (purpose is Purpose.HOLD) != (service is Service.NONE) or (purpose, service) == (
        Purpose.OPEN,
        Service.PUNCH,
    ):
        raise BadHeader("it names no service, or one too many")
    return StreamHeader(purpose, service, peer)


def read_answer(data: bytes) -> Answer:
    """The answer in these bytes. Raises `BadHeader`."""
    try:
        (byte,) = data
        return Answer(byte)
    except ValueError:
        raise BadHeader("its answer is none") from None


@dataclass(frozen=True, slots=True)
class RelayLimits:
    """How much a gateway does for others: nothing where `streams` is 0. A peer's id is free, an address is not: so
    what matters is counted by networks, too."""

    streams: int = 0  # relayed at once
    streams_of_peer: int = 64  # of these, from or to one peer
    streams_of_network: int = 128  # of these, from one network
    held: int = 256  # peers that are connected, to be reached
    held_of_network: int = 64  # of these
    rate: float = 0.0  # bytes a second of all together; 0: no limit


@dataclass(frozen=True, slots=True)
class Hold:
    """One connection of a peer that can be reached through this relay."""

    peer: bytes
    number: int


class RelayBook:
    """Who is connected to a relay, and what it relays now. A network stands for the addresses that are counted
    together (`strangers.network_of`)."""

    def __init__(self, limits: RelayLimits) -> None:
        self.limits = limits
        unlimited = RateLimit(1, 1)  # nothing is charged
        self._places = Strangers[Hold](StrangerLimits(limits.held, limits.held_of_network, unlimited))
        self._held = Counter[bytes]()  # places of each peer: one that came back has two for a moment
        self._number = 0
        self._streams = Counter[bytes]()  # of each peer, from it or to it
        self._of_network = Counter[str]()  # streams from each
        self.count = 0

    def limit(self, streams: int) -> None:
        """Relay so many streams at once from now on; those there are go on."""
        self.limits = replace(self.limits, streams=streams)

    @property
    def held(self) -> int:
        """Peers that are connected, to be reached."""
        return len(self._held)

    def hold(self, peer: bytes, network: str) -> tuple[Answer, Hold, Hold | None]:
        """Whether a peer from this network may be reached through this relay until `let_go`, and who loses its
        place to it: of the network that has the most."""
        self._number += 1
        hold = Hold(peer, self._number)
        if not self.limits.streams:
            return Answer.NO_RELAY, hold, None
        if self._held[peer] >= 2:
            return Answer.FULL, hold, None
        displaced = self._places.admit(hold, network, 0.0, charge=False).displaced
        self._held[peer] += 1
        if displaced is not None:
            self._forget(displaced)
        return Answer.YES, hold, displaced

    def let_go(self, hold: Hold) -> None:
        """Take back a `hold` that was answered with YES; one that was displaced is none any more."""
        if self._places.leave(hold) is not None:
            self._forget(hold)

    def _forget(self, hold: Hold) -> None:
        self._held[hold.peer] -= 1
        self._held += Counter()  # drops what is 0

    def begin(self, source: bytes, target: bytes, network: str) -> Answer:
        """Whether a stream may be relayed until `end`. `network`: the source's."""
        if not self.limits.streams:
            return Answer.NO_RELAY
        if target not in self._held:
            return Answer.NOT_HELD
        crowded = any(self._streams[peer] >= self.limits.streams_of_peer for peer in (source, target))
        crowded = crowded or self._of_network[network] >= self.limits.streams_of_network
        if self.count >= self.limits.streams or crowded:
            return Answer.FULL
        self.count += 1
        self._streams.update((source, target))
        self._of_network[network] += 1
        return Answer.YES

    def end(self, source: bytes, target: bytes, network: str) -> None:
        """Take back one `begin` that was answered with YES."""
        self.count -= 1
        self._streams.subtract((source, target))
        self._streams += Counter()
        self._of_network[network] -= 1
        self._of_network += Counter()
