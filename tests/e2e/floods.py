"""Strangers who know an address and nothing else: processes that send it connections and calls at a fixed rate."""

import asyncio
import multiprocessing
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import cycle
from typing import Any

import grpc

from atoll.comm.proto import atoll_pb2 as pb
from atoll.comm.proto import atoll_pb2_grpc as pb_grpc

Address = tuple[str, int]
HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS = b"\0\0\0\4\0\0\0\0\0"
PING = b"\0\0\10\6\0\0\0\0\0" + bytes(8)
PINGS = HTTP2 + SETTINGS + 100 * PING
FIRST_WORDS = (b"", b"GET /api/run HTTP/1.1\r\nHost: x\r\n\r\n", PINGS, bytes(4096), b"\x16\3\1")
KEPT_OPEN = 200  # connections of one process that say nothing more
BATCHES_PER_SECOND = 20
NICENESS = 10  # strangers stand for other machines: they take no time from what is measured
SPAWN = multiprocessing.get_context("spawn")


def connections(targets: Sequence[Address], source: str, rate: float, sent: Any) -> None:
    """Open `rate` connections a second, in turn to each target, with some first words; count them in `sent`."""
    os.nice(NICENESS)
    opened: list[socket.socket] = []
    words, where = cycle(FIRST_WORDS), cycle(targets)
    for batch in _batches(rate):
        for _ in range(batch):
            sock = socket.socket()
            sock.setblocking(False)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            with suppress(OSError):
                sock.bind((source, 0))
                sock.connect_ex(next(where))
                opened.append(sock)
        for sock in opened[-batch:]:
            with suppress(OSError):
                sock.send(next(words))
        for sock in opened[:-KEPT_OPEN]:
            sock.close()
        del opened[:-KEPT_OPEN]
        sent.value += batch


def calls(targets: Sequence[Address], source: str, rate: float, sent: Any) -> None:
    """Make `rate` calls a second to the first target: joins with a wrong token, streams of views and of health,
    methods that are not there. They come from 127.0.0.1."""
    os.nice(NICENESS)
    asyncio.run(_calls(targets[0], rate, sent))


def _kinds(channel: grpc.aio.Channel) -> list[Callable[[], Any]]:
    stub: Any = pb_grpc.CoordinatorStub(channel)

    def raw(method: str, message: bytes = b"") -> Callable[[], Any]:
        call: Any = channel.unary_unary(method)
        return lambda: call(message, timeout=1.0)

    return [
        lambda: stub.Join(pb.JoinRequest(run="demo"), timeout=1.0),
        lambda: stub.Heartbeat(pb.HeartbeatRequest(), timeout=1.0),
        raw("/grpc.health.v1.Health/Check"),
        raw("/grpc.health.v1.Health/Watch"),
        raw("/none.of/These", bytes(1000)),
    ]


async def _calls(target: Address, rate: float, sent: Any) -> None:
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_reconnect_backoff_ms", 200)]
    channels = [grpc.aio.insecure_channel(f"{target[0]}:{target[1]}", options) for _ in range(8)]
    kinds = [kind for channel in channels for kind in _kinds(channel)]
    turn, waiting = cycle(kinds), set[asyncio.Task[None]]()

    async def one(call: Any) -> None:
        with suppress(grpc.aio.AioRpcError):
            await call()

    for batch in _batches(rate, pause=False):
        for _ in range(batch):
            waiting.add(task := asyncio.create_task(one(next(turn))))
            task.add_done_callback(waiting.discard)
        sent.value += batch
        await asyncio.sleep(1 / BATCHES_PER_SECOND)


def _batches(rate: float, pause: bool = True) -> Iterator[int]:
    begun, done = time.monotonic(), 0
    while True:
        due = int((time.monotonic() - begun) * rate)
        yield max(min(due - done, int(rate)), 0)
        done = due
        if pause:
            time.sleep(1 / BATCHES_PER_SECOND)


@contextmanager
def flood(targets: Sequence[Address], rate: float) -> Iterator[Any]:
    """Four processes that send `rate` connections and calls a second together; yields what counts them."""
    sent = SPAWN.Value("q", 0, lock=False)
    kinds = (connections, connections, connections, calls)
    processes = [
        SPAWN.Process(target=kind, args=(targets, f"127.0.0.{i}", rate / 4, sent), daemon=True)
        for i, kind in enumerate(kinds, 2)
    ]
    for process in processes:
        process.start()
    try:
        yield sent
    finally:
        for process in processes:
            process.kill()
            process.join()


@contextmanager
def sink() -> Iterator[Address]:
    """A port that resets what connects: where a flood costs this machine as much, and nobody minds."""
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as server:
        process = SPAWN.Process(target=_reset_all, args=(server,), daemon=True)
        process.start()
        try:
            yield server.getsockname()
        finally:
            process.kill()
            process.join()


def _reset_all(server: socket.socket) -> None:
    os.nice(NICENESS)
    while True:
        sock, _ = server.accept()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        sock.close()


def follow(words: Any, committed_at: Any) -> None:
    """Note when each round was ordered, by what the simulated members tell."""
    while True:
        word = words.get()
        if isinstance(word, int):
            committed_at.append(time.monotonic())
        elif isinstance(word, str):
            committed_at.append(float("nan"))  # a member failed: no round is as long as another then
