import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from atoll.comm.config.run import MembersConfig, RunConfig
from atoll.comm.incidents import IncidentKind
from atoll.node.config import NodeConfig, TrainerSpec
from atoll.node.daemon import trainer_supervisor
from atoll.node.daemon.trainer_supervisor import TrainerFailed, TrainerSupervisor, end_launcher
from atoll.node.trainer_channel import Failed, Hello, LogLine, LoopLeft, Preparing, Ready, ToDaemon, Train

NOBODY = 1 << 30  # a process id that there is not


class Process:
    """A launcher that ends when it is told to."""

    pid, returncode = NOBODY, None

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

    def write(self, message: bytes) -> None:
        pass

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


@pytest.mark.parametrize(
    "command, sentence",
    [
        (
            ("sh", "-c", "echo no data; exit 3"),
            "ended with exit code 3 and had never called `participate`: no",
        ),
        (
            ("sh", "-c", "kill -SEGV $$"),
            "ended with signal SIGSEGV and had never called `participate`: it",
        ),
        (("true",), "the command `true` ended with exit code 0 and had never called `participate`"),
        (("/no/such/program", "x"), "cannot start the command /no/such/program: No such file or directory"),
    ],
)
def test_a_command_that_never_takes_part_is_named_with_how_it_ended(
    command: tuple[str, ...], sentence: str, tmp_path: Path
) -> None:
    """A real launcher, and no second try."""

    async def story() -> None:
        spec = TrainerSpec(RunConfig(), NodeConfig(), command=command)
        await TrainerSupervisor(spec, tmp_path, lambda _: None, lambda: None).run()

    with pytest.raises(TrainerFailed) as raised:
        asyncio.run(asyncio.wait_for(story(), 120))
    assert sentence in str(raised.value)
    assert "trainer.log" in str(raised.value) or command[0] == "/no/such/program"


def test_a_command_that_is_slow_to_take_part_is_waited_for_and_then_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(trainer_supervisor, "START_SECONDS", 0.01)
    monkeypatch.setattr(trainer_supervisor, "COMMAND_START_SECONDS", 0.01)
    monkeypatch.setattr(trainer_supervisor, "STOP_SECONDS", 0.01)

    async def story() -> None:
        run = RunConfig(members=MembersConfig(stall=0.01))
        spec = TrainerSpec(run, NodeConfig(), command=("sleep", "1000"))
        await TrainerSupervisor(spec, tmp_path, lambda _: None, lambda: None).run()

    with pytest.raises(TrainerFailed, match="`sleep 1000` was ended and had never called `participate`"):
        asyncio.run(asyncio.wait_for(story(), 120))
    assert "`sleep 1000` has not begun to take part after 0 s" in caplog.text


def test_a_trainer_that_prepares_and_says_nothing_any_more_is_ended_and_one_that_takes_orders_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(trainer_supervisor, "PREPARATION_SECONDS", 0.05)
    lives: list[tuple[ToDaemon, ...]] = [
        (Preparing(), LogLine("half of it is here")),  # and then it hangs
        (Preparing(), Hello(NOBODY, 1, 1, ())),
    ]
    heard: list[ToDaemon] = []

    async def story() -> None:
        spec = TrainerSpec(RunConfig(), NodeConfig(max_restarts=1), command=("python", "train.py"))
        supervisor = TrainerSupervisor(spec, tmp_path, heard.append, lambda: None)
        readers: list[asyncio.StreamReader] = []

        async def start(*command: str, **how: Any) -> Process:
            reader = asyncio.StreamReader()
            for message in lives[len(readers)]:
                reader.feed_data(msgspec.json.encode(message) + b"\n")
            readers.append(reader)
            await supervisor._accept(reader, cast(Any, Writer()))
            (process := Process()).kill()
            return process

        monkeypatch.setattr(asyncio, "create_subprocess_exec", start)
        running = asyncio.create_task(supervisor.run())
        while len(heard) < 4:
            await asyncio.sleep(0.01)
        finished, _ = await asyncio.wait([running], timeout=0.5)  # ten times as long as one that prepares has
        assert not finished
        readers[1].feed_eof()
        with pytest.raises(TrainerFailed, match="the trainer died 2 times"):
            await running

    asyncio.run(asyncio.wait_for(story(), 60))
    assert heard == [*lives[0], *lives[1]]
    assert "`python train.py` prepares and has said nothing for 0 s: it is ended" in caplog.text


def test_a_script_that_leaves_its_loop_is_started_again_as_often_as_the_node_allows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """However many rounds it has finished before."""

    async def story() -> None:
        lives = 0
        spec = TrainerSpec(RunConfig(), NodeConfig(max_restarts=2), command=("python", "train.py"))
        supervisor = TrainerSupervisor(spec, tmp_path, lambda _: None, lambda: None)

        async def start(*command: str, **how: Any) -> Process:
            nonlocal lives
            lives += 1
            messages = Hello(NOBODY, 1, 1, ()), Ready(lives, 1, 2.0, 4), LoopLeft()
            await supervisor._accept(*cast(Any, connection(*messages)))
            (process := Process()).kill()
            return process

        monkeypatch.setattr(asyncio, "create_subprocess_exec", start)
        with pytest.raises(TrainerFailed, match="left its training loop while the run goes on, 3 times: let it"):
            await supervisor.run()
        assert lives == 3

    asyncio.run(asyncio.wait_for(story(), 60))
    assert caplog.text.count("`python train.py` left its training loop while the run goes on: it starts") == 2


def test_a_round_that_was_under_way_when_a_trainer_died_is_none_that_the_next_one_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a script that dies in every round, and goes on from its copy, is started again for ever."""

    async def story(finished: int) -> None:
        spec = TrainerSpec(RunConfig(), NodeConfig(max_restarts=2), command=("python", "train.py"))
        round_ = 0

        def on_message(message: ToDaemon) -> None:
            nonlocal round_
            if not isinstance(message, Hello):
                round_ += 1
            supervisor.send(Train(round_, 1, 1, 1, 0, 1, ((0, 1),)))

        supervisor = TrainerSupervisor(spec, tmp_path, on_message, lambda: None)

        async def start(*command: str, **how: Any) -> Process:
            messages = (Ready(round_ + i, 1, 2.0, 4) for i in range(finished))
            await supervisor._accept(*cast(Any, connection(Hello(NOBODY, 1, 1, ()), *messages)))
            (process := Process()).kill()
            return process

        async def go_on(seconds: float) -> None:
            assert round_ < 20, "it is started again for ever"

        monkeypatch.setattr(asyncio, "create_subprocess_exec", start)
        monkeypatch.setattr(asyncio, "sleep", go_on)
        await supervisor.run()

    with pytest.raises(TrainerFailed, match="died 3 times without finishing a round"):
        asyncio.run(asyncio.wait_for(story(1), 60))
    with pytest.raises(AssertionError, match="for ever"):
        asyncio.run(asyncio.wait_for(story(2), 60))


def test_the_signal_that_ended_a_trainer_is_named_with_what_it_said_last(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def story() -> None:
        spec = TrainerSpec(
            RunConfig(), NodeConfig(max_restarts=0), command=("sh", "-c", "echo ranks 0 1; kill -9 $$")
        )
        deaths: list[tuple[IncidentKind, int]] = []
        supervisor = TrainerSupervisor(
            spec, tmp_path, lambda _: None, lambda: None, lambda kind, code: deaths.append((kind, code))
        )
        supervisor._took_part = True
        try:
            await supervisor.run()
        finally:
            assert deaths == [(IncidentKind.TRAINER_DIED, -9)]

    with pytest.raises(TrainerFailed, match=r"round: it was killed by SIGKILL; it last said: ranks 0 1 \(see "):
        asyncio.run(asyncio.wait_for(story(), 120))


def test_a_script_that_may_take_its_time_to_end_is_ended_when_its_operator_says_so_again() -> None:
    async def story() -> None:
        process, hurried = Process(), asyncio.Event()
        ending = asyncio.create_task(end_launcher(cast(Any, process), 3600.0, hurried))
        await asyncio.sleep(0)
        assert not process.over.is_set()
        hurried.set()
        await ending
        assert process.over.is_set(), "it was killed"

    asyncio.run(asyncio.wait_for(story(), 60))
