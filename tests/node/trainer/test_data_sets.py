"""Trainers of a run whose data come from a web server."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_sets import WebServer, web_server, write_data_set
from numpy.typing import NDArray
from trainers import Node, launched, order, small

from atoll.comm.config.data import DataConfig, DataKind
from atoll.comm.config.run import InnerConfig, OptimizerName, RunConfig
from atoll.node.trainer_channel import Evaluate, Evaluated, Initialise, Initialised, Progress, Ready


@pytest.fixture
def web(tmp_path: Path) -> Iterator[WebServer]:
    (tmp_path / "web").mkdir()
    with web_server(tmp_path / "web") as served:
        yield served


def run_of(web: WebServer) -> RunConfig:
    digest = write_data_set(web.folder, train=9000, validation=3000)
    data = DataConfig(kind=DataKind.DATASET, url=web.url, digest=digest, val_batches=2)
    return small(
        data=data, inner=InnerConfig(batch_size=4, optimizer=OptimizerName.SGD, lr=0.1, warmup_tokens=512)
    )


async def begun(node: Node) -> None:
    await node.attach()
    await node.ask(Initialise(7), Initialised)


@pytest.mark.long
def test_two_ranks_fetch_each_block_once_and_train_as_one_does_on_a_folder_of_its_own(
    tmp_path: Path, web: WebServer
) -> None:
    run = run_of(web)

    async def trained(ranks: int, **settings: Any) -> tuple[NDArray[np.float32], float, float]:
        async with launched(tmp_path / f"{ranks}", run, ranks, **settings) as node:
            await begun(node)
            await node.ask(order(1, 10), Ready)
            local = node.local.copy()
            before = (await node.ask(Evaluate(1), Evaluated)).loss
            await node.ask(order(2, 3, first=40), Ready)
            await node.stop()
            return local, before, node.progress[-1].data_wait

    async def both() -> None:
        (two, loss, wait), (one, expected, _) = await asyncio.gather(trained(2), trained(1, data=str(web.folder)))
        assert np.abs(two - one).max() < 1e-5 and abs(loss - expected) < 1e-4
        assert 0 <= wait <= 1

    asyncio.run(both())
    assert len(web.requests) == len(set(web.requests))
    assert web.total < sum(path.stat().st_size for path in web.folder.iterdir())


@pytest.mark.long
def test_a_store_that_is_away_is_in_the_figures_and_costs_steps_and_no_trainer(
    tmp_path: Path, web: WebServer
) -> None:
    run = run_of(web)

    async def story() -> None:
        async with launched(tmp_path / "node", run) as node:
            await begun(node)
            web.status = 503
            node.end.send(order(1, 5))
            while "503" not in (said := await node.answer(Progress)).trouble:
                pass
            assert said.step == 0 and said.data_wait == 1
            assert "cannot fetch the run's data, and tries again" in said.trouble
            web.status = 0
            assert (await node.answer(Ready)).steps == 5
            assert [sentence.partition(":")[0] for sentence in node.told] == [
                "cannot fetch the run's data, and tries again",
                "fetches the run's data again from http",
            ]
            assert node.process.returncode is None

    asyncio.run(story())


@pytest.mark.long
def test_a_data_set_that_is_not_the_runs_ends_the_trainer_with_a_sentence(tmp_path: Path, web: WebServer) -> None:
    run = run_of(web)
    run.data.digest = "0" * 32

    async def story() -> None:
        async with launched(tmp_path / "node", run) as node:
            assert "and the run's is 00000000000000000000000000000000" in await node.failure()

    asyncio.run(story())
