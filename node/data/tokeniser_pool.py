"""Processes that tokenise units, and give back what they made of them in the order of the units.

Each is an interpreter of its own behind a pipe, led by a thread here, and has one unit at a time: results are the
same for any number of processes. A process ends when its pipe does, so that none survives a build that is killed.
"""

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any, Self

import msgspec

from atoll.comm.errors import ResourceError
from atoll.node.data.tokenise import TokenisedUnit, Tokeniser, TokeniserConfig
from atoll.node.data.units import MAX_RECORD_BYTES, UNIT_BYTES, Unit, UnitRead

UNITS_AHEAD = 2  # for each process: one in it, one for when it is done
EXIT_SECONDS = 10.0  # that a process has to end in once its pipe is closed


class TokeniserPool:
    """`count` processes, while the context lasts."""

    def __init__(self, config: TokeniserConfig, count: int) -> None:
        self._config, self._count = config, count
        self._local = threading.local()
        self._processes = list[tuple[Any, Connection]]()
        self._threads = ThreadPoolExecutor(count, "tokenise")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process, _connection in self._processes:
            process.terminate()  # before the threads are waited for: they wait for it
        self._threads.shutdown(cancel_futures=True)
        for process, connection in self._processes:
            connection.close()  # one that was just being started ends with it
            process.join(EXIT_SECONDS)

    def tokenise(self, units: Iterable[UnitRead]) -> Iterator[tuple[UnitRead, TokenisedUnit]]:
        """Each unit with its tokens, in order. Bounded: units in processes and results that wait for an earlier
        one are two for each process, or one where they are as large as a record may be. Raises `ResourceError` if
        a process ends by itself."""
        waiting = deque[tuple[UnitRead, Future[TokenisedUnit]]]()
        size, limit = 0, max(MAX_RECORD_BYTES, UNITS_AHEAD * self._count * UNIT_BYTES)
        for read in units:
            while waiting and (len(waiting) >= UNITS_AHEAD * self._count or size + read.size > limit):
                first, result = waiting.popleft()
                size -= first.size
                yield first, result.result()
            waiting.append((read, self._threads.submit(self._ask, read.unit)))
            size += read.size
        for first, result in waiting:
            yield first, result.result()

    def _ask(self, unit: Unit) -> TokenisedUnit:
        if not hasattr(self._local, "connection"):
            self._local.connection = self._start()
        try:
            self._local.connection.send_bytes(msgspec.msgpack.encode(unit))
            return msgspec.msgpack.decode(self._local.connection.recv_bytes(), type=TokenisedUnit)
        except (EOFError, OSError) as error:
            raise ResourceError(
                "a process that tokenises ended by itself, as when memory runs out; start again with fewer "
                "--workers: the build goes on where it was"
            ) from error

    def _start(self) -> Connection:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, self._config), daemon=True)
        process.start()
        theirs.close()
        self._processes.append((process, ours))
        return ours


def _serve(connection: Connection, config: TokeniserConfig) -> None:
    """A process's life: a unit in, its tokens out, until the pipe ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's goes to all: who reads the units ends it all
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tokeniser, units = Tokeniser(config), msgspec.msgpack.Decoder(Unit)
    while True:
        try:
            unit = units.decode(connection.recv_bytes())
            connection.send_bytes(msgspec.msgpack.encode(tokeniser(unit)))
        except (EOFError, OSError):
            return
