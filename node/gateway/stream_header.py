"""The first bytes of a stream between two gateways: what it is for; and what a gateway lets others reach. Pure.

    magic     4 bytes
    purpose   1 byte: OPEN asks for a service of the gateway itself, RELAY for one of a peer that it holds a
              connection to, HOLD asks to be such a peer
    service   1 byte
    length    1 byte, of the peer's id behind it: of RELAY alone

The other side answers with one byte. After YES the bytes of an OPEN or a RELAY are the service's, as they are;
those of a HOLD are signs of life.
"""

from collections import Counter
from dataclasses import dataclass
from enum import IntEnum

from atoll.comm.peer_names import is_peer

MAGIC = b"AGS1"
PREFIX_BYTES = 7


class Purpose(IntEnum):
    """What a stream is for."""

    OPEN = 1
    RELAY = 2
    HOLD = 3


class Service(IntEnum):
    """What can be reached through a gateway: nothing else of its machine can."""

    NONE = 0  # of a HOLD
    DATA = 1  # the data plane of its node
    COORDINATOR = 2


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
    if (purpose is Purpose.HOLD) != (service is Service.NONE):
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
    """How much a gateway does for others: nothing where `streams` is 0."""

    streams: int = 0  # relayed at once
    streams_of_peer: int = 64  # of these, from or to one peer
    held: int = 256  # peers that are connected, to be reached
    rate: float = 0.0  # bytes a second of all together; 0: no limit


class RelayBook:
    """Who is connected to a relay, and what it relays now."""

    def __init__(self, limits: RelayLimits) -> None:
        self.limits = limits
        self._held = Counter[bytes]()  # streams of each; one that came back has two for a moment
        self._streams = Counter[bytes]()  # of each peer, from it or to it
        self.count = 0

    @property
    def held(self) -> int:
        """Peers that are connected, to be reached."""
        return len(self._held)

    def hold(self, peer: bytes) -> Answer:
        """Whether a peer may be reached through this relay until `let_go`."""
        if not self.limits.streams:
            return Answer.NO_RELAY
        if (peer not in self._held and len(self._held) >= self.limits.held) or self._held.get(peer, 0) >= 2:
            return Answer.FULL
        self._held[peer] += 1
        return Answer.YES

    def let_go(self, peer: bytes) -> None:
        """Take back one `hold` that was answered with YES."""
        self._held[peer] -= 1
        self._held += Counter()  # drops what is 0

    def begin(self, source: bytes, target: bytes) -> Answer:
        """Whether a stream may be relayed until `end`."""
        if not self.limits.streams:
            return Answer.NO_RELAY
        if target not in self._held:
            return Answer.NOT_HELD
        crowded = any(self._streams[peer] >= self.limits.streams_of_peer for peer in (source, target))
        if self.count >= self.limits.streams or crowded:
            return Answer.FULL
        self.count += 1
        self._streams.update((source, target))
        return Answer.YES

    def end(self, source: bytes, target: bytes) -> None:
        """Take back one `begin` that was answered with YES."""
        self.count -= 1
        self._streams.subtract((source, target))
        self._streams += Counter()
