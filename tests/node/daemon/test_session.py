import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from atoll.comm.ids import Round
from atoll.comm.incidents import IncidentKind
from atoll.comm.invite import Invite
from atoll.comm.proto import atoll_pb2 as pb
from atoll.node.config import NodeConfig
from atoll.node.daemon.session import CoordinatorSession
from atoll.node.daemon.state_dir import JoinOptions


class Nothing:
    async def sealed(self, round: Round, chunk: int) -> None: ...
    async def state(self, round: Round, chunk: int) -> None: ...
    async def digests(self, round: Round) -> None: ...


def test_a_nodes_limits_are_those_of_its_data_plane(tmp_path: Path) -> None:
    async def body() -> None:
        config = NodeConfig(upload=16.0, download=8.0, streams=3, congestion="reno")  # Mbit/s
        options = JoinOptions(tmp_path, "127.0.0.1:0", "", "ada", 1.0)
        async with CoordinatorSession.opened(
            Invite("127.0.0.1:1", "run", "token"), config, options, Nothing()
        ) as member:
            plane = member.plane
            assert (plane._up.rate, plane._down.rate) == (2e6, 1e6)
            assert (plane.peers.fixed_streams, plane._answers._congestion) == (3, "reno")

    asyncio.run(body())


def test_a_node_says_what_is_held_against_it_and_when_that_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def watch() -> AsyncIterator[pb.View]:
        for penalty in ("", "its work is not taken", "its work is not taken", ""):
            yield pb.View(penalty=penalty)

    async def body() -> None:
        options = JoinOptions(tmp_path, "127.0.0.1:0", "", "ada", 1.0)
        async with CoordinatorSession.opened(
            Invite("127.0.0.1:1", "run", "token"), NodeConfig(), options, Nothing()
        ) as member:
            monkeypatch.setattr(member.control, "watch", watch)
            held = [member.penalty async for _ in member.views()]
            assert held == ["", "its work is not taken", "its work is not taken", ""]

    asyncio.run(body())
    assert caplog.messages == ["its work is not taken", "this node's chunks and work are taken again"]


def test_a_node_accounts_for_a_round_once_when_it_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def watch() -> AsyncIterator[pb.View]:
        for account in (0, 7, 7, 0, 8):
            yield pb.View(committed=7, account=account)

    async def body() -> None:
        options, told = JoinOptions(tmp_path, "127.0.0.1:0", "", "ada", 1.0), list[pb.ReportRequest]()
        async with CoordinatorSession.opened(
            Invite("127.0.0.1:1", "run", "token"), NodeConfig(), options, Nothing()
        ) as member:
            monkeypatch.setattr(member.control, "watch", watch)
            monkeypatch.setattr(member.control, "report", lambda report, more=False: told.append(report))
            member.plane.limit(125_000, 250_000)
            member.accountant.record(IncidentKind.STATE_CHANGED, value=2)
            async for _ in member.views():
                pass
        assert [r.fence.round for r in told] == [7, 8]
        assert [[i.kind for i in r.round_account.incidents] for r in told] == [[], [IncidentKind.STATE_CHANGED]]
        limits = [(r.round_account.limit_up, r.round_account.limit_down) for r in told]
        assert limits == [(125_000, 250_000)] * 2, "the owner's, as they are now"

    asyncio.run(body())
