"""The verdict on replayed work, on vectors: a gradient that all have in common, what the samples add, what the
moments of each optimizer add, and the rounding of bf16."""

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from atoll.coordinator.state_machine.events import Likeness
from atoll.coordinator.state_machine.replay_verdict import Verdict, verdict
from atoll.node.daemon.replays import likeness

F64 = NDArray[np.float64]
NUMEL, SEEDS = 16384, 200


class Round:
    """The deltas of a round: of four others, of the contributor if it is honest, and of its replay."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        common, mine = self.vector(), self.vector()
        self.others = [self.trained(common, self.vector()) for _ in range(4)]
        self.honest, self.replayed = self.trained(common, mine), self.trained(common, mine)
        self.before = [self.trained(self.vector() + 0.3 * common, self.vector()) for _ in range(4)]

    def vector(self) -> F64:
        return self.rng.normal(size=NUMEL)

    def trained(self, common: F64, samples: F64) -> F64:
        delta = common + samples + self.vector()  # the last: what the optimizer's moments, and hardware, add
        upper = delta.astype(np.float32).view(np.uint32) & np.uint32(0xFFFF0000)
        return upper.view(np.float32).astype(np.float64)

    def verdict(self, delta: F64) -> Verdict:
        work, *others = (
            Likeness(*likeness(float(delta @ other), float(delta @ delta), float(other @ other)))
            for other in (self.replayed, *self.others)
        )
        return verdict(work, others)


LIES: dict[str, Callable[[Round], F64]] = {
    "zeros": lambda r: np.zeros(NUMEL),
    "noise": lambda r: 1.7 * r.vector(),
    "a replayed round's delta": lambda r: r.before[0],
    "the last round's mean": lambda r: 1.5 * np.mean(r.before, axis=0),
    "another's delta": lambda r: r.others[0],
    "the mean of others": lambda r: 1.2 * np.mean(r.others[:3], axis=0),
    "the opposite": lambda r: -r.honest,
    "ten times as much": lambda r: 10 * r.honest,
    "a tenth": lambda r: 0.1 * r.honest,
}


@pytest.mark.long
def test_honest_work_is_well_over_200_seeds() -> None:
    for seed in range(SEEDS):
        round_ = Round(seed)
        assert round_.verdict(round_.honest) is Verdict.WELL


@pytest.mark.long
@pytest.mark.parametrize("lie", sorted(LIES))
def test_work_that_is_not_of_the_samples_is_found_in_a_few_replays(lie: str) -> None:
    found = [(round_ := Round(seed)).verdict(LIES[lie](round_)) for seed in range(SEEDS)]
    assert found.count(Verdict.FALSE) >= 0.5 * SEEDS and found.count(Verdict.WELL) <= 0.05 * SEEDS


def test_a_member_that_copies_honest_work_does_not_have_its_maker_blamed() -> None:
    for seed in range(SEEDS):
        round_ = Round(seed)
        round_.others[2] = round_.honest
        assert round_.verdict(round_.honest) is Verdict.WELL


def test_with_fewer_than_three_others_nothing_can_be_told() -> None:
    few = [Likeness(0.9, 1.0)] * 2
    assert verdict(Likeness(0.1, 1.0), few) is Verdict.UNCLEAR


def test_vectors_of_zeros_are_like_nothing() -> None:
    assert likeness(0.0, 0.0, 4.0) == (0.0, 1e30)
    assert likeness(0.0, 4.0, 0.0) == (0.0, 0.0)
    assert likeness(-6.0, 9.0, 4.0) == (-1.0, 2.0 / 3.0)
