import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from atoll.comm.config.run import RunConfig
from atoll.comm.invite import Invite
from atoll.node.config import NodeConfig
from atoll.node.daemon.daemon import Daemon
from atoll.node.daemon.state_dir import JoinOptions
from atoll.node.state_machine import effects


def test_a_trainer_that_dies_while_state_0_is_read_has_it_read_no_second_time() -> None:
    async def story() -> None:
        daemon = Daemon(Invite("there:7", "reef", "token"), NodeConfig(), JoinOptions(Path(), "", "", "ada", 0.0))
        begun, read = 0, asyncio.Event()

        async def begin(progress: Callable[[float], None]) -> None:
            nonlocal begun
            begun += 1
            await read.wait()

        daemon._member = cast(Any, SimpleNamespace(run=RunConfig(init_from="s3://a-slow-one"), reports=None))
        daemon._loop = cast(Any, SimpleNamespace(load_initial=begin))
        async with asyncio.TaskGroup() as daemon._tasks:
            for _ in range(2):  # the second time for a trainer that was started again
                daemon._act(effects.OrderInitialisation())
                await asyncio.sleep(0)
            assert begun == 1
            read.set()

    asyncio.run(asyncio.wait_for(story(), 60))
