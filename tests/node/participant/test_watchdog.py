"""Steps that do not end: the process is ended, its log says where it was, and it is started again."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest
from trainers import DEADLINE, FAR, order, small

from atoll.comm.config.run import MembersConfig
from atoll.node import trainer_channel
from atoll.node.config import Device, NodeConfig, TrainerSpec
from atoll.node.daemon.trainer_supervisor import TrainerSupervisor
from atoll.node.participant.watchdog import StepWatchdog
from atoll.node.trainer.launcher import set_environment
from atoll.node.trainer_channel import Hello, Initialised, Progress, ToDaemon

STALL = 20.0  # seconds; a collective times out after 10, a step after 12


@pytest.mark.long
def test_a_rank_that_hangs_in_a_step_ends_the_trainer_with_the_stack_in_the_log_and_another_is_started(
    tmp_path: Path,
) -> None:
    hellos: asyncio.Queue[Hello] = asyncio.Queue()
    steps: asyncio.Queue[Progress] = asyncio.Queue()
    run, node = small(members=MembersConfig(stall=STALL)), NodeConfig(device=Device.CPU, ranks=2, threads=1)

    def hear(message: ToDaemon) -> None:
        match message:
            case Hello(numel=numel):
                for name in ("anchor", "local"):
                    np.memmap(tmp_path / name, np.float32, "w+", shape=(numel,))
                attach = trainer_channel.Attach(str(tmp_path / "anchor"), str(tmp_path / "local"), numel)
                supervisor.send(attach)
                supervisor.send(trainer_channel.Initialise(0))
                hellos.put_nowait(message)
            case Initialised():
                supervisor.send(order(1, FAR))
            case Progress():
                steps.put_nowait(message)

    async def story() -> None:
        running = asyncio.create_task(supervisor.run())
        try:
            first = await asyncio.wait_for(hellos.get(), DEADLINE)
            await asyncio.wait_for(steps.get(), DEADLINE)
            launcher = psutil.Process(psutil.Process(first.pid).ppid())
            ranks = [child.pid for child in launcher.children()]
            (other,) = set(ranks) - {first.pid}
            os.kill(other, signal.SIGSTOP)
            again = await asyncio.wait_for(hellos.get(), DEADLINE)
            assert again.pid not in ranks
            assert not psutil.pid_exists(other)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    supervisor = TrainerSupervisor(
        TrainerSpec(run, node, "", str(tmp_path / "cache"), ""), tmp_path, hear, lambda: None
    )
    asyncio.run(story())
    log = (tmp_path / "trainer.log").read_text()
    # a collective's own, or the watchdog's where ranks wait for each other's data, which may take long
    assert "Timed out waiting 10000ms" in log or "Timeout (0:00:12)!" in log
    assert "in take_part" in log


@pytest.mark.long
def test_a_step_that_does_not_end_ends_the_process_with_the_stacks_of_all_threads() -> None:
    hangs = (
        "import threading\n"
        "from atoll.node.participant.watchdog import StepWatchdog\n"
        "def step(): threading.Event().wait()\n"
        "threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
        "watchdog = StepWatchdog(0.2, 0.2)\n"
        "watchdog.tick()\n"
        "step()\n"
    )
    ended = subprocess.run([sys.executable, "-P", "-c", hangs], capture_output=True, text=True, timeout=DEADLINE)
    assert ended.returncode == 1
    assert ended.stderr.count("Thread 0x") == 2 and "in step" in ended.stderr


def test_the_first_step_may_take_longer_and_whoever_rests_is_not_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    alarms = list[float]()
    monkeypatch.setattr(
        "faulthandler.dump_traceback_later", lambda seconds, exit, file: alarms.append(seconds if exit else 0.0)
    )
    monkeypatch.setattr("faulthandler.cancel_dump_traceback_later", lambda: alarms.append(0.0))
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    watchdog = StepWatchdog(60.0, 660.0)
    watchdog.tick()
    watchdog.tick()  # as soon as the second step begins
    for now[0] in (100.5, 100.9, 101.5):
        watchdog.tick()  # at most once a second: it takes a thread
    watchdog.rest()
    watchdog.rest()
    watchdog.tick()
    assert alarms == [660.0, 60.0, 60.0, 0.0, 60.0]


def test_what_collectives_did_before_they_hung_is_written_to_the_nodes_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as environment:
        environment.setattr("os.environ", {})
        set_environment(TrainerSpec(node=NodeConfig(threads=1)), tmp_path / "trainer.json")
        assert os.environ["TORCH_FR_DUMP_TEMP_FILE"] == str(tmp_path / "flight-record-")
        assert os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "1" and int(os.environ["TORCH_FR_BUFFER_SIZE"]) > 0
