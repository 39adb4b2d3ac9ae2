"""A node of several machines: network namespaces stand for them. Needs root."""

import asyncio
import logging
import os
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from lan import Machine, two_machines
from numpy.typing import NDArray
from trainers import DEADLINE, launched, order, small

from atoll.comm.config.run import InnerConfig, OptimizerName
from atoll.comm.errors import ConfigError, Unreachable
from atoll.node import trainer_channel
from atoll.node.config import Device, NodeConfig
from atoll.node.daemon.worker import Worker

RUN = small(inner=InnerConfig(optimizer=OptimizerName.ADAMW, batch_size=4, warmup_tokens=512))
EIGHT = order(1, 8, tokens=256, fleet=3, first=40)


@pytest.fixture
def machines() -> Iterator[tuple[Machine, Machine]]:
    with two_machines() as both:
        yield both


@asynccontextmanager
async def worker(machine: Machine, host: str, folder: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    """`atoll node worker` on another machine, with two ranks."""
    words = ("node", "worker", host, "--state-dir", str(folder), "device=cpu", "ranks=2", "threads=1")
    command = (*machine.through, sys.executable, "-P", "-m", "atoll.comm.cli", *words)
    process = await asyncio.create_subprocess_exec(*command)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def trained(folder: Path, ranks: int) -> NDArray[np.float32]:
    """What eight steps on one machine write."""
    async with launched(folder, RUN, ranks) as node:
        await node.attach()
        await node.ask(trainer_channel.Initialise(7), trainer_channel.Initialised)
        await node.ask(EIGHT, trainer_channel.Ready)
        return np.array(node.local)


@pytest.mark.chaos
@pytest.mark.root
@pytest.mark.long
def test_two_machines_of_two_ranks_write_what_one_rank_does(
    machines: tuple[Machine, Machine], tmp_path: Path
) -> None:
    first, second = machines
    host = f"{first.address}:29400"

    async def story() -> None:
        one = await trained(tmp_path / "one", 1)
        async with (
            worker(second, host, tmp_path / "worker") as other,
            launched(tmp_path / "two", RUN, 2, through=first.through, machines=2, rendezvous=host) as node,
        ):
            hello = await node.attach()
            assert hello.ranks == 4
            await node.ask(trainer_channel.Initialise(7), trainer_channel.Initialised)
            anchor = node.anchor.copy()
            ready = await node.ask(EIGHT, trainer_channel.Ready)
            assert (ready.steps, ready.samples) == (8, 32)
            assert np.abs(node.local - one).max() < 1e-6 < 1e-3 < np.abs(node.local - anchor).max()
            assert np.isclose(ready.norm, np.linalg.norm(node.local - node.anchor), rtol=1e-5)
            node.anchor[:] = node.local
            before = await node.ask(trainer_channel.Evaluate(1), trainer_channel.Evaluated)
            assert before.loss < np.log(256)
            await node.ask(order(2, 1), trainer_channel.Ready)  # at no committed tokens: it has the new anchor
            assert node.local.tobytes() == node.anchor.tobytes()
            await node.stop()
            assert await asyncio.wait_for(other.wait(), DEADLINE) == 0, "the node has left its run"

    asyncio.run(story())


@pytest.mark.chaos
@pytest.mark.root
@pytest.mark.long
@pytest.mark.parametrize("fewest", [1, pytest.param(2, marks=pytest.mark.chaos)])
def test_a_machine_that_dies_ends_the_trainer_which_starts_again_with_those_left_or_waits(
    fewest: int, machines: tuple[Machine, Machine], tmp_path: Path
) -> None:
    first, second = machines
    host = f"{first.address}:29400"
    both: dict[str, Any] = {"machines": 2, "rendezvous": host}

    async def story() -> None:
        async with (
            worker(second, host, tmp_path / "worker") as other,
            launched(tmp_path / "life", RUN, 2, through=first.through, **both) as node,
        ):
            assert (await node.attach()).ranks == 4
            await node.ask(trainer_channel.Initialise(7), trainer_channel.Initialised)
            node.end.send(order(1, 1_000_000))
            await node.working()
            os.kill(other.pid, 9)
            assert await asyncio.wait_for(node.process.wait(), DEADLINE) != 0
        async with AsyncExitStack() as stack:
            if fewest == 2:  # else nobody comes in its place
                await stack.enter_async_context(worker(second, host, tmp_path / "worker"))
            left = {**both, "machines_min": fewest}
            next_life = launched(tmp_path / "next", RUN, 2, through=first.through, **left)
            node = await stack.enter_async_context(next_life)
            assert (await node.attach()).ranks == 2 * fewest

    asyncio.run(story())


def test_a_worker_that_reaches_nobody_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "atoll.node")
    life = Worker("127.0.0.1:1", NodeConfig(device=Device.CPU), tmp_path, 0.5)
    with pytest.raises(Unreachable, match=r"nobody answers at 127.0.0.1:1: .* rendezvous=127.0.0.1:1"):
        asyncio.run(life.run())
    assert caplog.text.count("waits for the node at 127.0.0.1:1, up to 0 s") == 1


def test_a_worker_does_not_wait_for_a_host_that_nobody_knows(tmp_path: Path) -> None:
    life = Worker("nosuchhost.invalid:29400", NodeConfig(device=Device.CPU), tmp_path, 600.0)
    unknown = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
    with patch("socket.getaddrinfo", side_effect=unknown), pytest.raises(ConfigError, match="for nosuchhost.inva"):
        asyncio.run(life.run())
