"""JSON lines of a run of real processes: each says of which process, run, node and round it is."""

import json
import re
from typing import Any

import pytest
from e2e.harness import Run, until

from atoll.comm.exit_codes import ExitCode

pytestmark = [pytest.mark.e2e, pytest.mark.long]

KEYS = {"at", "time", "level", "process", "run", "node", "round", "what"}


def lines(text: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in text.splitlines()]
    assert all(KEYS <= set(line) for line in found)
    return found


def test_coordinator_daemon_and_trainer_say_in_json_of_which_run_node_and_round_they_speak(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATOLL_LOG", "json")
    run.start()
    url = run.invite(2)
    run.join(url, "one")
    two = run.join(url, "two", faults="trainer.step@10=memory")  # in its second round, of six steps each
    assert two.wait(120) == ExitCode.RESOURCE
    until("a round without it", lambda: run.committed() >= 3)
    ids = {name: run.member(name)["id"] for name in ("one", "two")}
    run.stop()

    said = lines(run.log("c"))
    assert {line["process"] for line in said} == {"coordinator"} and {line["run"] for line in said} == {"demo"}
    assert {line["node"] for line in said} == {None, *ids.values()}
    commits = [line for line in said if re.match(r"round \d+ committed", line["what"])]
    assert len(commits) >= 3
    assert [line["round"] for line in commits] == [int(line["what"].split()[1]) for line in commits]

    for name, node in ids.items():
        said = lines(run.log(name))
        assert {line["process"] for line in said} == {"node"} and {line["run"] for line in said[1:]} == {"demo"}
        joined = next(at for at, line in enumerate(said) if line["node"])
        assert {line["node"] for line in said[joined:]} == {node}
        rounds = [line["round"] for line in said if line["round"] is not None]
        assert rounds == sorted(rounds) and rounds[-1] >= 2
    assert said[-1]["exit_code"] == ExitCode.RESOURCE and "ran out of memory" in said[-1]["what"]

    trainer = (run.folder / "two" / "trainer.log").read_text()
    (end,) = [line for line in lines(trainer) if line["process"] == "trainer rank 0"]
    assert (end["level"], end["run"], end["node"], end["round"]) == ("error", "demo", ids["two"], 2)
    assert "the trainer ran out of memory" in end["what"]
