"""Curves of a run for a picture: of bounded size, by round, tokens or time, with what happened to rounds."""

import math

import numpy as np
import past_runs
import pytest

from atoll.comm.replace import replace
from atoll.coordinator.history.series import SERIES, SeriesTable, series_row
from atoll.coordinator.monitor.curves import MAX_MARKS, BadQuestion, CurvesAsked, curves

ROUNDS = 100_000


@pytest.fixture(scope="module")
def long_table() -> SeriesTable:
    rows = np.zeros((ROUNDS, len(SERIES)))
    number = np.arange(1, ROUNDS + 1)
    for name, values in (
        ("round", number),
        ("committed_at", 1e9 + 60.0 * number),
        ("tokens", 1000.0 * number),
        ("train_loss", 3 + np.sin(number / 100)),
        ("val_loss", np.where(number % 10, np.nan, 2.5)),
        ("members", 8 + (number % 2)),
        ("attempts", 1 + (number % 500 == 0)),
    ):
        rows[:, SERIES.index(name)] = values
    rows[777, SERIES.index("train_loss")] = 9.0
    rows[50_000, SERIES.index("void")] = 1.0
    table = SeriesTable()
    table._rows, table._count = rows, ROUNDS
    return table


def test_a_hundred_thousand_rounds_are_a_bounded_answer_in_which_one_odd_round_is_seen(
    long_table: SeriesTable,
) -> None:
    found = curves(long_table, CurvesAsked(points=1000))
    assert 500 < len(found["x"]) <= 2000 and found["total"] == found["inside"] == ROUNDS
    assert len(found["round"]) == len(found["at"]) == len(found["x"]) == len(found["series"]["val_loss"])
    assert max(v for v in found["series"]["train_loss"] if v is not None) == 9.0
    assert found["x"] == sorted(found["x"]) and found["span"] == [1.0, ROUNDS]
    assert len(found["marks"]) == MAX_MARKS and "void" in {mark["kind"] for mark in found["marks"]}


def test_a_closer_look_has_every_round_and_goes_on_to_the_edges(long_table: SeriesTable) -> None:
    found = curves(long_table, CurvesAsked(names=("train_loss",), start=1000, end=1100, points=1000))
    assert found["round"] == list(range(999, 1102)) and found["inside"] == 101


@pytest.mark.parametrize(
    ("axis", "start", "end"), [("tokens", 1e6, 1.1e6), ("time", 1e9 + 60 * 1000, 1e9 + 60 * 1100)]
)
def test_the_same_rounds_are_found_by_tokens_and_by_time(
    long_table: SeriesTable, axis: str, start: float, end: float
) -> None:
    found = curves(long_table, CurvesAsked(axis, ("wall", "tokens_per_s"), start, end))
    assert found["round"][1:-1] == list(range(1000, 1101))
    assert set(found["series"]["wall"][1:]) == {60.0}
    assert found["series"]["tokens_per_s"][5] == pytest.approx(1000 / 60, rel=1e-5)


def test_what_is_not_known_is_left_out() -> None:
    table = SeriesTable()
    assert curves(table, CurvesAsked()) == {
        **{"x": [], "round": [], "at": [], "total": 0, "inside": 0, "span": None, "marks": []},
        "series": {"train_loss": [], "val_loss": []},
    }
    story = past_runs.Story(rounds=30)
    records = [replace(r, committed_at=0.0, train_loss=math.inf) for r in past_runs.records(story)]
    table.extend(map(series_row, records))
    found = curves(table, CurvesAsked(names=("train_loss", "val_loss", "wall")))
    marked = [15, 16, 17]
    assert found["round"] == [10, *marked, 20, 30] and found["series"]["train_loss"] == [None] * 6
    assert found["series"]["wall"] == [None] * 6


def test_void_rounds_attempts_and_members_that_come_and_go_are_marked() -> None:
    story, table = past_runs.Story(rounds=30), SeriesTable()
    table.extend(map(series_row, past_runs.records(story)))
    found = curves(table, CurvesAsked(points=4))
    marks = found["marks"]
    assert found["series"]["train_loss"][found["round"].index(17)] is None, (
        "a void round has its point all the same"
    )
    assert [(mark["round"], mark["kind"]) for mark in marks] == [(15, "gone"), (16, "retried"), (17, "void")]
    assert marks[1]["text"] == "round 16: the exchange took 3 attempts"


@pytest.mark.parametrize(
    "question", [{"x": "loss"}, {"names": ("q",)}, {"points": 3}, {"points": 5000}, {"names": ("__class__",)}]
)
def test_a_question_that_makes_no_sense_is_refused_with_a_sentence(question: dict[str, object]) -> None:
    with pytest.raises(BadQuestion):
        CurvesAsked(**question)  # type: ignore[arg-type]


def test_the_first_round_took_its_phases() -> None:
    table = SeriesTable()
    table.extend(map(series_row, past_runs.records(past_runs.Story(rounds=5))))
    found = curves(table, CurvesAsked(names=("wall", "tokens_per_s")))
    first = next(past_runs.records(past_runs.Story(rounds=5)))
    assert found["series"]["wall"][0] == pytest.approx(sum(first.seconds.values()), rel=1e-5)
    assert found["series"]["tokens_per_s"][0] == pytest.approx(
        first.tokens / sum(first.seconds.values()), rel=1e-5
    )
