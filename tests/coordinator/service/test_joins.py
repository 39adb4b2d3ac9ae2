"""Joins over gRPC: repeated, by a caller that is gone, by a later life of the same session."""

import asyncio
import math
import threading
from pathlib import Path
from typing import Any, cast

import pytest
from control_nodes import SOON, Code, coordinator, digest, refused

from atoll.comm.config.run import MembersConfig
from atoll.comm.proto import atoll_pb2 as pb
from atoll.comm.transport.frames import PROTOCOL
from atoll.coordinator.service import rpc


def test_a_join_under_a_secret_of_the_nodes_own_can_be_repeated(tmp_path: Path) -> None:
    async def story() -> None:
        async with coordinator(tmp_path) as c:
            c.token = c.journal.issue_token("one", 1, math.inf)
            ada, secret = c.node(), "5" * 32
            first = await ada.join(secret)
            assert (first.node_id, first.session) == ("n1", f"{secret}.1")
            again = await ada.join(secret)  # the answer to the first was lost: no second token, no second node
            assert (again.node_id, again.session) == ("n1", f"{secret}.2")
            assert "used up" in await refused(c.node().join(), Code.PERMISSION_DENIED)

    asyncio.run(story())


class Caller:
    """The context of a call that is made without a socket."""

    def peer(self) -> str:
        return "ipv4:127.0.0.1:7"


def test_a_join_whose_caller_is_gone_while_it_is_written_is_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        async with coordinator(tmp_path) as c:
            loop, metrics = c.event_loop, c.plane.metrics
            edge = rpc.CoordinatorService(loop, c.plane.views, c.journal, metrics, "reef", b"key")
            begun, may_end, append = threading.Event(), threading.Event(), c.journal.append

            def slowly(*batch: Any) -> None:
                begun.set()
                assert may_end.wait(SOON)
                append(*batch)

            def join(secret: str) -> asyncio.Task[pb.JoinReply]:
                fields: dict[str, Any] = {"token": c.token, "name": "a node", "address": ":7", "session": secret}
                request = pb.JoinRequest(protocol=PROTOCOL, run="reef", **fields)
                return asyncio.create_task(edge.Join(request, cast(Any, Caller())))

            monkeypatch.setattr(c.journal, "append", slowly)
            ada, bo = "a" * 32, "b" * 32
            given_up = join(ada)
            await asyncio.to_thread(begun.wait, SOON)
            given_up.cancel()
            await asyncio.wait([given_up])
            other = join(bo)
            await asyncio.sleep(0)  # it has begun
            may_end.set()
            reply = await asyncio.wait_for(other, SOON)
            assert (reply.node_id, reply.session) == ("n2", f"{bo}.1")
            again = await asyncio.wait_for(join(ada), SOON)
            assert (again.node_id, again.session) == ("n1", f"{ada}.2")

    asyncio.run(story())


def test_only_the_latest_life_of_a_session_is_a_members(tmp_path: Path) -> None:
    async def story() -> None:
        async with coordinator(tmp_path) as c:
            old, new = c.node(), c.node()
            await old.join()
            old.watch()
            await old.sees(lambda v: v.you == "joining")
            await new.join(old.session)
            assert new.node == old.node and new.session != old.session
            await old.stream_ends()
            for late in (await old.heartbeat(), await old.report(leave=pb.Leave(reason="bye"))):
                assert not late.known and "joined again" in late.reason
            stream = old.stub.Watch(pb.WatchRequest(session=old.session))
            assert "joined again" in await refused(stream.read(), Code.UNAUTHENTICATED)
            assert new.node in c.event_loop.state.members.here and (await new.heartbeat()).known

    asyncio.run(story())


def test_another_model_is_refused_for_good_and_a_layout_of_an_earlier_session_is_not(tmp_path: Path) -> None:
    async def story() -> None:
        async with coordinator(tmp_path) as c:
            ada, bo = await c.pair()
            other = pb.LayoutReported(numel=41, digest=digest("layout"))
            assert "41 parameters" in await refused(bo.report(layout_reported=other), Code.FAILED_PRECONDITION)
            before, same = ada.session, pb.LayoutReported(numel=40, digest=digest("layout"))
            await ada.join(before)
            late = await ada.stub.Report(pb.ReportRequest(session=before, layout_reported=same), timeout=SOON)
            assert not late.known and "joined again" in late.reason
            assert (await ada.report(layout_reported=same)).known

    asyncio.run(story())


def test_thousands_of_members_send_heartbeats_more_seldom_where_the_lease_is_long_enough() -> None:
    assert rpc.heartbeat_interval(MembersConfig(lease=14.0), 3) == 2.0
    assert rpc.heartbeat_interval(MembersConfig(lease=200.0), 3) == 3.0
    assert rpc.heartbeat_interval(MembersConfig(lease=20.0), 7000) == 20.0 / 7
    assert rpc.heartbeat_interval(MembersConfig(lease=200.0), 7000) == 20.0
    assert rpc.heartbeat_interval(MembersConfig(lease=200.0, start=7000), 1) == 20.0
    assert rpc.heartbeat_interval(MembersConfig(lease=0.7), 3) == 0.2
