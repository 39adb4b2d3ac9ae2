"""An honest node whose daemon notes what its calls to the coordinator take, and the hellos with which it dials
others, for somebody to record."""

import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from atoll.comm.cli import main as atoll
from atoll.comm.ids import NO_PIN, NodeId, Pin
from atoll.comm.proto import atoll_pb2_grpc
from atoll.comm.proto.report_stream import ReportStream
from atoll.comm.transport import frames

CALLS = HEARTBEAT, REPORT = ("heartbeat", "report")


def hello_file(folder: Path, node: str) -> Path:
    """The bytes with which a member was dialled last."""
    return folder / f"hello-{node}"


def main(calls: str, hellos: str) -> None:
    """`atoll`, in a process that appends to the file `calls` when each call began (seconds since 1970), what it
    took (seconds) and what it was, and keeps hellos in the folder `hellos`."""
    with open(calls, "a", buffering=1) as out:
        _clock_calls(lambda began, took, what: out.write(f"{began:.6f} {took:.6f} {what}\n"))
        _record_hellos(Path(hellos))
        atoll()


def _clock_calls(note: Callable[[float, float, str], object]) -> None:
    def clocked(call: Callable[..., Awaitable[Any]], what: str) -> Callable[..., Awaitable[Any]]:
        async def timed(*arguments: Any, **options: Any) -> Any:
            began, start = time.time(), time.monotonic()
            try:
                return await call(*arguments, **options)
            finally:
                note(began, time.monotonic() - start, what)

        return timed

    stubs: Any = atoll_pb2_grpc
    honest = stubs.CoordinatorStub

    def clocked_stub(channel: Any) -> Any:
        stub = honest(channel)
        stub.Heartbeat = clocked(stub.Heartbeat, HEARTBEAT)
        return stub

    stubs.CoordinatorStub = clocked_stub
    stream: Any = ReportStream
    stream.send = clocked(stream.send, REPORT)


def _record_hellos(folder: Path) -> None:
    greet: Any = frames.greet

    async def recorded(link: Any, run: Any, me: Any, to: NodeId, keys: Any, pin: Pin = NO_PIN) -> None:
        write = link.write

        async def record(*buffers: bytes | memoryview) -> None:
            hello_file(folder, to).write_bytes(b"".join(bytes(buffer) for buffer in buffers))
            await write(*buffers)

        link.write = record
        try:
            await greet(link, run, me, to, keys, pin)
        finally:
            link.write = write

    dialling: Any = frames
    dialling.greet = recorded
