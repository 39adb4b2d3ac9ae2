"""A trainer that may compute for a share of the time only, or is told to rest."""

import asyncio
from pathlib import Path

import pytest
from trainers import FAR, launched, small

from atoll.comm.config.run import InnerConfig, MembersConfig, RunConfig
from atoll.node import trainer_channel as channel
from atoll.node.participant.duty import REST_SHARE

pytestmark = pytest.mark.long
SAMPLES = 64  # of a batch: a step takes long enough for something to happen in the rest after it


def slow(stall: float = 300.0) -> RunConfig:
    return small(inner=InnerConfig(batch_size=SAMPLES), members=MembersConfig(stall=stall))


def order(round_: int, duty: float = 1.0, floor: int = 1) -> channel.Train:
    return channel.Train(round_, 2, floor, FAR, 0, 1, ((0, SAMPLES * FAR),), duty=duty)


def test_told_to_rest_it_stops_after_the_step_at_hand_whatever_the_floor(tmp_path: Path) -> None:
    async def story() -> None:
        async with launched(tmp_path / "node", small()) as node:
            await node.attach()
            await node.ask(channel.Initialise(0), channel.Initialised)
            node.end.send(channel.Train(1, 2, FAR, FAR, 0, 1, ((0, 4 * FAR),)))
            await node.answer(channel.Reached)
            ready = await node.ask(channel.Finish(1, rest=True), channel.Ready)
            assert 2 <= ready.steps < FAR and not ready.ahead
            assert node.micro_batch == 4, "which it has said"

    asyncio.run(story())


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_command_that_comes_in_a_rest_is_heeded_before_another_step_is_taken(ranks: int, tmp_path: Path) -> None:
    async def story() -> None:
        async with launched(tmp_path / "node", slow(), ranks) as node:
            await node.attach()
            await node.ask(channel.Initialise(0), channel.Initialised)
            node.end.send(order(1, duty=0.01))
            while (await node.answer(channel.Progress)).step < 1:
                pass
            while not isinstance(said := await node.end.receive(), channel.Progress):  # in the rest
                assert said is not None
            ready = await node.ask(channel.Finish(1, rest=True), channel.Ready)
            assert (ready.steps, ready.samples) == (1, SAMPLES)
            node.end.send(order(2, duty=0.01))  # the rest goes on, and is ended by a command once more
            ready = await node.ask(channel.Finish(2, rest=True), channel.Ready)
            assert ready.steps <= 1

    asyncio.run(story())


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_rest_that_would_look_like_a_hang_is_asked_of_the_daemon(ranks: int, tmp_path: Path) -> None:
    stall = 4.0

    async def story() -> None:
        async with launched(tmp_path / "node", slow(stall), ranks) as node:
            await node.attach()
            await node.ask(channel.Initialise(0), channel.Initialised)
            node.end.send(order(1, duty=0.01))
            while not isinstance(said := await node.end.receive(), channel.Rests):
                assert said is not None
            assert said.seconds > REST_SHARE * stall
            ready = await node.ask(channel.Finish(1, rest=True), channel.Ready)
            assert ready.steps == 1

    asyncio.run(story())
