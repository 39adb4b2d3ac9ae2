"""Streams of reports over a real connection, before a coordinator of a few lines."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

import grpc
import pytest

from atoll.comm.errors import Unreachable
from atoll.comm.proto import atoll_pb2 as pb
from atoll.comm.proto import atoll_pb2_grpc as rpc
from atoll.comm.proto.report_stream import ENDED, ReportStream

SOON = 20.0  # seconds; nothing here takes longer than a moment on an idle machine
Answers = AsyncIterator[pb.Ack]
Reports = AsyncIterator[pb.ReportRequest]
Context = grpc.aio.ServicerContext[Any, Any]
Handler = Callable[[Reports, Context], Answers]


@asynccontextmanager
async def stream(
    handler: Handler, encode: Callable[[Any], bytes] = pb.Ack.SerializeToString
) -> AsyncIterator[ReportStream]:
    """A stream to a coordinator that takes reports as `handler` does."""
    server = grpc.aio.server()
    report = grpc.stream_stream_rpc_method_handler(handler, pb.ReportRequest.FromString, encode)
    calls = grpc.method_handlers_generic_handler("atoll.v1.Coordinator", {"Report": report})
    server.add_generic_rpc_handlers((calls,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel, asyncio.timeout(SOON):
        stub: Any = rpc.CoordinatorStub(channel)
        try:
            yield ReportStream(stub)
        finally:
            await server.stop(None)


def report(round_: int) -> pb.ReportRequest:
    return pb.ReportRequest(state_reported=pb.StateReported(round=round_))


async def error_of(answer: Awaitable[pb.Ack]) -> Exception:
    with pytest.raises((grpc.aio.AioRpcError, Unreachable)) as error:
        await answer
    return error.value


def test_reports_leave_before_those_ahead_of_them_are_answered_and_get_their_own_answers() -> None:
    async def take(reports: Reports, context: Context) -> Answers:
        read = [await anext(reports) for _ in range(3)]
        for one in read:
            yield pb.Ack(version=one.state_reported.round)

    async def story() -> None:
        async with stream(take) as reports:
            answers = await asyncio.gather(*(reports.send(report(k), SOON) for k in range(3)))
            assert [answer.version for answer in answers] == [0, 1, 2]

    asyncio.run(story())


def test_who_does_not_wait_for_its_answer_takes_nobody_elses() -> None:
    async def story() -> None:
        answering = asyncio.Event()

        async def take(reports: Reports, context: Context) -> Answers:
            async for one in reports:
                await answering.wait()
                yield pb.Ack(version=one.state_reported.round)

        async with stream(take) as reports:
            sending = [asyncio.create_task(reports.send(report(k), SOON)) for k in range(2)]
            while len(reports._unanswered) < 2:
                await asyncio.sleep(0.01)
            sending[0].cancel()
            answering.set()
            assert (await sending[1]).version == 1 and not reports.ended

    asyncio.run(story())


def test_a_report_that_is_refused_is_told_so_and_those_behind_it_are_taken() -> None:
    async def take(reports: Reports, context: Context) -> Answers:
        async for one in reports:
            status = 3 * (one.state_reported.round == 1)
            yield pb.Ack(status=status, reason="no such round" if status else "")

    async def story() -> None:
        async with stream(take) as reports:
            sending = [asyncio.create_task(reports.send(report(k), SOON)) for k in range(3)]
            assert await sending[0] == await sending[2] == pb.Ack()
            refused = await error_of(sending[1])
            assert isinstance(refused, grpc.aio.AioRpcError)
            assert (refused.code(), refused.details()) == (grpc.StatusCode.INVALID_ARGUMENT, "no such round")
            assert not reports.ended

    asyncio.run(story())


def test_where_the_stream_ends_nobody_is_left_waiting() -> None:
    async def take(reports: Reports, context: Context) -> Answers:
        yield pb.Ack(version=(await anext(reports)).state_reported.round)

    async def story() -> None:
        async with stream(take) as reports:
            sending = [asyncio.create_task(reports.send(report(k), SOON)) for k in range(3)]
            assert (await sending[0]).version == 0
            assert len([await error_of(answer) for answer in sending[1:]]) == 2
            assert reports.ended and str(await error_of(reports.send(report(3), SOON))) == ENDED

    asyncio.run(story())


def test_a_stream_that_does_not_answer_in_time_is_given_up() -> None:
    async def story() -> None:
        async def take(reports: Reports, context: Context) -> Answers:
            await asyncio.Event().wait()
            yield pb.Ack()

        async with stream(take) as reports:
            waiting = asyncio.create_task(reports.send(report(0), SOON))
            await asyncio.sleep(0)
            assert "for 0.1 s" in str(await error_of(reports.send(report(1), 0.1)))
            assert str(await error_of(waiting)) == ENDED and reports.ended

    asyncio.run(story())


def test_where_nobody_listens_the_report_fails_at_once() -> None:
    async def story() -> None:
        async with grpc.aio.insecure_channel("127.0.0.1:1") as channel, asyncio.timeout(SOON):
            stub: Any = rpc.CoordinatorStub(channel)
            error = await error_of(ReportStream(stub).send(report(0), 10 * SOON))
            assert isinstance(error, grpc.aio.AioRpcError) and error.code() is grpc.StatusCode.UNAVAILABLE

    asyncio.run(story())


def test_a_stream_that_is_closed_before_it_is_connected_leaves_nobody_waiting() -> None:
    async def story() -> None:
        with socket.create_server(("127.0.0.1", 0)) as mute:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{mute.getsockname()[1]}") as channel:
                stub: Any = rpc.CoordinatorStub(channel)
                reports = ReportStream(stub)
                waiting = [asyncio.create_task(reports.send(report(k), SOON)) for k in range(2)]
                while not reports._unanswered:
                    await asyncio.sleep(0.01)
                reports.close()
                assert {str(await error_of(answer)) for answer in waiting} == {ENDED}

    asyncio.run(story())


def test_an_answer_to_nothing_ends_the_stream() -> None:
    async def take(reports: Reports, context: Context) -> Answers:
        await anext(reports)
        for _ in range(3):
            yield pb.Ack()
        await asyncio.Event().wait()

    async def story() -> None:
        async with stream(take) as reports:
            await reports.send(report(0), SOON)
            while not reports.ended:
                await asyncio.sleep(0.01)

    asyncio.run(story())


def test_an_answer_that_is_none_ends_the_stream() -> None:
    async def take(reports: Reports, context: Context) -> Answers:
        async for _ in reports:
            yield cast(Any, b"\xff")

    async def story() -> None:
        async with stream(take, lambda garbage: garbage) as reports:
            assert str(await error_of(reports.send(report(0), SOON))) == ENDED and reports.ended

    asyncio.run(story())
