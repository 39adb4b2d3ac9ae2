"""A node that its owner tells to pause, and one that keeps to what it may exchange."""

import asyncio
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from atoll.comm.errors import ConfigError, Refused, ResourceError
from atoll.comm.pause_reasons import PauseReason
from atoll.node.config import NodeConfig
from atoll.node.daemon import control_socket, manners
from atoll.node.daemon.manners import Manners
from atoll.node.manners.byte_account import load_account
from atoll.node.manners.limits import KEYS, TRAINER_KEYS
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


def test_a_time_has_its_seconds_unless_it_is_a_full_minute() -> None:
    assert manners.clock_words(datetime(2026, 11, 26, 2, 57, 40)) == "02:57:40 on Thu 26 Nov"
    assert manners.clock_words(datetime(2026, 11, 26, 22, 0)) == "22:00 on Thu 26 Nov"


def test_limits_are_followed_at_once_and_a_refused_one_changes_nothing(tmp_path: Path) -> None:
    told = Told(tmp_path, NodeConfig(upload=30.0))
    assert [c.upload for c in told.configs] == [30.0]
    answer = told.ask("limits", "upload=20", "gpu_duty=0.5")
    assert answer["limits"]["upload"] == 20.0 and answer["told"] == ["gpu_duty", "upload"]
    assert (told.configs[-1].upload, told.configs[-1].gpu_duty) == (20.0, 0.5)
    with pytest.raises(ConfigError, match="hours is '7'.*none of these 2 limits was set"):
        told.ask("limits", "download=5", "hours=7")
    assert told.configs[-1].download == 0 and len(told.configs) == 2
    assert Told(tmp_path, NodeConfig(upload=30.0)).configs[-1].upload == 20.0


def test_bytes_of_this_day_are_counted_over_restarts_and_hold_the_node_back(tmp_path: Path) -> None:
    config = NodeConfig(daily=1e-6)  # 1000 bytes
    told = Told(tmp_path, config)
    told.traffic = 600
    assert told.manners.room() == 400
    told.manners.decide()
    again = Told(tmp_path, config)
    assert again.manners.status()["bytes_this_day"] == 600 and not again.events
    again.traffic = 399
    assert again.manners.room() == 1 and not again.events
    again.traffic = 400
    assert again.manners.room() == 0
    assert again.events == [PauseChanged(True, saves_bytes=True)], "at once, not at the next look"
    assert again.manners.saves_bytes and again.manners.reason is PauseReason.DAY_BYTES
    again.manners.decide()
    assert again.manners.room() == 0 and len(again.events) == 1
    again.ask("limits", "daily=1")
    assert again.events[1:] == [PauseChanged(False)] and again.manners.room() == 10**9 - 1000


def test_a_round_that_would_not_fit_is_not_begun(tmp_path: Path) -> None:
    told = Told(tmp_path, NodeConfig(daily=1e-6))
    assert told.manners.round_is(3) is None
    told.traffic = 400
    assert told.manners.round_is(4) is None and told.manners.round_is(4) is None
    told.manners.decide()
    assert told.manners.reason is None
    told.traffic = 701
    assert told.manners.round_is(5) == PauseChanged(True), "before that round is begun"
    assert told.manners.reason is PauseReason.DAY_BYTES and not told.events
    assert told.manners.room() == 299, "for the run's state"


def test_a_round_that_is_begun_is_not_stopped_for_what_it_was_known_to_take(tmp_path: Path) -> None:
    told = Told(tmp_path, NodeConfig(daily=1e-6))
    told.manners.round_is(3)
    told.traffic = 450
    assert told.manners.round_is(4) is None
    told.traffic = 890  # of another 450
    told.manners.decide()
    assert told.manners.reason is None and not told.events


def test_a_round_that_it_only_followed_says_nothing_of_what_one_takes(tmp_path: Path) -> None:
    told = Told(tmp_path, NodeConfig(daily=1e-6))
    told.manners.round_is(3)
    told.traffic = 400
    assert told.manners.round_is(4) is None
    told.traffic = 750
    assert told.manners.round_is(5) == PauseChanged(True)
    told.traffic = 760
    assert told.manners.round_is(6) is None and told.manners.reason is PauseReason.DAY_BYTES
    told.traffic = 770
    assert told.manners.round_is(7) is None and told.manners.reason is PauseReason.DAY_BYTES


def test_a_step_asks_for_a_rest_which_ends_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told, now = Told(tmp_path), [100.0]
    monkeypatch.setattr(manners, "time", SimpleNamespace(monotonic=lambda: now[0], time=time.time))
    told.manners.rest(30.0)
    assert told.events == [PauseChanged(True)] and told.manners.reason is PauseReason.RESTS
    now[0] += 29.0
    told.manners.decide()
    now[0] += 1.0
    assert len(told.events) == 1
    told.manners.decide()
    assert told.events[1:] == [PauseChanged(False)]


def test_a_node_that_takes_more_memory_than_it_may_pauses_and_is_made_smaller(tmp_path: Path) -> None:
    told, taken, shrunk = Told(tmp_path, NodeConfig(memory=2.0)), [0], list[int]()
    told.manners.watch_memory(lambda config: None, lambda: taken[0], lambda: shrunk.append(taken[0]))

    def look(*gigabytes: float) -> None:
        for amount in gigabytes:
            taken[0] = int(amount * 1e9)
            asyncio.run(told.manners._weigh())

    look(1.9, 2.1, 1.9, 2.1)
    assert not told.events and not shrunk, "once is no reason"
    look(2.2)
    assert told.events == [PauseChanged(True)] and told.manners.reason is PauseReason.MEMORY
    assert shrunk == [2_200_000_000] and told.manners.status()["memory_bytes"] == 2_200_000_000
    look(2.2, 2.2)
    assert len(shrunk) == 1, "it is being made smaller"
    told.manners.shrunk()
    assert told.events[1:] == [PauseChanged(False)]


def test_a_limit_on_memory_that_the_node_could_not_work_in_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    told = Told(tmp_path)

    def fits(config: NodeConfig) -> None:
        if 0 < config.memory < 3:
            raise ResourceError("it needs 3 GB")

    told.manners.watch_memory(fits, lambda: 0, lambda: None)
    with pytest.raises(ResourceError, match="3 GB"):
        told.ask("limits", "memory=2.5", "upload=3")
    assert len(told.configs) == 1
    told.ask("limits", "memory=3.5")
    assert told.configs[-1].memory == 3.5


def test_a_node_without_a_trainer_shows_and_takes_the_limits_that_it_can_obey(tmp_path: Path) -> None:
    keys = tuple(key for key in KEYS if key not in TRAINER_KEYS)
    reducer = Manners(NodeConfig(), tmp_path, keys)
    reducer.attach(lambda: 0, lambda event: None, lambda config: None)
    assert set(reducer.status()["limits"]) == {*keys, "disk"}
    with pytest.raises(ConfigError, match="gpu_duty is a limit on a trainer"):
        reducer.verbs["limits"](["gpu_duty=0.5"])
    assert reducer.verbs["limits"](["daily=1"])["limits"]["daily"] == 1.0


def test_a_node_that_ends_pauses_for_that(tmp_path: Path) -> None:
    told = Told(tmp_path)
    told.manners.leave_soon()
    assert told.events == [PauseChanged(True)] and told.manners.reason is PauseReason.LEAVING


def test_requests_with_arguments_are_answered_and_refused_with_the_error_that_the_node_found(
    tmp_path: Path,
) -> None:
    def echo(arguments: Sequence[str]) -> dict[str, Any]:
        match arguments:
            case []:
                raise ConfigError("say something")
            case ["memory"]:
                raise ResourceError("it has no room")
        return {"said": list(arguments)}

    async def story() -> None:
        def ask(*words: str) -> dict[str, Any]:
            return control_socket.ask(tmp_path, *words)

        async with control_socket.serve(tmp_path, lambda: {"phase": "inner"}, lambda: None, {"echo": echo}):
            assert await asyncio.to_thread(ask, "echo", "a b", 'c"d') == {"said": ["a b", 'c"d']}
            assert await asyncio.to_thread(ask, "status") == {"phase": "inner"}
            for words, error, says in (
                (("echo",), ConfigError, "say something"),
                (("echo", "memory"), ResourceError, "it has no room"),
                (("dance", "now"), Refused, "dance"),
            ):
                with pytest.raises(error, match=says) as said:
                    await asyncio.to_thread(ask, *words)
                assert type(said.value) is error, "and with its exit code"

    asyncio.run(asyncio.wait_for(story(), 60))


def test_a_node_that_ends_keeps_all_that_it_exchanged(tmp_path: Path) -> None:
    told = Told(tmp_path)

    async def life() -> None:
        running = asyncio.create_task(told.manners.run())
        for told.traffic in (1_000, 2_000, 3_000):  # within the minute in which it is written once
            await asyncio.sleep(0)
            told.ask("limits", "upload=1")
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(life())
    assert load_account(tmp_path).month_bytes == 3_000
