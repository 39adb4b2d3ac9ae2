"""The bytes between two data planes, version 8.

Every connection starts like this (integers are little-endian, text is UTF-8; with TLS, inside of its session):

    accepting side      4  magic "ATOL"
                        1  version, 8
                        3  zero
                       16  nonce, fresh for each connection
    dialling side       4  magic "ATOL"
                        1  version, 8
                        1  bytes of the run id            r
                        1  bytes of the sender's node id  s
                        1  bytes of the receiver's id     t
                        4  number of the run's key: how many members were expelled before it
                    r+s+t  the three ids
                       32  HMAC-SHA256(the run's key, nonce + all bytes of the hello before this)
                       64  the sender's signature (`atoll.comm.signatures`) over the nonce, the pin of the
                           certificate that the receiver showed it (with TLS), and the hello

So no key ever travels, a recorded hello opens nothing, nobody speaks in the name of another member, who accepts a
connection cannot use its hello at a third node, and a node that inherited another's address does not take its
mail. `key_ring` says who is let in. Then frames, in both directions:

                        1  kind
                        1  flags: 1 = the payload is a zstandard frame of what it stands for, in the order
                           of `zstd.pack_shuffled`; of a state's fp32, three planes of lower bytes, none if all
                           are zero, and a frame of the topmost
                        2  the sender's place in the plan
                        4  chunk
                        8  incarnation
                        8  epoch
                        8  round
                        4  attempt
                        4  length of the payload that follows
                        4  where in the whole payload it belongs
                        4  length of the whole payload
                   length  payload

The kinds, by number; below, what those mean that are not their names:

    1 LINK             5 WANT      9 PARTIAL        18 GET_DIGESTS
    2 CONTRIBUTION     6 LACK     10 OFFER          24 DATA
    3 SEALED           7 RESYNC   16 GET_SEALED     25 MISSING
    4 MERGED           8 REFUSED  17 GET_STATE      19 GET_INPUT   20 GET_RECEIPT
    11 INPUT          12 RECEIPT

Over a long path a payload travels in pieces, each in a frame, over all links to the peer at once. A request for
a chunk of the state names the part of it that is wanted: from the first of the last two fields to the second.

A connection that starts with LINK is one of several between two members and carries their reduces, this round's
and the next ones', both ways (`protocol` says when):

    CONTRIBUTION   an encoded chunk, to its owner, or to the relay of the sender's region
    PARTIAL        the encoded mean of what a relay has of its region, to the chunk's owner; behind it the places
                   of those who are in it, as a bitmap of as many bytes as the plan's `regions` need.
                   Where the plan has a salt, the 64 bytes of the sender's signature are behind either of the two,
                   not in the zstandard frame (`atoll.comm.receipts`)
    SEALED         a sealed chunk, from its owner or relay, or from whoever was asked for it
    MERGED         no payload: the owner or relay has made use of what it was sent of the chunk, its memory is free
    WANT           no payload: send this sealed chunk
    LACK           no payload: it is not here
    RESYNC         three bitmaps of ceil(chunks / 8) bytes, chunk c is bit c % 8 of byte c // 8: what of the
                   receiver is here to be merged, what is merged, and the sealed chunks that are here.
                   Chunk 0: so it is; 1: and the other side is to answer with its own, links broke;
                   2 and 3: only to hear that the other side is alive, and the answer to that
    GET_INPUT, GET_RECEIPT   an auditor's question, as below, and INPUT, RECEIPT its answer; without a payload if
                   it is not here, or if the asking side had its share of the links in this round

Their attempt is the one in which the chunk got its owner; of a RESYNC, the sender's. A connection that starts
with a request (GET_...) carries requests and answers; one that starts with OFFER does, too, but the side that was
dialled asks: the other one is a leaf.

The GET_... ask for what there is of a round: the sealed bytes of a chunk, a chunk of the state after it (its
anchor, then its momentum, fp32), the digests of all chunks of that state, 16 bytes each, in their order. Of the
round that is being reduced, until its commit: GET_INPUT asks for what the other side contributed to the chunk, as
CONTRIBUTION has it, unpacked; GET_RECEIPT for its receipt, as the owner of the chunk or the relay of its region.
The answer is DATA, or MISSING without a payload.

`receive` reads the 48 bytes of a header and nothing more. Whoever calls it knows which length must follow, and
refuses another one before a byte is allocated for it.
"""

import asyncio
import os
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from enum import IntEnum

from atoll.comm.byte_view import Octets, view
from atoll.comm.ids import NO_PIN, Epoch, Incarnation, NodeId, Pin, Round, RunId
from atoll.comm.plan import Fence
from atoll.comm.transport.connection import (
    CAPPED_PIECE_BYTES,
    LINGER_TIMEOUT,
    STALL_TIMEOUT,
    Link,
    LinkBroken,
    LinkSpoiled,
)
from atoll.comm.transport.key_ring import PROOF_BYTES, KeyRing

MAGIC = b"ATOL"
VERSION = 8
PROTOCOL = 302 + VERSION  # version of the control plane: who could not talk to peers is refused by the coordinator
GREETING = struct.Struct("<4sB3x16s")
HELLO = struct.Struct("<4sBBBBI")
HEADER = struct.Struct("<BBHIQQQIIII")
MAX_SENTENCE = 512  # bytes of a refusal's sentence at most
MAX_SKIPPED = 1 << 28  # bytes of a payload that is read away
HANDSHAKE_TIMEOUT = 10.0  # seconds to connect, and to say hello
_SCRATCH = memoryview(bytearray(CAPPED_PIECE_BYTES))  # for bytes that nobody looks at


class FrameKind(IntEnum):
    """A frame's kind, as the number in its header; the module's docstring says more."""

    LINK = 1  # dialling side, first: what follows belongs to reduces
    CONTRIBUTION = 2
    SEALED = 3
    MERGED = 4
    WANT = 5
    LACK = 6
    RESYNC = 7
    REFUSED = 8  # last: the payload is a sentence
    PARTIAL = 9
    OFFER = 10  # dialling side, first: a leaf, which answers requests on this connection
    INPUT = 11  # on a link, the answer to GET_INPUT
    RECEIPT = 12  # and to GET_RECEIPT
    GET_SEALED = 16  # requests, without payload
    GET_STATE = 17
    GET_DIGESTS = 18
    GET_INPUT = 19  # of the reduce under way
    GET_RECEIPT = 20
    DATA = 24  # answers: the bytes themselves,
    MISSING = 25  # or this side does not have them


QueuedFrame = tuple[FrameKind, int, int]  # kind, chunk, attempt in which the chunk got its owner


@dataclass(frozen=True, slots=True)
class Header:
    """The header of a frame, which comes before its payload: 48 bytes on the wire."""

    kind: FrameKind
    fence: Fence
    chunk: int = 0
    length: int = 0  # bytes of the payload
    packed: bool = False  # the payload is a zstandard frame
    place: int = 0  # of the sender in its plan
    offset: int = 0  # of this piece in the whole payload
    whole: int = 0  # bytes of the whole payload; 0: this is all

    @property
    def total(self) -> int:
        """Bytes of the whole payload."""
        return self.whole or self.length

    def pack(self) -> bytes:
        """The `HEADER.size` bytes of this header."""
        f = self.fence
        return HEADER.pack(
            *(self.kind, self.packed, self.place, self.chunk),
            *(f.incarnation, f.epoch, f.round, f.attempt, self.length, self.offset, self.total),
        )

    @staticmethod
    def unpack(data: bytes) -> "Header":
        """The header in `HEADER.size` bytes. Raises `LinkSpoiled` if they are none."""
        kind, flags, place, chunk, incarnation, epoch, round, attempt, length, offset, total = HEADER.unpack(data)
        try:
            known = FrameKind(kind)
        except ValueError:
            raise LinkSpoiled(f"a frame of unknown kind {kind}") from None
        fence = Fence(Incarnation(incarnation), Epoch(epoch), Round(round), attempt)
        if offset + length > total:
            raise LinkSpoiled(f"a piece of {length} bytes from {offset} on, of {total}")
        whole = 0 if total == length else total
        return Header(known, fence, chunk, length, bool(flags & 1), place, offset, whole)


def unfenced(kind: FrameKind, round: int = 0, chunk: int = 0, length: int = 0, packed: bool = False) -> Header:
    """The header of a frame outside of any attempt: fetches and last words."""
    return Header(kind, Fence(Incarnation(0), Epoch(0), Round(round), 0), chunk, length, packed)


def part(kind: FrameKind, round: int, chunk: int, start: int, end: int) -> Header:
    """A request for bytes `start` to `end` of what there is of the chunk."""
    return Header(kind, Fence(Incarnation(0), Epoch(0), Round(round), 0), chunk, offset=start, whole=end)


async def send(link: Link, header: Header, payload: Octets = b"") -> None:
    """Hand a frame to the kernel; `payload` must not change meanwhile."""
    if header.length:
        await link.write(header.pack(), view(payload))
    else:
        await link.write(header.pack())


async def receive(link: Link, timeout: float | None) -> Header:
    """Read the next frame's header. `timeout`: seconds from byte to byte; None: no limit. Raises `LinkClosed` at
    the end, `LinkBroken` if these bytes are no header."""
    return Header.unpack(await link.read(HEADER.size, timeout))


async def skip(link: Link, length: int) -> None:
    """Read away a payload of `length` bytes that is of no use; `LinkBroken` if no peer would send so much."""
    if length > MAX_SKIPPED:
        raise LinkBroken(f"it sent a frame of {length} bytes")
    while length:
        piece = _SCRATCH[: min(length, CAPPED_PIECE_BYTES)]
        await link.read_into(piece)
        length -= len(piece)


async def farewell(link: Link, kind: FrameKind, text: str = "") -> None:
    """Send a last frame, so that it is heard even by one that is still sending."""
    data = text.encode()[:MAX_SENTENCE]
    with suppress(LinkBroken, TimeoutError):
        async with asyncio.timeout(LINGER_TIMEOUT):
            await send(link, unfenced(kind, length=len(data)), data)
        await link.drain()


async def sentence(link: Link, header: Header) -> str:
    """The sentence that a refusal with this header carries. Raises `LinkBroken` if it is too long."""
    if header.length > MAX_SENTENCE:
        raise LinkBroken(f"a refusal of {header.length} bytes")
    return (await link.read(header.length, STALL_TIMEOUT)).decode(errors="replace")


async def greet(link: Link, run: RunId, me: NodeId, to: NodeId, keys: KeyRing, pin: Pin = NO_PIN) -> None:
    """Take the dialling side's part in the handshake; `pin`: of the certificate that was shown to it. Whether it
    was accepted shows in the first frame read. Raises `LinkBroken`."""
    async with _in_time():
        magic, version, nonce = GREETING.unpack(await link.read(GREETING.size, None))
        if magic != MAGIC:
            raise LinkBroken("what listens there is no data plane of this software")
        if version != VERSION:
            raise LinkBroken(_other(version))
        ids = [text.encode() for text in (run, me, to)]
        hello = HELLO.pack(MAGIC, VERSION, *(len(text) for text in ids), keys.key.number) + b"".join(ids)
        await link.write(hello + keys.prove(nonce, hello, pin))


async def welcome(link: Link, run: RunId, me: NodeId, keys: KeyRing, pin: Pin = NO_PIN) -> NodeId:
    """Take the accepting side's part in the handshake; returns who dialled. `pin`: of the certificate that this
    side shows. Reads at most 873 bytes from a stranger. Raises `LinkBroken`."""
    async with _in_time():
        nonce = os.urandom(16)
        await link.write(GREETING.pack(MAGIC, VERSION, nonce))
        start = await link.read(HELLO.size, None)
        magic, version, *lengths, number = HELLO.unpack(start)
        if magic != MAGIC:
            raise LinkBroken("its first bytes are not those of a data plane")
        if version != VERSION:
            raise LinkBroken(_other(version))
        ids = await link.read(sum(lengths), None)
        proof = await link.read(PROOF_BYTES, None)
    theirs, sender, to = (text.decode(errors="replace") for text in _split(ids, lengths))
    if why := await keys.refusal(nonce, start + ids, pin, proof, number, NodeId(sender)):
        raise LinkBroken(why)
    if theirs != run:
        raise LinkBroken(f"it belongs to run {theirs!r}, this node to {run!r}")
    if to != me:
        raise LinkBroken(f"it looks for {to}, this is {me}")
    if sender == me:
        raise LinkBroken(f"it says that it is {me}, and this is")
    return NodeId(sender)


@asynccontextmanager
async def _in_time() -> AsyncIterator[None]:
    """A handshake as a whole has its deadline: one byte a second wins nobody time."""
    try:
        async with asyncio.timeout(HANDSHAKE_TIMEOUT):
            yield
    except TimeoutError:
        raise LinkBroken(f"it did not say hello within {HANDSHAKE_TIMEOUT:g} s") from None


def _other(version: int) -> str:
    return f"it speaks version {version} of the data plane, this node speaks {VERSION}: use one release"


def parse_address(address: str) -> tuple[str, int]:
    """("host", port) of "host:port", "[v6 literal]:port" or ":port"; `ValueError` with a sentence."""
    host, colon, port = address.rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not colon or not (port.isascii() and port.isdigit()) or int(port) > 65535 or (":" in host and bare == host):
        raise ValueError(f"{address!r} is no address: write host:port, or [host]:port for IPv6")
    return bare, int(port)


def format_address(host: str, port: int) -> str:
    """ "host:port", with an IPv6 literal in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _split(data: bytes, lengths: list[int]) -> list[bytes]:
    parts = []
    for length in lengths:
        parts.append(data[:length])
        data = data[length:]
    return parts
