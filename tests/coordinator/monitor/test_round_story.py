"""Why a round took long, who was slow and by how much, and where its time went, by the record alone."""

import past_runs
import pytest

from atoll.comm.ids import NodeId
from atoll.comm.replace import replace
from atoll.coordinator.causes import slowness
from atoll.coordinator.causes.explanation import Confidence, Kind, Verdict
from atoll.coordinator.causes.slowness import MEMORY, RoundPace
from atoll.coordinator.history.series import SeriesTable, series_row
from atoll.coordinator.monitor.round_story import (
    UsualTimes,
    in_round,
    slow_nodes,
    usual_times,
    verdict_of,
    waterfall,
    why,
)
from atoll.coordinator.state_machine.events import CommitRecord, Failure

STORY = past_runs.Story(rounds=60)
RECORDS = list(past_runs.records(STORY))
LAST = RECORDS[-1]


def series(upto: int) -> SeriesTable:
    table = SeriesTable()
    table.extend(map(series_row, RECORDS[:upto]))
    return table


def test_what_rounds_usually_take_is_the_median_of_those_before() -> None:
    usual = usual_times(series(60), LAST)
    assert usual.wall == pytest.approx(60.0, abs=1.0) and usual.took == 98.0
    paces = [RoundPace(**r.seconds) for r in RECORDS[-1 - MEMORY : -1]]
    assert usual.phases == slowness.usual(paces), "by the same rounds as the run's own verdict"
    assert usual_times(series(59), LAST) == usual, "also while its own row is not there yet"
    assert usual_times(SeriesTable(), RECORDS[0]) == UsualTimes(dict.fromkeys(usual.phases, 0.0), 0.0, 0.0)


def test_a_long_round_is_explained_by_the_phase_that_took_longest_and_who_was_slow_in_it() -> None:
    said = why(LAST, usual_times(series(60), LAST))
    assert (
        said.startswith("The exchange took 4")
        and "longer than usual: ivy " in said
        and said.endswith("; a quorum has its 20 steps; gus had less.")
    )
    training = replace(LAST, seconds=LAST.seconds | {"inner": 90.0, "reduce": 6.0})
    assert why(training, usual_times(series(60), training)).startswith("Training took 1 min 30 s, ")
    away = RECORDS[STORY.middle - 1]
    assert why(away, usual_times(series(60), away)).startswith("Before it the run stood still for 20 min 00 s;")
    usual = RECORDS[20]
    assert why(usual, usual_times(series(60), usual)).startswith("It took about as long as usual;")
    longer = usual_times(series(60), usual)
    longer = replace(longer, took=1.12 * longer.wall)
    assert why(usual, longer).startswith("It took about as long as usual (+12 %);")
    vague = Verdict(
        Kind.UNKNOWN, "", "", "", "", "nothing that was gathered says why", Confidence.GUESSED, 7.0, 7.0
    )
    assert why(replace(usual, verdict=vague), longer) == why(usual, longer), "a round of the same slowness"
    long = replace(longer, took=1.3 * longer.wall)
    assert why(replace(usual, verdict=vague), long) == "Nothing that was gathered says why."
    quick = usual_times(series(60), usual)
    quick = replace(quick, took=0.7 * quick.wall)
    assert why(usual, quick) == "It was quicker than usual (-30 %); a quorum has its 20 steps; gus had less."


def test_of_a_void_round_nobody_was_slow_because_nothing_of_it_counts() -> None:
    [void] = [record for record in RECORDS if record.void]
    assert [s.what for s in slow_nodes(void)] == ["training"], "what was measured stands"
    assert (
        why(void, usual_times(series(60), void)) == f"Round {void.round} is void: nobody has its state any more."
    )


def test_a_verdict_of_the_run_is_said_in_its_words() -> None:
    sentence = "the link from ivy to gus lost 3 % of its packets"
    verdict = Verdict(Kind.PACKET_LOSS, "n8", "ivy", "n6", "gus", sentence, Confidence.TOLD)
    judged = replace(LAST, verdict=verdict)
    assert verdict_of(judged, usual_times(series(60), judged)) == sentence
    assert why(judged, usual_times(series(60), judged)) == f"T{sentence[1:]}."
    named = replace(judged, verdict=replace(verdict, sentence="ivy died"))
    assert why(named, usual_times(series(60), named)) == "ivy died.", "a name stays as it is"
    whose = replace(judged, verdict=replace(verdict, sentence="ivy's trainer hung"))
    assert why(whose, usual_times(series(60), whose)) == "ivy's trainer hung."
    assert verdict_of(LAST, usual_times(series(60), LAST)) == ""


def test_who_is_to_blame_is_among_the_slow_once() -> None:
    def judged(culprit: str, name: str, seconds: float) -> CommitRecord:
        said = f"{name} computed slowly"
        return replace(
            LAST, verdict=Verdict(Kind.SLOW_COMPUTE, culprit, name, "", "", said, Confidence.AGREED, seconds)
        )

    assert slow_nodes(judged("n1", "ada", 9.0))[-1].sentence == "ada computed slowly"
    assert slow_nodes(judged("n1", "ada", 0.0)) == slow_nodes(LAST), "a condition that took no time"
    assert slow_nodes(judged(past_runs.SLOW, "gus", 9.0)) == slow_nodes(LAST)
    assert slow_nodes(judged("coordinator", "coordinator", 9.0)) == slow_nodes(LAST)


def test_the_slow_are_named_with_how_many_times_slower_they_were_the_worst_first() -> None:
    slow = slow_nodes(LAST)
    assert [(s.node, s.what) for s in slow] == [
        *[(past_runs.SLOW_LINK, "link")] * 2,
        (past_runs.SLOW, "training"),
    ]
    assert slow[0].times == pytest.approx(10.4, rel=0.2) and slow[2].times == pytest.approx(2.5, rel=0.2)
    assert slow[2].sentence.startswith("gus trained 2.") and "tokens/s" in slow[2].sentence
    some = {**LAST.contributors}
    del some[NodeId("n1")]
    odd = replace(LAST, contributors=some, figures={}, rates={}, shares={}, lacking={4: (NodeId("n2"),)})
    assert {(s.name, s.what) for s in slow_nodes(odd)} == {("bo", "lost in the exchange"), ("ada", "left out")}


def test_who_rests_between_its_steps_is_the_slow_one_and_not_whose_last_steps_were_slow() -> None:
    """Three trained alike, but for the limit of the third one's owner; the first one's last steps took long."""
    ada, bo, cy = nodes = [NodeId(n) for n in ("n1", "n2", "n3")]
    momentary = {ada: 1624.0, bo: 3264.0, cy: 4224.0}  # tokens a second
    record = replace(
        LAST,
        members=tuple(nodes),
        contributors={ada: 18_944.0, bo: 19_456.0, cy: 5_632.0},
        figures={n: replace(LAST.figures[ada], tokens_per_s=told) for n, told in momentary.items()},
        spent={n: {"inner": 6.3, "sync": 1.0} for n in nodes},
        rates={},
        lacking={},
    )
    [slow] = slow_nodes(record)
    assert slow.node == cy and slow.times == pytest.approx(18_944 / 5_632, rel=0.01)
    [guessed] = slow_nodes(replace(record, spent={}))
    assert guessed.node == ada, "by what trainers told, where nothing else is known"


def test_time_is_estimated_by_tokens_and_pace_and_comes_to_the_rounds() -> None:
    rows = waterfall(LAST, 98.0)
    assert len(rows) == len(LAST.members) and all(row["estimated"] for row in rows)
    whole = sum(LAST.seconds.values())
    for row in rows:
        assert row["inner"] + row["wait"] + row["exchange"] == pytest.approx(whole, abs=0.01)
        assert min(row["inner"], row["wait"], row["exchange"]) >= 0


def test_time_that_the_record_says_is_taken_from_it() -> None:
    spent = {NodeId("n1"): {"inner": 50.0, "sync": 7.0, "waiting": 2.0, "recovering": 1.0}}
    rows = waterfall(replace(LAST, spent=spent), 98.0)
    [ada] = [row for row in rows if row["node_id"] == "n1"]
    assert not ada["estimated"]
    assert (ada["inner"], ada["exchange"], ada["wait"], ada["recovery"]) == (50.0, 7.0, 2.0, 1.0)
    assert sum(row["estimated"] for row in rows) == len(rows) - 1


def test_of_the_time_for_which_a_member_was_away_a_round_has_no_more_than_it_took() -> None:
    spent = {NodeId("n1"): {"down": 25.8, "recovering": 1.0, "inner": 3.0, "open": -0.5}}
    [ada] = [row for row in waterfall(replace(LAST, spent=spent), 8.0) if row["node_id"] == "n1"]
    assert (ada["inner"], ada["recovery"], ada["down"]) == (2.5, 1.0, 4.5)


def test_who_failed_in_a_round_was_in_it() -> None:
    cy, dee = NodeId("n33"), NodeId("n34")
    died = Failure(1, cy, LAST.round, "silent for 5 s", LAST.committed_at - 9, 5.0)
    joining = replace(died, number=2, node=dee)
    spent = {cy: {"lost": 3.0, "down": 5.0}, dee: {"recovering": 4.0}}
    assert in_round(replace(LAST, spent=spent, failures=(died, joining))) == {*LAST.members, cy}
    earlier = replace(died, round=LAST.round - 1)
    assert in_round(replace(LAST, spent=spent, failures=(earlier,))) == {*LAST.members}
