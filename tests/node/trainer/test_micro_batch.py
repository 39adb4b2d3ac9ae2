"""The choice of a micro-batch, with made-up costs; and what a node remembers of it."""

import math
from pathlib import Path

import pytest

from atoll.node.config import Checkpointing
from atoll.node.trainer.micro_batch import (
    KEPT_RECORDS,
    LEVELS,
    SEARCH_SECONDS,
    Cost,
    MicroBatchStore,
    NothingFits,
    Record,
    StepPlan,
    after_death,
    levels_of,
    search,
    smaller,
)

NONE, SELECTIVE, FULL = LEVELS


class Machine:
    """Takes `launch + size * each` seconds for a micro-batch, and has memory for `room` sequences at a level."""

    def __init__(self, launch: float, each: float, room: dict[Checkpointing, int], told: bool = False) -> None:
        self.launch, self.each, self.room, self.told = launch, each, room, told
        self.tried: list[StepPlan] = []
        self.pass_seconds = 0.0

    def __call__(self, plan: StepPlan) -> Cost | None:
        self.tried.append(plan)
        if plan.size > self.room[plan.level]:
            return None
        seconds = self.launch + plan.size * self.each
        elapsed = self.pass_seconds * len(self.tried)
        if self.told:
            return Cost(seconds / plan.size, plan.size * 1e9, self.room[plan.level] * 1e9, elapsed)
        return Cost(seconds / plan.size, elapsed=elapsed)


def everything(size: int) -> dict[Checkpointing, int]:
    return dict.fromkeys(LEVELS, size)


def test_it_is_doubled_while_that_pays() -> None:
    machine = Machine(0.1, 0.5, everything(1000))  # 0.6, 0.55, 0.525 (5 %), 0.5125 (2.4 %)
    record = search(64, LEVELS, machine)
    assert record.plan == StepPlan(4)
    assert "8 at a time were not 3% faster" in record.reason
    assert [plan.size for plan in machine.tried] == [1, 2, 4, 8]


@pytest.mark.parametrize(("share", "sizes"), [(1, [1]), (6, [1, 2, 4, 6]), (8, [1, 2, 4, 8])])
def test_a_share_is_the_largest(share: int, sizes: list[int]) -> None:
    machine = Machine(100.0, 0.001, everything(1000))
    record = search(share, LEVELS, machine)
    assert record.plan == StepPlan(share)
    assert [plan.size for plan in machine.tried] == sizes


def test_the_largest_that_fits_is_taken() -> None:
    machine = Machine(100.0, 0.001, everything(11))
    record = search(64, LEVELS, machine)
    assert record.plan == StepPlan(8) and "16 at a time did not fit" in record.reason


def test_what_would_not_fit_is_not_tried_where_memory_is_told_of() -> None:
    """The kernel may end the wrong process."""
    machine = Machine(100.0, 0.001, everything(11), told=True)
    record = search(64, LEVELS, machine)
    assert record.plan == StepPlan(8) and "twice as many would not fit" in record.reason
    assert max(plan.size for plan in machine.tried) == 8


def test_the_lowest_level_of_checkpointing_is_taken_at_which_one_sequence_fits() -> None:
    machine = Machine(100.0, 0.001, {NONE: 0, SELECTIVE: 2, FULL: 9})
    assert search(8, LEVELS, machine).plan == StepPlan(2, SELECTIVE)
    machine = Machine(100.0, 0.001, {NONE: 0, SELECTIVE: 0, FULL: 9})
    assert search(8, LEVELS, machine).plan == StepPlan(8, FULL)
    with pytest.raises(NothingFits):
        search(8, LEVELS, Machine(1.0, 1.0, everything(0)))


def test_a_slow_machine_does_not_search_for_ever() -> None:
    machine = Machine(100.0, 0.001, everything(1000))
    machine.pass_seconds = SEARCH_SECONDS * 0.6
    record = search(64, LEVELS, machine)
    assert record.plan == StepPlan(2) and "larger ones were not tried" in record.reason


def test_less_memory_is_half_of_it_and_then_a_higher_level() -> None:
    plan, path = StepPlan(12), []
    while (below := smaller(plan, LEVELS)) is not None:
        path.append(below)
        plan = below
    assert path == [StepPlan(6), StepPlan(3), StepPlan(1), StepPlan(1, SELECTIVE), StepPlan(1, FULL)]
    assert smaller(StepPlan(1, FULL), levels_of(Checkpointing.FULL, True)) is None
    assert smaller(StepPlan(1), levels_of(Checkpointing.AUTO, has_blocks=False)) is None


def test_a_process_that_did_not_come_back_tried_too_much() -> None:
    assert after_death(Record(attempt=StepPlan(8)), LEVELS).plan == StepPlan(4)
    assert after_death(Record(attempt=StepPlan(1)), LEVELS).plan == StepPlan(1, SELECTIVE)
    assert after_death(Record(attempt=StepPlan(1, FULL)), LEVELS) == Record()  # it is tried again
    assert after_death(Record(StepPlan(2), "measured"), LEVELS) == Record(StepPlan(2), "measured")


def test_records_are_of_one_machine_and_of_its_settings(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    one, other = MicroBatchStore(folder, ("cpu", 1)), MicroBatchStore(folder, ("cpu", 2))
    assert one.read() == Record()
    one.write(Record(StepPlan(4, SELECTIVE), "measured"))
    other.write(Record(attempt=StepPlan(2)))
    assert MicroBatchStore(folder, ("cpu", 1)).read() == Record(StepPlan(4, SELECTIVE), "measured")
    assert other.read().attempt == StepPlan(2)
    for i in range(KEPT_RECORDS - 1):
        MicroBatchStore(folder, i).write(Record())
    assert one.read() == Record() and other.read().attempt == StepPlan(2)
    (folder / "micro_batch.json").write_text('{"half a')
    assert other.read() == Record()


def test_nothing_is_known_of_the_memory_of_a_system_that_does_not_tell() -> None:
    assert 2 * Cost(1.0).growth <= Cost(1.0).available == math.inf
