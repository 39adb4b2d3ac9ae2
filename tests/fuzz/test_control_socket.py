"""Whatever is written to a daemon's control socket, it answers the next one."""

import asyncio
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from atoll.comm.errors import Unreachable
from atoll.node.daemon import control_socket

TOO_LONG = b"s" * (1 << 17)  # beyond what asyncio reads as one line


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.one_of(st.binary(max_size=80), st.just(TOO_LONG), st.just(TOO_LONG + b"\n")))
def test_any_request_is_answered_or_hung_up_on_and_nothing_is_left_unhandled(tmp_path: Path, asked: bytes) -> None:
    unhandled: list[dict[str, Any]] = []

    async def body() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: unhandled.append(context))
        async with control_socket.serve(tmp_path, lambda: {"phase": "inner"}, lambda: None):
            reader, writer = await asyncio.open_unix_connection(str(tmp_path / control_socket.NAME))
            writer.write(asked)
            writer.write_eof()
            try:
                await reader.read()
            except ConnectionError:
                pass
            writer.close()
            answer = await asyncio.to_thread(control_socket.ask, tmp_path, "status")
            assert answer == {"phase": "inner"}

    asyncio.run(body())
    assert not unhandled


@pytest.mark.parametrize("answered", [b"", b"{}\n", b"[]\n", b"1\n", b"\xff\n", b"[" * 20_000 + b"\n"])
def test_an_answer_that_is_none_is_said_in_a_sentence(tmp_path: Path, answered: bytes) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(answered)
        writer.close()

    async def body() -> None:
        with closing(await asyncio.start_unix_server(answer, str(tmp_path / control_socket.NAME))):
            with pytest.raises(Unreachable, match="gives no answer"):
                await asyncio.to_thread(control_socket.ask, tmp_path, "status")

    asyncio.run(body())
