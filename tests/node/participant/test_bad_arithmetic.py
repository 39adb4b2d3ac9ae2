"""A trainer whose arithmetic is bad says so, hands nothing over, and goes on from the anchor: real trainers."""

import asyncio
import math
from pathlib import Path

import numpy as np
import pytest
from trainers import launched, order, small

from atoll.node import trainer_channel


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.long
def test_parameters_that_are_not_finite_are_never_ready_and_the_next_order_begins_from_the_anchor(
    ranks: int, tmp_path: Path
) -> None:
    async def story() -> None:
        async with launched(tmp_path / "node", small(), ranks) as node:
            await node.attach()
            await node.ask(trainer_channel.Initialise(0), trainer_channel.Initialised)
            sound = await node.ask(order(1, 20, tokens=1000), trainer_channel.Ready)
            node.local[-1] = math.nan  # of the work that is carried on, in the last parameter, `norm.weight`
            resumed = trainer_channel.Train(2, 20, 1, 20, 0, 1, ((80, 80),), resume=True)
            bad = await node.ask(resumed, trainer_channel.BadArithmetic)
            assert (bad.round, bad.sentence) == (2, "the gradients of 3 steps in a row were not finite")
            short = trainer_channel.Train(2, 1, 1, 1, 0, 1, ((80, 4),), resume=True)
            bad = await node.ask(short, trainer_channel.BadArithmetic)
            assert "diverged" in bad.sentence and " norm.weight holds NaN" in bad.sentence
            again = await node.ask(order(2, 20, tokens=1000), trainer_channel.Ready)
            assert (again.samples, again.skipped) == (80, 0)
            assert math.isclose(again.loss, sound.loss, abs_tol=0.1) and np.isfinite(node.local).all()
            assert node.told[-1].startswith("begins round 2 without the inner optimizer's moments")

    asyncio.run(story())


@pytest.mark.long
def test_samples_of_steps_that_are_left_out_are_not_claimed_and_a_delta_of_zero_is_no_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_models.py").write_text(
        "import torch\n"
        "class Bigram(torch.nn.Module):\n"
        "    calls = 0\n"
        "    def __init__(self, config):\n"
        "        super().__init__()\n"
        "        self.table = torch.nn.Embedding(config.vocab_size, config.vocab_size)\n"
        "    def forward(self, tokens):\n"
        "        self.calls += self.training\n"
        "        return self.table(tokens) * (float('nan') if self.calls in (3, 5) else 1.0)\n"
        "class Stuck(Bigram):\n"
        "    def __init__(self, config):\n"
        "        super().__init__(config)\n"
        "        self.bias = torch.nn.Parameter(torch.zeros(config.vocab_size))\n"
        "    def forward(self, tokens):\n"
        "        return self.table(tokens).detach() + 0 * self.bias\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    async def skipping() -> None:
        async with launched(tmp_path / "skips", small(), model="my_models:Bigram") as trainer:
            await trainer.attach()
            await trainer.ask(trainer_channel.Initialise(0), trainer_channel.Initialised)
            ready = await trainer.ask(order(1, 8, tokens=1000), trainer_channel.Ready)
            assert (ready.steps, ready.samples, ready.skipped) == (8, 32, 8)
            assert ready.norm > 0 and abs(ready.loss - math.log(256)) < 1.0, "of the steps that were taken"

    async def stuck() -> None:
        async with launched(tmp_path / "stuck", small(), model="my_models:Stuck") as trainer:
            await trainer.attach()
            await trainer.ask(trainer_channel.Initialise(0), trainer_channel.Initialised)
            bad = await trainer.ask(order(1, 8, tokens=1000), trainer_channel.BadArithmetic)
            assert bad.round == 1 and bad.sentence.startswith("the parameters are what they were")

    async def both() -> None:
        await asyncio.gather(skipping(), stuck())

    asyncio.run(both())
