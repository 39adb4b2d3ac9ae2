"""The inner learning rate."""

import math

import pytest

from atoll.comm.config import InnerConfig
from atoll.node.schedule import learning_rate

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


def test_without_a_warm_up_the_first_token_is_at_the_peak() -> None:
    assert learning_rate(InnerConfig(lr=1.0, warmup_tokens=0), 0) == 1.0
