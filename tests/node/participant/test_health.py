"""Bad arithmetic is told from the noise of real losses."""

import random

import pytest

from atoll.node.participant.health import FIRST_STEPS, HIGH_LOSS_STEPS, NOT_FINITE_STEPS, TrainingHealth

# Losses of the demo's model with Muon, batches of 4: the run's first steps, and those of a node that joins with a
# learning rate that rises.
BEGINNING = """
5.22 5.12 5.20 5.00 4.71 4.26 3.85 3.27 2.86 3.38 2.93 2.85 3.14 2.88 2.83 3.28 2.91 2.79 2.80 2.72
2.92 2.89 3.30 3.13 2.59 2.91 2.70 2.55 2.79 2.47 2.24 2.67 2.54 3.12 2.66 2.78 2.83 3.02 2.86 2.50
2.63 2.55 2.67 2.49 2.60 2.36 2.41 2.27 2.69 2.59 2.69 2.46 2.50 2.49 2.39 2.95 2.33 2.37 2.80 2.51
2.66 2.62 2.61 2.67 2.38 2.93 2.72 2.21 2.32 2.68 2.41 2.75 2.74 2.83 2.31 2.20 3.15 2.76 2.21 2.56
2.71 2.74 2.31 1.91 2.65 2.57 2.91 2.22 2.39 2.39 2.30 2.50 2.36 2.57 2.27 2.65 2.22 2.54 2.10 2.12
"""
JOINING = """
2.09 2.40 2.41 2.69 3.16 2.10 2.21 2.43 2.28 2.33 2.40 2.71 2.18 2.43 2.48 2.26 2.10 2.32 2.19 2.80
1.89 1.96 2.24 2.22 2.22 2.28 2.06 2.49 2.08 1.86 2.38 2.11 2.13 2.25 2.07 2.15
"""
CURVES = [[float(loss) for loss in curve.split()] for curve in (BEGINNING, JOINING)]


def judged(losses: list[float], health: TrainingHealth | None = None) -> tuple[int, str]:
    """The number of the step at which something is wrong, and what; (0, "") if nothing is."""
    health = health or TrainingHealth()
    for number, loss in enumerate(losses, 1):
        if wrong := health.record(loss, False):
            return number, wrong
    return 0, ""


def noise(count: int, mean: float, seed: int = 0) -> list[float]:
    rng = random.Random(seed)
    return [rng.gauss(mean, 0.25) for _ in range(count)]


@pytest.mark.parametrize("curve", CURVES, ids=["beginning", "joining"])
def test_real_losses_are_sound(curve: list[float]) -> None:
    assert judged(curve) == (0, "")
    health = TrainingHealth()
    for _ in range(3):  # round after round
        health.begin()
        assert judged(curve, health) == (0, "") and health.is_sound


def test_noise_is_sound_and_so_are_single_batches_far_above() -> None:
    for seed in range(20):
        losses = noise(1000, 2.0, seed)
        losses[::50] = [9.0] * 20
        assert judged(losses) == (0, "")


def test_an_order_from_an_earlier_state_with_higher_losses_is_sound() -> None:
    health = TrainingHealth()
    assert judged(noise(300, 1.5), health) == (0, "")
    health.begin()
    assert judged(noise(300, 4.5), health) == (0, "")


@pytest.mark.parametrize("curve", CURVES, ids=["beginning", "joining"])
def test_a_loss_that_leaves_its_range_is_found_after_some_steps(curve: list[float]) -> None:
    settled = curve[-36:]
    number, wrong = judged(settled + noise(60, 6.0))
    assert number == len(settled) + HIGH_LOSS_STEPS
    assert wrong.startswith("the loss left its range: it is ") and f"for {HIGH_LOSS_STEPS} steps in a row" in wrong


def test_a_loss_that_rises_slowly_is_found_before_it_has_gone_twice_as_high_and_a_half() -> None:
    number, wrong = judged([loss + max(0, i - 50) * 0.01 for i, loss in enumerate(noise(600, 2.0))])
    assert wrong and 2.0 + (number - 50) * 0.01 < 5.0


def test_an_order_that_goes_wrong_at_once_is_found() -> None:
    number, wrong = judged([2.0, 2.1, *noise(30, 8.0)])
    assert wrong and number < FIRST_STEPS


def test_a_loss_that_hardly_varies_may_vary_a_little_more() -> None:
    assert judged([0.01] * 100 + [0.08] * 100) == (0, "")
    assert judged([2.0] * 100 + [2.4] * 100) == (0, "")
    assert judged([2.0] * 100 + [2.6] * 100)[0] == 100 + HIGH_LOSS_STEPS


def test_gradients_that_are_not_finite_several_times_in_a_row_are_bad_and_now_and_then_are_not() -> None:
    health = TrainingHealth()
    said = list[str]()
    for number in range(60):
        said.append(health.record(1e4 if number % 3 else 2.0, skipped=bool(number % 3)))
    assert not any(said)
    health.begin()
    said = [health.record(1e4, skipped=True) for _ in range(NOT_FINITE_STEPS)]
    assert said == ["", "", "the gradients of 3 steps in a row were not finite"] and not health.is_sound


def test_text_that_becomes_easier_for_a_while_is_sound() -> None:
    losses = [*noise(150, 3.0), *noise(210, 1.2, 1), *noise(150, 3.0, 2)]
    assert judged(losses) == (0, "")
