"""Alerts begin and end when the table in `alerts` says, once each."""

from typing import Any

import pytest

from atoll.comm.config.run import MembersConfig, RunConfig
from atoll.comm.evidence import Consequence, Evidence, Offence
from atoll.comm.ids import NodeId
from atoll.comm.replace import replace
from atoll.coordinator.monitor.alerts import Alert, AlertKind, AlertRules
from atoll.coordinator.state_machine.events import CommitRecord, Decision
from atoll.coordinator.state_machine.members import MemberState
from atoll.coordinator.state_machine.state import Phase, State

A, B = NodeId("n1"), NodeId("n2")
NAMES = {A: "ada", B: "bo"}


def record(number: int, **changed: Any) -> CommitRecord:
    """A good round of 100 s of two members."""
    usual: dict[str, Any] = {
        **dict(round=number, epoch=1, attempts=1, members=(A, B), contributors={A: 1.0, B: 1.0}, tokens=number),
        **dict(train_loss=3.0, seconds={"inner": 90.0, "reduce": 10.0}, bytes_up={}, bytes_down={}, reason=""),
        **dict(sealed_digest="", digests_equal=True, names=NAMES, state_digest="aa", digests={A: "aa", B: "aa"}),
        **dict(spent={A: {"inner": 90.0, "sync": 10.0}, B: {"inner": 90.0, "sync": 10.0}}),
    }
    return CommitRecord(**(usual | changed))


def run(committed: int, able: int = 2, phase: Phase = Phase.INNER) -> State:
    state = State(RunConfig(members=MembersConfig(minimum=2)), committed=committed)
    members = replace(state.members, trusted_counts={MemberState.ACTIVE: able})
    return replace(state, members=members, round=replace(state.round, number=committed + 1, phase=phase))


def said(alerts: list[Alert]) -> list[tuple[AlertKind, bool]]:
    return [(alert.kind, alert.on) for alert in alerts]


def after(*records: CommitRecord) -> AlertRules:
    rules = AlertRules(records)
    assert not rules.look(run(records[-1].round if records else 0), 0.0)
    return rules


def test_a_run_that_goes_well_alerts_nobody() -> None:
    rules = after()
    for number in range(1, 50):
        rules.record(record(number))
        assert not rules.look(run(number), 100.0 * number)


def test_no_commit_for_four_times_as_long_as_usual_is_a_stall_and_a_commit_ends_it() -> None:
    rules = after(*map(record, range(1, 6)))
    assert not rules.look(run(5), 400.0)
    (alert,) = rules.look(run(5), 401.0)
    assert (alert.kind, alert.on, alert.round) == (AlertKind.STALL, True, 6)
    assert "401 s" in alert.sentence and "100 s" in alert.sentence
    assert not rules.look(run(5), 500.0), "it is told once"
    (alert,) = rules.look(run(6), 501.0)
    assert (alert.kind, alert.on) == (AlertKind.STALL, False) and "100 s" in alert.sentence


def test_short_rounds_and_a_finished_run_and_the_time_before_the_first_commit_are_no_stall() -> None:
    short = [record(number, seconds={"inner": 1.0}) for number in range(1, 6)]
    assert not after(*short).look(run(5), 299.0)
    assert said(after(*short).look(run(5), 301.0)) == [(AlertKind.STALL, True)]
    assert not after(*short).look(run(5, phase=Phase.FINISHED), 9999.0)
    assert not after().look(run(0), 9999.0)


def test_the_time_for_which_the_coordinator_was_away_is_no_stall() -> None:
    rules = AlertRules(map(record, range(1, 6)))
    assert not rules.look(run(5), 50_000.0)


def test_too_few_members_are_an_alert_after_a_minute_and_no_stall_beside_it() -> None:
    rules = after(record(1))
    assert not rules.look(run(1, able=1), 10.0)
    assert not rules.look(run(1), 60.0), "one was only away for a moment"
    assert not rules.look(run(1, able=1), 100.0)
    (alert,) = rules.look(run(1, able=1), 160.0)
    assert alert.kind is AlertKind.LOST_QUORUM and "1 of the 2" in alert.sentence
    assert not rules.look(run(1, able=1), 5000.0)
    found = dict(said(rules.look(run(1), 5001.0)))
    assert found == {AlertKind.LOST_QUORUM: False, AlertKind.STALL: True}


def test_states_that_differ_are_an_alert_until_those_of_a_later_round_are_equal() -> None:
    rules = after(record(1))
    rules.record(record(2, digests_equal=False, digests={A: "aa", B: "bb"}))
    (alert,) = rules.look(run(2), 1.0)
    assert alert.kind is AlertKind.STATE_DIVERGENCE and "bo" in alert.sentence and "ada" not in alert.sentence
    rules.record(record(3, digests_equal=None))
    assert not rules.look(run(3), 2.0), "nobody told"
    rules.record(record(4))
    assert said(rules.look(run(4), 3.0)) == [(AlertKind.STATE_DIVERGENCE, False)]


def test_where_nobody_can_tell_which_state_is_right_nobody_is_said_to_have_another() -> None:
    rules = after(record(1))
    rules.record(record(2, digests_equal=False, state_digest="", digests={A: "aa", B: "bb"}))
    (alert,) = rules.look(run(2), 1.0)
    assert alert.kind is AlertKind.STATE_DIVERGENCE
    assert alert.sentence == "the states that members made of round 2 differ; nobody can tell which is right"


@pytest.mark.parametrize("loss", [3.31, float("nan"), float("inf")])
def test_a_loss_that_rises_by_a_tenth_for_two_rounds_or_is_no_number_is_an_alert(loss: float) -> None:
    rules = after(*map(record, range(1, 9)))
    rules.record(record(9, train_loss=loss))
    first = said(rules.look(run(9), 1.0))
    assert first == ([] if loss == 3.31 else [(AlertKind.LOSS_DIVERGENCE, True)]), "one spike is none"
    rules.record(record(10, train_loss=loss))
    assert first + said(rules.look(run(10), 2.0)) == [(AlertKind.LOSS_DIVERGENCE, True)]
    for number in (11, 12):
        rules.record(record(number))
    assert said(rules.look(run(12), 3.0)) == [(AlertKind.LOSS_DIVERGENCE, False)]


def test_void_rounds_have_no_loss_and_take_the_place_of_what_was() -> None:
    rules = after(*map(record, range(1, 9)))
    rules.record(record(9, train_loss=float("nan")))
    rules.record(record(9, train_loss=0.0, void=True, digests_equal=None, spent={}))
    assert not rules.look(run(9), 1.0)


def test_goodput_below_a_half_over_ten_minutes_is_an_alert_until_it_is_well_above() -> None:
    def spent(inner: float) -> dict[str, Any]:
        of = {"inner": inner, "waiting": 100.0 - inner}
        return {"spent": {A: of, B: of}}

    rules = after()
    for number in range(1, 6):
        rules.record(record(number, **spent(40.0)))
    assert not rules.look(run(5), 1.0), "five rounds are 500 s"
    rules.record(record(6, **spent(40.0)))
    (alert,) = rules.look(run(6), 2.0)
    assert alert.kind is AlertKind.LOW_GOODPUT and alert.sentence.startswith("40%")
    for number in range(7, 13):
        rules.record(record(number, **spent(55.0)))
        assert not rules.look(run(number), 3.0), "neither low nor good again"
    for number in range(13, 19):
        rules.record(record(number, **spent(90.0)))
    assert said(rules.look(run(18), 4.0)) == [(AlertKind.LOW_GOODPUT, False)]


def test_who_is_banned_is_told_once_and_who_is_struck_is_not() -> None:
    evidence = Evidence(4, Offence.FORGED_SEAL, "it sealed something else")
    rules = after(record(1))
    rules.decide(Decision(1, A, "", 4, evidence, Consequence.STRUCK, name="ada"))
    assert not rules.look(run(1), 1.0)
    rules.decide(Decision(2, A, "", 4, evidence, Consequence.BANNED, name="ada"))
    (alert,) = rules.look(run(1), 2.0)
    assert (alert.kind, alert.on, alert.node, alert.name) == (AlertKind.CONVICTED, True, A, "ada")
    assert alert.sentence == "ada (n1) is banned: it sealed something else"
    assert not rules.look(run(1), 3.0)


def test_a_restart_repeats_no_alert_and_ends_those_that_are_over() -> None:
    odd = record(2, digests_equal=False, digests={A: "aa", B: "bb"})
    rules = after(record(1))
    rules.record(odd)
    assert said(rules.look(run(2), 1.0)) == [(AlertKind.STATE_DIVERGENCE, True)]
    again = AlertRules([record(1), odd])
    again.restore(rules.dump())
    assert not again.look(run(2), 2.0)
    again.record(record(3))
    assert said(again.look(run(3), 3.0)) == [(AlertKind.STATE_DIVERGENCE, False)]


@pytest.mark.parametrize("text", [None, "", "[]", '{"another": 1}', "\x00"])
def test_what_no_dump_wrote_is_no_alert(text: str | None) -> None:
    rules = AlertRules()
    rules.restore(text)
    assert not rules.on


def test_each_kind_has_a_title() -> None:
    for kind in AlertKind:
        begins, ends = (Alert(kind, on, "", 0.0, 1).title for on in (True, False))
        assert begins and ends == f"over: {begins}"
