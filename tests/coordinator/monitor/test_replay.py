"""A past run is shown by its records alone: from a state directory, an archive, a store; and in a terminal."""

import shutil
from pathlib import Path

import fsspec
import past_runs
import pytest
from click.testing import CliRunner

from atoll.comm.errors import ConfigError
from atoll.comm.replace import replace
from atoll.coordinator.causes.explanation import Confidence, Kind, Verdict
from atoll.coordinator.cli import replay as replay_command
from atoll.coordinator.history.record_archive import copy_missing
from atoll.coordinator.history.record_store import LocalStore
from atoll.coordinator.history.record_store import opened as opened_store
from atoll.coordinator.history.segment import ROUNDS
from atoll.coordinator.monitor import terminal_replay
from atoll.coordinator.monitor.recorded import recorded_snapshot
from atoll.coordinator.monitor.replay import PastRun, opened
from atoll.coordinator.monitor.run_answers import NotThere, RunAnswers
from atoll.coordinator.monitor.terminal_replay import Scrubber, moved
from atoll.coordinator.service.run_records import FOLDER, ROWS_KEPT
from atoll.coordinator.state_machine.events import CommitRecord

STORY = past_runs.Story(rounds=ROWS_KEPT + ROUNDS + 30, total=1000)


@pytest.fixture(scope="module")
def state_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("state")
    past_runs.write(folder, STORY)
    return folder


def test_a_run_is_shown_as_of_any_of_its_rounds(state_dir: Path) -> None:
    records = {r.round: r for r in past_runs.records(STORY)}
    with opened(str(state_dir)) as past:
        answers = RunAnswers(past)
        assert answers.last == STORY.rounds
        for number in (1, ROUNDS, ROUNDS + 1, STORY.middle + 2, STORY.rounds):
            said, record = answers.past(number), records[number]
            assert (said["round"], said["tokens"], said["epoch"]) == (number, record.tokens, record.epoch)
            assert [m["node_id"] for m in said["members"]] == list(record.members)
            assert said["last_commit_at"] == record.committed_at and said["last_recorded"] == STORY.rounds
            assert all(event["at"] <= record.committed_at + 0.001 for event in said["events"])
            assert said["phase"] == ("void" if record.void else "committed")
        assert answers.past(1)["fleet_goodput"] == pytest.approx(0.83)
        assert answers.past(1)["compute_utilisation"] == pytest.approx(0.835 / 0.935)
        losses = [r.val_loss for r in records.values() if r.val_loss is not None and r.round <= ROUNDS + 5]
        assert answers.past(ROUNDS + 5)["val_loss"] == pytest.approx(losses[-1])
        assert answers.past(10**9)["round"] == STORY.rounds
        assert answers.past(1)["passage"] is None, "none was measured yet, also after one was asked for"
        assert answers.past(19)["passage"]["round"] == answers.past(10)["passage"]["round"] == 10
        assert Pruned(past).past(19)["passage"] is None
        [out] = answers.past(STORY.rounds)["put_out"]
        assert answers.past(STORY.rounds)["void_rounds"] == 1
        assert (out["name"], out["consequence"], out["round"]) == ("kai", "banned", STORY.middle)
        assert answers.past(STORY.middle - 30)["put_out"] == [], "it was there then"
        [mark] = [m for m in answers.series({})["marks"] if m["kind"] == "gone"]
        assert mark["text"] == f"round {STORY.middle}: kai is gone"
        [told] = [e for e in answers.events({"search": "kai evicted"})["events"]]
        assert (told["node"], told["name"]) == (past_runs.GONE, "kai"), "also of a node that is gone"
        with pytest.raises(NotThere, match="there is no round 0"):
            answers.past(0)


class Closing(PastRun):
    """The record of the last commit is not complete yet."""

    newest: CommitRecord

    def pending(self) -> CommitRecord:
        return self.newest


def test_why_the_last_round_took_long_is_said_by_the_verdict_as_soon_as_there_is_one(state_dir: Path) -> None:
    with opened(str(state_dir)) as past:
        run = Closing(past.records, past.facts())
        run.newest = replace(past_runs.record(STORY, STORY.rounds, 0), round=STORY.rounds + 1)
        answers = RunAnswers(run)

        def why() -> str:
            now = recorded_snapshot(run.facts(), run.newest, STORY.rounds + 1, None)
            said: str = answers.current(now, {})["last_round"]["why"]
            return said

        assert why().startswith("The exchange took ")
        verdict = Verdict(Kind.SLOW_LINK, "n9", "ivy", "", "", "the link of ivy is slow", Confidence.TOLD)
        run.newest = replace(run.newest, verdict=verdict)
        assert why() == "The link of ivy is slow."


def test_who_is_slow_is_said_while_the_last_rounds_record_is_not_complete(state_dir: Path) -> None:
    with opened(str(state_dir)) as past:
        run = Closing(past.records, past.facts())
        whole = replace(past_runs.record(STORY, STORY.rounds, 0), round=STORY.rounds + 1)
        run.newest = replace(whole, figures={}, spent={})
        answers = RunAnswers(run)
        now = answers.current(recorded_snapshot(run.facts(), run.newest, STORY.rounds + 1, None), {})
        before = answers.past(STORY.rounds)
        assert (
            [(m["name"], m["pace"], m["slow"]) for m in now["members"] if "trains" in (m["slow"] or "")]
            == [(m["name"], m["pace"], m["slow"]) for m in before["members"] if "trains" in (m["slow"] or "")]
            != []
        )


class Pruned(RunAnswers):
    """Of the first ten rounds there are curves and no records any more."""

    def _record(self, number: int) -> CommitRecord:
        if number <= 10:
            raise NotThere(f"there is no record of round {number}")
        return super()._record(number)


def test_a_state_directory_and_its_archive_know_who_contributed_and_whose_nodes_they_are(state_dir: Path) -> None:
    with opened(str(state_dir)) as past:
        assert len(past.contributions(2, 0)["nodes"]) == 2
        credited = past.contributions(9, 0)
        assert credited["owners_total"] == 4
        assert past.contributions(9, 0)["uncredited"] == 0
    with opened(str(state_dir / FOLDER)) as past:
        added_up = past.contributions(99, 0)
        assert added_up["nodes_total"] == STORY.members and added_up["owners_total"] == 4
        assert {a["owner"] for a in added_up["owners"]} == {a["owner"] for a in credited["owners"]}
        for field in ("tokens", "nodes"):
            assert sum(a[field] for a in added_up["owners"]) == (
                added_up["tokens"] if field == "tokens" else STORY.members
            )
        assert all(a["rounds"] <= added_up["committed"] for a in added_up["owners"])
        assert added_up["tokens"] == sum(a["tokens"] for a in added_up["nodes"])
        assert {a["name"] for a in added_up["nodes"]} == set(past_runs.NAMES[: STORY.members])
        assert past.facts().rounds_total == 1000 and past.facts().run == "reef"


def test_an_archive_in_a_folder_or_a_store_has_its_segments_notes_and_decisions(
    state_dir: Path, tmp_path: Path
) -> None:
    shutil.copytree(state_dir / FOLDER, tmp_path / "archive")
    fsspec.filesystem("memory").store.clear()
    copy_missing(LocalStore(tmp_path / "archive"), opened_store("memory://runs/reef"))
    for place in (str(tmp_path / "archive"), "memory://runs/reef"):
        with opened(place) as past:
            answers = RunAnswers(past)
            assert answers.last == ROUNDS
            assert answers.past(ROUNDS)["members"][0]["name"] == "ada"
            said = answers.events({"search": "joined", "limit": "500"})
            assert len(said["events"]) == STORY.members
            early = answers.events({"before": str(past_runs.BEGAN + 60 * 50)})["events"]
            assert early and max(event["at"] for event in early) < past_runs.BEGAN + 60 * 50
            assert answers.node({"node": "n3"})["name"] == "cy"
            assert past.records.decisions() == []


def test_decisions_are_found_in_an_archives_records(tmp_path: Path) -> None:
    story = past_runs.Story(rounds=2 * (ROWS_KEPT + ROUNDS))  # its middle is in a segment
    past_runs.write(tmp_path, story)
    with opened(str(tmp_path / FOLDER)) as past:
        [(at, decision)] = past.records.decisions()
        assert decision.node == past_runs.GONE and at == story.committed_at(story.middle)
        assert past.records.decisions(at, at) == [(at, decision)]
        assert past.records.decisions(at + 1) == past.records.decisions(until=at - 1) == []
        [out] = RunAnswers(past).past(story.middle)["put_out"]
        assert (out["node_id"], out["at"]) == (past_runs.GONE, at)
        assert RunAnswers(past).past(story.middle - 1)["put_out"] == []
        gone = RunAnswers(past).node({"node": past_runs.GONE})
        assert gone["evidence"][0]["evidence"]["offence"] == "forged_input" and gone["standing"] == "banned"
    with opened(str(tmp_path)) as past:
        there = RunAnswers(past).node({"node": past_runs.GONE})["series"]["round"]
        assert there == list(range(story.middle - 400, story.middle)), "its own last rounds, not the run's"


@pytest.mark.parametrize("place", ["nowhere", "."])
def test_a_place_without_a_run_is_refused_with_a_sentence(place: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has neither a coordinator's journal nor records"):
        with opened(str(tmp_path / place)):
            pass


def test_the_terminal_shows_the_run_as_of_a_round(state_dir: Path) -> None:
    said = CliRunner().invoke(
        replay_command, [str(state_dir), "--terminal", "--round", "150"], env={"COLUMNS": "150"}
    )
    assert said.exit_code == 0, said.output
    first = said.output.splitlines()[0]
    assert first.startswith("run reef: round 150 of 1000 committed (") and "gus (n7)" in said.output
    said = CliRunner().invoke(replay_command, [str(state_dir), "--json", "--round", "150"])
    assert '"round":150' in said.output


def test_keys_move_through_the_run_and_space_plays_it() -> None:
    start = Scrubber(500, 1000)
    for key, at in (
        ("left", 499),
        ("right", 501),
        ("page up", 400),
        ("page down", 600),
        ("home", 1),
        ("end", 1000),
    ):
        assert moved(start, key) == Scrubber(at, 1000)
    assert moved(Scrubber(1, 1000), "left").at == 1 and moved(Scrubber(1000, 1000), "page down").at == 1000
    assert moved(start, None) == start and moved(start, "x") == start and moved(start, "quit").over
    playing = moved(start, "space")
    assert playing.playing and moved(playing, None) == Scrubber(505, 1000, playing=True)
    assert not moved(playing, "left").playing and not moved(playing, "space").playing
    assert moved(Scrubber(999, 1000, playing=True), None) == Scrubber(1000, 1000)
    assert moved(Scrubber(1000, 1000), "space") == Scrubber(1, 1000, playing=True)
    assert terminal_replay.KEYS["\x1b[D"] == "left"
