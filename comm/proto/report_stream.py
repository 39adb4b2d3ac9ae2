"""One stream of reports to the coordinator, over which those of all kinds travel; who reports opens the next one
when it has ended.

Reports leave as they come, without waiting for the answers to those before them. The coordinator takes them one
after the other and answers in their order: an answer says that its report was taken, or with which status and
sentence it is refused, as a call of its own would be.
"""

import asyncio
from collections import deque

import grpc

from atoll.comm.errors import Unreachable
from atoll.comm.proto import atoll_pb2 as pb
from atoll.comm.proto import atoll_pb2_grpc as rpc

ENDED = "the stream of reports ended"
CODES = {code.value[0]: code for code in grpc.StatusCode}


class ReportStream:
    """An open stream of reports. It ends with its connection, with a report that is not answered in time, and by
    `close`; whether what has no answer by then was taken nobody knows."""

    def __init__(self, stub: "rpc.CoordinatorAsyncStub") -> None:
        self._call: grpc.aio.StreamStreamCall[pb.ReportRequest, pb.Ack] = stub.Report()
        self._unsent = asyncio.Queue[pb.ReportRequest]()
        self._unanswered = deque[asyncio.Future[pb.Ack]]()
        self._writing = asyncio.create_task(self._write())
        self._reading = asyncio.create_task(self._read())
        self._reading.add_done_callback(self._end)

    @property
    def ended(self) -> bool:
        """Whether reports need another stream."""
        return self._reading.done() or self._call.done()

    async def send(self, report: pb.ReportRequest, timeout: float) -> pb.Ack:
        """Send a report, and return the answer to it. Raises `AioRpcError` for one that is refused, or may have
        been taken before the connection broke, `Unreachable` for one that may have been taken before the stream
        ended otherwise: as it does where no answer comes in `timeout` seconds."""
        if self._reading.done():
            raise Unreachable(ENDED)
        answer: asyncio.Future[pb.Ack] = asyncio.get_running_loop().create_future()
        self._unanswered.append(answer)
        self._unsent.put_nowait(report)
        try:
            async with asyncio.timeout(timeout):
                ack = await answer
        except TimeoutError:
            self.close()
            raise Unreachable(f"no answer to a report for {timeout:g} s") from None
        if ack.status:
            nothing = grpc.aio.Metadata()
            code = CODES.get(ack.status, grpc.StatusCode.UNKNOWN)
            raise grpc.aio.AioRpcError(code, nothing, nothing, details=ack.reason)
        return ack

    def close(self) -> None:
        """End the stream."""
        self._reading.cancel()

    async def _write(self) -> None:
        """Write reports as they come; where that fails, `_read` hears why."""
        try:
            while True:
                await self._call.write(await self._unsent.get())
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            pass

    async def _read(self) -> None:
        """Hand each report its answer, until the stream ends; an answer to nothing ends it, too, and so does one
        that cannot be read, in whose place gRPC gives none."""
        async for ack in self._call:
            if ack is None or not self._unanswered:
                return
            if not (answer := self._unanswered.popleft()).done():
                answer.set_result(ack)

    def _end(self, reading: asyncio.Task[None]) -> None:
        """Let nobody wait who has no answer."""
        self._writing.cancel()
        self._call.cancel()
        error = None if reading.cancelled() else reading.exception()
        for answer in self._unanswered:
            if not answer.done():
                answer.set_exception(error or Unreachable(ENDED))
