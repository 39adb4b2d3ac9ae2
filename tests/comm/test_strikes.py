"""Strikes: how they add up, are forgotten, and what they lead to."""

import pytest

from atoll.comm.evidence import Consequence, Evidence, Offence
from atoll.comm.ids import NodeId
from atoll.comm.strikes import BANNING, FALSE_STATEMENTS, Strikes, decay, remember, strike

NODE = NodeId("n1")
TROUBLE = [o for o in Offence if o not in FALSE_STATEMENTS | BANNING | {Offence.FALSE_WORK, Offence.UNSHOWN}]


def struck(offence: Offence, rounds: list[int], before: Strikes | None = None) -> Strikes:
    record = before or Strikes(NODE)
    for k in rounds:
        record = strike(record, Evidence(k, offence, "it did"), k)
    return record


def test_strikes_halve_in_twenty_rounds_and_fall_in_each_round_between() -> None:
    assert [decay(k) for k in (0, 20, 40, 60)] == [1.0, 0.5, 0.25, 0.125]
    values = [decay(k) for k in range(200)]
    assert all(a > b for a, b in zip(values, values[1:], strict=False))
    assert decay(-3) == 1.0 and decay(10**9) == decay(20_000) < 1e-300


@pytest.mark.parametrize("offence", TROUBLE)
def test_trouble_in_a_row_costs_the_chunks_then_the_contribution_and_nothing_more(offence: Offence) -> None:
    found = [struck(offence, list(range(k))).consequence(k - 1) for k in range(1, 200)]
    assert found[:2] == [Consequence.STRUCK] * 2
    assert found[2:5] == [Consequence.NO_OWNER] * 3
    assert set(found[5:]) == {Consequence.NO_CONTRIBUTOR}


def test_work_that_was_not_done_costs_the_chunks_then_the_contribution_and_nothing_more() -> None:
    found = [struck(Offence.FALSE_WORK, list(range(k))).consequence(k - 1) for k in range(1, 200)]
    assert found[:2] == [Consequence.NO_OWNER] * 2
    assert set(found[2:]) == {Consequence.NO_CONTRIBUTOR}


def test_chunks_that_nobody_is_shown_cost_the_chunks_for_some_rounds_then_the_contribution_and_nothing_more() -> (
    None
):
    once = struck(Offence.UNSHOWN, [0])
    assert [once.consequence(k) for k in (0, 14, 16)] == [Consequence.NO_OWNER] * 2 + [Consequence.STRUCK]
    often = [struck(Offence.UNSHOWN, list(range(k))).consequence(k - 1) for k in range(2, 200)]
    assert set(often) == {Consequence.NO_CONTRIBUTOR}


@pytest.mark.parametrize("offence", TROUBLE)
def test_trouble_now_and_then_costs_nothing(offence: Offence) -> None:
    record = Strikes(NODE)
    for k in range(0, 3000, 20):
        record = struck(offence, [k], record)
        assert record.consequence(k) is Consequence.STRUCK


def test_who_is_in_trouble_again_before_all_is_forgotten_is_in_quarantine_for_longer() -> None:
    lengths, k, record = [], 0, Strikes(NODE)
    for _ in range(4):
        while record.consequence(k) is not Consequence.NO_CONTRIBUTOR:
            record = struck(Offence.LATE, [k], record)
            k += 1
        k -= 1
        began = k
        while record.consequence(k) is Consequence.NO_CONTRIBUTOR:
            k += 1
        lengths.append(k - began)
    assert lengths[0] < 10 and lengths[1:] == [21, 41, 61]


@pytest.mark.parametrize("offence", sorted(FALSE_STATEMENTS))
def test_false_statements_cost_the_chunks_then_the_contribution_then_the_place(offence: Offence) -> None:
    record, found = Strikes(NODE), []
    for k in range(3):
        record = struck(offence, [k], record)
        found.append(record.consequence(k))
    assert found == [Consequence.NO_OWNER, Consequence.NO_CONTRIBUTOR, Consequence.EVICTED]
    assert record.consequence(2 + 20) is Consequence.NO_CONTRIBUTOR, "it may come back, and is watched"
    assert record.consequence(2 + 60) is Consequence.STRUCK


@pytest.mark.parametrize("offence", sorted(FALSE_STATEMENTS))
def test_who_says_what_is_not_after_a_quarantine_is_out(offence: Offence) -> None:
    record, k = struck(offence, [0, 1]), 1
    while record.consequence(k) is Consequence.NO_CONTRIBUTOR:
        k += 1
    assert 10 < k < 20
    assert struck(offence, [k], record).consequence(k) is Consequence.EVICTED


@pytest.mark.parametrize("offence", sorted(BANNING))
def test_who_forges_or_is_banned_by_the_operator_is_out_for_good(offence: Offence) -> None:
    record = struck(offence, [7])
    assert record.consequence(7) is record.consequence(10**6) is Consequence.BANNED
    assert record.ban == Evidence(7, offence, "it did")
    assert struck(Offence.FORGED_SEAL, [8], record).ban == record.ban
    assert not record.forgotten(10**6)


def test_what_is_forgotten_leaves_the_book_and_a_ban_does_not() -> None:
    records = {"a": struck(Offence.LATE, [1]), "b": struck(Offence.FORGED_SEAL, [1])}
    assert remember(records, 60) == records
    assert remember(records, 100) == {"b": records["b"]}


def test_the_book_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atoll.comm.strikes.MAX_RECORDS", 3)
    records = {"ban": struck(Offence.FORGED_INPUT, [1])} | {f"k{i}": struck(Offence.LATE, [1]) for i in range(6)}
    assert list(remember(records, 1)) == ["ban", "k4", "k5"]
