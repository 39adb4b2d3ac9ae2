import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from atoll.comm.config.run import MembersConfig, RunConfig
from atoll.node.config import NodeConfig, TrainerSpec
from atoll.node.daemon import trainer_supervisor
from atoll.node.daemon.trainer_supervisor import TrainerFailed, TrainerSupervisor, end_launcher
from atoll.node.trainer_channel import Failed, Hello, ToDaemon

NOBODY = 1 << 30  # a process id that there is not


class Process:
    """A launcher that ends when it is told to."""

    pid = NOBODY

    def __init__(self) -> None:
        self.over = asyncio.Event()
        self.on_end: Callable[[], Any] | None = None

    async def wait(self) -> int:
        await self.over.wait()
        on_end, self.on_end = self.on_end, None
        if on_end is not None:
            on_end()
        return 0

    def kill(self) -> None:
        self.over.set()


class Writer:
    def __init__(self) -> None:
        self.closed = False

    def close(self) -> None:
        self.closed = True


def connection(*messages: ToDaemon) -> tuple[asyncio.StreamReader, Writer]:
    """Of a trainer that says this and is gone."""
    reader = asyncio.StreamReader()
    for message in messages:
        reader.feed_data(msgspec.json.encode(message) + b"\n")
    reader.feed_eof()
    return reader, Writer()


def test_a_trainer_that_connects_when_it_was_given_up_is_not_taken_for_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        heard: list[ToDaemon] = []
        spec = TrainerSpec(RunConfig(members=MembersConfig(stall=60.0)), NodeConfig(), "", "", "")
        supervisor = TrainerSupervisor(spec, tmp_path, heard.append, lambda: None)
        processes: asyncio.Queue[Process] = asyncio.Queue()

        async def start(*command: str, **how: Any) -> Process:
            processes.put_nowait(process := Process())
            return process

        def connect(to: tuple[asyncio.StreamReader, Writer]) -> Any:
            return supervisor._accept(to[0], cast(Any, to[1]))

        monkeypatch.setattr(asyncio, "create_subprocess_exec", start)
        first = asyncio.create_task(supervisor._live_once(tmp_path))
        (await processes.get()).kill()
        await first
        await connect(late := connection())
        second = asyncio.create_task(supervisor._live_once(tmp_path))
        process = await processes.get()
        await connect(connection(hello := Hello(NOBODY, 1, 1, ())))
        process.kill()
        await second
        assert heard == [hello] and late[1].closed

    asyncio.run(asyncio.wait_for(story(), 60))


def test_what_a_rank_beside_the_first_failed_of_ends_the_node_with_its_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        spec = TrainerSpec(RunConfig(members=MembersConfig(stall=60.0)), NodeConfig(), "", "", "")
        supervisor = TrainerSupervisor(spec, tmp_path, lambda _: None, lambda: None)
        process = Process()

        async def start(*command: str, **how: Any) -> Process:
            for messages in ((Hello(NOBODY, 2, 1, ()),), (Failed("rank 1 has no memory"),)):
                reader, writer = connection(*messages)
                await supervisor._accept(reader, cast(Any, writer))
            process.kill()
            return process

        monkeypatch.setattr(asyncio, "create_subprocess_exec", start)
        with pytest.raises(TrainerFailed, match="rank 1 has no memory"):
            await supervisor._live_once(tmp_path)

    asyncio.run(asyncio.wait_for(story(), 60))


def test_a_rank_that_outlives_its_launcher_and_says_nothing_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        spec = TrainerSpec(RunConfig(members=MembersConfig(stall=60.0)), NodeConfig(), "", "", "")
        supervisor = TrainerSupervisor(spec, tmp_path, lambda _: None, lambda: None)
        process, silent = Process(), Writer()

        async def start(*command: str, **how: Any) -> Process:
            await supervisor._accept(*cast(Any, connection(Hello(NOBODY, 2, 1, ()))))
            await supervisor._accept(asyncio.StreamReader(), cast(Any, silent))
            process.kill()
            return process

        monkeypatch.setattr(asyncio, "create_subprocess_exec", start)
        monkeypatch.setattr(trainer_supervisor, "LAST_WORD_SECONDS", 0.0)
        await supervisor._live_once(tmp_path)
        assert silent.closed

    asyncio.run(asyncio.wait_for(story(), 60))


def test_a_node_that_stops_at_the_moment_in_which_its_trainer_ends_stops() -> None:
    async def story() -> None:
        process = Process()
        ending = asyncio.create_task(end_launcher(cast(Any, process)))
        process.on_end = ending.cancel
        await asyncio.sleep(0)
        process.kill()
        with pytest.raises(asyncio.CancelledError):
            await ending

    asyncio.run(asyncio.wait_for(story(), 60))
