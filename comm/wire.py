"""The bytes between two data planes.

Every connection carries one reduce stream or a series of fetches, and starts like this (integers are
little-endian, text is UTF-8):

    accepting side      4  magic "ATOL"
                        1  version, 1
                        3  zero
                       16  nonce, fresh for each connection
    dialling side       4  magic "ATOL"
                        1  version, 1
                        1  bytes of the run id            r
                        1  bytes of the sender's node id  s
                        1  bytes of the receiver's id     t
                    r+s+t  the three ids
                       32  HMAC-SHA256(key, nonce + all bytes of the hello before this)

So the key never travels, a recorded hello opens nothing, and a node that inherited another's address does
not take its mail. Then frames, in both directions:

                        1  kind
                        3  zero
                        4  chunk
                        8  incarnation
                        8  epoch
                        8  round
                        4  attempt
                        4  length of the payload
                   length  payload

`Link.receive` reads the 40 bytes of a header and nothing more. Whoever calls it knows which length must
follow, and refuses another one before a byte is allocated for it.

A wrong byte, a broken connection, an expired deadline: all are `Broken`, with a sentence.
"""

import asyncio
import hashlib
import hmac
import os
import socket
import struct
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum

from atoll.comm.codec import Octets, view
from atoll.comm.errors import PeerError
from atoll.comm.ids import Epoch, Incarnation, NodeId, Round, RunId
from atoll.comm.plan import Fence

MAGIC = b"ATOL"
VERSION = 1
GREETING = struct.Struct("<4sB3x16s")
HELLO = struct.Struct("<4sBBBB")
HEADER = struct.Struct("<B3xIQQQII")
PROOF = 32  # bytes
MAX_SENTENCE = 512  # bytes of a refusal

HANDSHAKE = 10.0  # seconds to connect and to say hello, each
STALL = 60.0  # seconds without a byte in the middle of something
# Longer than a receiver may leave a window closed (plane.PATIENCE): Linux counts that against it too.
USER_TIMEOUT = 45.0  # seconds that sent bytes may stay unacknowledged
LINGER = 1.0  # seconds for which a last frame may be on its way before the connection is reset
PIECE = 1 << 18  # bytes handed to the transport at once


class Broken(PeerError):
    """This connection is of no more use; the text says why."""


class Closed(Broken):
    """The other side closed it between two frames."""


class Kind(IntEnum):
    OPEN = 1  # a reduce stream of this fence begins; dialling side, first
    CONTRIBUTION = 2  # an encoded chunk, to its owner
    RESULT = 3  # a sealed chunk, from its owner
    DONE = 4  # accepting side, last: the attempt succeeded here
    ABORT = 5  # accepting side, last: this member gave the attempt up, and is well
    REFUSED = 6  # accepting side, last: the payload is a sentence
    GET_SEALED = 16  # requests, without payload
    GET_STATE = 17
    GET_DIGESTS = 18
    DATA = 24  # answers: the bytes themselves,
    PACKED = 25  # or a smaller zstandard frame of them,
    MISSING = 26  # or this side does not have them


@dataclass(frozen=True)
class Header:
    kind: Kind
    fence: Fence
    chunk: int = 0
    length: int = 0  # bytes of the payload

    def pack(self) -> bytes:
        f = self.fence
        return HEADER.pack(self.kind, self.chunk, f.incarnation, f.epoch, f.round, f.attempt, self.length)

    @staticmethod
    def unpack(data: bytes) -> "Header":
        kind, chunk, incarnation, epoch, round, attempt, length = HEADER.unpack(data)
        try:
            known = Kind(kind)
        except ValueError:
            raise Broken(f"a frame of unknown kind {kind}") from None
        fence = Fence(Incarnation(incarnation), Epoch(epoch), Round(round), attempt)
        return Header(known, fence, chunk, length)


def unfenced(kind: Kind, round: int = 0, chunk: int = 0, length: int = 0) -> Header:
    """The header of a frame outside of any attempt: fetches and last words."""
    return Header(kind, Fence(Incarnation(0), Epoch(0), Round(round), 0), chunk, length)


@dataclass
class Meter:
    """Bytes through all links of a plane, headers and handshakes included."""

    up: int = 0
    down: int = 0


class Link:
    """One connection: frames out, frames in. At most one task sends and one receives."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, meter: Meter) -> None:
        self._reader, self._writer, self._meter = reader, writer, meter
        # drain() then waits until the kernel has everything: nothing is left to lose at close.
        writer.transport.set_write_buffer_limits(high=0)
        tune(writer.get_extra_info("socket"))

    async def send(self, header: Header, payload: Octets = b"") -> None:
        """Hand a frame to the kernel; `payload` must not change meanwhile."""
        await self.write(header.pack())
        data = view(payload)
        for start in range(0, len(data), PIECE):
            await self.write(data[start : start + PIECE])

    async def write(self, data: bytes | memoryview) -> None:
        try:
            async with asyncio.timeout(STALL):
                self._writer.write(data)
                self._meter.up += len(data)
                await self._writer.drain()
        except TimeoutError:
            raise Broken(f"it took no byte for {STALL:g} s") from None
        except OSError as error:
            raise Broken(f"the connection broke while sending: {reason(error)}") from None

    async def receive(self, timeout: float | None) -> Header:
        """The next frame's header; `Closed` at the end. Without a timeout the caller has a deadline of its own."""
        return Header.unpack(await self.read(HEADER.size, timeout))

    async def read(self, size: int, timeout: float | None = STALL) -> bytes:
        """Exactly `size` bytes, which the caller has found to be what was expected."""
        data = bytearray(size)
        await self.read_into(memoryview(data), timeout)
        return bytes(data)

    async def read_into(self, place: memoryview, timeout: float | None = STALL) -> None:
        """Fill `place`; `timeout` runs from each byte to the next."""
        clock = asyncio.get_running_loop().time
        filled, size = 0, len(place)
        try:
            async with asyncio.timeout(timeout) as limit:
                while filled < size:
                    data = await self._reader.read(size - filled)
                    if not data:
                        raise (
                            Broken("the connection ended in mid-frame")
                            if filled
                            else Closed("the connection was closed")
                        )
                    place[filled : filled + len(data)] = data
                    filled += len(data)
                    self._meter.down += len(data)
                    if timeout is not None:
                        limit.reschedule(clock() + timeout)
        except TimeoutError:
            raise Broken(f"it sent nothing for {timeout:g} s") from None
        except OSError as error:
            raise Broken(f"the connection broke: {reason(error)}") from None

    async def farewell(self, kind: Kind, sentence: str = "") -> None:
        """Send a last frame, and read what still arrives for a moment: a reset would overtake the frame."""
        text = sentence.encode()[:MAX_SENTENCE]
        with suppress(Broken, OSError, TimeoutError):
            async with asyncio.timeout(LINGER):
                await self.send(unfenced(kind, length=len(text)), text)
                self._writer.write_eof()
                while await self._reader.read(PIECE):
                    pass

    async def sentence(self, header: Header) -> str:
        """The payload of a refusal."""
        if header.length > MAX_SENTENCE:
            raise Broken(f"a refusal of {header.length} bytes")
        return (await self.read(header.length)).decode(errors="replace")

    def close(self) -> None:
        self._writer.close()

    def abort(self) -> None:
        """Close without sending what is still buffered."""
        self._writer.transport.abort()


async def greet(link: Link, run: RunId, me: NodeId, to: NodeId, key: bytes) -> None:
    """The dialling side's part of the handshake. Whether it was accepted shows in the first frame read."""
    magic, version, nonce = GREETING.unpack(await link.read(GREETING.size, HANDSHAKE))
    if magic != MAGIC:
        raise Broken("what listens there is no data plane of this software")
    if version != VERSION:
        raise Broken(f"it speaks version {version} of the data plane, this node speaks {VERSION}: use one release")
    ids = [text.encode() for text in (run, me, to)]
    hello = HELLO.pack(MAGIC, VERSION, *(len(text) for text in ids)) + b"".join(ids)
    await link.write(hello + _proof(key, nonce, hello))


async def welcome(link: Link, run: RunId, me: NodeId, key: bytes) -> NodeId:
    """The accepting side's part; returns who dialled. Reads at most 805 bytes from a stranger.

    Without a key, which a node has from its join on, nobody is accepted.
    """
    nonce = os.urandom(16)
    await link.write(GREETING.pack(MAGIC, VERSION, nonce))
    start = await link.read(HELLO.size, HANDSHAKE)
    magic, version, *lengths = HELLO.unpack(start)
    if magic != MAGIC:
        raise Broken("its first bytes are not those of a data plane")
    if version != VERSION:
        raise Broken(f"it speaks version {version} of the data plane, this node speaks {VERSION}: use one release")
    ids = await link.read(sum(lengths), HANDSHAKE)
    proof = await link.read(PROOF, HANDSHAKE)
    if not key:
        raise Broken("this node has not joined its run yet")
    if not hmac.compare_digest(proof, _proof(key, nonce, start + ids)):
        raise Broken("it does not know the run's key")
    theirs, sender, to = (text.decode(errors="replace") for text in _split(ids, lengths))
    if theirs != run:
        raise Broken(f"it belongs to run {theirs!r}, this node to {run!r}")
    if to != me:
        raise Broken(f"it looks for {to}, this is {me}")
    return NodeId(sender)


def parse_address(address: str) -> tuple[str, int]:
    """("host", port) of "host:port", "[v6 literal]:port" or ":port"; `ValueError` with a sentence."""
    host, colon, port = address.rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not colon or not (port.isascii() and port.isdigit()) or int(port) > 65535 or (":" in host and bare == host):
        raise ValueError(f"{address!r} is no address: write host:port, or [host]:port for IPv6")
    return bare, int(port)


def format_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def tune(sock: socket.socket) -> None:
    """No waiting to fill segments; a dead or vanished host is noticed."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in [
        ("TCP_KEEPIDLE", 10),
        ("TCP_KEEPINTVL", 5),
        ("TCP_KEEPCNT", 3),
        ("TCP_USER_TIMEOUT", int(USER_TIMEOUT * 1000)),
    ]:
        if hasattr(socket, name):  # Linux has them all, others some
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def reason(error: OSError) -> str:
    """What the system says, without its number."""
    if error.errno is not None and error.errno > 0:  # asyncio puts addresses into strerror
        return os.strerror(error.errno).lower()
    return str(error.strerror or error or type(error).__name__).lower()


def _proof(key: bytes, nonce: bytes, hello: bytes) -> bytes:
    return hmac.digest(key, nonce + hello, hashlib.sha256)


def _split(data: bytes, lengths: list[int]) -> list[bytes]:
    parts = []
    for length in lengths:
        parts.append(data[:length])
        data = data[length:]
    return parts
