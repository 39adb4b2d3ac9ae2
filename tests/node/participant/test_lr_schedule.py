"""The inner learning rate."""

import math

import pytest

from atoll.comm.config.run import InnerConfig, OptimizerName
from atoll.node.participant.lr_schedule import learning_rate

INNER = InnerConfig(lr=1.0, min_lr=0.1, warmup_tokens=100, decay_tokens=1100)


@pytest.mark.parametrize(
    ("tokens", "rate"),
    [(0, 0.0), (50, 0.5), (100, 1.0), (600, 0.55), (1100, 0.1), (99_999, 0.1)],
)
def test_the_rate_warms_up_linearly_and_decays_along_a_cosine(tokens: float, rate: float) -> None:
    assert math.isclose(learning_rate(INNER, tokens), rate, abs_tol=1e-12)


def test_the_rate_rises_until_the_peak_and_never_after() -> None:
    rates = [learning_rate(INNER, tokens) for tokens in range(0, 1300, 10)]
    assert rates[:11] == sorted(rates[:11])
    assert rates[10:] == sorted(rates[10:], reverse=True)


def test_the_peak_is_the_optimizers_own_unless_it_is_given_and_the_least_is_a_tenth_of_it() -> None:
    adamw, muon = InnerConfig(optimizer=OptimizerName.ADAMW), InnerConfig(optimizer=OptimizerName.MUON)
    assert (adamw.peak_lr, muon.peak_lr) == (3e-3, 1.2e-2)
    assert learning_rate(muon, muon.warmup_tokens) == 1.2e-2
    assert learning_rate(muon, muon.decay_tokens) == pytest.approx(1.2e-3)
    given = InnerConfig(lr=0.5)
    assert (given.peak_lr, given.final_lr) == (0.5, 0.05)
    assert InnerConfig(lr=0.5, min_lr=0.0).final_lr == 0.0


def test_without_a_warm_up_the_first_token_is_at_the_peak() -> None:
    assert learning_rate(InnerConfig(lr=1.0, warmup_tokens=0), 0) == 1.0
