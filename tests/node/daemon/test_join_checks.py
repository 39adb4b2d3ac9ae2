"""What a node says when it joins, of its machine, of the run and of the way to the coordinator."""

import asyncio
import re
from pathlib import Path

import pytest
from control_nodes import coordinator, until

from atoll.comm import extras
from atoll.comm.config.run import RunConfig
from atoll.comm.gateway_note import write_gateways
from atoll.comm.ids import NO_PIN
from atoll.comm.invite import Invite, join_host_port, split_host_port
from atoll.comm.proto import atoll_pb2 as pb
from atoll.comm.transport.certificates import load_or_make
from atoll.node.config import NodeConfig
from atoll.node.daemon import join_checks
from atoll.node.daemon.join_checks import ask_around, log_machine, log_run, look_around
from atoll.node.daemon.reducer import NothingToFetch
from atoll.node.daemon.session import CoordinatorSession
from atoll.node.daemon.state_dir import JoinOptions

RUN = RunConfig(name="reef")


@pytest.fixture(autouse=True)
def everything(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "atoll.node")


def said(caplog: pytest.LogCaptureFixture, words: str) -> list[str]:
    return [message for message in caplog.messages if re.match(words, message)]


def test_the_machine_is_one_line_and_what_it_lacks_a_warning_each(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    log_machine(NodeConfig(), tmp_path)
    [line] = caplog.messages
    assert re.match(
        r"this machine: python 3\.\d+.*; cores .*; memory .* GB available; gpu .*; disk .* GB free", line
    )
    monkeypatch.setattr("atoll.node.checks.machine.has_compiler", lambda: False)
    log_machine(NodeConfig(compile=True), tmp_path)
    assert [r.getMessage() for r in caplog.records if r.levelname == "WARNING"] == [
        "compiler: none, which compile=true needs (install g++)"
    ]


@pytest.mark.parametrize(("leaf", "encrypted"), [(False, True), (True, True), (False, False)])
def test_a_node_that_joined_learns_of_the_way_and_says_what_it_will_do(
    leaf: bool, encrypted: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (folder := tmp_path / "node").mkdir()
    certificate = load_or_make(tmp_path) if encrypted else None

    async def story() -> None:
        async with coordinator(tmp_path, RUN, certificate) as c:
            invite = Invite(c.address, "reef", c.token, certificate.pin if certificate else NO_PIN)
            options = JoinOptions(folder, "127.0.0.1:0", "", "ada", 1.0, leaf)
            async with CoordinatorSession.opened(invite, NodeConfig(), options, NothingToFetch()) as member:
                await member.join()
                log_run(member.run, NodeConfig(), folder, member.invite)
                await ask_around(member)
                await until(lambda: not member.plane._accepted)
                assert len(c.event_loop.state.members.here) == 1

    asyncio.run(story())
    assert said(caplog, rf"model: {RUN.model.n_params:,} parameters take .* GB of memory")
    assert said(caplog, f"writes: {folder}: logs, the run's state") and said(caplog, "reads: the source of Python")
    assert said(caplog, "talks to: the coordinator at 127.0.0.1")
    assert [r.getMessage() for r in caplog.records if r.levelname == "WARNING"] == []
    assert len(said(caplog, "reach: the coordinator dialled this machine at 127.0.0.1")) == (not leaf)
    assert said(caplog, "rates: .* Mbit/s up, .* Mbit/s down") and said(
        caplog, "exchange: .* less than a second here"
    )


def test_a_node_that_peers_cannot_dial_is_warned_and_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def story() -> None:
        async with coordinator(tmp_path, RUN) as c:
            invite = Invite(c.address, "reef", c.token)
            options = JoinOptions(tmp_path, "127.0.0.1:0", "127.0.0.1:1", "ada", 1.0)
            async with CoordinatorSession.opened(invite, NodeConfig(), options, NothingToFetch()) as member:
                await member.join()
                await ask_around(member, rates=False)  # whose owner counts the link's bytes

    asyncio.run(story())
    assert not said(caplog, "rates|exchange")
    [warned] = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert "cannot dial this machine at 127.0.0.1:1" in warned and "--leaf" in warned


PLACE = "/ip4/203.0.113.7/tcp/4701/p2p/12D3KooWAhYiUJLCTg3PuwTMd1Vv7TRrQGMrFLXcvYXRShTqnDAC"


@pytest.mark.long
@pytest.mark.parametrize(("late", "encrypted"), [(False, True), (True, True), (False, False)])
def test_a_node_that_peers_cannot_dial_is_a_leaf_where_the_run_has_a_gateway_and_it_may_have_none(
    late: bool,
    encrypted: bool,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    certificate = load_or_make(tmp_path) if encrypted else None
    monkeypatch.setattr(join_checks, "is_loopback", lambda host: False)
    monkeypatch.setattr(extras, "installed", lambda package: package != "hivemind")
    (folder := tmp_path / "node").mkdir()
    rejoined = list[bool]()

    async def story() -> None:
        async with coordinator(tmp_path, RUN, certificate) as c:
            if not late:
                write_gateways(tmp_path, "one", [PLACE])
                await until(lambda: c.plane.gateways.told)
            invite = Invite(c.address, "reef", c.token, certificate.pin if certificate else NO_PIN)
            options = JoinOptions(folder, "127.0.0.1:0", "", "ada", 1.0)
            async with CoordinatorSession.opened(invite, NodeConfig(), options, NothingToFetch()) as member:
                await member.join()
                assert member.plane._serving is not None
                member.plane._serving.cancel()  # as good as behind a firewall

                async def beat() -> None:
                    while True:
                        await member.control.heartbeat(pb.HeartbeatRequest())
                        await asyncio.sleep(0.05)

                session = asyncio.create_task(member.maintain(lambda: rejoined.append(True), beat))
                looking = asyncio.create_task(look_around(member, rates=False))
                if late:
                    await until(lambda: said(caplog, "reach: peers cannot dial this machine"))
                    write_gateways(tmp_path, "one", [PLACE])
                await until(lambda: rejoined)
                assert c.event_loop.state.members.here[member.me].leaf and member.me == "n1"
                await looking
                session.cancel()
                await asyncio.gather(session, return_exceptions=True)

    asyncio.run(story())
    [words] = said(caplog, ".*so it is a leaf, and dials the others")
    why = "a gateway needs hivemind, not installed here" if encrypted else "what is not encrypted goes through no"
    assert why in words and ('".[p2p]"' in words) is encrypted


def test_of_a_coordinator_on_this_machine_nothing_is_asked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def story() -> None:
        async with coordinator(tmp_path, RUN) as c:
            for host in ("127.0.0.1", "localhost"):
                port = split_host_port(c.address, "its address")[1]
                invite = Invite(join_host_port(host, port), "reef", c.token)
                options = JoinOptions(tmp_path, "127.0.0.1:0", "", "ada", 1.0)
                async with CoordinatorSession.opened(invite, NodeConfig(), options, NothingToFetch()) as member:
                    await member.join()
                    await look_around(member)

    asyncio.run(story())
    assert not said(caplog, "reach|rates|the way")
