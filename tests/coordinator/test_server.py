"""What the coordinator decides before it serves: encryption, and whether the state directory is this run's."""

import asyncio
import gc
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from atoll.comm.config.outer import OuterConfig
from atoll.comm.config.run import RunConfig, WandbMode, from_json, to_json
from atoll.comm.config.security import PrivateAddresses, SecurityConfig, TlsMode
from atoll.comm.errors import ConfigError
from atoll.comm.replace import replace
from atoll.coordinator import server
from atoll.coordinator.door.front_door import listening_socket
from atoll.coordinator.door.ports import PAGE
from atoll.coordinator.server import ServerOptions, _no_other_version, _same_run, encrypted, private_addresses
from atoll.coordinator.service.journal import Journal
from atoll.coordinator.service.run_records import RunRecords
from atoll.coordinator.state_machine import events as ev
from atoll.coordinator.state_machine.state import Phase, RoundState, State


@pytest.mark.parametrize(
    ("listen", "advertise", "expected"),
    [
        ("127.0.0.1:0", "", False),
        ("127.8.8.8:0", "localhost:4700", False),
        ("[::1]:0", "[::1]:4700", False),
        ("localhost:0", "", False),
        ("0.0.0.0:0", "", True),
        (":0", "", True),
        ("[::]:0", "", True),
        ("10.0.0.1:0", "", True),
        ("127.0.0.1:0", "reef.example.org:4700", True),  # something forwards to it
        ("0.0.0.0:0", "127.0.0.1:4700", True),
    ],
)
def test_tls_is_on_unless_everything_is_loopback(listen: str, advertise: str, expected: bool) -> None:
    options = ServerOptions(Path(), listen, "127.0.0.1:0", advertise)
    assert encrypted(RunConfig(), options) is expected
    for mode in (TlsMode.ON, TlsMode.OFF):
        assert encrypted(RunConfig(security=SecurityConfig(mode)), options) is (mode is TlsMode.ON)


@pytest.mark.parametrize(
    ("listen", "advertise", "expected"),
    [
        ("127.0.0.1:0", "", True),
        ("0.0.0.0:0", "", True),  # join URLs name 127.0.0.1
        ("10.0.0.1:0", "", True),
        ("0.0.0.0:0", "192.168.1.2:4700", True),
        ("0.0.0.0:0", "8.8.8.8:4700", False),
        ("127.0.0.1:0", "8.8.8.8:4700", False),  # something forwards to it
        ("8.8.8.8:0", "", False),
    ],
)
def test_members_have_private_addresses_where_the_coordinator_has_one(
    listen: str, advertise: str, expected: bool
) -> None:
    options = ServerOptions(Path(), listen, "127.0.0.1:0", advertise)
    assert private_addresses(RunConfig(), options) is expected
    for asked in (PrivateAddresses.ALLOW, PrivateAddresses.REFUSE):
        config = RunConfig(security=SecurityConfig(private_addresses=asked))
        assert private_addresses(config, options) is (asked is PrivateAddresses.ALLOW)


def test_a_state_directory_of_the_same_run_may_be_older_than_a_key_of_its_config(tmp_path: Path) -> None:
    config = RunConfig(name="reef")
    older = msgspec.json.decode(to_json(config))
    del older["security"]
    with closing(Journal(tmp_path)) as journal:
        journal.set_meta("config", msgspec.json.encode(older).decode())
        journal.set_meta("address", "127.0.0.1:4700")
        _same_run(journal, config)
        for other, differs in (
            (RunConfig(name="reef", outer=OuterConfig(lr=0.1)), "outer.lr is 0.9 there and 0.1 here"),
            (
                RunConfig(name="reef", security=SecurityConfig(TlsMode.ON)),
                "security.tls is 'auto' there and 'on' here",
            ),
            (RunConfig(name="sea", seed=1), "name is 'reef' there and 'sea' here, seed is 0 there and 1 here"),
        ):
            with pytest.raises(ConfigError, match=rf"another config \({differs}\): start with"):
                _same_run(journal, other)


def test_who_watches_a_run_may_change_at_each_start_and_all_before_the_first(tmp_path: Path) -> None:
    config = RunConfig(name="reef")
    with closing(Journal(tmp_path)) as journal:
        _same_run(journal, RunConfig(name="sea", seed=7))  # its port was in use: that run never began
        _same_run(journal, config)
        journal.set_meta("address", "127.0.0.1:4700")
        config.wandb.mode, config.figures.jsonl = WandbMode.ONLINE, True
        _same_run(journal, config)
        assert from_json((journal.meta("config") or "").encode()) == config
        config.wandb.notes, config.seed = "another word", 1
        with pytest.raises(ConfigError, match=r"another config \(seed is 0 there and 1 here\)"):
            _same_run(journal, config)


@pytest.mark.parametrize("phase", [Phase.WAITING, Phase.COLLECTING])
def test_garbage_is_collected_also_while_a_round_waits_for_members(
    phase: Phase, monkeypatch: pytest.MonkeyPatch
) -> None:
    collected, thresholds = asyncio.Event(), list[tuple[int, ...]]()
    monkeypatch.setattr(gc, "collect", collected.set)
    monkeypatch.setattr(gc, "set_threshold", lambda *counts: thresholds.append(counts))
    for name in ("GARBAGE_INTERVAL", "GARBAGE_POLL"):
        monkeypatch.setattr(server, name, 0.0)
    plane: Any = SimpleNamespace(
        event_loop=SimpleNamespace(state=State(RunConfig(), round=RoundState(phase=phase)))
    )

    async def story() -> None:
        collecting = asyncio.create_task(server._collect_garbage(plane))
        async with asyncio.timeout(30.0):
            await collected.wait()
        collecting.cancel()

    asyncio.run(story())
    assert [count > 1_000_000 for count in thresholds[0]] == [False, False, True]


def test_a_request_that_trickles_into_the_page_is_ended_and_others_are_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "PAGE", replace(PAGE, deadline=0.3))
    tracker: Any = SimpleNamespace(tell=lambda *_: None, alert=lambda *_: None)
    options = ServerOptions(tmp_path, "127.0.0.1:0", "", "")

    async def story() -> None:
        loop = asyncio.get_running_loop()
        with closing(Journal(tmp_path)) as journal:
            page = listening_socket("127.0.0.1:0", "--http")
            where = page.getsockname()[:2]
            records = RunRecords(journal, tmp_path, "run")
            serving = asyncio.create_task(server._serve(RunConfig(), options, journal, records, page, tracker))

            async def asked(source: str, request: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
                reader, writer = await asyncio.open_connection(*where, local_addr=(source, 0))
                writer.write(request)
                return reader, writer

            async with asyncio.timeout(30.0):
                reader, writer = await asked("127.0.0.2", b"GET / HTTP/1.1\r\n")
                began, over = loop.time(), asyncio.create_task(reader.read())
                while not over.done():
                    writer.write(b"x: y\r\n")
                    other, its = await asked("127.0.0.1", b"GET /api/run HTTP/1.0\r\n\r\n")
                    assert b" 200 OK" in await other.read()
                    its.close()
                    await asyncio.sleep(0.01)  # connections of one address are few a second
                assert 0.25 < loop.time() - began < 10.0
                writer.close()
                await asyncio.gather(over, return_exceptions=True)
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)

    asyncio.run(story())


def test_what_a_killed_coordinator_was_told_last_no_other_version_takes_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(Journal(tmp_path)) as journal:
        _no_other_version(journal)
        journal.append([(1.0, ev.Started(1, b"nonce"))], [], [], [])
        _no_other_version(journal)
        for version in ("9.9.9", "9.9.9-dirty"):
            monkeypatch.setattr(server, "full_version", lambda version=version: version)
            with pytest.raises(ConfigError, match=r"of which there are 1\) it alone .* this is 9\.9\.9: start"):
                _no_other_version(journal)
        journal.snapshot(1.0, b"all of it")
        _no_other_version(journal)
        assert journal.meta("version") == "9.9.9"
    with closing(Journal(tmp_path / "old")) as journal:  # of a version that did not say which it was
        journal.append([(1.0, ev.Started(1, b"nonce"))], [], [], [])
        with pytest.raises(ConfigError, match="another version of atoll was killed here"):
            _no_other_version(journal)
