"""A member may report as much as a round has: what is more than that is refused, and nothing of it is kept."""

import asyncio
from functools import partial
from pathlib import Path

import grpc
import pytest
from control_nodes import CONFIG, Code, Coordinator, Node, coordinator, digest, refused

from atoll.comm.ids import NodeId
from atoll.comm.proto import atoll_pb2 as pb
from atoll.comm.rate_limits import RateLimit
from atoll.coordinator.service import event_loop, report_limits, rpc
from atoll.coordinator.service.journal import Journal
from atoll.coordinator.service.journaled_machine import JournaledMachine
from atoll.coordinator.service.note_quota import NOTE_LIMIT
from atoll.coordinator.state_machine import conduct
from atoll.coordinator.state_machine import events as ev
from atoll.coordinator.state_machine.events import Note

LIAR = NodeId("n1")


async def reducing(c: Coordinator) -> tuple[Node, Node]:
    """Two nodes, in a reduce of four chunks."""
    ada, bo = await c.pair()
    for node in (ada, bo):
        await node.report(pb.Fence(round=1), steps_reached=pb.StepsReached())
    for node in (ada, bo):
        await node.ready(1)
    await ada.sees(lambda v: v.HasField("plan"))
    return ada, bo


def journal_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("journal.sqlite*"))


@pytest.mark.long
def test_more_chunks_than_there_are_end_in_no_journal(tmp_path: Path) -> None:
    async def story() -> None:
        async with coordinator(tmp_path) as c:
            ada, _ = await reducing(c)
            plan = ada.seen[-1].plan
            fence = pb.Fence(
                incarnation=plan.incarnation, epoch=plan.epoch, round=plan.round, attempt=plan.attempt
            )
            before = journal_bytes(tmp_path)
            many = [pb.Seal(chunk=i, digest=digest(0)) for i in range(100_000)]
            for report in (
                {"orphans_found": pb.OrphansFound(here=many)},
                {"chunks_sealed": pb.ChunksSealed(seals=many)},
                {"chunks_missing": pb.ChunksMissing(chunks=b"\xff" * (1 << 14))},
            ):
                said = await refused(ada.report(fence, **report), Code.INVALID_ARGUMENT)
                assert "chunks, and there are 4" in said
            said = await refused(ada.report(state_repaired=pb.StateRepaired(round=1 << 40)), Code.INVALID_ARGUMENT)
            assert "not committed yet" in said
            assert (await ada.report(fence, orphans_found=pb.OrphansFound(here=many[:4]))).known
            assert journal_bytes(tmp_path) < before + (1 << 16)

    asyncio.run(story())


def test_bytes_of_reports_are_a_members_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_limits, "REPORT_BYTES", RateLimit(1e-3, 2000))

    async def story() -> None:
        async with coordinator(tmp_path) as c:
            ada, bo = await c.pair()
            long = pb.LayoutReported(numel=40, digest=digest("layout"), fragments=[20, 20] * 300)
            for _ in range(2):
                await refused(ada.report(layout_reported=long), Code.INVALID_ARGUMENT)
            said = await refused(ada.report(layout_reported=long), Code.RESOURCE_EXHAUSTED)
            assert "bytes of reports from n1" in said
            assert (await ada.heartbeat()).known
            assert (await bo.report(pb.Fence(round=1), steps_reached=pb.StepsReached())).known

    asyncio.run(story())


@pytest.mark.parametrize("limit", ["reports", "bytes"])
def test_nobody_waits_for_whose_reports_are_too_many_and_that_is_entered_once_a_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    monkeypatch.setattr(rpc, "REFUSAL_PAUSE", 0.0)
    module, name, most = (rpc, "REPORT_LIMIT", 12) if limit == "reports" else (report_limits, "REPORT_BYTES", 1000)
    monkeypatch.setattr(module, name, RateLimit(1e-3, most))

    async def story() -> None:
        async with coordinator(tmp_path) as c:
            ada, bo = await c.pair()
            loop, entered = c.event_loop, list[ev.Event]()
            post = loop.post

            def enter(event: ev.Event) -> None:
                entered.append(event)
                post(event)

            monkeypatch.setattr(loop, "post", enter)
            reached = partial(ada.report, pb.Fence(round=1), steps_reached=pb.StepsReached())
            with pytest.raises(grpc.aio.AioRpcError):
                for _ in range(most):
                    await reached()
            assert ev.ReportsRefused(LIAR, 1) in entered
            await loop.wait_until(lambda state: conduct.owes_time(state, LIAR))
            for _ in range(5):
                await refused(reached(), Code.RESOURCE_EXHAUSTED)
            assert entered.count(ev.ReportsRefused(LIAR, 1)) == 1
            assert not conduct.owes_time(loop.state, NodeId("n2"))
            assert (await ada.heartbeat()).known and (await bo.heartbeat()).known

    asyncio.run(story())


def test_who_says_a_report_again_while_the_disk_is_full_floods_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rpc, "REFUSAL_PAUSE", 0.0)
    monkeypatch.setattr(rpc, "REPORT_LIMIT", RateLimit(1e-3, 12))
    monkeypatch.setattr(event_loop, "RETRY_INTERVAL", 0.02)

    async def story() -> None:
        async with coordinator(tmp_path) as c:
            ada, _ = await c.pair()
            layout = pb.LayoutReported(numel=40, digest=digest("layout"))
            [(pages,)] = c.journal._db.execute("pragma page_count")
            c.journal._db.execute(f"pragma max_page_count = {pages}")
            held = list[asyncio.Task[None]]()
            while not c.event_loop.trouble:
                held.append(asyncio.create_task(c.event_loop.submit(ev.Connected(ada.node, 1))))
                await asyncio.sleep(0.01)
            for _ in range(20):
                await refused(ada.report(layout_reported=layout), Code.UNAVAILABLE)
            c.journal._db.execute("pragma max_page_count = 1073741823")
            await asyncio.gather(*held)
            assert (await ada.report(layout_reported=layout)).known
            assert not conduct.owes_time(c.event_loop.state, ada.node)

    asyncio.run(story())


def test_repairs_without_end_leave_other_notes_where_they_are(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    machine = JournaledMachine(CONFIG, journal)
    machine.adopt(machine.prepare([ev.Started(1)], 0.0))
    for node in (LIAR, NodeId("n2")):
        machine.adopt(machine.prepare([ev.Joined(node, 1, str(node), "h:1", str(node))], 0.0))
    shown, written = list[Note](), 0
    for i in range(2000):
        batch = machine.prepare([ev.StateRepaired(LIAR, 1, 0, 1, True)], 1.0 + i / 200)
        machine.write(batch)
        machine.adopt(batch)
        written += len(batch.entries)
        shown += [note for _, note in batch.notes]
    assert len(shown) == written <= NOTE_LIMIT.burst + 10 * NOTE_LIMIT.per_second
    other = machine.prepare([ev.StateRepaired(NodeId("n2"), 1, 0, 1, True)], 11.0)
    assert len(other.notes) == 1
    later = machine.prepare([ev.StateRepaired(LIAR, 1, 0, 1, True)], 30.0).notes
    assert "notes about it before are left out" in later[0][1].sentence
    gone = machine.prepare([ev.StateRepaired(LIAR, 1, 0, 1, True), ev.Leaving(LIAR, 1, "done")], 11.0)
    assert "left the run" in gone.notes[-1][1].sentence or "done" in gone.notes[-1][1].sentence
    journal.close()
