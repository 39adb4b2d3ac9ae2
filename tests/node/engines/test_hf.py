"""transformers as a node's trainer: launched for real, with the test in the daemon's place."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hf_models import lora, run_of, tiny_qwen
from hub_files import hub_of
from numpy.typing import NDArray
from trainers import launched, order

from atoll.comm.config.hf import BaseDtype, HfConfig, read_config
from atoll.comm.config.run import RunConfig
from atoll.node import trainer_channel as channel
from atoll.node.config import Checkpointing

STEPS = 8


async def trained(
    folder: Path, run: RunConfig, ranks: int, **node: Any
) -> tuple[channel.Hello, NDArray[np.float32], NDArray[np.float32], channel.Ready, list[float]]:
    """The hello of a node of so many ranks, the anchor that it begins with, what it trains, its report, and the
    anchor's losses before and after."""
    async with launched(folder, run, ranks, files=True, **node) as trainer:
        hello = await trainer.attach()
        await trainer.ask(channel.Initialise(7), channel.Initialised)
        before = await trainer.ask(channel.Evaluate(0), channel.Evaluated)
        ready = await trainer.ask(order(1, STEPS, tokens=600), channel.Ready)
        after = await trainer.ask(channel.Evaluate(1), channel.Evaluated)
        await trainer.stop()
        return hello, np.array(trainer.anchor), np.array(trainer.local), ready, [before.loss, after.loss]


def compare(folder: Path, run: RunConfig, **node: Any) -> tuple[channel.Hello, NDArray[np.float32]]:
    """Check that one rank and two train the same, the latter in micro-batches of one; the hello of one, and what
    its parameters became."""

    async def both() -> tuple[channel.Hello, NDArray[np.float32]]:
        one = await trained(folder / "one", run, 1, **node)
        two = await trained(folder / "two", run, 2, micro_batch=1, **node)
        assert one[0].layout == two[0].layout and one[1].tobytes() == two[1].tobytes()
        assert np.abs(one[2] - one[1]).max() > 1e-3
        assert np.abs(one[2] - two[2]).max() < 1e-6
        assert one[3].steps == two[3].steps == STEPS
        assert one[3].loss == pytest.approx(two[3].loss, abs=1e-5)
        assert one[4][0] == one[4][1] == pytest.approx(two[4][0], abs=1e-5)
        return one[0], one[2]

    return asyncio.run(both())


@pytest.mark.chaos
@pytest.mark.long
def test_one_rank_and_two_train_the_same_adapters_and_nothing_else(tmp_path: Path) -> None:
    model = tiny_qwen(tmp_path / "base")
    hello, _ = compare(tmp_path, run_of(lora(tmp_path / "base")))
    names = [name for name, _ in hello.layout]
    assert len(names) == 2 * 2 * 2 and all(".lora_A." in name or ".lora_B." in name for name in names)
    assert hello.numel < 0.01 * sum(p.numel() for p in model.parameters()), "of the bytes of the whole model"


@pytest.mark.chaos
@pytest.mark.long
def test_one_rank_and_two_train_the_same_whole_model(tmp_path: Path) -> None:
    model = tiny_qwen(tmp_path / "base", hidden_size=64, intermediate_size=128)
    hello, _ = compare(tmp_path, run_of(HfConfig(config=read_config(str(tmp_path / "base")))))
    assert dict(hello.layout) == {name: tuple(p.shape) for name, p in model.named_parameters()}


@pytest.mark.chaos
@pytest.mark.long
def test_bf16_with_checkpointed_activations_trains_the_adapters_as_well(tmp_path: Path) -> None:
    """One rank in bf16 is sharded, too; its loss is that of fp32 to three digits."""
    tiny_qwen(tmp_path / "base", hidden_size=64, intermediate_size=128)
    run = run_of(replace(lora(tmp_path / "base", targets=[]), dtype=BaseDtype.BF16))

    async def story() -> None:
        plain = await trained(tmp_path / "plain", run, 1)
        other = await trained(tmp_path / "other", run, 1, bf16=True, checkpointing=Checkpointing.FULL)
        assert plain[0].layout == other[0].layout and plain[1].tobytes() == other[1].tobytes()
        assert other[3].loss == pytest.approx(plain[3].loss, rel=5e-3)
        assert np.linalg.norm(other[2] - other[1]) == pytest.approx(np.linalg.norm(plain[2] - plain[1]), rel=0.2)

    asyncio.run(story())


@pytest.mark.chaos
@pytest.mark.long
def test_a_node_that_fetches_its_frozen_weights_says_so_before_it_takes_orders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_qwen(tmp_path / "base", hidden_size=64, intermediate_size=128)
    run = run_of(replace(lora(tmp_path / "base"), base="hf://org/name"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")

    async def story() -> None:
        async with launched(tmp_path / "node", run, 2) as node:
            await node.attach()
            await node.stop()
            assert node.preparing == [
                "",
                "fetches the run's frozen weights: 0.000 GB",
                "compares the frozen weights that it has with the run's",
                "reads the run's frozen weights",
            ]

    with hub_of(tmp_path / "base") as endpoint:
        monkeypatch.setenv("HF_ENDPOINT", endpoint)
        asyncio.run(story())


@pytest.mark.chaos
@pytest.mark.long
def test_a_node_whose_frozen_weights_are_others_ends_with_a_sentence(tmp_path: Path) -> None:
    tiny_qwen(tmp_path / "base", hidden_size=64, intermediate_size=128)
    tiny_qwen(tmp_path / "other", hidden_size=64, intermediate_size=128, initializer_range=0.01)

    async def story() -> None:
        run = run_of(lora(tmp_path / "base"))
        async with launched(tmp_path / "node", run, 2, base=str(tmp_path / "other")) as node:
            assert "the weights in " in (said := await node.failure()) and "are not those of this run" in said

    asyncio.run(story())
