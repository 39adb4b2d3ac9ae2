"""The open streams of reports: one of each node, the newest."""

import asyncio

from atoll.comm.ids import NodeId


class ReportStreams:
    """The tasks that read the nodes' reports, each from one stream."""

    def __init__(self) -> None:
        self._tasks: dict[NodeId, asyncio.Task[object]] = {}

    def enter(self, node: NodeId) -> None:
        """Count the stream of this task as the node's; an earlier one of the node ends."""
        task, before = asyncio.current_task(), self._tasks.get(node)
        if before is not task and task is not None:
            self._tasks[node] = task
            if before is not None:
                before.cancel()

    def leave(self) -> None:
        """Forget the stream of this task, which ends."""
        task = asyncio.current_task()
        for node in [n for n, other in self._tasks.items() if other is task]:
            del self._tasks[node]

    def end(self) -> None:
        """End every stream."""
        for task in self._tasks.values():
            task.cancel()
