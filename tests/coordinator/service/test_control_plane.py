"""The control plane as nodes meet it: a real gRPC server in this process, its journal on a real disk."""

import asyncio
import hashlib
import json
import math
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Any, cast

import grpc
import msgspec
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from atoll.comm.config.run import MembersConfig, ReduceConfig, RoundsConfig, RunConfig
from atoll.comm.digest import root
from atoll.comm.ids import NodeId
from atoll.comm.proto import atoll_pb2 as pb
from atoll.comm.proto import atoll_pb2_grpc as pb_grpc
from atoll.comm.proto.packed_plan import unpack_plan
from atoll.comm.transport.certificates import NAME, Certificate, load_or_make, pin_of
from atoll.comm.transport.frames import PROTOCOL
from atoll.coordinator.monitor import http
from atoll.coordinator.monitor.http import app, snapshot
from atoll.coordinator.service import event_loop, rpc
from atoll.coordinator.service.control_plane import ControlPlane
from atoll.coordinator.service.journal import Journal
from atoll.coordinator.service.rate_limits import RateLimit
from atoll.coordinator.state_machine import events as ev
from atoll.coordinator.state_machine.state import Phase

Code = grpc.StatusCode
CONFIG = RunConfig(
    name="reef",
    rounds=RoundsConfig(inner_steps=4, grace=1.0),
    members=MembersConfig(start=2, minimum=2, lease=60.0, reconnect=60.0),
    reduce=ReduceConfig(block=1, chunk=10),
)
SOON = 60.0  # seconds; nothing here takes longer than a moment on an idle machine


def digest(word: object) -> bytes:
    return hashlib.blake2b(str(word).encode(), digest_size=16).digest()


class Node:
    """What a node daemon says and hears, by hand."""

    def __init__(self, channel: grpc.aio.Channel, token: str) -> None:
        self.stub, self.token = pb_grpc.CoordinatorStub(channel), token
        self.session, self.node, self.seen = "", NodeId(""), list[pb.View]()
        self._watching: asyncio.Task[None] | None = None

    async def join(self, session: str = "", **changes: Any) -> pb.JoinReply:
        fields: dict[str, Any] = {
            "protocol": PROTOCOL,
            "run": "reef",
            "token": self.token,
            "name": "ada",
            "address": ":7",
        } | changes
        reply = await self.stub.Join(pb.JoinRequest(session=session, **fields), timeout=SOON)
        self.session, self.node = reply.session, NodeId(reply.node_id)
        return reply

    async def report(self, fence: pb.Fence | None = None, **report: Any) -> pb.Ack:
        request = pb.ReportRequest(session=self.session, fence=fence, **report)
        return await self.stub.Report(request, timeout=SOON)

    async def heartbeat(self, **fields: Any) -> pb.Ack:
        return await self.stub.Heartbeat(pb.HeartbeatRequest(session=self.session, **fields), timeout=SOON)

    def watch(self) -> None:
        self._watching = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        with suppress(grpc.aio.AioRpcError):
            async for view in self.stub.Watch(pb.WatchRequest(session=self.session)):
                unpack_plan(view)
                self.seen.append(view)

    async def sees(self, holds: Callable[[pb.View], object]) -> pb.View:
        """The latest view, once it is as told."""
        await until(lambda: self.seen and holds(self.seen[-1]))
        return self.seen[-1]

    async def stream_ends(self) -> None:
        assert self._watching is not None
        await asyncio.wait_for(self._watching, SOON)

    async def at_work(self, **changes: Any) -> None:
        """Join, and get as far as a member can alone: it has state_0."""
        await self.join(**changes)
        self.watch()
        await self.report(layout_reported=pb.LayoutReported(numel=40, digest=digest("layout")))
        await self.sees(lambda v: v.initialise or v.has_state)
        await self.report(state_reported=pb.StateReported(round=0, digest=digest("state 0")))

    async def ready(self, round_: int) -> None:
        view = await self.sees(lambda v: v.closing)
        ready = pb.ContributionReady(steps=4, samples=2, loss=2.0, delta_norm=1.0, front=view.train.lease[0].first)
        await self.report(pb.Fence(round=round_), contribution_ready=ready)

    async def reduce(self) -> None:
        """Seal what it owns and hold everything."""
        plan = (await self.sees(lambda v: v.HasField("plan"))).plan
        fence = pb.Fence(incarnation=plan.incarnation, epoch=plan.epoch, round=plan.round, attempt=plan.attempt)
        me = [member.node_id for member in plan.members].index(self.node)
        seals = [
            pb.Seal(chunk=c, digest=digest(c), inputs=b"\xff")
            for c, owner in enumerate(plan.owners)
            if owner == me
        ]
        await self.report(fence, chunks_sealed=pb.ChunksSealed(seals=seals))
        sealed = root([digest(c) for c in range(len(plan.owners))])
        await self.report(fence, reduce_complete=pb.ReduceComplete(digest=sealed, bytes_up=1, bytes_down=1))


class Coordinator:
    def __init__(self, plane: ControlPlane, journal: Journal, address: str, tls: Certificate | None) -> None:
        self.plane, self.journal, self.address = plane, journal, address
        self.event_loop = plane.event_loop
        self.channel = grpc.aio.insecure_channel(address) if tls is None else trusting(address, tls)
        self.token = journal.issue_token("test", 100, math.inf)

    def node(self) -> Node:
        return Node(self.channel, self.token)

    async def pair(self) -> tuple[Node, Node]:
        """Two nodes that train round 1."""
        ada, bo = self.node(), self.node()
        await ada.at_work()
        await bo.at_work()
        for node in (ada, bo):
            await node.sees(lambda v: v.train.round == 1)
        return ada, bo


def trusting(address: str, certificate: Certificate) -> grpc.aio.Channel:
    options = [("grpc.ssl_target_name_override", NAME)]
    return grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(certificate.body), options)


@asynccontextmanager
async def coordinator(
    folder: Path, config: RunConfig = CONFIG, tls: Certificate | None = None
) -> AsyncIterator[Coordinator]:
    journal = Journal(folder)
    plane = ControlPlane(config, journal, lambda effect: None, tls)
    port, lives = plane.listen("127.0.0.1:0"), plane.event_loop.state.incarnation
    running = asyncio.create_task(plane.run())
    here = Coordinator(plane, journal, f"127.0.0.1:{port}", tls)
    try:
        await until(lambda: plane.event_loop.state.incarnation > lives)
        yield here
    finally:
        await here.channel.close()
        plane.stop()
        await running
        journal.close()


async def until(holds: Callable[[], object]) -> None:
    deadline = asyncio.get_running_loop().time() + SOON
    while not holds():
        assert asyncio.get_running_loop().time() < deadline, "it did not happen"
        await asyncio.sleep(0.01)


async def refused(call: Awaitable[object], code: grpc.StatusCode) -> str:
    """What a call that must fail with `code` was told."""
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call
    assert error.value.code() is code, error.value
    return error.value.details() or ""


async def healthy(coordinator: Coordinator, name: str = "") -> bool:
    stub: Any = health_pb2_grpc.HealthStub(coordinator.channel)
    answer = await stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=SOON)
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


async def get(coordinator: Coordinator, path: str) -> tuple[int, bytes]:
    """GET from the page, without a socket."""
    status, body = 0, b""

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        nonlocal status, body
        status, body = message.get("status", status), body + message.get("body", b"")

    path, _, query = path.partition("?")
    scope = {"type": "http", "method": "GET", "path": path, "query_string": query.encode(), "headers": []}
    await app(coordinator.event_loop, coordinator.journal, "reef")(scope, receive, send)
    return status, body


def test_health_and_reflection_answer_as_any_grpc_service(tmp_path: Path) -> None:
    async def story() -> None:
        async with coordinator(tmp_path) as c:
            assert await healthy(c) and await healthy(c, rpc.SERVICE_NAME)
            stub: Any = reflection_pb2_grpc.ServerReflectionStub(c.channel)  # type: ignore[arg-type]
            request = reflection_pb2.ServerReflectionRequest(list_services="")
            async for answer in stub.ServerReflectionInfo(iter([request])):
                names = [found.name for found in answer.list_services_response.service]
            assert rpc.SERVICE_NAME in names and "grpc.health.v1.Health" in names

    asyncio.run(story())


@pytest.mark.parametrize(
    "query",
    [
        "since=",
        "since=x",
        "since=-1",
        "limit=1.0",
        "limit=0",
        "limit=" + "9" * 19,
        "fields=__class__",
        "fields=round,",
        "fields=q",
    ],
)
def test_a_question_for_records_that_makes_no_sense_is_refused_with_a_sentence(tmp_path: Path, query: str) -> None:
    async def story() -> None:
        async with coordinator(tmp_path) as c:
            status, body = await get(c, f"/api/rounds?{query}")
            assert status == 400 and body.endswith(b"\n") and len(body) < 100
            assert await get(c, "/api/rounds?since=0&limit=1&fields=round,val_loss") == (200, b"[]")

    asyncio.run(story())


def record(number: int) -> ev.CommitRecord:
    spent = {"inner": 1.0, "collect": 0.0, "reduce": 0.0, "commit": 0.0}
    weights = {NodeId("n1"): 100.0}
    return ev.CommitRecord(number, 1, 1, (), weights, 100 * number, 3.0, spent, {}, {}, "", "", val_loss=2.0)


def test_records_are_answered_in_pages_of_bounded_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        async with coordinator(tmp_path) as c:
            records = [record(k) for k in range(1, 1251)]
            c.journal.append([], records)

            async def pages(query: str) -> list[list[dict[str, Any]]]:
                """What a reader gets that asks on until there is nothing more."""
                got, since = list[list[dict[str, Any]]](), 0
                while True:
                    status, body = await get(c, f"/api/rounds?since={since}{query}")
                    assert status == 200, body
                    if not (page := json.loads(body)):
                        return got
                    got, since = [*got, page], page[-1]["round"]

            whole = json.loads(msgspec.json.encode(records))
            assert [len(page) for page in await pages("")] == [200] * 6 + [50]
            assert list(chain(*await pages(""))) == whole
            assert [len(page) for page in await pages("&limit=9999&fields=round")] == [1000, 250]
            few = await pages("&limit=1000&fields=round,val_loss,fragment")
            assert list(chain(*few)) == [{"round": r.round, "val_loss": 2.0, "fragment": 0} for r in records]

            monkeypatch.setattr(http, "MAX_ANSWER_BYTES", 10_000)
            short = await pages("&limit=1000")
            assert list(chain(*short)) == whole and 1 < len(short[0]) < 50
            monkeypatch.setattr(http, "MAX_ANSWER_BYTES", 1)
            assert await get(c, "/api/rounds?since=7&fields=round") == (200, b'[{"round":8}]')

    asyncio.run(story())


def test_acks_name_the_incarnation_and_the_version_of_the_nodes_latest_view(tmp_path: Path) -> None:
    async def story() -> None:
        async with coordinator(tmp_path) as c:
            ada, bo = await c.pair()
            await until(lambda: c.plane.views.version(ada.node) == ada.seen[-1].version)
            ack = await ada.heartbeat(phase="inner", round=1)
            assert (ack.known, ack.incarnation, ack.version) == (True, 1, ada.seen[-1].version)
            versions = [view.version for view in ada.seen]
            assert versions == sorted(set(versions))
            ada._watching.cancel()  # type: ignore[union-attr]
            await until(lambda: not c.event_loop.state.members.here[ada.node].connected)
            assert (await ada.heartbeat()).version > versions[-1]  # so that it opens its stream again

    asyncio.run(story())


def test_a_node_gets_no_view_for_what_another_one_reports(tmp_path: Path) -> None:
    async def story() -> None:
        async with coordinator(tmp_path) as c:
            ada, bo = await c.pair()
            await bo.sees(lambda v: v.state_digest)
            before = len(bo.seen)
            for _ in range(3):
                assert (await ada.report(pb.Fence(round=1), steps_reached=pb.StepsReached())).known
            await until(lambda: ada.node in c.event_loop.state.round.reached)
            await bo.report(pb.Fence(round=1), steps_reached=pb.StepsReached())
            await bo.sees(lambda v: v.closing)
            assert len(bo.seen) <= before + 2  # that the round closes, and the grace's reason before at most

    asyncio.run(story())


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


def test_who_calls_too_often_is_told_to_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        monkeypatch.setattr(rpc, "HEARTBEAT_LIMIT", RateLimit(1e-3, 5))
        monkeypatch.setattr(rpc, "STRANGER_LIMIT", RateLimit(1e-3, 3))
        async with coordinator(tmp_path) as c:
            ada, bo = c.node(), c.node()
            await ada.join()
            await bo.join()
            for _ in range(5):
                assert (await ada.heartbeat()).known
            said = await refused(ada.heartbeat(), Code.RESOURCE_EXHAUSTED)
            assert f"more heartbeats from {ada.node} than" in said and "5 at once" in said
            assert (await bo.heartbeat()).known
            stranger = Node(c.channel, "wrong")
            for _ in range(3):
                assert "token" in await refused(stranger.join(), Code.PERMISSION_DENIED)
            for call in (stranger.join(), stranger.heartbeat()):
                assert "127.0.0.1" in await refused(call, Code.RESOURCE_EXHAUSTED)
            assert (await bo.heartbeat()).known

    asyncio.run(story())


def test_a_request_that_is_too_large_is_refused(tmp_path: Path) -> None:
    async def story() -> None:
        async with coordinator(tmp_path) as c:
            ada = c.node()
            await ada.join()
            seals = pb.ChunksSealed(seals=[pb.Seal(chunk=c, digest=digest(c)) for c in range(200_000)])
            await refused(ada.report(chunks_sealed=seals), Code.RESOURCE_EXHAUSTED)
            bad = pb.ContributionReady(steps=1, samples=1, loss=math.nan, delta_norm=1.0)
            assert "loss is nan" in await refused(ada.report(contribution_ready=bad), Code.INVALID_ARGUMENT)

    asyncio.run(story())


def test_a_stopping_coordinator_finishes_the_round_that_closes(tmp_path: Path) -> None:
    async def story() -> None:
        async with coordinator(tmp_path) as c:
            ada, bo = await c.pair()
            for node in (ada, bo):
                await node.report(pb.Fence(round=1), steps_reached=pb.StepsReached())
            await ada.ready(1)
            drained = asyncio.create_task(c.plane.drain(asyncio.Event()))
            for node in (ada, bo):
                await node.sees(lambda v: v.draining)
            assert "stopping" in await refused(c.node().join(), Code.UNAVAILABLE)
            assert not await healthy(c)
            assert (await get(c, "/healthz"))[0] == 503
            await bo.ready(1)
            assert not drained.done()
            await asyncio.gather(ada.reduce(), bo.reduce())
            await asyncio.wait_for(drained, SOON)
            assert c.event_loop.state.committed == 1
            for node in (ada, bo):
                await node.sees(lambda v: v.committed == 1 and v.draining)
        journal = Journal(tmp_path)
        assert not any(isinstance(event, ev.Disconnected) for _, event in journal.events())
        journal.close()

    asyncio.run(story())


def test_a_second_signal_and_a_quiet_round_end_the_wait_at_once(tmp_path: Path) -> None:
    async def story() -> None:
        async with coordinator(tmp_path) as c:
            ada, bo = await c.pair()
            await asyncio.wait_for(c.plane.drain(asyncio.Event()), SOON)  # nothing is closing
            for node in (ada, bo):
                await node.report(pb.Fence(round=1), steps_reached=pb.StepsReached())
            await until(lambda: c.event_loop.state.round.phase is Phase.COLLECTING)
            at_once = asyncio.Event()
            drained = asyncio.create_task(c.plane.drain(at_once))
            await asyncio.sleep(0)
            at_once.set()
            await asyncio.wait_for(drained, SOON)
            assert c.event_loop.state.committed == 0

    asyncio.run(story())


def test_what_a_node_says_of_its_progress_and_troubles_is_on_the_page(tmp_path: Path) -> None:
    async def story() -> None:
        async with coordinator(tmp_path) as c:
            ada = c.node()
            await ada.at_work()
            await ada.heartbeat(phase="recovering", progress="3 of 9 chunks\n", trouble="no room" + "!" * 900)
            [member] = json.loads((await get(c, "/api/run"))[1])["members"]
            assert member["progress"] == "3 of 9 chunks"
            assert member["trouble"].startswith("no room!") and len(member["trouble"]) < 300
            assert "3 of 9 chunks; no room!" in member["reason"]
            await ada.heartbeat(phase="inner")
            [member] = json.loads((await get(c, "/api/run"))[1])["members"]
            assert "chunks" not in member["reason"] and "room" not in member["reason"]

    asyncio.run(story())


def test_on_a_full_disk_nothing_leaves_until_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        monkeypatch.setattr(event_loop, "RETRY_INTERVAL", 0.02)
        async with coordinator(tmp_path) as c:
            ada = c.node()
            await ada.join()
            pages = c.journal._db.execute("pragma page_count").fetchone()[0]
            c.journal._db.execute(f"pragma max_page_count = {pages}")
            held_up = []
            while not c.event_loop.trouble:
                held_up.append(asyncio.create_task(c.event_loop.submit(ev.Connected(ada.node, 1))))
                await asyncio.sleep(0.01)
            state = c.event_loop.state
            assert not await healthy(c)
            status, said = await get(c, "/healthz")
            assert status == 503 and b"make room on its disk" in said
            assert "make room on its disk" in json.loads((await get(c, "/api/run"))[1])["phase_reason"]
            layout = pb.LayoutReported(numel=40, digest=digest("layout"))
            assert "make room on its disk" in await refused(ada.report(layout_reported=layout), Code.UNAVAILABLE)
            assert (await ada.heartbeat(phase="inner")).known
            assert c.event_loop.state.round == state.round and not held_up[-1].done()
            c.journal._db.execute("pragma max_page_count = 1073741823")
            await asyncio.wait_for(asyncio.gather(*held_up), SOON)
            assert not c.event_loop.trouble and (await ada.report(layout_reported=layout)).known
            assert await healthy(c)
            assert (await get(c, "/healthz")) == (200, b"ok\n")

    asyncio.run(story())


def test_a_call_without_a_deadline_is_not_kept_waiting_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        monkeypatch.setattr(rpc, "CALL_TIMEOUT", 0.1)
        async with coordinator(tmp_path) as c:
            ada = c.node()
            await ada.join()
            monkeypatch.setattr(c.event_loop, "submit", lambda event: asyncio.Event().wait())
            request = pb.ReportRequest(
                session=ada.session, layout_reported=pb.LayoutReported(numel=1, digest=digest(1))
            )
            assert "say it again" in await refused(ada.stub.Report(request), Code.UNAVAILABLE)

    asyncio.run(story())


def test_notes_goodput_and_vitals_survive_a_restart(tmp_path: Path) -> None:
    async def story() -> None:
        async with coordinator(tmp_path) as c:
            ada = c.node()
            await ada.join(name="ada")
            await ada.heartbeat(phase="inner", bytes_up=123)
            await ada.report(leave=pb.Leave(reason="bedtime"))
            before = snapshot(c.event_loop, "reef")
        async with coordinator(tmp_path) as c:
            after = snapshot(c.event_loop, "reef")
            assert after["incarnation"] == 2
            assert after["events"][: len(before["events"])] == before["events"]
            (member,) = after["members"]
            assert (member["state"], member["reason"], member["bytes_up"]) == ("left", "bedtime", 123)
            assert after["goodput_seconds"] == before["goodput_seconds"]
            again = Node(c.channel, "")
            await again.join(ada.session)
            assert again.node == ada.node

    asyncio.run(story())


def test_metrics_tell_of_the_control_plane(tmp_path: Path) -> None:
    async def story() -> None:
        async with coordinator(tmp_path) as c:
            ada, bo = await c.pair()
            await ada.heartbeat(phase="inner")
            status, body = await get(c, "/metrics")
            lines = body.decode().splitlines()
            assert status == 200
            for line in (
                "# TYPE atoll_heartbeats_total counter",
                "atoll_heartbeats_total 1.0",
                'atoll_reports_total{kind="layout_reported"} 2.0',
                'atoll_members{state="active"} 2.0',
                "# TYPE atoll_committed_rounds_total counter",
                "# TYPE atoll_journal_write_seconds histogram",
                "atoll_streams 2.0",
            ):
                assert line in lines, line

    asyncio.run(story())


def test_an_encrypted_run_passes_pins_on_and_asks_for_them(tmp_path: Path) -> None:
    pins = {name: pin_of(name.encode()) for name in ("ada", "bo")}

    async def story() -> None:
        async with coordinator(tmp_path, tls=load_or_make(tmp_path)) as c:
            old = await refused(c.node().join(), Code.INVALID_ARGUMENT)
            assert "this run is encrypted" in old and "update atoll" in old
            ada, bo = c.node(), c.node()
            await ada.at_work(name="ada", pin=pins["ada"])
            await bo.at_work(name="bo", pin=pins["bo"])
            for node in (ada, bo):
                await node.sees(lambda v: v.train.round == 1)
                await node.report(pb.Fence(round=1), steps_reached=pb.StepsReached())
            for node in (ada, bo):
                await node.ready(1)
            plan = (await ada.sees(lambda v: v.HasField("plan"))).plan
            assert [member.pin for member in plan.members] == [pins["ada"], pins["bo"]]
            await bo.join(
                bo.session, name="bo", pin=pin_of(b"another")
            )  # its state directory was lost but for that
            assert c.event_loop.state.members.here[bo.node].pin == pin_of(b"another")
            late = c.node()
            await late.join(name="late", pin=pin_of(b"late"))
            late.watch()
            donors = (await late.sees(lambda v: v.donors)).donors
            assert [(d.node_id, d.pin) for d in donors] == [(ada.node, pins["ada"])]

    asyncio.run(story())


def test_an_encrypted_control_plane_answers_only_who_trusts_its_certificate(tmp_path: Path) -> None:
    (tmp_path / "another").mkdir()
    certificate, another = load_or_make(tmp_path), load_or_make(tmp_path / "another")

    async def story() -> None:
        async with coordinator(tmp_path, tls=certificate) as c:
            assert await healthy(c)
            for channel in (grpc.aio.insecure_channel(c.address), trusting(c.address, another)):
                await refused(Node(channel, c.token).join(pin=certificate.pin), Code.UNAVAILABLE)
                await channel.close()

    asyncio.run(story())


def test_a_run_that_is_not_encrypted_keeps_no_pins(tmp_path: Path) -> None:
    async def story() -> None:
        async with coordinator(tmp_path) as c:
            node = c.node()
            await node.join(pin="a" * 52)
            assert c.event_loop.state.members.here[node.node].pin == ""

    asyncio.run(story())
