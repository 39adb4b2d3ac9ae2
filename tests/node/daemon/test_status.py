"""What `atoll node status` shows of what the daemon says."""

import asyncio
import os
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from atoll.comm.errors import ResourceError, Unreachable
from atoll.comm.proto import atoll_pb2 as pb
from atoll.node import cli
from atoll.node.daemon import control_socket
from atoll.node.daemon.run_status import last_sentence
from atoll.node.daemon.state_dir import exclusive, save_ending
from atoll.node.status_words import limit_words, status_lines

SAID = {"name": "ada", "phase": "waiting", "round": 2, "disk_round": -1, "recovery_trouble": "", "loss": 1.5}


@pytest.mark.parametrize("away", [0.0, 34.4])
def test_it_tells_that_the_coordinator_is_away_and_nothing_that_is_not_known(
    away: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    search = "should it have moved, it is looked for" if away else ""
    said = SAID | {"coordinator_away_s": away, "coordinator_search": search}
    monkeypatch.setattr(control_socket, "ask", lambda folder, what: said)
    shown = CliRunner().invoke(cli.node, ["status"], catch_exceptions=False).output
    assert ("the coordinator has not answered for 34 s" in shown) == (away > 0)
    assert ("coordinator search  should it have moved" in shown) == ("coordinator search" in shown) == (away > 0)
    assert "state of round  2" in shown and "1.50" in shown and "-1" not in shown and "trouble" not in shown


def test_figures_are_told_in_units_for_people_and_an_unknown_utilisation_as_such() -> None:
    said = {
        "tokens_per_s": 1234.5,
        "mfu": None,
        "data_wait": 0.012,
        "learning_rate": 0.0004,
        "limits": {"disk": 1},
    }
    assert dict(status_lines(said)) == {
        "tokens per s": "1,234.50",
        "mfu": "unknown",
        "data wait": "1.2 %",
        "learning rate": "0.0004",
    }
    assert dict(status_lines({"tokens_per_s": 9.0, "mfu": 0.4123}))["mfu"] == "41.2 %"
    limits = {"hours": "22:00-07:00", "battery": False, "metered": True, "upload": 20.0, "threads": 0, "disk": 9.0}
    assert dict(status_lines({"limits": limits})) == {"limits": "hours=22:00-07:00 battery=false upload=20"}
    assert "mfu" not in dict(status_lines({"tokens_per_s": 0.0, "mfu": None})), "it takes no steps"


def test_a_limit_of_0_is_said_to_be_none() -> None:
    limits = (("upload", 0.0), ("upload", 20.0), ("threads", 0), ("battery", False))
    assert [limit_words(*one) for one in limits] == ["no limit (0)", "20", "0", "false"]


def test_what_is_not_there_yet_has_no_line_and_times_and_sizes_are_for_people() -> None:
    young = {"loss": 0.0, "gradient_norm": 0.0, "learning_rate": 0.0, "device_bytes": 0, "trainer_rss_bytes": 0}
    assert dict(status_lines(young | {"memory_bytes": 0})) == {}
    spent = {"phase_seconds": {"starting": 8.174089459000243, "waiting": 0.0, "inner": 65.2}}
    assert dict(status_lines(spent)) == {"phase seconds": "starting 8.2 s, training 1 min 05 s"}
    said = {"trainer_rss_bytes": 350715904, "bytes_up": 12_345, "memory_bytes": 0}
    assert list(status_lines(said)) == [("memory", "350.7 MB"), ("sent", "12.3 kB")]
    assert list(status_lines(said | {"memory_bytes": 4e8}))[-1] == ("memory", "400.0 MB")
    assert len(list(status_lines(said | {"memory_bytes": 4e8}))) == 2, "the whole node's is told, once"


def test_a_node_that_does_not_run_and_one_that_does_are_told_of_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(Unreachable, match="no node runs in .*`atoll node join URL` starts one") as down:
        control_socket.ask(tmp_path, "status")
    assert "Errno" not in str(down.value)

    async def story() -> None:
        async with control_socket.serve(tmp_path, dict, lambda: None):
            with pytest.raises(
                ResourceError, match="a node of yours runs already in .*`atoll node status --state-d"
            ):
                control_socket.refuse_second(tmp_path)

    asyncio.run(story())


def test_of_a_node_that_has_ended_it_is_told_when_and_how(tmp_path: Path) -> None:
    (tmp_path / "session").write_text("reef")
    with pytest.raises(Unreachable, match="does not run, or has not joined again yet"):
        control_socket.ask(tmp_path, "status")
    save_ending(tmp_path, "the node has left the run, which is finished")
    os.utime(tmp_path / "ending", (1e9, 1e9))
    with pytest.raises(Unreachable) as ended:
        control_socket.ask(tmp_path, "status")
    assert re.search(r"its last word, of 2001-09-\d\d [\d:]+: the node has left .* finished\. ", str(ended.value))
    assert "is --state-dir right" not in str(ended.value)


def test_a_node_that_ends_with_an_error_keeps_it_until_the_next_one_begins(tmp_path: Path) -> None:
    with pytest.raises(ExceptionGroup), exclusive(tmp_path):
        raise ExceptionGroup("tasks", [ResourceError("the disk is full")])
    with pytest.raises(Unreachable, match="the node ended: the disk is full"):
        control_socket.ask(tmp_path, "status")
    with exclusive(tmp_path), pytest.raises(Unreachable, match="is --state-dir right"):
        control_socket.ask(tmp_path, "status")


def test_a_node_ends_with_a_sentence_that_says_how_and_what_the_run_has_of_it() -> None:
    view = pb.View(credited_tokens=12_345, credited_rounds=7)
    work = "12,345 tokens of its work are in it, of 7 rounds"
    assert last_sentence(True, view) == f"the node has left the run, which is finished: {work}"
    assert last_sentence(False, view) == f"the node has left the run, as it was told to: {work}"
    assert last_sentence(False, None) == "the node has left the run, as it was told to"
