"""The open streams of reports: one of each node, the newest; and how one of their reports is refused."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import grpc

from atoll.comm.ids import NodeId
from atoll.comm.proto import atoll_pb2 as pb

Task = asyncio.Task[object]


class ReportRefused(Exception):
    """A report that is refused; the stream goes on."""

    def __init__(self, code: grpc.StatusCode, sentence: str) -> None:
        super().__init__(sentence)
        self._code, self._sentence = code, sentence

    @property
    def ack(self) -> pb.Ack:
        """The answer to it."""
        return pb.Ack(status=self._code.value[0], reason=self._sentence)


class ReportContext:
    """The context of one report of a stream: what aborts a call of its own refuses this one report."""

    def __init__(self, context: grpc.aio.ServicerContext[object, object]) -> None:
        self._peer = context.peer()

    def peer(self) -> str:
        """From where it comes, as a call's context says it."""
        return self._peer

    async def abort(self, code: grpc.StatusCode, details: str = "") -> NoReturn:
        """Raises `ReportRefused`."""
        raise ReportRefused(code, details)


class ReportStreams:
    """The tasks that take the nodes' reports, each from one stream."""

    def __init__(self) -> None:
        self._tasks: dict[NodeId, Task] = {}
        self._ending = set[Task]()
        self._answering = set[Task]()

    @contextmanager
    def stream(self) -> Iterator[None]:
        """Take reports in this task, until the stream ends, or is ended here: that is no error."""
        task = _this_task()
        try:
            yield
        except asyncio.CancelledError:
            if task not in self._ending:
                raise
            task.uncancel()
        finally:
            self._ending.discard(task)
            for node in [n for n, other in self._tasks.items() if other is task]:
                del self._tasks[node]

    @contextmanager
    def answer(self) -> Iterator[None]:
        """Write an answer in this task. A stream that is to end meanwhile ends after it: gRPC cannot end one while
        it writes a message, and would leave it open for ever."""
        task = _this_task()
        self._answering.add(task)
        try:
            yield
        finally:
            self._answering.discard(task)
            if task in self._ending:
                task.cancel()

    def enter(self, node: NodeId) -> None:
        """Count this task's stream as the node's; an earlier one of the node ends."""
        task, before = _this_task(), self._tasks.get(node)
        if before is not task:
            self._tasks[node] = task
            if before is not None:
                self._end(before)

    def end(self) -> None:
        """End every stream."""
        for task in self._tasks.values():
            self._end(task)

    def _end(self, task: Task) -> None:
        self._ending.add(task)
        if task not in self._answering:
            task.cancel()


def _this_task() -> Task:
    task = asyncio.current_task()
    assert task is not None
    return task
