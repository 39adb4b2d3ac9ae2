"""The tracker writes to a real wandb run, offline; what it wrote is read back from the run's file."""

import os
from pathlib import Path

import pytest
import wandb_log

from atoll.comm.config.run import RunConfig, WandbMode
from atoll.comm.errors import ConfigError
from atoll.comm.ids import NodeId
from atoll.coordinator.monitor.wandb_logger import WandbLogger, trainer_figures, wandb_mode
from atoll.coordinator.service.telemetry import Vitals
from atoll.coordinator.state_machine.events import CommitRecord, Note, Publish

ADA, BO = NodeId("n1"), NodeId("n2")


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No key and no settings of the person who runs the tests."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)


def config(mode: WandbMode = WandbMode.OFFLINE) -> RunConfig:
    run = RunConfig(name="reef")
    run.wandb.mode = mode
    return run


def record(number: int) -> CommitRecord:
    weights = {ADA: 600.0, BO: 400.0} if number < 3 else {ADA: 600.0}
    return CommitRecord(
        round=number,
        epoch=2,
        attempts=1,
        members=(ADA, BO),
        contributors=weights,
        tokens=1000 * number,
        train_loss=5.0 / number,
        seconds={"inner": 1.5, "collect": 0.25, "reduce": 0.5, "commit": 0.125},
        bytes_up={ADA: 10 * number, BO: 20 * number},
        bytes_down={ADA: 30 * number, BO: 40 * number},
        reason="every member was ready",
        sealed_digest="ab",
        digests_equal=True,
        val_loss=None if number == 2 else 4.0 / number,
    )


def track(directory: Path, effects: list[Note | Publish], past: list[CommitRecord] | None = None) -> None:
    tracker = WandbLogger(config(), directory, past or [])
    for effect in effects:
        tracker.tell(effect)
    tracker.close()


def rounds(rows: list[wandb_log.Row]) -> list[wandb_log.Row]:
    return [row for row in rows if "loss/train" in row]


def test_every_committed_round_is_one_row_with_loss_tokens_and_a_series_for_each_member(tmp_path: Path) -> None:
    track(tmp_path, [Publish(record(number)) for number in (1, 2, 3)])

    (rows,) = wandb_log.rows(tmp_path / "wandb")

    assert [row["round"] for row in rounds(rows)] == [1, 2, 3]
    assert [row["tokens"] for row in rounds(rows)] == [1000, 2000, 3000]
    assert [row["loss/train"] for row in rounds(rows)] == [5.0, 2.5, 5.0 / 3]
    assert [row.get("loss/val") for row in rounds(rows)] == [4.0, None, 4.0 / 3]
    assert [row.get("tokens/n1") for row in rounds(rows)] == [600, 600, 600]
    assert [row.get("tokens/n2") for row in rounds(rows)] == [400, 400, None]
    assert [row.get("bytes_up/n2") for row in rounds(rows)] == [20, 40, None]
    assert [row["bytes_down/n1"] for row in rounds(rows)] == [30, 60, 90]
    assert [row["seconds/collect"] for row in rounds(rows)] == [0.25] * 3
    assert [row["members/contributors"] for row in rounds(rows)] == [2, 2, 1]
    assert [row["reduce/digests_equal"] for row in rounds(rows)] == [1, 1, 1]


def test_events_stand_at_the_round_in_which_they_happened(tmp_path: Path) -> None:
    track(tmp_path, [Note("bo joins as n2", BO), Publish(record(1)), Note("the run is finished")])

    (rows,) = wandb_log.rows(tmp_path / "wandb")
    events = [row for row in rows if "event/sentence" in row]

    assert [(row["event/sentence"], row["event/node"], row["event/round"]) for row in events] == [
        ("bo joins as n2", "n2", 0),
        ("the run is finished", "", 1),
    ]


def test_a_restarted_coordinator_logs_the_past_rounds_once_more_into_a_fresh_run(tmp_path: Path) -> None:
    track(tmp_path, [Publish(record(1)), Publish(record(2))])
    track(tmp_path, [Publish(record(3))], past=[record(1), record(2)])

    first, second = wandb_log.rows(tmp_path / "wandb")

    assert [row["round"] for row in rounds(first)] == [1, 2]
    assert [row["round"] for row in rounds(second)] == [1, 2, 3]


def test_a_round_that_breaks_over_blocks_of_the_log_comes_back_whole(tmp_path: Path) -> None:
    sentence = "x" * 50_000
    track(tmp_path, [Note(sentence), Publish(record(1))])

    (rows,) = wandb_log.rows(tmp_path / "wandb")

    assert [row["event/sentence"] for row in rows if "event/sentence" in row] == [sentence]
    assert [row["round"] for row in rounds(rows)] == [1]


def test_a_disabled_tracker_writes_nothing(tmp_path: Path) -> None:
    directory = tmp_path / "state"
    tracker = WandbLogger(config(WandbMode.DISABLED), directory, [record(1)])
    tracker.tell(Publish(record(2)))
    tracker.close()

    assert not directory.exists()


@pytest.mark.parametrize(
    ("mode", "environment", "expected"),
    [
        (WandbMode.AUTO, {}, WandbMode.OFFLINE),
        (WandbMode.AUTO, {"WANDB_API_KEY": "k" * 40}, WandbMode.ONLINE),
        (WandbMode.AUTO, {"WANDB_API_KEY": "k" * 40, "WANDB_MODE": "disabled"}, WandbMode.DISABLED),
        (WandbMode.AUTO, {"WANDB_API_KEY": "k" * 40, "WANDB_MODE": "dryrun"}, WandbMode.OFFLINE),
        (WandbMode.AUTO, {"WANDB_MODE": "online"}, WandbMode.ONLINE),
        (WandbMode.AUTO, {"WANDB_MODE": ""}, WandbMode.OFFLINE),
        (WandbMode.OFFLINE, {"WANDB_MODE": "disabled"}, WandbMode.OFFLINE),
        (WandbMode.DISABLED, {"WANDB_MODE": "online"}, WandbMode.DISABLED),
    ],
)
def test_auto_is_what_the_environment_says_and_else_goes_by_the_key(
    mode: WandbMode,
    environment: dict[str, str],
    expected: WandbMode,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert wandb_mode(config(mode)) is expected


def test_a_mode_that_wandb_does_not_know_is_refused_with_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "sometimes")
    with pytest.raises(ConfigError, match="WANDB_MODE is 'sometimes': set it to online, offline or disabled"):
        wandb_mode(config(WandbMode.AUTO))


def test_auto_is_disabled_by_the_environment_and_then_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")
    directory = tmp_path / "state"
    tracker = WandbLogger(config(WandbMode.AUTO), directory, [record(1)])
    tracker.tell(Publish(record(2)))
    tracker.close()

    assert not directory.exists()


@pytest.mark.parametrize(
    ("environment", "project", "expected"),
    [
        ({}, "", ("atoll", "reef")),
        ({}, "tides", ("tides", "reef")),
        ({"WANDB_PROJECT": "sea", "WANDB_NAME": "shoal"}, "", ("sea", "shoal")),
        ({"WANDB_PROJECT": "sea", "WANDB_NAME": "shoal"}, "tides", ("tides", "shoal")),
    ],
)
def test_project_and_name_are_the_environments_where_the_config_names_none(
    environment: dict[str, str],
    project: str,
    expected: tuple[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    run = config()
    run.wandb.project = project
    WandbLogger(run, tmp_path, []).close()

    (file,) = wandb_log.files(tmp_path / "wandb")
    (found,) = [r.run for r in wandb_log.records(file) if r.HasField("run")]
    assert (found.project, found.display_name) == expected


def test_the_figures_of_a_rounds_trainers_are_a_few_charts_however_many_there_are(tmp_path: Path) -> None:
    vitals = {
        ADA: Vitals(tokens_per_s=100.0, mfu=0.5, data_wait=0.1, gradient_norm=2.0, learning_rate=0.01),
        BO: Vitals(tokens_per_s=50.0, gradient_norm=4.0, learning_rate=0.01, trainer_rss_bytes=7),
        NodeId("n3"): Vitals(tokens_per_s=1e9, mfu=0.9),  # no contributor
    }
    tracker = WandbLogger(config(), tmp_path, [])
    tracker.tell(Publish(record(1)), vitals)
    tracker.close()

    (rows,) = wandb_log.rows(tmp_path / "wandb")
    (row,) = rounds(rows)
    figures = {name.removeprefix("trainer/"): value for name, value in row.items() if name.startswith("trainer/")}
    assert figures == {
        "tokens_per_s/sum": 150,
        "tokens_per_s/mean": 75,
        "tokens_per_s/least": 50,
        "mfu/mean": 0.5,
        "mfu/least": 0.5,
        "data_wait/mean": 0.05,
        "data_wait/most": 0.1,
        "gradient_norm/mean": 3,
        "gradient_norm/most": 4,
        "learning_rate/mean": 0.01,
        "trainer_rss_bytes/mean": 7,
        "trainer_rss_bytes/most": 7,
    }
    assert trainer_figures(record(1), {}) == {}
