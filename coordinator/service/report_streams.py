"""The open streams of reports: one of each node, the newest."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from atoll.comm.ids import NodeId

Task = asyncio.Task[object]


class ReportStreams:
    """The tasks that take the nodes' reports, each from one stream."""

    def __init__(self) -> None:
        self._tasks: dict[NodeId, Task] = {}
        self._ending = set[Task]()

    @contextmanager
    def stream(self) -> Iterator[None]:
        """Take reports in this task, until the stream ends, or is ended here: that is no error."""
        task = asyncio.current_task()
        assert task is not None
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

    def enter(self, node: NodeId) -> None:
        """Count this task's stream as the node's; an earlier one of the node ends."""
        task, before = asyncio.current_task(), self._tasks.get(node)
        assert task is not None
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
        task.cancel()
