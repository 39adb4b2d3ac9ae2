"""Joins over gRPC: repeated, by a caller that is gone, by a later life of the same session."""

import asyncio
import json
import math
import socket
import threading
from pathlib import Path
from typing import Any, cast

import grpc
import pytest
from control_nodes import CONFIG, SOON, Code, coordinator, digest, get, refused

from atoll.comm.config.run import MembersConfig
from atoll.comm.config.security import SecurityConfig
from atoll.comm.ids import NodeId
from atoll.comm.peer_names import host_of_peer
from atoll.comm.proto import atoll_pb2 as pb
from atoll.comm.proto.join_proof import is_proven, prove_join
from atoll.comm.replace import replace
from atoll.comm.signatures import PrivateKey
from atoll.comm.transport.frames import PROTOCOL
from atoll.coordinator.service import rpc
from atoll.coordinator.service.data_keys import DataKeys
from atoll.coordinator.state_machine.run_layout import config_layout


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

    async def abort(self, code: grpc.StatusCode, sentence: str) -> None:
        raise Aborted(code, sentence)


class Aborted(Exception):
    """The call was refused."""


def test_a_join_whose_caller_is_gone_while_it_is_written_is_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        async with coordinator(tmp_path) as c:
            loop, metrics = c.event_loop, c.plane.metrics
            edge = rpc.CoordinatorService(
                *(loop, c.plane.views, c.journal, metrics, c.plane.door, "reef"),
                DataKeys(b"secret"),
                c.plane.gateways,
            )
            begun, may_end, append = threading.Event(), threading.Event(), c.journal.append

            def slowly(*batch: Any) -> None:
                begun.set()
                assert may_end.wait(SOON)
                append(*batch)

            ada, bo = "a" * 32, "b" * 32
            keys = {secret: PrivateKey.generate() for secret in (ada, bo)}

            def join(secret: str) -> asyncio.Task[pb.JoinReply]:
                fields: dict[str, Any] = {"token": c.token, "name": "a node", "address": ":7", "session": secret}
                request = pb.JoinRequest(protocol=PROTOCOL, run="reef", **fields)
                prove_join(request, keys[secret])
                return asyncio.create_task(edge.Join(request, cast(Any, Caller())))

            monkeypatch.setattr(c.journal, "append", slowly)
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
            new.key = old.key
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
            late = await ada.send(pb.ReportRequest(session=before, layout_reported=same))
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


def test_a_join_under_another_nodes_key_or_by_none_is_refused(tmp_path: Path) -> None:
    async def story() -> None:
        async with coordinator(tmp_path) as c:
            ada, eve = c.node(), c.node()
            await ada.join(pin="")
            mine = pb.JoinRequest(protocol=PROTOCOL, run="reef", token=c.token, name="eve", address=":7")
            assert "names no key" in await refused(eve.stub.Join(mine, timeout=SOON), Code.INVALID_ARGUMENT)
            prove_join(mine, eve.key)
            mine.key = ada.key.public  # she has seen it in a plan
            assert "not signed by the key" in await refused(
                eve.stub.Join(mine, timeout=SOON), Code.INVALID_ARGUMENT
            )
            assert c.event_loop.state.members.here[ada.node].key == ada.key.public

    asyncio.run(story())


@pytest.mark.parametrize("field", ["run", "name", "address", "session", "role", "pin", "leaf"])
def test_no_field_of_a_signed_join_can_be_exchanged(field: str) -> None:
    request, key = pb.JoinRequest(run="reef", name="ada", address="a:7", session="5" * 32), PrivateKey.generate()
    prove_join(request, key)
    assert is_proven(request)
    request.token, request.protocol = "another", 1
    request.session += ".7"  # a later life of the same secret
    assert is_proven(request)
    setattr(request, field, True if field == "leaf" else "another")
    assert not is_proven(request)


def test_a_copy_of_a_state_directory_is_no_second_node(tmp_path: Path) -> None:
    async def story() -> None:
        async with coordinator(tmp_path) as c:
            ada, copy = c.node(), c.node()
            await ada.join()
            ada.watch()
            await ada.sees(lambda v: v.you == "joining")
            copy.key = ada.key
            assert "one key is one node" in await refused(copy.join("5" * 32), Code.ABORTED)
            assert "has another key" in await refused(c.node().join(ada.session), Code.PERMISSION_DENIED)
            assert (await ada.heartbeat()).known

    asyncio.run(story())


def test_a_model_that_the_config_does_not_say_is_refused_before_anybody_allocates_for_it(tmp_path: Path) -> None:
    async def story() -> None:
        async with coordinator(tmp_path, replace(CONFIG, security=SecurityConfig())) as c:
            ada = c.node()
            await ada.join()
            huge = pb.LayoutReported(numel=1 << 42, digest=digest("layout"))
            sentence = await refused(ada.report(layout_reported=huge), Code.FAILED_PRECONDITION)
            assert "4,398,046,511,104 parameters" in sentence and "the run's config says 824,448" in sentence
            assert c.event_loop.state.layout is None
            right = config_layout(c.event_loop.state.config)
            assert right is not None
            assert (
                await ada.report(layout_reported=pb.LayoutReported(numel=right.numel, digest=right.digest))
            ).known
            assert c.event_loop.state.layout == right[:2]

    asyncio.run(story())


def test_in_a_public_run_nobody_joins_with_an_address_in_a_private_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lookup(host: str, port: int, **options: object) -> list[object]:
        told = {"public.example.org": ["10.0.0.1", "8.8.8.8"], "private.example.org": ["10.0.0.1"]}.get(
            host, [host]
        )
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (ip, port)) for ip in told]

    async def story() -> None:
        async with coordinator(tmp_path, private=False) as c:
            monkeypatch.setattr(socket, "getaddrinfo", lookup)
            for address in ("10.0.0.1:7", "127.0.0.1:7", "169.254.169.254:80", "private.example.org:7", ":7"):
                sentence = await refused(c.node().join(address=address), Code.INVALID_ARGUMENT)
                assert "private network" in sentence and "security.private_addresses" in sentence
            assert not c.event_loop.state.members.here
            assert (await c.node().join(address="8.8.4.4:7")).address == "8.8.4.4:7"
            named = await c.node().join(address="public.example.org:7")
            assert named.address == "8.8.8.8:7", "peers dial what was looked at, whatever the name says later"
            await c.node().join(address="10.0.0.1:7", leaf=True)  # nobody dials it
            behind = f"{host_of_peer(bytes((0x12, 0x20)) + bytes(32))}:1"  # a gateway, which is asked for it
            assert (await c.node().join(address=behind)).address == behind
            assert "names no peer" in await refused(c.node().join(address="x.p2p:1"), Code.INVALID_ARGUMENT)

    asyncio.run(story())


def test_joins_by_one_key_are_limited_and_leave_one_session(tmp_path: Path) -> None:
    """It has lost its session each time, and never opens a stream of views: a token and its key let it in."""

    async def story() -> None:
        async with coordinator(tmp_path) as c:
            now, key = 100.0, PrivateKey.generate()
            edge = rpc.CoordinatorService(
                *(c.event_loop, c.plane.views, c.journal, c.plane.metrics, c.plane.door, "reef"),
                DataKeys(b"secret"),
                c.plane.gateways,
                clock=lambda: now,
            )

            async def join(key: PrivateKey) -> pb.JoinReply:
                request = pb.JoinRequest(protocol=PROTOCOL, run="reef", token=c.token, name="ada", address=":7")
                prove_join(request, key)
                return await edge.Join(request, cast(Any, Caller()))

            most = rpc.ENTRANCE_LIMIT.burst
            replies = [await join(key) for _ in range(most)]
            assert {reply.node_id for reply in replies} == {"n1"}
            for _ in range(3):
                with pytest.raises(Aborted, match="more joins from the key") as refusal:
                    await join(key)
                assert refusal.value.args[0] is Code.RESOURCE_EXHAUSTED
            assert c.event_loop.state.members.here[NodeId("n1")].life == most, "and nothing is in the journal"
            assert (await join(PrivateKey.generate())).node_id == "n2", "another key has joins of its own"
            now += 1 / rpc.ENTRANCE_LIMIT.per_second
            assert (await join(key)).session.endswith(f".{most + 1}")
            for reply in replies:
                ack = await edge.Heartbeat(pb.HeartbeatRequest(session=reply.session), cast(Any, Caller()))
                assert ack.reason == "the session is not a member's", "a node has one"

    asyncio.run(story())


def test_no_new_node_joins_with_an_invite_of_which_another_node_is_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        async with coordinator(tmp_path) as c:
            ada, bo = c.node(), c.node()
            await ada.join()
            await bo.join(token=(other := c.journal.issue_token("other", 1, math.inf)))
            shared = c.event_loop.state.members.here[ada.node].invite
            monkeypatch.setattr(rpc, "invite_refusal", lambda _, invite: "cy is out" if invite == shared else "")
            assert await refused(c.node().join(), Code.ABORTED) == "cy is out"
            await ada.join(ada.session)  # is back, not new
            was = ada.node
            await ada.join()  # nor is who has lost its session, and has its key
            assert ada.node == was
            assert other and (await bo.heartbeat()).known
            await c.node().join(token=c.journal.issue_token("third", 1, math.inf))

    asyncio.run(story())


def test_who_comes_back_by_its_key_with_another_token_keeps_the_invite_that_it_used_up(tmp_path: Path) -> None:
    """With that one it is revoked, should it be banned."""

    async def story() -> None:
        async with coordinator(tmp_path) as c:
            ada = c.node()
            await ada.join()
            first = c.event_loop.state.members.here[ada.node].invite
            await ada.join(token=c.journal.issue_token("other", 1, math.inf))
            assert c.event_loop.state.members.here[ada.node].invite == first
            assert [(invite.name, invite.left) for invite in c.journal.invites()] == [("test", 99), ("other", 1)]

    asyncio.run(story())


def test_the_version_that_a_node_says_it_has_is_shown_short_and_as_text(tmp_path: Path) -> None:
    async def story() -> None:
        async with coordinator(tmp_path) as c:
            await c.node().join(version="1.2.3")
            await c.node().join(version="9\x1b[2J" + "9" * 1000)
            await c.node().join()
            said = [m["version"] for m in json.loads((await get(c, "/api/run"))[1])["members"]]
            assert said[0] == "1.2.3" and said[2] == ""
            assert said[1].startswith("9") and len(said[1]) <= 20 and "\x1b" not in said[1]

    asyncio.run(story())
