"""The control plane as nodes meet it, over gRPC: views, acks, limits, a full disk, the end of a run, a restart."""

import asyncio
import json
import math
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from control_nodes import SOON, Code, Node, commit, coordinator, digest, get, healthy, refused, until
from grpc_health.v1 import health_pb2, health_pb2_grpc

from atoll.comm.ids import NodeId
from atoll.comm.proto import atoll_pb2 as pb
from atoll.comm.proto.report_stream import ReportStream
from atoll.comm.rate_limits import RateLimit
from atoll.coordinator.monitor.http import snapshot
from atoll.coordinator.service import control_plane, event_loop, rpc
from atoll.coordinator.service.journal import Journal
from atoll.coordinator.service.journaled_machine import JournaledMachine
from atoll.coordinator.service.telemetry import Vitals
from atoll.coordinator.state_machine import events as ev
from atoll.coordinator.state_machine.state import Phase


def test_health_is_one_answer_to_one_call_and_nothing_else_is_there(tmp_path: Path) -> None:
    async def story() -> None:
        async with coordinator(tmp_path) as c:
            assert await healthy(c) and await healthy(c, rpc.SERVICE_NAME)
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await healthy(c, "other")
            assert error.value.code() is Code.NOT_FOUND
            stub: Any = health_pb2_grpc.HealthStub(c.channel)
            await refused(stub.Watch(health_pb2.HealthCheckRequest()).read(), Code.UNIMPLEMENTED)
            reflection: Any = c.channel.stream_stream(
                "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
            )
            await refused(reflection(iter([b""])).read(), Code.UNIMPLEMENTED)

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


def test_who_calls_too_often_is_told_to_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        monkeypatch.setattr(rpc, "HEARTBEAT_LIMIT", RateLimit(1e-3, 5))
        monkeypatch.setattr(rpc, "STRANGER_LIMIT", RateLimit(1e-3, 3))
        monkeypatch.setattr(rpc, "REFUSAL_PAUSE", 0.0)
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


def test_who_does_not_wait_between_calls_can_make_few(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        monkeypatch.setattr(rpc, "REPORT_LIMIT", RateLimit(1e-3, 1))
        monkeypatch.setattr(rpc, "REFUSAL_PAUSE", 3600.0)
        async with coordinator(tmp_path) as c:
            bo = c.node()
            await bo.join()
            async with grpc.aio.insecure_channel(c.address, [("grpc.use_local_subchannel_pool", 1)]) as channel:
                ada = Node(channel, c.token)
                await ada.join()
                report = partial(ada.report, pb.Fence(round=1), steps_reached=pb.StepsReached())
                flood = [asyncio.ensure_future(report()) for _ in range(99)]
                done, _ = await asyncio.wait(flood, timeout=SOON, return_when=asyncio.FIRST_COMPLETED)
                assert len(done) == 1 and done.pop().result().known
                for _ in range(9):
                    assert (await bo.heartbeat()).known
                assert sum(call.done() for call in flood) == 1
                for call in flood:
                    call.cancel()
                await asyncio.gather(*flood, return_exceptions=True)

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
            assert c.event_loop.state.round.stalled > 0
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
            assert "say it again" in await refused(ada.send(request), Code.UNAVAILABLE)

    asyncio.run(story())


def test_a_node_has_one_stream_of_reports_and_another_ends_it(tmp_path: Path) -> None:
    async def story() -> None:
        async with coordinator(tmp_path) as c:
            ada = c.node()
            await ada.join()
            request = pb.ReportRequest(
                session=ada.session, layout_reported=pb.LayoutReported(numel=40, digest=digest("layout"))
            )
            first, second = ReportStream(ada.stub), ReportStream(ada.stub)
            assert (await first.send(request, SOON)).known and (await second.send(request, SOON)).known
            await until(lambda: first.ended)
            assert not second.ended and (await second.send(request, SOON)).known

    asyncio.run(story())


def test_a_stream_of_reports_whose_answer_is_on_its_way_ends_after_it(tmp_path: Path) -> None:
    async def story() -> None:
        # Of what it does not wait for, this client takes in nothing.
        unread = [
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.http2.lookahead_bytes", 0),
            ("grpc.http2.bdp_probe", 0),
        ]
        async with asyncio.timeout(SOON), coordinator(tmp_path) as c:
            async with grpc.aio.insecure_channel(c.address, unread) as channel:
                ada = Node(channel, c.token)
                await ada.join()
                repaired = pb.ReportRequest(session=ada.session, state_repaired=pb.StateRepaired(round=9))
                refusals = c.plane.metrics.refused.labels(Code.INVALID_ARGUMENT.name)
                stub: Any = ada.stub
                first = stub.Report()
                await first.write(repaired)
                await until(lambda: refusals._value.get() == 1)
                assert "not committed" in await refused(ada.send(repaired), Code.INVALID_ARGUMENT)
                assert "not committed" in (await first.read()).reason and await first.read() is grpc.aio.EOF

    asyncio.run(story())


def test_who_opens_stream_after_stream_waits_on_each_for_what_is_too_much(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        monkeypatch.setattr(rpc, "REPORT_LIMIT", RateLimit(1e-3, 1))
        monkeypatch.setattr(rpc, "REFUSAL_PAUSE", 3600.0)
        async with coordinator(tmp_path) as c:
            ada = c.node()
            await ada.join()
            reached = pb.ReportRequest(
                session=ada.session, fence=pb.Fence(round=1), steps_reached=pb.StepsReached()
            )
            assert (await ada.send(reached)).known
            streams = [ReportStream(ada.stub) for _ in range(5)]
            flood = [asyncio.create_task(stream.send(reached, SOON)) for stream in streams]
            for _ in range(9):
                assert (await ada.heartbeat()).known
            assert not any(call.done() for call in flood)
            for stream in streams:
                stream.close()
            await asyncio.gather(*flood, return_exceptions=True)

    asyncio.run(story())


def test_what_waits_in_streams_of_reports_is_little(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        monkeypatch.setattr(rpc, "REPORT_LIMIT", RateLimit(1e-3, 1))
        monkeypatch.setattr(rpc, "HEARTBEAT_LIMIT", RateLimit(1e4, 10_000))
        monkeypatch.setattr(rpc, "REFUSAL_PAUSE", 3600.0)
        streams, block, most = 4, 1 << 18, 1 << 19
        monkeypatch.setitem(control_plane.CHANNEL_OPTIONS, "grpc.http2.lookahead_bytes", most)
        written = [0] * streams

        async def push(stub: Any, session: str, number: int) -> None:
            call = stub.Report()
            while True:
                await call.write(pb.ReportRequest(session=session, leave=pb.Leave(reason="x" * block)))
                written[number] += block

        async with asyncio.timeout(SOON), coordinator(tmp_path) as c:
            ada = c.node()
            await ada.join()
            await ada.report(pb.Fence(round=1), steps_reached=pb.StepsReached())
            pushing = [asyncio.create_task(push(ada.stub, ada.session, k)) for k in range(streams)]
            before, still = -1, 0
            while still < 100:
                await ada.heartbeat()
                still = still + 1 if sum(written) == before and min(written) else 0
                before = sum(written)
            # One that is looked at, what waits behind it, and one that the sender still has.
            assert max(written) <= most + 3 * block
            for task in pushing:
                task.cancel()
            await asyncio.gather(*pushing, return_exceptions=True)

    asyncio.run(story())


@pytest.mark.parametrize("session", ["nobody.1", ""], ids=["nobody's", "its earlier life's"])
def test_a_member_whose_calls_prove_nothing_waits_when_they_are_too_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, session: str
) -> None:
    async def story() -> None:
        monkeypatch.setattr(rpc, "STRANGER_LIMIT", RateLimit(1e-3, 1))
        monkeypatch.setattr(rpc, "ENTRANCE_LIMIT", RateLimit(1e-3, 2))
        monkeypatch.setattr(rpc, "REFUSAL_PAUSE", 3600.0)
        async with coordinator(tmp_path) as c:
            ada = c.node()
            await ada.join()
            before = ada.session
            await ada.join(before)
            said = pb.ReportRequest(session=session or before, steps_reached=pb.StepsReached())
            assert not (await ada.send(said)).known
            if not session:
                assert not (await ada.send(said)).known
            too_many = asyncio.create_task(ada.send(said))
            for _ in range(9):
                assert (await ada.heartbeat()).known
            assert not too_many.done()
            too_many.cancel()

    asyncio.run(story())


def test_a_stopping_coordinator_waits_for_no_stream_of_reports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        monkeypatch.setattr(control_plane, "LAST_ANSWERS_TIMEOUT", 10 * SOON)
        async with asyncio.timeout(SOON), coordinator(tmp_path) as c:
            ada = c.node()
            await ada.at_work()
            c.plane.stop()
            await ada.stream_ends()

    asyncio.run(story())


def test_who_goes_on_after_a_coordinator_that_stopped_repeats_no_event(tmp_path: Path) -> None:
    """Another version might take it in otherwise."""

    async def story() -> None:
        async with coordinator(tmp_path) as c:
            await c.node().join()
            before = c.event_loop.state
            assert before.members.here
        with closing(Journal(tmp_path)) as journal:
            assert not list(journal.events())
            assert JournaledMachine(before.config, journal).state == before

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
            again.key = ada.key
            await again.join(ada.session)
            assert again.node == ada.node

    asyncio.run(story())


def test_after_a_restart_the_roster_that_a_node_has_is_not_told_again(tmp_path: Path) -> None:
    async def story() -> None:
        async with coordinator(tmp_path) as c:
            ada, bo = c.node(), c.node()
            await ada.join()
            await bo.join()
            ada.watch()
            first = await ada.sees(lambda v: v.roster.members)
            assert [m.node_id for m in first.roster.members] == [ada.node, bo.node]
            members, digest_ = ada.roster.members, ada.roster.digest
            assert {m.address for m in members.values()} == {m.address for m in first.roster.members}
        async with coordinator(tmp_path) as c:
            back = c.node()
            back.session, back.roster = ada.session, ada.roster
            back.watch()
            seen = await back.sees(lambda v: v.incarnation == 2)
            assert seen.roster.digest == digest_ and not seen.roster.members and not seen.roster.data_key
            assert back.roster.members == members

    asyncio.run(story())


def test_many_who_wait_for_one_write_are_a_crowd_for_a_while(tmp_path: Path) -> None:
    async def story() -> None:
        async with coordinator(tmp_path) as c:
            loop = c.event_loop
            await loop.submit(ev.Disconnected(NodeId("n9"), 1))
            assert not loop.crowded
            many = (loop.submit(ev.Disconnected(NodeId("n9"), 1)) for _ in range(2 * event_loop.CROWD))
            await asyncio.gather(*many)
            assert loop.crowded
            await until(lambda: not loop.crowded)

    asyncio.run(story())


def test_what_the_telemetry_cannot_take_in_costs_no_round_and_is_heard_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def story() -> None:
        async with coordinator(tmp_path) as c:
            ada, bo = await c.pair()
            beats = [ev.Heartbeat(NodeId(node.node), 1, "inner", 1, 1) for node in (ada, bo)]
            c.event_loop.heartbeat(beats[0], Vitals(), {"inner": ""})  # type: ignore[dict-item]
            c.event_loop.heartbeat(beats[1], Vitals(tokens_per_s=7.0), {})
            assert c.event_loop.telemetry.vitals[bo.node].tokens_per_s == 7.0
            await commit(ada, bo, round_=1)

    asyncio.run(story())
    (told,) = [r for r in caplog.records if r.exc_info is not None]
    assert told.name == "atoll.coordinator" and "is not counted: a fault of the coordinator" in told.getMessage()
