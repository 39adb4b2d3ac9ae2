"""When a demo kills and joins nodes, and which folders it writes to."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from atoll import configs
from atoll.comm.config.load import load_run
from atoll.comm.config.run import RunConfig
from atoll.comm.errors import ConfigError
from atoll.comm.ids import NodeId
from atoll.comm.replace import replace
from atoll.coordinator.demo import command
from atoll.coordinator.demo.command import Chaos
from atoll.coordinator.demo.report import DemoStory, Mark, MarkKind
from atoll.coordinator.service.event_loop import sentence
from atoll.coordinator.state_machine.events import CommitRecord


def config(total: int = 10) -> RunConfig:
    run = RunConfig()
    run.rounds.total, run.members.minimum = total, 2
    return run


def member(number: int, name: str, state: str = "active") -> dict[str, Any]:
    return {"node_id": f"n{number}", "name": name, "state": state, "phase": "inner", "inner_step": 1}


def at_round(number: int, seconds: float = 4.0, elapsed: float = 1.0) -> DemoStory:
    """Ten rounds of 4 seconds among three nodes, in the inner phase of round `number`."""
    story = DemoStory(rounds=10, inner_steps=10, n_params=1000, started=3, elapsed=elapsed)
    members = [member(10, "cy"), member(2, "bo"), member(1, "ada")]
    story.run = {"phase": "inner", "round": number, "committed": number - 1, "members": members}
    story.records = [record(k, seconds) for k in range(1, number)]
    return story


def record(number: int, seconds: float) -> CommitRecord:
    weights = {NodeId("n1"): 100.0}
    spent = {"inner": seconds, "collect": 0.0, "reduce": 0.0, "commit": 0.0}
    return CommitRecord(number, 1, 1, (), weights, 100 * number, 3.0, spent, {}, {}, "", "")


def test_the_last_that_joined_dies_in_the_middle_of_the_round_after_40_percent() -> None:
    chaos = Chaos.of(config())
    assert chaos.due(at_round(4), 0.0) is None
    assert chaos.due(at_round(4), 60.0) is None
    assert chaos.due(at_round(5), 100.0) is None
    assert chaos.due(at_round(5), 101.9) is None
    assert chaos.due(at_round(5), 102.0) == (MarkKind.KILLED, "cy")
    assert chaos.due(at_round(5), 102.1) is None


def test_rounds_that_are_over_before_the_next_look_at_them_have_their_death_too() -> None:
    chaos = Chaos.of(config())
    assert chaos.due(at_round(5, seconds=0.1), 100.0) == (MarkKind.KILLED, "cy")


def test_only_a_run_with_a_late_node_waits_for_it_with_its_end() -> None:
    def until_member(chaos: bool) -> int:
        return load_run(configs.DEMO, command._overrides(3, 18, (), chaos)).rounds.until_member

    assert (until_member(True), until_member(False)) == (4, 0)


def test_another_joins_under_a_new_name_at_60_percent() -> None:
    chaos = Chaos.of(config())
    chaos.due(at_round(5), 0.0)
    assert chaos.due(at_round(5), 2.0) == (MarkKind.KILLED, "cy")
    assert chaos.due(at_round(6), 5.0) is None
    assert chaos.due(at_round(7), 9.0) == (MarkKind.JOINED, "dee")
    assert chaos.due(at_round(7), 9.1) is None


def test_it_joins_at_once_where_starting_up_takes_as_long_as_the_rest_of_the_run() -> None:
    chaos = Chaos.of(config())
    chaos.due(at_round(1, elapsed=20.0), 0.0)
    chaos.due(at_round(5), 1.0)
    assert chaos.due(at_round(5), 3.0) == (MarkKind.KILLED, "cy")
    assert chaos.due(at_round(5), 3.1) == (MarkKind.JOINED, "dee")


def test_it_joins_at_once_where_the_run_waits_for_members() -> None:
    run = config()
    run.members.minimum = 3
    chaos = Chaos.of(run)
    chaos.due(at_round(5), 0.0)
    assert chaos.due(at_round(5), 2.0) == (MarkKind.KILLED, "cy")
    assert chaos.due(at_round(5), 2.1) == (MarkKind.JOINED, "dee")


def test_without_chaos_nothing_happens() -> None:
    chaos = Chaos.none()
    assert all(chaos.due(at_round(k), 10.0 * k) is None for k in range(1, 10))


def test_the_only_node_is_never_killed() -> None:
    chaos, story = Chaos.of(config()), at_round(5)
    story.run["members"] = [member(1, "ada"), member(2, "bo", "joining")]
    assert chaos.due(story, 0.0) is None
    assert chaos.due(story, 100.0) is None


def test_every_node_logs_at_the_level_that_was_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = list[tuple[str, ...]]()
    monkeypatch.setattr(command.DemoProcesses, "start", lambda fleet, *arguments: started.append(arguments))
    command.DemoProcesses(tmp_path, "debug").join("ada", "atoll://token@127.0.0.1:1/demo")
    (arguments,) = started
    assert arguments[arguments.index("--log-level") + 1] == "debug"


def test_of_a_node_that_is_killed_nothing_is_left_outside_of_the_demos_folder(tmp_path: Path) -> None:
    spec, socket = tmp_path / "ada" / "trainer.json", tmp_path / "atoll-tmp" / "trainer.sock"
    for folder in (spec.parent, socket.parent):
        folder.mkdir()
    socket.touch()
    spec.write_text(json.dumps({"channel": str(socket)}))
    for _ in range(2):  # with what it wrote for its trainer, and before it did
        fleet = command.DemoProcesses(tmp_path, "info")
        fleet.processes["ada"] = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        fleet.kill("ada")
        assert not socket.parent.exists()
        spec.unlink(missing_ok=True)


def test_a_folder_with_anything_but_a_demos_files_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "coordinator.log").touch()
    (tmp_path / "thesis.tex").write_text("years of work")

    with pytest.raises(ConfigError, match="it holds thesis.tex: give another --out"):
        command._prepare(tmp_path)
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


def test_a_folder_that_only_looks_like_a_demos_is_refused(tmp_path: Path) -> None:
    (tmp_path / "wandb").mkdir()
    with pytest.raises(ConfigError, match="not an earlier demo's folder"):
        command._prepare(tmp_path)


def test_a_file_is_refused_as_a_folder(tmp_path: Path) -> None:
    (tmp_path / "out").touch()
    with pytest.raises(ConfigError, match="not an earlier demo's folder"):
        command._prepare(tmp_path / "out")


def test_an_earlier_demos_files_are_replaced(tmp_path: Path) -> None:
    for name in ("coordinator.log", "ada.log", "node17.log", "report.json", "loss.png", "rounds.jsonl"):
        (tmp_path / name).touch()
    for name in ("coordinator", "ada", "wandb"):
        (tmp_path / name / "deep").mkdir(parents=True)

    command._prepare(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("nodes", "rounds"), [(1, 14), (4, 4)])
def test_too_little_for_a_death_and_a_recovery_is_refused_before_anything_starts(nodes: int, rounds: int) -> None:
    with pytest.raises(ConfigError, match="leave no room to kill a node"):
        command._check(config(rounds), nodes, chaos=True)
    command._check(config(rounds), nodes, chaos=False)


def test_names_are_short_and_never_run_out() -> None:
    names = command.names(40)
    assert names[:3] == ["ada", "bo", "cy"]
    assert len(set(names)) == 40


def test_marks_belong_to_the_round_that_was_being_trained() -> None:
    story = at_round(5)
    story.marks.append(Mark(MarkKind.KILLED, "cy", story.run["round"]))
    assert story.names(MarkKind.KILLED) == {"cy"}
    assert story.names(MarkKind.JOINED) == set()


def test_a_commit_of_one_node_is_told_in_the_singular() -> None:
    alone = record(1, 4.0)
    assert "round 1 committed: 1 contributor, train loss" in sentence(alone)
    both = replace(alone, contributors={NodeId("n1"): 1.0, NodeId("n2"): 1.0})
    assert "2 contributors, train loss" in sentence(both)
