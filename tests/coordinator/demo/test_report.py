"""A demo's report and picture, from records made by hand."""

import json
from pathlib import Path
from typing import Any

import pytest

from atoll.comm.ids import NodeId
from atoll.coordinator.demo import report
from atoll.coordinator.demo.report import DemoStory, Mark, MarkKind
from atoll.coordinator.state_machine.events import CommitRecord

ADA, BO, CY = NodeId("n1"), NodeId("n2"), NodeId("n3")
PNG = b"\x89PNG\r\n\x1a\n"


def record(number: int, contributors: dict[NodeId, float], sent: int, **changes: Any) -> CommitRecord:
    fields: dict[str, Any] = {
        "round": number,
        "epoch": 1,
        "attempts": 1,
        "members": tuple(contributors),
        "contributors": contributors,
        "tokens": 1000 * number,
        "train_loss": 5.0 - number,
        "seconds": {"inner": 2.0, "collect": 1.0, "reduce": 0.5, "commit": 0.5},
        "bytes_up": dict.fromkeys(contributors, sent),
        "bytes_down": {},
        "reason": "every member was ready",
        "sealed_digest": "ab",
        "digests_equal": True,
        "val_loss": 5.5 - number,
    }
    return CommitRecord(**(fields | changes))


@pytest.fixture
def story() -> DemoStory:
    """Three rounds: ada and bo, ada alone because bo was killed, ada and cy, who joined in round 2."""
    members = [{"node_id": "n1", "name": "ada"}, {"node_id": "n2", "name": "bo"}, {"node_id": "n3", "name": "cy"}]
    return DemoStory(
        rounds=3,
        inner_steps=10,
        n_params=1000,
        started=3,
        run={
            "run_id": "reef",
            "val_loss_first": 5.5,
            "members": members,
            "goodput": {"inner": 0.75, "sync": 0.05, "recovering": 0.2, "waiting": 0.0, "down": 0.0, "lost": 0.0},
        },
        records=[
            record(1, {ADA: 500.0, BO: 500.0}, 100),
            record(2, {ADA: 1000.0}, 40),
            record(3, {ADA: 500.0, CY: 500.0}, 130),
        ],
        marks=[Mark(MarkKind.KILLED, "bo", 2), Mark(MarkKind.JOINED, "cy", 2)],
        elapsed=30.0,
        first_commit=12.0,
    )


def test_the_report_counts_what_happened(story: DemoStory) -> None:
    found = report.summarize(story)

    assert (found.rounds_committed, found.nodes_started, found.tokens) == (3, 3, 3000)
    assert (found.nodes_killed, found.nodes_recovered) == (1, 1)
    assert (found.val_loss_first, found.val_loss_last) == (5.5, 2.5)
    assert (found.goodput, found.wall_s, found.first_commit_s) == (0.75, 30.0, 12.0)
    assert found.digests_equal


def test_bytes_are_the_mean_over_all_records_and_contributors(story: DemoStory) -> None:
    assert report.summarize(story).bytes_per_node_per_round == (100 + 100 + 40 + 130 + 130) / 5


def test_the_fp32_equivalent_is_an_all_reduce_of_every_step_among_the_mean_number_of_contributors() -> None:
    assert report.allreduce_bytes(2, 1000, 10) == 2 * 0.5 * 4 * 1000 * 10
    assert report.allreduce_bytes(4, 1000, 10) == 2 * 0.75 * 4 * 1000 * 10
    assert report.allreduce_bytes(1, 1000, 10) == 0


def test_a_node_that_joined_but_contributed_to_no_commit_is_not_recovered(story: DemoStory) -> None:
    story.records.pop()
    assert report.summarize(story).nodes_recovered == 0


def test_a_node_that_joined_in_round_1_is_not_recovered(story: DemoStory) -> None:
    story.marks = [Mark(MarkKind.JOINED, "cy", 1)]
    assert report.summarize(story).nodes_recovered == 0


def test_one_round_with_unequal_digests_is_enough_to_say_so(story: DemoStory) -> None:
    story.records[1] = record(2, {ADA: 1000.0}, 40, digests_equal=False)
    assert not report.summarize(story).digests_equal


def test_the_last_validation_loss_is_the_last_one_measured(story: DemoStory) -> None:
    story.records[2] = record(3, {ADA: 500.0}, 40, val_loss=None)
    assert report.summarize(story).val_loss_last == 3.5


def test_a_run_without_a_commit_has_a_report(story: DemoStory) -> None:
    story.records, story.marks = [], []
    found = report.summarize(story)

    assert (found.rounds_committed, found.tokens, found.bytes_per_node_per_round) == (0, 0, 0.0)
    assert (found.val_loss_last, found.digests_equal) == (None, False)


def test_the_files_hold_the_report_and_one_record_a_line(story: DemoStory, tmp_path: Path) -> None:
    report.write(tmp_path, report.summarize(story), story.records)

    written = json.loads((tmp_path / "report.json").read_text())
    lines = [json.loads(line) for line in (tmp_path / "rounds.jsonl").read_text().splitlines()]

    assert {"nodes_recovered": 1, "digests_equal": True, "wall_s": 30.0}.items() <= written.items()
    assert [line["round"] for line in lines] == [1, 2, 3]
    assert lines[2]["contributors"] == {"n1": 500.0, "n3": 500.0}


def test_the_picture_shows_each_nodes_tokens_round_by_round(story: DemoStory, tmp_path: Path) -> None:
    rows = report.contributions(story.run, story.records)
    report.draw(tmp_path / "loss.png", story)

    assert rows == {"ada": [500.0, 1000.0, 500.0], "bo": [500.0, 0.0, 0.0], "cy": [0.0, 0.0, 500.0]}
    assert (tmp_path / "loss.png").read_bytes().startswith(PNG)


def test_a_run_without_losses_is_drawn_too(story: DemoStory, tmp_path: Path) -> None:
    story.records, story.marks, story.run["val_loss_first"] = [], [], None
    report.draw(tmp_path / "loss.png", story)

    assert (tmp_path / "loss.png").read_bytes().startswith(PNG)
