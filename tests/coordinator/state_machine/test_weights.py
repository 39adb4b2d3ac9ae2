"""What contributions count is what simulations make of them, and does not change with who comes and goes."""

import random
from statistics import median

import pytest

from atoll.comm.config.model import ModelConfig
from atoll.comm.config.outer import OuterConfig, WeightName
from atoll.comm.config.run import InnerConfig, RunConfig
from atoll.comm.config.security import SecurityConfig
from atoll.comm.ids import NodeId
from atoll.comm.replace import replace
from atoll.coordinator.state_machine import ledger as book
from atoll.coordinator.state_machine.events import Contribution
from atoll.coordinator.state_machine.ledger import Ledger
from atoll.coordinator.state_machine.weights import round_length, scales, weights
from atoll.outer_opt import weights as reference
from atoll.outer_opt.clip import clip_factors

REFERENCE = {
    WeightName.TOKENS: reference.by_tokens,
    WeightName.EQUAL: reference.equal,
    WeightName.QUALITY: reference.by_quality,
}


def config(outer: OuterConfig) -> RunConfig:
    return RunConfig(model=ModelConfig(seq_len=32), inner=InnerConfig(batch_size=4), outer=outer)


def opened(ledger: Ledger, found: list[Contribution], reducers: tuple[NodeId, ...] = ()) -> Ledger:
    nodes = tuple(NodeId(f"n{i}") for i in range(len(found)))
    for node, contribution in zip(nodes, found, strict=True):
        ledger = book.contribute(ledger, node, contribution)
    return book.reopen(ledger, nodes, reducers, 3, lambda chunks: nodes[:1] * chunks)


def drawn(rng: random.Random, count: int) -> list[Contribution]:
    steps = [rng.choice([1, 10, 100, 1000]) * rng.randint(1, 9) for _ in range(count)]
    return [Contribution(4 * n, n, 2.0, rng.choice([0.0, 1e-3, 1.0, 1e6]) * rng.random()) for n in steps]


@pytest.mark.parametrize("name", WeightName)
@pytest.mark.parametrize("seed", range(5))
def test_weights_scales_and_length_are_those_of_simulations(name: WeightName, seed: int) -> None:
    rng = random.Random(seed)
    found = drawn(rng, rng.randint(1, 9))
    tokens, steps = [float(c.samples * 32) for c in found], [float(c.steps) for c in found]
    ledger, run = opened(Ledger(), found), config(OuterConfig(weights=name, clip=True, per_token=True))
    assert weights(ledger, run) == reference.bounded(REFERENCE[name](tokens, steps), 1.5)
    samples, most = [float(c.samples) for c in found], float(run.rounds.inner_steps * run.inner.batch_size)
    assert scales(ledger, run) == clip_factors([c.norm for c in found], samples, most)
    length = sum(min(n, 1.5 * median(steps)) for n in steps) / len(steps)
    assert round_length(ledger, run) == length / run.rounds.inner_steps
    run = replace(run, security=SecurityConfig(weight_bound=0))
    assert weights(ledger, run) == REFERENCE[name](tokens, steps)
    assert round_length(ledger, run) == sum(steps) / len(steps) / run.rounds.inner_steps
    plain = config(OuterConfig(weights=name, clip=False))
    assert set(scales(ledger, plain)) == {1.0} and round_length(ledger, plain) == 1.0


@pytest.mark.parametrize("name", WeightName)
def test_steps_that_were_committed_with_other_fragments_are_in_a_delta_as_well(name: WeightName) -> None:
    found = [Contribution(40, 10, 2.0, 1.0), Contribution(8, 2, 2.0, 1.0, earlier=32)]
    ledger, run = opened(Ledger(), found), config(OuterConfig(weights=name, per_token=True))
    assert len(set(weights(ledger, run))) == 1
    assert round_length(ledger, run) == 10 / run.rounds.inner_steps


@pytest.mark.parametrize("name", WeightName)
def test_samples_whose_steps_were_left_out_weigh_nothing(name: WeightName) -> None:
    found = [Contribution(40, 10, 2.0, 1.0), Contribution(80, 20, 2.0, 1.0, skipped=40)]
    ledger, run = opened(Ledger(), found), config(OuterConfig(weights=name, per_token=True))
    assert len(set(weights(ledger, run))) == 1
    assert round_length(ledger, run) == 10 / run.rounds.inner_steps


def test_a_delta_of_1000_times_the_others_norm_counts_a_thousandth() -> None:
    found = [Contribution(40, 10, 2.0, norm) for norm in (1.0, 1000.0, 1.0, 0.5)]
    assert scales(opened(Ledger(), found), config(OuterConfig(clip=True))) == [1.0, 0.001, 1.0, 1.0]


@pytest.mark.parametrize("times", [10.0, 1e4, 1e30])
def test_whatever_its_length_a_delta_counts_as_one_of_the_median(times: float) -> None:
    found = [Contribution(40, 10, 2.0, norm) for norm in (1.0, times, 1.0, 0.5)]
    told = scales(opened(Ledger(), found), config(OuterConfig()))  # as a run has it that says nothing of it
    assert times * told[1] == pytest.approx(1.0)


def test_late_work_counts_what_its_node_says_where_the_run_damps_it() -> None:
    found = [
        Contribution(40, 10, 2.0, norm, damping=damping) for norm, damping in ((1.0, 1.0), (4.0, 0.25), (1.0, 0.5))
    ]
    ledger = opened(Ledger(), found)
    assert scales(ledger, config(OuterConfig(damping=True, clip=False))) == [1.0, 0.25, 0.5]
    assert scales(ledger, config(OuterConfig(damping=True, clip=True))) == [1.0, 0.0625, 0.5]
    assert scales(ledger, config(OuterConfig(clip=False))) == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("name", WeightName)
def test_a_reducer_has_no_weight_and_changes_no_measure(name: WeightName) -> None:
    found, run = (
        drawn(random.Random(0), 2),
        config(OuterConfig(weights=name, clip=True, damping=True, per_token=True)),
    )
    alone, beside = opened(Ledger(), found), opened(Ledger(), found, (NodeId("n9"),))
    assert weights(beside, run) == [*weights(alone, run), 0.0] and scales(beside, run) == [
        *scales(alone, run),
        1.0,
    ]
    assert round_length(beside, run) == round_length(alone, run)
    only = book.reopen(Ledger(), (), (NodeId("n9"),), 1, lambda chunks: (NodeId("n9"),))
    assert (weights(only, run), scales(only, run), round_length(only, run)) == ([0.0], [1.0], 1.0)


@pytest.mark.parametrize("name", WeightName)
def test_who_comes_in_a_later_attempt_changes_nothing_for_the_others(name: WeightName) -> None:
    rng = random.Random(1)
    found, run = drawn(rng, 3), config(OuterConfig(weights=name, clip=True, per_token=True))
    first = opened(Ledger(), found)
    later = opened(first, [*found, replace(found[0], samples=400_000, norm=1e9)])
    assert later.attempt == 2 and len(later.entries) == 4
    assert weights(later, run)[:3] == weights(first, run) and scales(later, run)[:3] == scales(first, run)
    assert round_length(later, run) == round_length(first, run)
    assert scales(later, run)[3] < 1e-2
