"""A node that its owner tells to pause, and one that keeps to what it may exchange."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from atoll.comm.errors import ConfigError, Refused
from atoll.comm.pause_reasons import PauseReason
from atoll.node.config import NodeConfig
from atoll.node.daemon import control_socket
from atoll.node.daemon.manners import Manners
from atoll.node.state_machine.events import Event, PauseChanged


class Told:
    """What the manners tell the node."""

    def __init__(self, folder: Path, config: NodeConfig | None = None) -> None:
        self.traffic, self.events, self.configs = 0, list[Event](), list[NodeConfig]()
        self.manners = Manners(config or NodeConfig(), folder)
        self.manners.attach(lambda: self.traffic, self.events.append, self.configs.append)

    def ask(self, verb: str, *arguments: str) -> dict[str, Any]:
        return self.manners.verbs[verb](arguments)


def test_a_pause_is_told_at_once_and_lasts_over_a_restart(tmp_path: Path) -> None:
    told = Told(tmp_path)
    assert told.ask("pause")["paused"] == "its owner told it to"
    assert told.events == [PauseChanged(True)]
    again = Told(tmp_path)
    assert again.events == [PauseChanged(True)] and again.manners.reason is PauseReason.TOLD
    assert again.ask("resume")["paused"] == ""
    assert again.events == [PauseChanged(True), PauseChanged(False)]
    assert Told(tmp_path).events == []


def test_a_pause_for_so_long_says_until_when(tmp_path: Path) -> None:
    told = Told(tmp_path)
    words = told.ask("pause", "7200")["paused"]
    assert words.startswith("its owner told it to, until ")
    for wrong in ("0", "-1", "nan", "1e99", "soon"):
        with pytest.raises(ConfigError, match="cannot pause"):
            told.ask("pause", wrong)
    assert told.manners.words == words, "what was refused changes nothing"


def test_limits_are_followed_at_once_and_a_refused_one_changes_nothing(tmp_path: Path) -> None:
    told = Told(tmp_path, NodeConfig(upload=30.0))
    assert [c.upload for c in told.configs] == [30.0]
    answer = told.ask("limits", "upload=20", "gpu_duty=0.5")
    assert answer["limits"]["upload"] == 20.0 and answer["told"] == ["gpu_duty", "upload"]
    assert (told.configs[-1].upload, told.configs[-1].gpu_duty) == (20.0, 0.5)
    with pytest.raises(ConfigError):
        told.ask("limits", "download=5", "hours=7")
    assert told.configs[-1].download == 0 and len(told.configs) == 2
    assert Told(tmp_path, NodeConfig(upload=30.0)).configs[-1].upload == 20.0


def test_bytes_of_this_day_are_counted_over_restarts_and_hold_the_node_back(tmp_path: Path) -> None:
    config = NodeConfig(daily=1e-6)  # 1000 bytes
    told = Told(tmp_path, config)
    told.traffic = 600
    assert not told.manners.spent
    told.manners.decide()
    again = Told(tmp_path, config)
    assert again.manners.status()["bytes_this_day"] == 600 and not again.events
    again.traffic = 399
    assert not again.manners.spent
    again.traffic = 400
    assert again.manners.spent, "at once, not at the next look"
    again.traffic = 401
    again.manners.decide()
    assert again.events == [PauseChanged(True, saves_bytes=True)] and again.manners.is_silent
    assert again.manners.reason is PauseReason.DAY_BYTES


def test_a_round_that_would_not_fit_is_not_begun(tmp_path: Path) -> None:
    told = Told(tmp_path, NodeConfig(daily=1e-6))
    assert told.manners.round_is(3) is None
    told.traffic = 400
    assert told.manners.round_is(4) is None and told.manners.round_is(4) is None
    told.manners.decide()
    assert told.manners.reason is None
    told.traffic = 701
    assert told.manners.round_is(5) == PauseChanged(True, saves_bytes=True), "before that round is begun"
    assert told.manners.reason is PauseReason.DAY_BYTES and not told.manners.spent and not told.events


def test_a_node_that_ends_pauses_for_that(tmp_path: Path) -> None:
    told = Told(tmp_path)
    told.manners.leave_soon()
    assert told.events == [PauseChanged(True)] and told.manners.reason is PauseReason.LEAVING


def test_requests_with_arguments_are_answered_and_refused_with_a_sentence(tmp_path: Path) -> None:
    def echo(arguments: Sequence[str]) -> dict[str, Any]:
        if not arguments:
            raise ConfigError("say something")
        return {"said": list(arguments)}

    async def story() -> None:
        def ask(*words: str) -> dict[str, Any]:
            return control_socket.ask(tmp_path, *words)

        async with control_socket.serve(tmp_path, lambda: {"phase": "inner"}, lambda: None, {"echo": echo}):
            assert await asyncio.to_thread(ask, "echo", "a b", 'c"d') == {"said": ["a b", 'c"d']}
            assert await asyncio.to_thread(ask, "status") == {"phase": "inner"}
            for words, says in ((("echo",), "say something"), (("dance", "now"), "dance")):
                with pytest.raises(Refused, match=says):
                    await asyncio.to_thread(ask, *words)

    asyncio.run(asyncio.wait_for(story(), 60))
