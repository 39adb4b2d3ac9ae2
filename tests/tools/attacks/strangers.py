"""What somebody can do who knows the addresses of a run and nothing else (and, of joins, has a token): processes
that do it until they are ended, and count what comes of it. Like those of `e2e.floods` they are nice: they stand
for other machines, and take no time from what is measured.
"""

import asyncio
import os
import socket
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import grpc
from attacks.tally import Tally
from e2e.floods import NICENESS, SPAWN, Address, sink
from grpc_health.v1 import health_pb2, health_pb2_grpc

from atoll.comm.descriptors import raise_limit
from atoll.comm.proto import atoll_pb2 as pb
from atoll.comm.proto import atoll_pb2_grpc as pb_grpc
from atoll.comm.proto.join_proof import prove_join
from atoll.comm.signatures import PrivateKey
from atoll.comm.transport.frames import GREETING, PROTOCOL

STREAMS_PER_SECOND, CHANNELS = 1_000.0, 8
IDLE, IDLE_ADDRESSES = 1_100, 11  # connections to each port, from so many addresses
TRICKLES, TRICKLE_SECONDS = 128, 1.0  # connections to each port, and from one byte of each to the next
KNOCKS_PER_SECOND = 840.0
REPLAYS_PER_SECOND = 50.0
JOINS_PER_SECOND = 200.0
IDLE_PAUSE, TRICKLE_PAUSE = 10.0, 2.0  # seconds until who was put out comes again
OPTIONS = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_reconnect_backoff_ms", 200)]


@dataclass(frozen=True)
class Aim:
    """Where a stranger goes, and what it has."""

    control: Address
    page: Address
    data: Address  # of an honest member
    run: str
    token: str  # of an invite; who is a stranger makes no use of it
    hello: bytes  # with which that member was dialled once

    @property
    def ports(self) -> dict[str, Address]:
        return {"control": self.control, "page": self.page, "data": self.data}

    def elsewhere(self, sink: Address) -> "Aim":
        """The same, at a port of nobody's."""
        return Aim(sink, sink, sink, self.run, self.token, self.hello)


Work = Callable[[Aim, Tally], Coroutine[Any, Any, None]]


@contextmanager
def stranger(word: str, aim: Aim, flag: Path, tally: Path) -> Iterator[None]:
    """A process that does this while the context lasts: to the run once the file `flag` is there, and before that
    to a port of nobody's, which costs this machine as much."""
    with sink() as port:
        process = SPAWN.Process(target=_work, args=(word, aim, aim.elsewhere(port), flag, tally), daemon=True)
        process.start()
        try:
            yield
        finally:
            process.kill()
            process.join()


def _work(word: str, aim: Aim, elsewhere: Aim, flag: Path, tally: Path) -> None:
    os.nice(NICENESS)
    raise_limit()
    asyncio.run(_in_turn(WORKS[word], aim, elsewhere, flag, tally))


async def _in_turn(work: Work, aim: Aim, elsewhere: Aim, flag: Path, tally: Path) -> None:
    async def do(where: Aim, counted: Tally, while_there: bool) -> None:
        working = asyncio.create_task(work(where, counted))
        while flag.exists() is while_there:
            await asyncio.sleep(0.05)
        working.cancel()
        await asyncio.wait([working])

    await do(elsewhere, Tally(tally.with_suffix(".elsewhere")), False)
    await do(aim, Tally(tally), True)


async def often(rate: float, once: Callable[[int], Coroutine[Any, Any, None]]) -> None:
    """So many a second; those that are due while as many are under way are left out."""
    under_way, began, made = set[asyncio.Task[None]](), time.monotonic(), 0
    while True:
        while made < int(rate * (time.monotonic() - began)):
            if len(under_way) < rate:
                under_way.add(task := asyncio.create_task(once(made)))
                task.add_done_callback(under_way.discard)
            made += 1
        await asyncio.sleep(0.05)


async def _connected(target: Address, source: str) -> socket.socket:
    """A connection from another address of this machine. Raises `OSError`."""
    sock = socket.socket()
    sock.setblocking(False)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    try:
        sock.bind((source, 0))
        async with asyncio.timeout(5):
            await asyncio.get_running_loop().sock_connect(sock, target)
    except (OSError, TimeoutError) as error:
        sock.close()
        raise OSError(str(error)) from None
    return sock


# At the control port


async def health(aim: Aim, tally: Tally) -> None:
    """Streams of health, from the address that members come from."""
    host, port = aim.control
    channels = [grpc.aio.insecure_channel(f"{host}:{port}", OPTIONS) for _ in range(CHANNELS)]
    stubs: list[Any] = [health_pb2_grpc.HealthStub(channel) for channel in channels]

    async def once(number: int) -> None:
        stream = stubs[number % CHANNELS].Watch(health_pb2.HealthCheckRequest(), timeout=30)
        tally.note((await stream.code()).name)

    await often(STREAMS_PER_SECOND, once)


def join_request(run: str, token: str, secret: str, key: PrivateKey) -> pb.JoinRequest:
    """A join by who has this key, under a session's secret if there is one."""
    request = pb.JoinRequest(protocol=PROTOCOL, run=run, token=token, session=secret)
    request.name, request.address = "again", "127.0.0.1:9"
    prove_join(request, key)
    return request


async def answer(channel: grpc.aio.Channel, request: pb.JoinRequest) -> str:
    """What becomes of a join, in a word."""
    stub: Any = pb_grpc.CoordinatorStub(channel)
    try:
        await stub.Join(request, timeout=5)
    except grpc.aio.AioRpcError as error:
        return error.code().name
    return "taken"


async def joins(aim: Aim, tally: Tally) -> None:
    """Joins by one key, that has a token, and nothing after them."""
    host, port = aim.control
    key = PrivateKey.generate()
    channels = [grpc.aio.insecure_channel(f"{host}:{port}", OPTIONS) for _ in range(3)]

    async def once(number: int) -> None:
        request = join_request(aim.run, aim.token, "", key)
        tally.note(await answer(channels[number % len(channels)], request))

    await often(JOINS_PER_SECOND, once)


# At all ports


async def _hold(name: str, target: Address, source: str, period: float, pause: float, tally: Tally) -> None:
    """A connection, and another one `pause` seconds after it was closed. `period`: seconds between two bytes; 0:
    none."""
    loop = asyncio.get_running_loop()
    while True:
        with suppress(OSError):
            sock = await _connected(target, source)
            with sock:
                tally.note(f"opened at {name}")
                tally.note(f"open at {name}")
                began, writing = loop.time(), asyncio.create_task(_trickle(sock, period))
                try:
                    while await loop.sock_recv(sock, 1 << 16):
                        pass
                finally:
                    writing.cancel()
                    tally.note(f"open at {name}", -1)
                    tally.largest(f"longest at {name}, ms", int(1e3 * (loop.time() - began)))
        await asyncio.sleep(pause)


async def _trickle(sock: socket.socket, period: float) -> None:
    with suppress(OSError):
        while period:
            await asyncio.sleep(period)
            await asyncio.get_running_loop().sock_sendall(sock, b"P")


async def _hold_all(aim: Aim, tally: Tally, count: int, addresses: int, period: float, pause: float) -> None:
    sources = cycle(f"127.0.1.{1 + i}" for i in range(addresses))
    async with asyncio.TaskGroup() as group:
        for i in range(count):
            for name, target in aim.ports.items():
                group.create_task(_hold(name, target, next(sources), period, pause, tally))
            if i % 20 == 19:
                await asyncio.sleep(0.02)


async def idle(aim: Aim, tally: Tally) -> None:
    """Connections that say nothing."""
    await _hold_all(aim, tally, IDLE, IDLE_ADDRESSES, 0.0, IDLE_PAUSE)


async def trickle(aim: Aim, tally: Tally) -> None:
    """Connections that say a byte a second, from two addresses."""
    await _hold_all(aim, tally, TRICKLES, 2, TRICKLE_SECONDS, TRICKLE_PAUSE)


# At a data port


async def knocks(aim: Aim, tally: Tally) -> None:
    """Connections that wait for the greeting, and end."""

    async def once(_: int) -> None:
        tally.note("connections")
        with suppress(OSError, TimeoutError):
            with await _connected(aim.data, "127.0.2.1") as sock:
                async with asyncio.timeout(0.5):
                    greeted = await asyncio.get_running_loop().sock_recv(sock, 1)
                tally.note("greeted", len(greeted))

    await often(KNOCKS_PER_SECOND, once)


async def replays(aim: Aim, tally: Tally) -> None:
    """The hello of a member, which somebody has recorded."""
    loop = asyncio.get_running_loop()

    async def once(_: int) -> None:
        word = "not greeted"
        with suppress(OSError, TimeoutError):
            with await _connected(aim.data, "127.0.2.2") as sock:
                async with asyncio.timeout(10):
                    if len(await loop.sock_recv(sock, GREETING.size)) == GREETING.size:
                        word = "no answer"
                        await loop.sock_sendall(sock, aim.hello)
                        answer = b""
                        while more := await loop.sock_recv(sock, 4096):
                            answer += more
                        word = "refused" if b"does not know the run's key" in answer else "another answer"
        tally.note(word)

    await often(REPLAYS_PER_SECOND, once)


async def nothing(aim: Aim, tally: Tally) -> None:
    """No harm."""


WORKS: dict[str, Work] = {
    "nothing": nothing,
    "health": health,
    "idle": idle,
    "trickle": trickle,
    "knocks": knocks,
    "replays": replays,
    "joins": joins,
}
