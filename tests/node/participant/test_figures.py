"""The meter of a trainer's steps, on a clock of the test's own; and what a launched trainer says of itself."""

import asyncio
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from trainers import launched, order, small

from atoll.comm.config.round_time import flops_per_token
from atoll.comm.config.run import InnerConfig, OptimizerName
from atoll.node import trainer_channel
from atoll.node.participant.figures import RankMemory, Speed, StepMeter
from atoll.node.participant.lr_schedule import learning_rate

CPU = torch.device("cpu")


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def step(self, meter: StepMeter, loading: float, computing: float) -> Speed | None:
        meter.begin()
        with meter.loading():
            self.now += loading
        self.now += computing
        return meter.end()


def test_only_steps_count_and_loading_is_a_part_of_them() -> None:
    clock = Clock()
    meter = StepMeter(step_tokens=500, token_flops=4.0, peak=40_000.0, clock=clock)
    assert clock.step(meter, 0.0, 0.1) is not None, "the first is told at once"
    assert clock.step(meter, 0.02, 0.08) is None, "a quarter of a second has not passed"
    clock.now += 1000.0  # a hand-over, or the daemon has nothing to do
    speed = clock.step(meter, 0.03, 0.07)
    assert speed is not None
    assert speed.tokens_per_s == pytest.approx(5000)
    assert speed.mfu == pytest.approx(5000 * 4 / 40_000)
    assert speed.data_wait == pytest.approx(0.25)
    speed = clock.step(meter, 0.0, 0.5)
    assert speed is not None and (speed.tokens_per_s, speed.data_wait) == pytest.approx((1000, 0))


def test_the_utilisation_of_an_unknown_card_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, run = Clock(), small()
    for device, name, peak in (
        (CPU, "", None),
        (torch.device("cuda", 0), "NVIDIA H100 80GB HBM3", 4 * 989.4e12),
        (torch.device("cuda", 0), "NVIDIA GT 710", None),
    ):
        monkeypatch.setattr("torch.cuda.get_device_name", lambda _, name=name: name)
        meter = replace(StepMeter.of(run, run.model.n_params, device, ranks=4), clock=clock)
        assert meter.peak == peak
        speed = clock.step(meter, 0.0, 1.0)
        assert speed is not None and (speed.mfu > 0) == (peak is not None)


def test_a_model_that_is_not_the_configs_counts_by_its_parameters() -> None:
    run = small()
    assert StepMeter.of(run, run.model.n_params, CPU, 1).token_flops == flops_per_token(run.model)
    assert StepMeter.of(run, 1000, CPU, 1).token_flops == 6000
    assert StepMeter.of(run, 1000, CPU, 1, token_flops=7000.0).token_flops == 7000


def test_memory_is_looked_at_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    memory = RankMemory(CPU, clock)
    on_device, resident = memory.bytes()
    assert on_device == 0 and resident > 10 << 20
    monkeypatch.setattr(memory, "_process", None)  # it is not asked again
    clock.now += 0.9
    assert memory.bytes() == (0, resident)


@pytest.mark.long
@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.chaos), 2])
def test_a_trainer_tells_the_figures_of_its_steps(ranks: int, tmp_path: Path) -> None:
    inner = InnerConfig(
        optimizer=OptimizerName.SGD, batch_size=4, warmup_tokens=0, decay_tokens=1 << 40, clip=1e-6
    )
    run = small(inner=inner)

    async def story() -> None:
        async with launched(tmp_path / "node", run, ranks) as node:
            await node.attach()
            await node.ask(trainer_channel.Initialise(0), trainer_channel.Initialised)
            await node.ask(order(1, 300), trainer_channel.Ready)
            assert len(node.progress) >= 2
            last = node.progress[-1]
            assert last.tokens_per_s > 0 and last.mfu == 0 and last.device_bytes == 0
            assert 0 < last.data_wait < 1
            assert ranks * (50 << 20) < last.host_bytes < ranks * (4 << 30)
            assert last.learning_rate == pytest.approx(learning_rate(inner, 0))
            assert 0.01 < last.gradient_norm < 100 and math.isfinite(last.gradient_norm), "before it was bounded"

    asyncio.run(story())
