"""Whatever bytes a peer sends: they are a frame, or the link breaks with a sentence; and of a payload in pieces
only what was sent arrives, once all of it is here."""

import asyncio
import socket
from random import Random
from unittest.mock import patch

import numpy as np
from hostile import nearly
from hypothesis import given
from hypothesis import strategies as st

from atoll.comm.byte_view import U8
from atoll.comm.ids import NO_PIN, Epoch, Incarnation, NodeId, Pin, Round, RunId
from atoll.comm.plan import Fence
from atoll.comm.transport import frames, key_ring
from atoll.comm.transport.connection import ByteCounter, Link, LinkBroken
from atoll.comm.transport.frames import FrameKind, Header
from atoll.comm.transport.key_ring import KeyRing
from atoll.comm.transport.peer_links import PeerLinks

RUN, HERE, THERE, KEY = RunId("run"), NodeId("here"), NodeId("there"), b"k" * 32
FENCE = Fence(Incarnation(1), Epoch(2), Round(3), 4)
PAYLOAD = np.random.default_rng(0).integers(200, 256, 200_000, np.uint8)  # no byte begins a frame
OF_ROUND = range(24, 32)  # bytes of a header; a frame of a round to come is waited for, which takes seconds
U32, U64 = st.integers(0, (1 << 32) - 1), st.integers(0, (1 << 64) - 1)


def unpacked(data: bytes) -> Header | None:
    """None: the link breaks."""
    try:
        return Header.unpack(data)
    except LinkBroken as error:
        assert str(error)
        return None


@given(st.binary(min_size=frames.HEADER.size, max_size=frames.HEADER.size))
def test_any_48_bytes_are_a_header_or_break_the_link(data: bytes) -> None:
    header = unpacked(data)
    assert header is None or header.offset + header.length <= header.total
    assert header is None or unpacked(header.pack()) == header


@st.composite
def headers(draw: st.DrawFn) -> Header:
    """One that can be written: of a whole payload, or of a piece of it."""
    fence = Fence(Incarnation(draw(U64)), Epoch(draw(U64)), Round(draw(U64)), draw(U32))
    ends = sorted([draw(U32), draw(U32), draw(U32)])
    offset, length, whole = ends[0], ends[1] - ends[0], ends[2]
    if (offset, length) == (0, whole) or draw(st.booleans()):
        offset = whole = 0
    named = draw(st.sampled_from(FrameKind)), fence, draw(U32), length
    return Header(*named, draw(st.booleans()), draw(st.integers(0, 65535)), offset, whole)


@given(headers())
def test_a_header_is_read_as_it_was_written(header: Header) -> None:
    assert Header.unpack(header.pack()) == header


def hello_of(nonce: bytes) -> bytes:
    ids = [text.encode() for text in (RUN, THERE, HERE)]
    start = frames.HELLO.pack(frames.MAGIC, frames.VERSION, *map(len, ids), 0) + b"".join(ids)
    return start + KeyRing(secret=KEY).prove(nonce, start, NO_PIN)


@given(st.one_of(nearly(hello_of(bytes(16))), st.binary(max_size=900)))
def test_a_hello_without_the_proof_opens_nothing_and_at_most_873_bytes_of_it_are_read(first: bytes) -> None:
    async def body() -> None:
        ends = socket.socketpair()
        for end in ends:
            end.setblocking(False)
        here, there = (Link(end, ByteCounter()) for end in ends)
        try:
            await there.write(first)
            there.close()
            try:
                with patch.object(key_ring, "VIEW_DELAY", 0.001):
                    await frames.welcome(here, RUN, HERE, KeyRing(secret=KEY))
            except LinkBroken as error:
                assert str(error)
            else:
                raise AssertionError("who does not know the nonce was let in")
            assert here._meter.down <= 873
        finally:
            here.close()
            there.close()

    asyncio.run(body())


class Recorder:
    """A reduce that takes one payload of which it knows the size."""

    round = FENCE.round

    def __init__(self) -> None:
        self.whole: list[bytes] = []

    async def buffer_for(self, node: NodeId, header: Header) -> U8 | None:
        if header.length != PAYLOAD.size:
            raise LinkBroken(f"a payload of {header.length} bytes")
        return np.zeros(header.length, np.uint8)

    def arrived(self, node: NodeId, header: Header, payload: U8) -> None:
        self.whole.append(payload.tobytes())

    async def frame(self, node: NodeId, waiting: object) -> None:
        return None

    async def evidence(self, node: NodeId, kind: FrameKind, c: int) -> None: ...

    async def ask(self, node: NodeId, kind: FrameKind, c: int, size: int, exact: bool) -> None: ...
    def joined(self, node: NodeId) -> None: ...
    def spoiled(self, node: NodeId, sentence: str) -> None: ...
    def lost(self, node: NodeId, sentence: str) -> None: ...


async def nobody(node: NodeId, address: str, pin: Pin) -> Link:
    raise LinkBroken("nobody is there")


def received(data: bytes) -> list[bytes]:
    """The payloads that arrived over a link that carried this and then ended."""
    recorder = Recorder()

    async def body() -> None:
        ends = socket.socketpair()
        for end in ends:
            end.setblocking(False)
        here, there = (Link(end, ByteCounter()) for end in ends)
        links = PeerLinks(nobody, ByteCounter())
        links.begin(recorder)
        adopted = asyncio.create_task(links.adopt(THERE, here))
        try:
            await there.write(data)
        except LinkBroken:
            pass  # it had enough before the end
        there.close()
        await adopted
        links.end(recorder)
        await links.close()

    asyncio.run(body())
    return recorder.whole


def piece(start: int, end: int, packed: bool = False) -> bytes:
    of_all = (start, end) == (0, PAYLOAD.size)
    place = (0, 0) if of_all else (start, PAYLOAD.size)
    header = Header(FrameKind.SEALED, FENCE, 5, end - start, packed, 0, *place)
    return header.pack() + PAYLOAD[start:end].tobytes()


def cut_at(edges: list[int]) -> list[tuple[int, int]]:
    ends = sorted({0, PAYLOAD.size, *edges})
    return list(zip(ends, ends[1:], strict=False))


EDGES = st.lists(st.sampled_from([65_536, 66_000, 100_000, 131_072, 134_464]), max_size=2)


@given(st.lists(EDGES, min_size=1, max_size=3), st.randoms(use_true_random=False), st.integers(0, 3))
def test_of_pieces_in_any_order_sent_again_and_cut_otherwise_only_the_payload_arrives(
    cuts: list[list[int]], order: Random, lost: int
) -> None:
    pieces = [span for edges in cuts for span in cut_at(edges)]
    order.shuffle(pieces)
    sent = pieces[lost:]
    whole = received(b"".join(piece(*span) for span in sent))
    assert all(payload == PAYLOAD.tobytes() for payload in whole)
    covered = np.zeros(PAYLOAD.size, bool)
    for start, end in sent:
        covered[start:end] = True
    assert not whole or covered.all(), "it arrived without a part of it"
    assert len(whole) <= len(cuts)


SPOILED = st.sampled_from([i for i in range(frames.HEADER.size) if i not in OF_ROUND])


@given(EDGES, st.lists(st.tuples(st.integers(0, 2), SPOILED, st.integers(0, 255)), max_size=3))
def test_a_stream_whose_headers_were_spoiled_gives_whole_payloads_or_breaks(
    edges: list[int], changes: list[tuple[int, int, int]]
) -> None:
    pieces = [bytearray(piece(*span)) for span in cut_at(edges)]
    for number, at, value in changes:
        pieces[number % len(pieces)][at] = value
    assert all(len(payload) == PAYLOAD.size for payload in received(b"".join(pieces)))
