"""A round's answer: what is known now of what failed in it, by whose names, and what was noted of it, whenever."""

from collections.abc import Generator, Iterator, Sequence
from math import inf
from typing import Any

import past_runs

from atoll.comm.ids import NodeId
from atoll.comm.replace import replace
from atoll.coordinator.history import record_codec
from atoll.coordinator.history.record_codec import RecordView
from atoll.coordinator.history.series import SeriesTable, series_row
from atoll.coordinator.monitor.recorded import RecordedRun
from atoll.coordinator.monitor.replay import PastRun
from atoll.coordinator.monitor.run_answers import RunAnswers
from atoll.coordinator.state_machine.events import CommitRecord, Decision, Failure, Note

STORY = past_runs.Story(rounds=8, members=4)
DUNE = NodeId("n4")


class MadeUp:
    """Records of a run in memory, and what was noted in it."""

    def __init__(self, records: list[CommitRecord], notes: list[tuple[float, Note]]) -> None:
        self._records, self._notes = records, notes

    def iter_rounds(self, since: int = 0, limit: int = 0) -> Generator[CommitRecord, None, None]:
        yield from [r for r in self._records if r.round > since][: limit or None]

    def iter_notes(self, before: float = inf) -> Iterator[tuple[float, Note]]:
        return (one for one in reversed(self._notes) if one[0] < before)

    def decisions(self, since: float = -inf, until: float = inf) -> list[tuple[float, Decision]]:
        return []

    def series(self) -> SeriesTable:
        table = SeriesTable()
        table.extend(map(series_row, self._records))
        return table

    def views(self, rounds: Sequence[int]) -> Iterator[RecordView]:
        return (RecordView(record_codec.encode(r)) for r in self._records if r.round in rounds)


def without(record: CommitRecord, node: NodeId) -> CommitRecord:
    """The record of a round at whose commit the node was gone."""
    left: dict[str, Any] = {
        field: {n: v for n, v in getattr(record, field).items() if n != node} for field in BY_NODE
    }
    return replace(record, members=tuple(n for n in record.members if n != node), **left)


BY_NODE = ("contributors", "names", "figures", "rates", "shares", "losses", "bytes_up", "bytes_down", "digests")
WHOLE = list(past_runs.records(STORY))
AT = [STORY.committed_at(number) for number in range(STORY.rounds + 1)]
DIED = Failure(1, DUNE, 3, "silent for 5 s", AT[3] - 20, 5.0, None, 12.0, 30.0)
BACK = replace(DIED, recovered=36.0)


def told(*changed: CommitRecord, notes: Sequence[tuple[float, Note]] = ()) -> RunAnswers:
    records = {r.round: r for r in (*WHOLE, *changed)}
    return RunAnswers(PastRun(MadeUp(list(records.values()), list(notes)), RecordedRun("reef")))


def asked(answers: RunAnswers, number: int, *latest: Failure) -> dict[str, Any]:
    return answers.round({"round": str(number)}, latest)


THIRD = replace(without(WHOLE[2], DUNE), failures=(DIED,), spent={DUNE: {"lost": 12.0, "down": 20.0}})


def test_of_a_failure_is_told_what_is_known_of_it_now() -> None:
    assert asked(told(THIRD), 3)["failures"] == [DIED]
    later = replace(WHOLE[4], failures=(BACK,))
    assert asked(told(THIRD, later), 3)["failures"] == [BACK], "by the record of a later round"
    assert asked(told(THIRD), 3, BACK)["failures"] == [BACK], "and before there is one"
    another = replace(BACK, at=BACK.at + 500.0)  # the run's failures were counted anew
    assert asked(told(THIRD), 3, another)["failures"] == [DIED]


def test_who_is_gone_meanwhile_has_its_name_and_was_in_the_round() -> None:
    said = asked(told(THIRD), 3)
    assert said["names"][DUNE] == past_runs.name(DUNE)
    assert {row["name"] for row in said["waterfall"]} == {past_runs.name(NodeId(f"n{k}")) for k in range(1, 5)}
    assert (len(said["record"].contributors), said["members"]) == (3, 4)


def test_what_is_noted_of_a_round_is_listed_with_it_and_with_no_other() -> None:
    notes = [
        (AT[2] + 3.0, Note("round 2 took 60 s, usually 52: dune was slow (slow compute)", DUNE, 2)),
        (AT[3] - 9.0, Note("dune is suspected: silent for 5 s", DUNE)),
        (AT[3] - 1.0, Note("round 3 closes: dune contributes the steps that it has")),
        (AT[5] + 0.5, Note("dune is at work again, 36 s after it was last well in round 3", DUNE, 3)),
    ]
    answers = told(THIRD, notes=notes)

    def of(number: int) -> list[str]:
        return [event["sentence"] for event in asked(answers, number)["events"]]

    assert of(2) == [notes[0][1].sentence] and of(5) == of(6) == []
    assert of(3) == [notes[3][1].sentence, notes[1][1].sentence], "what is said of any round aside"
