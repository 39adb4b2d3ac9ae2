"""One stream of reports to the coordinator, over which those of all queues travel; `ControlClient` opens the next.

Reports leave as they come, without waiting for the answers to those before them. The coordinator takes them one
after the other and answers in their order. One that it refuses ends the stream: the refusal is the answer to the
first that has none; what was sent behind it is to be sent again, as nobody knows whether it was taken.
"""

import asyncio
from collections import deque
from contextlib import suppress

import grpc

from atoll.comm.errors import Unreachable
from atoll.comm.proto import atoll_pb2 as pb
from atoll.comm.proto import atoll_pb2_grpc as rpc

ENDED = "the stream of reports ended"


class ReportStream:
    """An open stream of reports. It ends with a report that is refused or not answered in time, with the
    connection, and by `close`."""

    def __init__(self, stub: "rpc.CoordinatorAsyncStub") -> None:
        self._call: grpc.aio.StreamStreamCall[pb.ReportRequest, pb.Ack] = stub.Report()
        self._writing = asyncio.Lock()
        self._unanswered = deque[asyncio.Future[pb.Ack]]()
        self._reading = asyncio.create_task(self._read())

    @property
    def ended(self) -> bool:
        """Whether reports need another stream."""
        return self._reading.done() or self._call.done()

    async def send(self, report: pb.ReportRequest, timeout: float) -> pb.Ack:
        """Send a report, and return the answer to it. Raises `AioRpcError` for one that is refused, and
        `Unreachable` for one that may have been taken: where the stream ended, or no answer came in `timeout`
        seconds, with which the stream ends."""
        answer: asyncio.Future[pb.Ack] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(timeout):
                async with self._writing:
                    if self._reading.done():
                        raise Unreachable(ENDED)
                    self._unanswered.append(answer)
                    with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):  # `_read` hears why
                        await self._call.write(report)
                return await answer
        except TimeoutError:
            self.close()
            raise Unreachable(f"no answer to a report for {timeout:g} s") from None

    def close(self) -> None:
        """End the stream."""
        self._call.cancel()

    async def _read(self) -> None:
        """Hand each report its answer, until the stream ends."""
        why: Exception = Unreachable(ENDED)
        try:
            async for ack in self._call:
                if not self._unanswered:
                    break  # an answer to nothing
                if not (answer := self._unanswered.popleft()).done():
                    answer.set_result(ack)
        except grpc.aio.AioRpcError as refusal:
            why = refusal
        finally:
            self._call.cancel()
            for answer in self._unanswered:
                if not answer.done():
                    answer.set_exception(why)
                why = Unreachable(ENDED)
            self._unanswered.clear()
