"""A node's figures over the rounds, read of a bounded number of records."""

import past_runs
import pytest

from atoll.comm.ids import NodeId
from atoll.comm.replace import replace
from atoll.coordinator.history import record_codec
from atoll.coordinator.history.record_codec import RecordView
from atoll.coordinator.history.segment import ROUNDS
from atoll.coordinator.monitor.node_story import (
    MAX_POINTS,
    MAX_SEGMENTS,
    last_there,
    membership_change,
    node_series,
    rounds_to_add_up,
    rounds_to_read,
    time_spent,
)


def test_a_nodes_time_is_the_sum_of_its_records_and_open_time_of_before_is_not_less_than_nothing() -> None:
    first, second = list(past_runs.records(past_runs.Story(rounds=2)))
    ada, bo, cy = (NodeId(f"n{k}") for k in (1, 2, 3))
    records = [
        replace(first, spent={ada: {"inner": 3.5, "open": 2.0}, bo: {"down": 1.25}}),
        replace(second, spent={ada: {"inner": 2.0, "open": -2.5, "sync": 0.5}}),
    ]
    views = [RecordView(record_codec.encode(r)) for r in records]
    assert [view.spent_by(ada) for view in views] == [r.spent[ada] for r in records]
    assert time_spent(views, ada) == ({"inner": 5.5, "sync": 0.5}, [1, 2])
    assert time_spent(views, bo) == ({"down": 1.25}, [1]) and time_spent(views, cy) == ({}, [])


def test_time_is_added_up_over_a_bounded_number_of_rounds() -> None:
    assert rounds_to_add_up(600, 12) == range(1, 601)
    assert rounds_to_add_up(50_000, 12) == range(50_000 - MAX_SEGMENTS * ROUNDS + 1, 50_001)
    assert rounds_to_add_up(50_000, 10_000) == range(50_000 - MAX_POINTS + 1, 50_001)
    assert not rounds_to_add_up(0, 0)


@pytest.mark.parametrize(
    ("first", "last", "points"),
    [(1, 10, 400), (1, 400, 400), (1, 401, 400), (5, 50_000, 400), (1, 7, 0), (3, 2, 10)],
)
def test_rounds_are_spread_evenly_and_the_last_is_among_them(first: int, last: int, points: int) -> None:
    rounds = list(rounds_to_read(first, last, points))
    if last < first:
        return assert_empty(rounds)
    assert rounds[-1] == last and first <= rounds[0] and len(rounds) <= max(min(points, MAX_POINTS), 1)
    assert len({b - a for a, b in zip(rounds, rounds[1:], strict=False)}) <= 1
    assert len({(number - 1) // ROUNDS for number in rounds}) <= MAX_SEGMENTS


def assert_empty(rounds: list[int]) -> None:
    assert rounds == []


def test_a_nodes_figures_are_those_of_the_records() -> None:
    story = past_runs.Story(rounds=40)
    records = list(past_runs.records(story))
    views = [RecordView(record_codec.encode(r)) for r in records]
    series, name = node_series(views, past_runs.GONE)
    assert name == "kai" and series["round"] == list(range(1, 41))
    here = [r.contributors.get(past_runs.GONE) for r in records]
    assert series["weight"] == here and here[-1] is None and series["loss"][-1] is None
    assert series["bytes_up"][:5] == [r.bytes_up[past_runs.GONE] for r in records[:5]]
    assert series["tokens_per_s"][3] == records[3].figures[past_runs.GONE].tokens_per_s
    assert series["exchange_s"][3] == records[3].seconds["reduce"] and series["exchange_s"][-1] is None
    spent = {past_runs.GONE: {"inner": 40.0, "open": 10.0, "sync": 5.0}}
    accounted = RecordView(record_codec.encode(replace(records[3], spent=spent)))
    assert node_series([accounted], past_runs.GONE)[0]["tokens_per_s"] == [
        records[3].contributors[past_runs.GONE] / 50.0
    ], "rests between steps too"
    assert last_there(series) == story.middle - 1
    before, after = (views[number - 1].names for number in (story.middle - 1, story.middle))
    assert membership_change(before, after) == "kai is gone" and membership_change(after, before) == "kai joined"
    assert membership_change(before, {NodeId("x"): "max"}) == "ada, bo, cy and 9 more are gone, max joined"
    assert membership_change({}, after) == "", "it is not known"
