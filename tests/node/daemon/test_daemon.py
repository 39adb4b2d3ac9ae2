import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from accountants import accountant

from atoll.comm.config.run import RunConfig
from atoll.comm.errors import AtollError
from atoll.comm.invite import Invite
from atoll.comm.proto import atoll_pb2 as pb
from atoll.node.config import NodeConfig
from atoll.node.daemon import pulse
from atoll.node.daemon.daemon import Daemon
from atoll.node.daemon.state_dir import JoinOptions
from atoll.node.state_machine import effects
from atoll.node.state_machine.state import At, Idle, State, Training
from atoll.node.trainer_channel import BadArithmetic, Hello, Preparing, Progress, Train


def test_a_trainer_that_dies_while_state_0_is_read_has_it_read_no_second_time() -> None:
    async def story() -> None:
        daemon = Daemon(Invite("there:7", "reef", "token"), NodeConfig(), JoinOptions(Path(), "", "", "ada", 0.0))
        begun, read = 0, asyncio.Event()

        async def begin(progress: Callable[[float], None]) -> None:
            nonlocal begun
            begun += 1
            await read.wait()

        daemon._member = cast(
            Any, SimpleNamespace(run=RunConfig(init_from="s3://a-slow-one"), reports=None, accountant=accountant())
        )
        daemon._loop = cast(Any, SimpleNamespace(load_initial=begin))
        async with asyncio.TaskGroup() as daemon._tasks:
            for _ in range(2):  # the second time for a trainer that was started again
                daemon._act(effects.OrderInitialisation())
                await asyncio.sleep(0)
            assert begun == 1
            read.set()

    asyncio.run(asyncio.wait_for(story(), 60))


FIGURES: dict[str, Any] = {
    "tokens_per_s": 5000.0,
    "mfu": 0.25,
    "data_wait": 0.125,
    "gradient_norm": 0.5,
    "learning_rate": 0.001,
    "device_bytes": 3 << 30,
}


def test_the_figures_of_the_trainer_are_in_the_heartbeat_and_in_the_status(tmp_path: Path) -> None:
    """Speed, utilisation and waiting are of a trainer that takes steps; the others stay known."""

    async def story() -> None:
        config = NodeConfig(upload=8.0, threads=3)
        daemon = Daemon(Invite("there:7", "reef", "token"), config, JoinOptions(tmp_path, "", "", "ada", 0.0))
        beats = asyncio.Queue[pb.HeartbeatRequest]()
        peers = SimpleNamespace(links=lambda: [("n2", 1), ("n2", 2), ("n3", 3)])
        plane = SimpleNamespace(bytes_up=1, bytes_down=2, peers=peers)
        control = SimpleNamespace(heartbeat=beats.put, away=0.0)
        member = SimpleNamespace(
            plane=plane,
            control=control,
            reports=SimpleNamespace(),
            me="n1",
            penalty="",
            search=SimpleNamespace(words=""),
            accountant=accountant(),
        )
        daemon._member, daemon._heartbeat = cast(Any, member), 60.0
        daemon._state = State(trainer=Training(4, ((0, 8),), True))
        daemon._on_trainer(Progress(4, 7, 2.5, host_bytes=5 << 30, **FIGURES))
        beating = asyncio.create_task(daemon._heartbeats())
        beat = await beats.get()
        assert (beat.round, beat.inner_step, beat.loss, beat.trainer_rss_bytes) == (4, 7, 2.5, 5 << 30)
        assert {name: getattr(beat, name) for name in FIGURES} == FIGURES
        status = daemon.status()
        assert {name: status[name] for name in FIGURES} == FIGURES
        assert (status["peers"], status["threads"], status["trouble"]) == (2, 3, "")
        told = {"upload": 8.0, "download": 0.0, "disk": 0.0, "hours": "", "threads": 3}
        assert {key: status["limits"][key] for key in told} == told and status["paused"] == ""
        assert status["state"] == status["phase"] and status["reason"] == "waits for the coordinator"
        daemon._state = State(trainer=Idle())
        daemon._beat.set()
        beat = await beats.get()
        assert beat.tokens_per_s == 5000, "it idles between two short rounds"
        daemon._pulse.said_at = time.monotonic() - pulse.SPEED_SECONDS
        daemon._beat.set()
        beat = await beats.get()
        assert (beat.tokens_per_s, beat.mfu, beat.data_wait, beat.gradient_norm) == (0, 0, 0, 0.5)
        beating.cancel()

    asyncio.run(asyncio.wait_for(story(), 60))


def test_an_unknown_utilisation_is_none_in_the_status(tmp_path: Path) -> None:
    daemon = Daemon(Invite("there:7", "reef", "t"), NodeConfig(), JoinOptions(tmp_path, "", "", "ada", 0.0))
    plane = SimpleNamespace(bytes_up=1, bytes_down=2, peers=SimpleNamespace(links=list))
    daemon._member = cast(
        Any,
        SimpleNamespace(
            plane=plane,
            control=SimpleNamespace(away=0.0),
            me="n1",
            penalty="",
            search=SimpleNamespace(words=""),
            accountant=accountant(),
        ),
    )
    daemon._on_trainer(Progress(4, 7, 2.5, 100.0))
    assert daemon.status()["mfu"] is None and daemon.status()["tokens_per_s"] == 100


def test_what_a_trainer_prepares_is_shown_until_it_takes_orders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = Daemon(Invite("there:7", "reef", "t"), NodeConfig(), JoinOptions(tmp_path, "", "", "ada", 0.0))
    plane = SimpleNamespace(bytes_up=1, bytes_down=2, peers=SimpleNamespace(links=list))
    daemon._member = cast(
        Any,
        SimpleNamespace(
            plane=plane,
            control=SimpleNamespace(away=0.0),
            me="n1",
            penalty="",
            search=SimpleNamespace(words=""),
            accountant=accountant(),
        ),
    )
    monkeypatch.setattr(daemon, "_attach", lambda hello: None)
    monkeypatch.setattr(daemon, "_spawn", lambda task: task.close())
    daemon._on_trainer(Preparing())
    assert daemon.status()["reason"] == "its trainer prepares" and daemon.status()["state"] == "starting"
    daemon._on_trainer(Preparing("cannot fetch the run's data set, and tries again: down"))
    assert daemon.status()["reason"] == "cannot fetch the run's data set, and tries again: down"
    daemon._on_trainer(Hello(1, 1, 4, ()))
    assert daemon.status()["reason"] == "waits for the coordinator"


def node_at(state: State) -> Daemon:
    daemon = Daemon(Invite("there:7", "reef", "token"), NodeConfig(), JoinOptions(Path(), "", "", "ada", 0.0))
    daemon._state, daemon._member = state, cast(Any, SimpleNamespace(reports=None, accountant=accountant()))
    return daemon


def test_a_trainer_is_told_of_which_state_its_anchor_is() -> None:
    daemon, orders = node_at(State(outer=At(3, b"\x5e\x01"))), list[Train]()
    daemon._supervisor = cast(Any, SimpleNamespace(send=orders.append))
    daemon._loop = cast(Any, SimpleNamespace(begin_training=lambda effect: None))
    view = pb.View(train=pb.Train(round=4, steps=9, lease=[pb.Range(first=40, count=36)]))
    daemon._act(effects.OrderTraining(view, 0, False, False, False, False, doubted_round=3))
    assert (orders[0].round, orders[0].lease, orders[0].state) == (4, ((40, 36),), "5e01")
    assert orders[0].doubted_round == 3


def test_bad_arithmetic_is_shown_as_trouble_and_the_node_leaves_when_its_machine_says_so() -> None:
    daemon = node_at(State(trouble="the loss left its range"))
    assert daemon._trouble == "the loss left its range"
    daemon._loop = cast(Any, SimpleNamespace(trouble="its disk is full"))
    assert daemon._trouble == "the loss left its range; its disk is full"
    daemon._on_trainer(bad := BadArithmetic(3, "the loss left its range"))
    assert daemon._events.get_nowait() is bad


def test_a_trainer_that_waits_for_its_data_says_why_and_has_not_stepped_by_that() -> None:
    daemon = node_at(State())
    daemon._on_trainer(Progress(1, 0, 0.0, data_wait=1.0, trouble="cannot fetch the run's data: down"))
    assert daemon._trouble == "cannot fetch the run's data: down" and not daemon._has_stepped
    daemon._on_trainer(Progress(1, 1, 5.5))
    assert daemon._trouble == "" and daemon._has_stepped


def test_a_node_that_leaves_for_what_its_trainer_does_says_so_before_that_has_ended() -> None:
    async def story() -> None:
        daemon, said, script_over = node_at(State()), list[str](), False

        async def leave(reason: str) -> None:
            assert not script_over
            said.append(reason)

        async def script() -> None:
            nonlocal script_over
            try:
                await asyncio.Event().wait()
            finally:
                script_over = True

        daemon._member = cast(Any, SimpleNamespace(reports=None, leave=leave, accountant=accountant()))
        async with asyncio.TaskGroup() as daemon._tasks:
            daemon._tasks.create_task(script())
            await asyncio.sleep(0)
            daemon._act(effects.LeaveRun("nothing of 5 orders in a row could be used"))
        assert said == ["nothing of 5 orders in a row could be used"]

    with pytest.raises(ExceptionGroup) as raised:
        asyncio.run(asyncio.wait_for(story(), 60))
    assert raised.group_contains(AtollError, match="nothing of 5 orders in a row")
