"""A commit record's figures, under the names that charts have."""

from typing import Any

import pytest
from watched_runs import record

from atoll.comm.ids import NodeId
from atoll.comm.replace import replace
from atoll.coordinator.state_machine.events import CommitRecord, Failure, TrainerFigures
from atoll.coordinator.tracking.figures import MAX_NODES, MAX_NUMBER, chart_names, row

ADA, BO = NodeId("n1"), NodeId("n2")


def of_two(**changes: Any) -> CommitRecord:
    made = CommitRecord(
        round=7,
        epoch=2,
        attempts=1,
        members=(ADA, BO),
        contributors={ADA: 600.0, BO: 400.0},
        tokens=7000,
        train_loss=2.5,
        seconds={"inner": 1.5, "collect": 0.25, "reduce": 0.5, "commit": 0.25},
        bytes_up={ADA: 10, BO: 20},
        bytes_down={ADA: 30, BO: 40},
        reason="every member was ready",
        sealed_digest="ab",
        predicted=0.4,
        norms={ADA: 1.0, BO: 3.0},
        digests_equal=True,
        val_loss=2.0,
        committed_at=1.7e9,
        names={ADA: "ada", BO: "bo"},
        losses={ADA: 2.0, BO: 3.0},
        exchange={ADA: 0.5, BO: 0.75},
        figures={
            ADA: TrainerFigures(tokens_per_s=100.0, mfu=0.5, gradient_norm=2.0, learning_rate=0.01, data_wait=0.1),
            BO: TrainerFigures(tokens_per_s=50.0, gradient_norm=4.0, learning_rate=0.01),
        },
        goodput={"inner": 30.0, "sync": 10.0},
    )
    return replace(made, **changes)


def test_a_row_has_axes_losses_speeds_seconds_and_the_exchange_as_predicted_and_measured() -> None:
    found = row(of_two())
    expected = {
        "round": 7,
        "tokens": 7000,
        "committed_at": 1.7e9,
        "loss/train": 2.5,
        "loss/val": 2.0,
        "train/learning_rate": 0.01,
        "train/gradient_norm": 3.0,
        "train/delta_norm": 2.0,
        "speed/run_tokens_per_s": 400.0,
        "speed/trainers_tokens_per_s": 150.0,
        "speed/mfu": 0.5,  # of those that know theirs
        "speed/data_wait": 0.05,
        "seconds/inner": 1.5,
        "seconds/collect": 0.25,
        "seconds/reduce": 0.5,
        "seconds/commit": 0.25,
        "seconds/round": 2.5,
        "exchange/predicted_s": 0.4,
        "exchange/measured_s": 0.5,
        "exchange/attempts": 1,
        "exchange/levels": 1,
        "exchange/bytes_up": 30,
        "exchange/bytes_down": 70,
        "exchange/states_equal": 1,
        "members/active": 2,
        "members/contributors": 2,
        "members/epoch": 2,
        "goodput/inner": 0.75,
        "goodput/sync": 0.25,
        "fleet/goodput": 0.75,
        "fleet/compute_utilisation": 0.75,
        "failures/noticed": 0,
    }
    assert {name: value for name, value in found.items() if not name.startswith("node")} == expected


def test_utilisation_is_of_steps_and_exchange_alone_and_goodput_of_all_time() -> None:
    found = row(of_two(goodput={"inner": 60.0, "lost": 15.0, "sync": 25.0, "down": 100.0}))
    assert (found["fleet/goodput"], found["fleet/compute_utilisation"]) == (0.3, 0.75)


def test_a_failure_counts_in_the_round_in_which_it_was_noticed_and_its_recovery_when_that_is_told() -> None:
    silent = Failure(1, ADA, 7, "silent", 1.7e9, detected=5.0, waited=30.0)
    dead = Failure(2, BO, 7, "its connection broke", 1.7e9, detected=2.0, recovered=12.0, waited=30.0)
    earlier = Failure(3, BO, 6, "silent", 1.7e9, detected=50.0, recovered=40.0, waited=99.0)
    found = row(of_two(failures=(silent, dead, earlier)))
    told = {name: value for name, value in found.items() if name.startswith("failures/")}
    assert told == {
        "failures/noticed": 2,
        "failures/detect_s": 5.0,
        "failures/recover_s": 40.0,
        "failures/survivors_lost_s": 60.0,
    }


def test_each_contributor_has_charts_under_its_name() -> None:
    found = {name: value for name, value in row(of_two()).items() if name.startswith("node/")}
    assert found == {
        "node/ada/loss": 2.0,
        "node/ada/tokens": 600.0,
        "node/ada/tokens_per_s": 100.0,
        "node/ada/mfu": 0.5,
        "node/ada/gradient_norm": 2.0,
        "node/ada/data_wait": 0.1,
        "node/ada/delta_norm": 1.0,
        "node/ada/exchange_s": 0.5,
        "node/ada/bytes_up": 10,
        "node/ada/bytes_down": 30,
        "node/bo/loss": 3.0,
        "node/bo/tokens": 400.0,
        "node/bo/tokens_per_s": 50.0,
        "node/bo/gradient_norm": 4.0,
        "node/bo/data_wait": 0.0,
        "node/bo/delta_norm": 3.0,
        "node/bo/exchange_s": 0.75,
        "node/bo/bytes_up": 20,
        "node/bo/bytes_down": 40,
    }


def test_of_many_contributors_least_median_and_most_are_shown_and_no_charts_of_each() -> None:
    few, many = row(record(3, MAX_NODES)), row(record(3, MAX_NODES + 1))
    assert sum(name.startswith("node/") for name in few) == 10 * MAX_NODES
    assert not any(name.startswith("node/") for name in many)
    assert few.keys() - many.keys() == {name for name in few if name.startswith("node/")}
    made = record(3, MAX_NODES + 1)
    assert many["nodes/exchange_s/most"] == max(made.exchange.values())
    assert many["nodes/loss/least"] == min(made.losses.values())
    assert many["nodes/tokens/median"] == sorted(made.contributors.values())[MAX_NODES // 2]


def test_what_is_not_known_is_left_out() -> None:
    found = row(of_two(val_loss=None, predicted=0.0, digests_equal=None, figures={}, goodput={}, exchange={}))
    unknown = ("loss/val", "exchange/predicted_s", "exchange/states_equal", "speed/mfu", "train/learning_rate")
    parts = (
        "goodput/",
        "fleet/",
        "failures/detect_s",
        "failures/recover_s",
        "exchange_s",
        "trainers_tokens_per_s",
        "data_wait",
    )
    assert [name for name in found if name in unknown or any(part in name for part in parts)] == []


def test_of_a_void_round_only_the_axes_are_shown() -> None:
    assert row(of_two(void=True)) == {
        "round": 7,
        "tokens": 7000,
        "committed_at": 1.7e9,
        "members/epoch": 2,
        "void": 1,
    }


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ({ADA: "ada", BO: "bo"}, {ADA: "ada", BO: "bo"}),
        ({ADA: "ada", BO: "ada"}, {ADA: "ada-n1", BO: "ada-n2"}),
        ({ADA: "a/../b c", BO: "<script>"}, {ADA: "a_b_c", BO: "_script_"}),
        ({ADA: "x" * 500}, {ADA: "x" * 32, BO: "n2"}),
    ],
)
def test_the_names_in_charts_are_plain_and_each_is_of_one_node(
    names: dict[NodeId, str], expected: dict[NodeId, str]
) -> None:
    assert chart_names(of_two(names=names)) == expected


def test_in_a_run_that_many_join_and_leave_there_is_an_end_to_the_charts() -> None:
    late = NodeId(f"n{MAX_NUMBER + 1}")
    made = of_two(
        contributors={ADA: 1.0, late: 1.0}, names={ADA: "ada", late: "late"}, losses={ADA: 1.0, late: 2.0}
    )
    found = row(made)
    assert "node/ada/loss" in found and "node/late/loss" not in found
    assert found["nodes/loss/most"] == 2.0
