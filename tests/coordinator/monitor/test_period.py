"""What became of a run in an hour."""

import past_runs

from atoll.coordinator.history.series import SeriesTable, series_row
from atoll.coordinator.monitor.period import period

STORY = past_runs.Story(rounds=40)


def test_a_round_is_of_one_hour_alone_and_a_void_one_is_counted_apart() -> None:
    table = SeriesTable()
    assert period(table, 0.0, 1e12) is None
    records = list(past_runs.records(STORY))
    table.extend(map(series_row, records))
    edges = [0.0, *(records[at].committed_at for at in (9, 10, 25)), 1e12]
    parts = [found for a, b in zip(edges, edges[1:], strict=False) if (found := period(table, a, b))]
    assert [(part["committed"], part["void"], part["rounds"]) for part in parts] == [
        *[(9, 0, [1, 9]), (1, 0, [10, 10])],
        *[(14, 1, [11, 25]), (15, 0, [26, 40])],
    ]
    assert parts[1]["train_loss"] == [records[9].train_loss] * 2
    after = period(table, records[-1].committed_at + 1, 1e12)
    assert after is not None and (after["committed"], after["rounds"], after["train_loss"]) == (0, None, None)
    assert (after["began"], after["ended"]) == (records[0].committed_at, records[-1].committed_at)
