import asyncio
import socket
from collections.abc import Awaitable, Callable

import pytest

from atoll.comm.ids import NO_PIN, Epoch, Incarnation, NodeId, Round, RunId
from atoll.comm.plan import Fence
from atoll.comm.transport import connection, frames
from atoll.comm.transport.connection import ByteCounter, Link, LinkBroken, LinkClosed
from atoll.comm.transport.frames import FrameKind, Header
from atoll.comm.transport.key_ring import KeyRing

RUN, A, B, KEY = RunId("run"), NodeId("a"), NodeId("b"), b"k" * 32
FENCE = Fence(Incarnation(1 << 40), Epoch(2), Round(1 << 33), 4)
Talk = Callable[[Link, Link], Awaitable[None]]


def between_two_links(talk: Talk) -> None:
    """Run `talk` with both ends of a connection."""

    async def body() -> None:
        ends = socket.socketpair()
        for end in ends:
            end.setblocking(False)
        links = [Link(end, ByteCounter()) for end in ends]
        try:
            await talk(links[0], links[1])
        finally:
            for side in links:
                side.close()

    asyncio.run(body())


def test_a_header_has_the_documented_bytes() -> None:
    header = Header(FrameKind.SEALED, FENCE, chunk=7, length=9, packed=True, place=513, offset=11, whole=20)
    expected = b"\x03\x01\x01\x02" + b"".join(
        value.to_bytes(size, "little")
        for value, size in [(7, 4), (1 << 40, 8), (2, 8), (1 << 33, 8), (4, 4), (9, 4), (11, 4), (20, 4)]
    )
    assert header.pack() == expected and len(expected) == frames.HEADER.size == 48
    assert Header.unpack(expected) == header


def test_what_is_no_piece_travels_as_the_whole() -> None:
    header = Header.unpack(Header(FrameKind.SEALED, FENCE, chunk=7, length=9).pack())
    assert (header.offset, header.whole, header.total) == (0, 0, 9)


def test_a_frame_of_unknown_kind_is_refused() -> None:
    with pytest.raises(LinkBroken, match="unknown kind 99"):
        Header.unpack(b"\x63" + bytes(frames.HEADER.size - 1))


def test_a_piece_beyond_the_end_of_its_payload_is_refused() -> None:
    with pytest.raises(LinkBroken, match="a piece of 5 bytes from 6 on, of 10"):
        Header.unpack(Header(FrameKind.SEALED, FENCE, length=5, offset=6, whole=10).pack())


def test_frames_arrive_as_they_were_sent_and_every_byte_is_counted() -> None:
    payload = bytes(range(256)) * 10_000

    async def talk(here: Link, there: Link) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(frames.send(here, Header(FrameKind.SEALED, FENCE, 1, len(payload)), payload))
            header = await frames.receive(there, 1)
            place = bytearray(header.length)
            await there.read_into(memoryview(place))
        assert header == Header(FrameKind.SEALED, FENCE, 1, len(payload)) and place == payload
        assert here._meter.up == there._meter.down == frames.HEADER.size + len(payload)

    between_two_links(talk)


def test_the_hello_proves_the_key_without_showing_it() -> None:
    async def talk(here: Link, there: Link) -> None:
        sent: list[bytes] = []
        write = here.write

        async def recorded(*buffers: bytes | memoryview) -> None:
            sent.extend(bytes(b) for b in buffers)
            await write(*buffers)

        here.write = recorded  # type: ignore[method-assign]
        async with asyncio.TaskGroup() as group:
            accepted = group.create_task(frames.welcome(there, RUN, B, KeyRing(secret=KEY)))
            group.create_task(frames.greet(here, RUN, A, B, KeyRing(secret=KEY)))
        assert accepted.result() == A
        assert KEY not in b"".join(sent)

    between_two_links(talk)


@pytest.mark.parametrize(
    ("run", "to", "key", "sentence"),
    [
        (RUN, B, b"x" * 32, "does not know the run's key"),
        (RunId("other"), B, KEY, "belongs to run 'other'"),
        (RUN, NodeId("c"), KEY, "looks for c, this is b"),
    ],
)
def test_a_hello_with_another_key_or_run_or_receiver_is_refused(
    run: RunId, to: NodeId, key: bytes, sentence: str
) -> None:
    async def talk(here: Link, there: Link) -> None:
        greeting = asyncio.create_task(frames.greet(here, run, A, to, KeyRing(secret=key)))
        with pytest.raises(LinkBroken, match=sentence):
            await frames.welcome(there, RUN, B, KeyRing(secret=KEY))
        await greeting

    between_two_links(talk)


def test_a_hello_in_the_name_of_who_hears_it_is_refused() -> None:
    async def talk(here: Link, there: Link) -> None:
        greeting = asyncio.create_task(frames.greet(here, RUN, B, B, KeyRing(secret=KEY)))
        with pytest.raises(LinkBroken, match="it says that it is b, and this is"):
            await frames.welcome(there, RUN, B, KeyRing(secret=KEY))
        await greeting

    between_two_links(talk)


def test_a_recorded_hello_opens_nothing() -> None:
    async def talk(here: Link, there: Link) -> None:
        hello = frames.HELLO.pack(frames.MAGIC, frames.VERSION, 3, 1, 1, 0) + b"runab"
        old = KeyRing(secret=KEY).prove(b"an older nonce..", hello, NO_PIN)
        await here.write(hello + old)
        with pytest.raises(LinkBroken, match="key"):
            await frames.welcome(there, RUN, B, KeyRing(secret=KEY))

    between_two_links(talk)


@pytest.mark.parametrize(
    "first",
    [
        b"GET / HTTP/1.1\r\nHost: example\r\n\r\n",
        bytes(1000),
        b"ATOL\x01" + b"\xff" * 50,
        b"ATOL\x09" + b"\xff" * 50,
    ],
)
def test_other_protocols_and_versions_are_refused_at_the_first_bytes(first: bytes) -> None:
    async def talk(here: Link, there: Link) -> None:
        await here.write(first)
        with pytest.raises(
            LinkBroken, match="first bytes|speaks version [19] of .*, this node speaks 8: use one release"
        ):
            await frames.welcome(there, RUN, B, KeyRing(secret=KEY))

    between_two_links(talk)


@pytest.mark.parametrize(
    ("greeting", "sentence"),
    [
        (b"SSH-2.0-OpenSSH_9.6\r\nxxxx", "no data plane of this software"),
        (
            frames.GREETING.pack(frames.MAGIC, 1, bytes(16)),
            "speaks version 1 .*, this node speaks 8: use one release",
        ),
    ],
)
def test_what_listens_there_and_is_no_data_plane_of_this_version_is_told_apart(
    greeting: bytes, sentence: str
) -> None:
    async def talk(here: Link, there: Link) -> None:
        await there.write(greeting[: frames.GREETING.size])
        with pytest.raises(LinkBroken, match=sentence):
            await frames.greet(here, RUN, A, B, KeyRing(secret=KEY))

    between_two_links(talk)


def test_nobody_is_welcome_before_this_node_has_the_key() -> None:
    async def talk(here: Link, there: Link) -> None:
        greeting = asyncio.create_task(frames.greet(here, RUN, A, B, KeyRing()))
        with pytest.raises(LinkBroken, match="has not joined its run yet"):
            await frames.welcome(there, RUN, B, KeyRing())
        await greeting

    between_two_links(talk)


def test_an_end_between_frames_differs_from_an_end_within_one() -> None:
    async def whole(here: Link, there: Link) -> None:
        here.close()
        with pytest.raises(LinkClosed):
            await frames.receive(there, 1)

    async def half(here: Link, there: Link) -> None:
        await here.write(bytes(frames.HEADER.size - 1))
        here.close()
        with pytest.raises(LinkBroken, match="in mid-frame") as caught:
            await frames.receive(there, 1)
        assert not isinstance(caught.value, LinkClosed)

    between_two_links(whole)
    between_two_links(half)


def test_a_silent_peer_ends_a_wait_at_its_deadline() -> None:
    async def talk(here: Link, there: Link) -> None:
        with pytest.raises(LinkBroken, match="sent nothing for 0.01 s"):
            await frames.receive(there, 0.01)

    between_two_links(talk)


def test_a_peer_that_takes_nothing_ends_a_send_at_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "STALL_TIMEOUT", 0.05)

    async def talk(here: Link, there: Link) -> None:
        with pytest.raises(LinkBroken, match="took no byte for 0.05 s"):
            await frames.send(here, Header(FrameKind.DATA, FENCE, length=1 << 24), bytes(1 << 24))

    between_two_links(talk)


def test_a_farewell_is_heard_even_if_its_receiver_was_still_sending() -> None:
    async def talk(here: Link, there: Link) -> None:
        async with asyncio.TaskGroup() as group:
            sending = group.create_task(
                frames.send(here, Header(FrameKind.DATA, FENCE, length=1 << 22), bytes(1 << 22))
            )
            group.create_task(frames.farewell(there, FrameKind.REFUSED, "not today"))
            header = await frames.receive(here, 5)
            assert header.kind is FrameKind.REFUSED and await frames.sentence(here, header) == "not today"
            await sending
            here.close()

    between_two_links(talk)


def test_a_refusal_too_long_to_be_a_sentence_is_not_read() -> None:
    async def talk(here: Link, there: Link) -> None:
        with pytest.raises(LinkBroken, match="a refusal of 4294967295 bytes"):
            await frames.sentence(here, frames.unfenced(FrameKind.REFUSED, length=0xFFFFFFFF))

    between_two_links(talk)


@pytest.mark.parametrize(
    ("address", "parts"),
    [
        ("127.0.0.1:4000", ("127.0.0.1", 4000)),
        ("host.example:0", ("host.example", 0)),
        ("[::1]:4000", ("::1", 4000)),
        ("[fe80::1%eth0]:65535", ("fe80::1%eth0", 65535)),
        (":4000", ("", 4000)),
    ],
)
def test_addresses_are_host_and_port_with_ipv6_in_brackets(address: str, parts: tuple[str, int]) -> None:
    assert frames.parse_address(address) == parts
    assert frames.format_address(*parts) == address


@pytest.mark.parametrize(
    "address", ["", "host", "host:", "host:http", "host:65536", "::1:4000", "host:-1", "host:４"]
)
def test_what_is_no_address_is_refused_with_the_remedy(address: str) -> None:
    with pytest.raises(ValueError, match=r"write host:port, or \[host\]:port"):
        frames.parse_address(address)
