"""When a snapshot is due, and what the disk gives up: the policy is told what the disk has."""

from dataclasses import replace

from atoll.node.checkpoint.policy import (
    DiskContent,
    SnapshotPolicy,
    droppable,
    first_needed,
    overflow,
    reach,
    retained,
)

FINE = DiskContent(reach=7, newest_snapshot=5)


def test_a_snapshot_is_due_where_there_is_none_or_a_damaged_one_and_every_few_rounds() -> None:
    def due(disk: DiskContent, round_: int = 7) -> bool:
        return SnapshotPolicy(4).finalized(round_, False, disk)

    assert not due(FINE)
    assert due(replace(FINE, newest_snapshot=-1))
    assert due(replace(FINE, damaged=True))
    assert due(replace(FINE, log_incomplete=True))
    assert due(replace(FINE, newest_snapshot=3)) and not due(replace(FINE, newest_snapshot=4))


def test_what_the_rest_of_the_disk_cannot_bring_back_is_urgent() -> None:
    due, alone, unreachable = SnapshotPolicy(2), SnapshotPolicy(9), SnapshotPolicy(9)
    assert due.finalized(7, False, FINE) and not due.urgent
    assert alone.finalized(7, True, FINE) and alone.urgent
    assert unreachable.finalized(7, False, replace(FINE, reach=6)) and unreachable.urgent


def test_one_is_taken_at_a_time_and_the_state_that_needs_one_follows() -> None:
    policy = SnapshotPolicy(1)
    assert policy.finalized(7, False, FINE)
    assert not policy.finalized(8, False, replace(FINE, reach=8)) and not policy.urgent, "the log has it"
    assert not policy.finalized(9, True, replace(FINE, reach=9)) and policy.urgent
    assert not policy.finalized(10, False, replace(FINE, reach=9))
    assert policy.ended(True) is True, "nobody else had round 9"
    assert not policy.urgent and policy.ended(True) is None


def test_one_that_failed_is_taken_at_the_next_round() -> None:
    policy = SnapshotPolicy(9)
    assert policy.finalized(7, True, FINE)
    policy.ended(False)
    assert policy.finalized(8, False, replace(FINE, reach=8, newest_snapshot=7))


def test_after_distrust_the_next_state_replaces_all_and_nothing_less() -> None:
    policy = SnapshotPolicy(9)
    assert policy.finalized(7, True, FINE) and not policy.replaces_all
    policy.distrust()
    assert not policy.finalized(7, False, FINE) and policy.urgent
    assert policy.ended(True) is False and not policy.replaces_all, "that one was begun before"
    assert policy.finalized(7, False, FINE) and policy.replaces_all
    policy.ended(False)
    assert policy.finalized(8, False, FINE) and policy.replaces_all, "it was not taken"
    policy.ended(True)
    assert not policy.finalized(9, False, replace(FINE, reach=9, newest_snapshot=8))


def test_a_snapshot_reaches_as_far_as_the_log_goes_on_and_nowhere_if_its_own_rounds_lack() -> None:
    assert [reach(3, 3, ()), reach(3, 3, {4, 5, 7}), reach(3, 5, {4, 5})] == [3, 5, 5]
    assert reach(3, 5, {4}) == -1


def test_two_snapshots_stay_unless_they_may_not_be_the_runs() -> None:
    assert retained([5, 3, 1], False) == [5] and retained([5, 3, 1], True) == []


def test_the_log_goes_back_to_the_oldest_snapshot_and_at_least_over_a_snapshots_bytes() -> None:
    sizes = dict.fromkeys(range(1, 9), 1)
    needed = first_needed([6, 4], sizes, -1, True)
    assert needed == 4
    assert droppable(sizes, needed, 3, 0) == [1, 2, 3, 4]
    assert droppable(sizes, needed, 6, 0) == [1, 2], "a peer might ask for the others"
    assert droppable(sizes, needed, 6, 4) == [1, 2, 3, 4], "the volunteer gave less"
    assert droppable(sizes, needed, 1, 0) == [1, 2, 3, 4, 5], "three snapshots' bytes are enough in any case"
    assert droppable(sizes, first_needed([], sizes, -1, True), 3, 0) == [1, 2, 3, 4, 5]
    assert droppable(sizes, first_needed([6, 4], sizes, -1, False), 3, 0) == [1, 2, 3, 4, 5]
    assert droppable({8: 99}, 8, 1, 99) == [], "the newest stays"


def test_of_the_rounds_that_wait_the_oldest_are_forgotten_but_not_the_one_that_is_written() -> None:
    assert overflow([4, 1, 2, 3], -1, 2) == [1, 2]
    assert overflow([4, 1, 2, 3], 1, 2) == [2]
    assert overflow([1, 2], -1, 2) == []
