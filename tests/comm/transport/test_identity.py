"""Who a node is on the data plane: nobody is let in as another member, or when it is none any more, over real
sockets, with TLS and without."""

import asyncio
import socket
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from serving_planes import KEY, NEW, RUN, SEALED, A, B, Books

from atoll.comm.ids import NO_PIN, NodeId, PublicKey
from atoll.comm.signatures import PrivateKey
from atoll.comm.transport import data_plane, frames, key_ring
from atoll.comm.transport.certificates import load_or_make
from atoll.comm.transport.connection import ByteCounter, Link, LinkBroken, LinkClosed
from atoll.comm.transport.data_plane import DataPlane
from atoll.comm.transport.fetch_client import DonorLost, FetchClient, FetchItem
from atoll.comm.transport.frames import FrameKind
from atoll.comm.transport.key_ring import KeyRing, RunKey
from atoll.comm.transport.tls import TlsContexts

EVE = NodeId("eve")
FIRST, SECOND = RunKey(0, KEY), RunKey(1, b"s" * 32)
both_ways = pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])


class Machine:
    """A machine with its own key and certificate, and its data plane."""

    def __init__(self, plane: DataPlane, public: PublicKey) -> None:
        self.plane, self.public = plane, public

    async def fetches(self, of: "Machine") -> bytes:
        return await self.plane.fetch(
            of.plane.node, of.plane.address, FetchItem.SEALED, NEW, 0, len(SEALED), pin=of.plane.pin
        )

    def says_it_is(self, node: NodeId) -> None:
        """Everything but another key: what a member knows of the others it can say."""
        self.plane.identify(node, self.plane.keys.key)


Machines = dict[NodeId, Machine]


def admit(machines: Machines, *names: NodeId, key: RunKey = FIRST) -> None:
    """Views that say that these are the members come to all of them."""
    members = {name: machines[name].public for name in names}
    for name in names:
        machines[name].plane.admit(members, key)


@asynccontextmanager
async def started(folder: Path, tls: bool, *names: NodeId) -> AsyncIterator[Machines]:
    machines = Machines()
    try:
        for name in names:
            (folder / name).mkdir()
            own = load_or_make(folder / name)
            key, contexts = own.signing_key(), TlsContexts(own) if tls else None
            plane = await DataPlane.start("127.0.0.1:0", RUN, name, KEY, Books(), tls=contexts, identity=key)
            machines[name] = Machine(plane, key.public)
        yield machines
    finally:
        for machine in machines.values():
            await machine.plane.close()


def run(body: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(60):
            await body
        assert asyncio.all_tasks() == {asyncio.current_task()}, "tasks are left"

    asyncio.run(bounded())


@pytest.fixture(autouse=True)
def _views_come_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_ring, "VIEW_DELAY", 0.05)


@both_ways
def test_a_member_that_dials_as_another_is_refused(tls: bool, tmp_path: Path) -> None:
    async def body() -> None:
        async with started(tmp_path, tls, A, B, EVE) as machines:
            admit(machines, A, B, EVE)
            a, b, eve = (machines[name] for name in (A, B, EVE))
            assert await eve.fetches(a) == SEALED
            eve.says_it_is(B)
            with pytest.raises(DonorLost, match="it refused: it is not b: it does not have its key"):
                await eve.fetches(a)
            assert await b.fetches(a) == SEALED

    run(body())


@both_ways
def test_a_member_that_dials_as_another_gets_no_link_of_a_reduce(tls: bool, tmp_path: Path) -> None:
    async def body() -> None:
        async with started(tmp_path, tls, A, B, EVE) as machines:
            admit(machines, A, B, EVE)
            a, eve = machines[A].plane, machines[EVE]
            eve.says_it_is(B)
            link = await eve.plane.dial(A, a.address, a.pin)
            await frames.send(link, frames.unfenced(FrameKind.LINK))
            answer = await frames.receive(link, 5)
            assert answer.kind is FrameKind.REFUSED and "does not have its key" in await frames.sentence(
                link, answer
            )
            assert not a.peers.links()
            link.close()

    run(body())


@both_ways
def test_who_is_evicted_is_refused_and_what_it_had_open_is_closed(tls: bool, tmp_path: Path) -> None:
    async def body() -> None:
        async with started(tmp_path, tls, A, B, EVE) as machines:
            admit(machines, A, B, EVE)
            a, b, eve = (machines[name] for name in (A, B, EVE))
            link = await eve.plane.dial(A, a.plane.address, a.plane.pin)
            await frames.send(link, frames.unfenced(FrameKind.LINK))
            other = await b.plane.dial(A, a.plane.address, a.plane.pin)
            await frames.send(other, frames.unfenced(FrameKind.LINK))
            async with FetchClient(eve.plane, A, a.plane.address, a.plane.pin) as fetcher:
                assert await fetcher.fetch(FetchItem.SEALED, NEW, 0, len(SEALED)) == SEALED
                while {node for node, _ in a.plane.peers.links()} != {B, EVE}:
                    await asyncio.sleep(0)
                admit(machines, A, B)
                with pytest.raises(LinkBroken):
                    await link.read(1, 5)
                with pytest.raises(DonorLost):
                    await fetcher.fetch(FetchItem.SEALED, NEW, 0, len(SEALED))
            with pytest.raises(DonorLost, match="it refused: eve is no member of the run"):
                await eve.fetches(a)
            assert {node for node, _ in a.plane.peers.links()} == {B}
            assert await b.fetches(a) == SEALED
            link.close()
            other.close()

    run(body())


@both_ways
def test_after_an_expulsion_the_key_before_is_good_for_members_alone(tls: bool, tmp_path: Path) -> None:
    async def body() -> None:
        async with started(tmp_path, tls, A, B, EVE) as machines:
            admit(machines, A, B, EVE)
            a, b, eve = (machines[name] for name in (A, B, EVE))
            a.plane.admit({A: a.public, B: b.public}, SECOND)  # the view of b has not come yet
            assert await b.fetches(a) == SEALED
            with pytest.raises(DonorLost, match="eve is no member"):
                await eve.fetches(a)
            admit(machines, A, B, key=SECOND)
            assert await b.fetches(a) == SEALED

    run(body())


def test_the_key_before_is_not_good_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_ring, "KEY_OVERLAP", 0.0)

    async def body() -> None:
        async with started(tmp_path, False, A, B) as machines:
            admit(machines, A, B)
            a, b = machines[A], machines[B]
            a.plane.admit({A: a.public, B: b.public}, SECOND)
            with pytest.raises(DonorLost, match="key number 0 is not the one in force"):
                await b.fetches(a)

    run(body())


@both_ways
def test_who_dials_before_the_view_that_names_it_has_come_is_let_in_when_it_comes(
    tls: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_ring, "VIEW_DELAY", 30.0)

    async def body() -> None:
        async with started(tmp_path, tls, A, B) as machines:
            a, b = machines[A], machines[B]
            fetching = asyncio.create_task(b.fetches(a))
            while not a.plane._strangers:  # it is here
                await asyncio.sleep(0)
            a.plane.admit({B: b.public}, FIRST)
            assert await fetching == SEALED
            b.plane.identify(B, SECOND)  # and here a key that is new
            fetching = asyncio.create_task(b.fetches(a))
            while not a.plane._strangers:
                await asyncio.sleep(0)
            a.plane.admit({B: b.public}, SECOND)
            assert await fetching == SEALED

    run(body())


def test_before_the_first_view_nobody_is_let_in(tmp_path: Path) -> None:
    async def body() -> None:
        async with started(tmp_path, False, A, B) as machines:
            with pytest.raises(DonorLost, match="b is no member of the run"):
                await machines[B].fetches(machines[A])

    run(body())


async def heard(link: Link) -> bytes:
    """The greeting of the plane at the other end: its nonce."""
    nonce: bytes = frames.GREETING.unpack(await link.read(frames.GREETING.size))[2]
    return nonce


async def connected(plane: DataPlane) -> Link:
    sock = socket.socket()
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, frames.parse_address(plane.address))
    return Link(sock, ByteCounter())


async def refusal(link: Link) -> str:
    answer = await frames.receive(link, 5)
    assert answer.kind is FrameKind.REFUSED
    sentence = await frames.sentence(link, answer)
    with pytest.raises(LinkClosed):
        await link.read(1, 5)
    link.close()
    return sentence


def test_a_recorded_hello_opens_nothing_not_even_with_its_signature(tmp_path: Path) -> None:
    async def body() -> None:
        async with started(tmp_path, False, A, B) as machines:
            admit(machines, A, B)
            a, b = machines[A].plane, machines[B].plane
            recorded = bytearray()
            link = await connected(a)
            write = link.write

            async def record(*buffers: bytes | memoryview) -> None:
                for buffer in buffers:
                    recorded.extend(buffer)
                await write(*buffers)

            link.write = record  # type: ignore[method-assign]
            await frames.greet(link, RUN, B, A, b.keys)
            await frames.send(link, frames.unfenced(FrameKind.LINK))
            while not a.peers.links():
                await asyncio.sleep(0)
            link.close()
            again = await connected(a)
            await heard(again)
            await again.write(bytes(recorded))
            assert await refusal(again) == "it does not know the run's key"

    run(body())


def test_a_member_cannot_use_the_hello_that_it_is_dialled_with_at_a_third_node(tmp_path: Path) -> None:
    """Eve shows b the nonce that a has given her, and passes on what b says to it."""

    async def body() -> None:
        async with started(tmp_path, False, A, B, EVE) as machines:
            admit(machines, A, B, EVE)
            to_a = await connected(machines[A].plane)
            nonce = await heard(to_a)
            with socket.create_server(("127.0.0.1", 0)) as server:
                server.setblocking(False)
                address = frames.format_address(*server.getsockname())
                dialling = asyncio.create_task(machines[B].plane.dial(EVE, address))
                accepted = Link((await asyncio.get_running_loop().sock_accept(server))[0], ByteCounter())
                await accepted.write(frames.GREETING.pack(frames.MAGIC, frames.VERSION, nonce))
                lengths = len(RUN) + len(B) + len(EVE)
                await to_a.write(await accepted.read(frames.HELLO.size + lengths + key_ring.PROOF_BYTES))
                assert await refusal(to_a) == "it looks for eve, this is a"
                (await dialling).close()
                accepted.close()

    run(body())


def test_a_proof_is_of_its_nonce_its_certificate_its_hello_and_its_sender() -> None:
    key, other = PrivateKey.generate(), PrivateKey.generate()
    here, there = KeyRing(PrivateKey.generate(), KEY), KeyRing(key, KEY)
    here.change_members({B: key.public, EVE: other.public})

    async def body() -> None:
        proof = there.prove(b"nonce", b"hello", NO_PIN)

        async def judged(nonce: bytes, hello: bytes, pin: Any, sender: NodeId) -> str:
            return await here.refusal(nonce, hello, pin, proof, 0, sender)

        assert await judged(b"nonce", b"hello", NO_PIN, B) == ""
        assert "run's key" in await judged(b"another", b"hello", NO_PIN, B)
        assert "run's key" in await judged(b"nonce", b"another", NO_PIN, B)
        assert "not b" in await judged(b"nonce", b"hello", "p" * 52, B)
        assert "not eve" in await judged(b"nonce", b"hello", NO_PIN, EVE)
        assert "no member" in await judged(b"nonce", b"hello", NO_PIN, A)

    asyncio.run(body())


def test_a_member_has_a_few_connections_and_costs_others_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_plane, "MAX_LINKS_PER_MEMBER", 3)

    async def body() -> None:
        async with started(tmp_path, False, A, B, EVE) as machines:
            admit(machines, A, B, EVE)
            a, b, eve = (machines[name].plane for name in (A, B, EVE))

            async def opened(by: DataPlane) -> Link:
                link = await by.dial(A, a.address)
                await frames.send(link, frames.unfenced(FrameKind.GET_SEALED, NEW))
                answer = await frames.receive(link, 5)
                assert await link.read(answer.length) == SEALED
                return link

            mine = await opened(b)
            hers = [await opened(eve) for _ in range(5)]
            assert sum(link.path() is not None for link in a._accepted) == 4
            for given_up in hers[:2]:
                with pytest.raises(LinkBroken):
                    await given_up.read(1, 5)
            for link in (mine, *hers[2:]):
                await frames.send(link, frames.unfenced(FrameKind.GET_SEALED, NEW))
                assert (await frames.receive(link, 5)).length == len(SEALED)
            for link in (mine, *hers):
                link.close()

    run(body())


def test_strangers_without_the_runs_key_cost_no_verification(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def verify(*_: object) -> bool:
        raise AssertionError("a signature of a stranger was looked at")

    monkeypatch.setattr(key_ring, "verify", verify)

    async def body() -> None:
        async with started(tmp_path, False, A, B) as machines:
            admit(machines, A, B)
            machines[B].plane.identify(B, RunKey(0, b"x" * 32))
            with pytest.raises(DonorLost, match="it does not know the run's key"):
                await machines[B].fetches(machines[A])

    run(body())


async def invented(name: str, plane: DataPlane, keys: KeyRing) -> str:
    """What who knows the run's key is told under such a name; empty: nothing, it is not even greeted."""
    try:
        sock = await connection_from("127.0.0.2", plane)
    except OSError:
        return ""
    link = Link(sock, ByteCounter())
    try:
        await frames.greet(link, RUN, NodeId(name), A, keys)
        await frames.send(link, frames.unfenced(FrameKind.LINK))
        answer = await frames.receive(link, 30)
        return await frames.sentence(link, answer)
    except LinkBroken:
        return ""
    finally:
        link.close()


async def connection_from(address: str, plane: DataPlane) -> socket.socket:
    """A connection to a plane from another address of this machine."""
    sock = socket.socket()
    sock.setblocking(False)
    sock.bind((address, 0))
    try:
        await asyncio.get_running_loop().sock_connect(sock, frames.parse_address(plane.address))
    except OSError:
        sock.close()
        raise
    return sock


@pytest.mark.long
def test_1024_links_under_invented_names_are_none_and_members_have_theirs(tmp_path: Path) -> None:
    """By one who knows the run's key, from an address of its own."""

    async def body() -> None:
        async with started(tmp_path, False, A, B) as machines:
            admit(machines, A, B)
            a, b = machines[A], machines[B]
            keys, told = KeyRing(PrivateKey.generate(), KEY), set[str]()
            for first in range(0, 1024, 64):
                batch = (invented(f"x{i}", a.plane, keys) for i in range(first, first + 64))
                told.update(*[await asyncio.gather(*batch)])
                assert await b.fetches(a) == SEALED
            assert not a.plane.peers.links()
            assert all("is no member of the run" in sentence for sentence in told if sentence) and len(told) > 500

    run(body())


def test_840_connections_a_second_are_answered_seldom_and_members_come_in(tmp_path: Path) -> None:
    """Of one address that proves nothing: from the 513th on 20 a second are greeted."""

    async def body() -> None:
        loop, greeted = asyncio.get_running_loop(), 0
        async with started(tmp_path, False, A, B) as machines:
            admit(machines, A, B)
            a, b = machines[A], machines[B]

            async def stranger() -> bool:
                with suppress(OSError), await connection_from("127.0.0.2", a.plane) as sock:
                    return bool(await loop.sock_recv(sock, 1))
                return False

            began = loop.time()
            for _ in range(20):
                greeted += sum(await asyncio.gather(*(stranger() for _ in range(42))))
                assert await b.fetches(a) == SEALED
            rate = data_plane.STRANGER_RATE
            assert greeted <= rate.burst + rate.per_second * (loop.time() - began) + 1

    run(body())
