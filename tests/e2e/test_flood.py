"""A stranger with the public addresses and nothing else, as fast as four processes can: no member is missed,
rounds go on, and no memory is gone.

The machine is shared by everybody here, so the same flood goes to a port of nobody's before. What rounds and
members' calls take in both is printed side by side (`pytest -s`), for who has a quiet machine, with
ATOLL_FLOOD=600 for ten minutes of it.
"""

import asyncio
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import grpc
import psutil
import pytest
from e2e.floods import SPAWN, Address, flood, follow, sink
from e2e.harness import Run, until

from atoll.comm.invite import Invite, parse, split_host_port
from atoll.comm.proto import atoll_pb2 as pb
from atoll.comm.proto import atoll_pb2_grpc as pb_grpc
from atoll.comm.proto.join_proof import prove_join
from atoll.comm.proto.report_stream import ReportStream
from atoll.comm.signatures import PrivateKey
from atoll.comm.transport.frames import PROTOCOL
from atoll.coordinator.bench.load import LoadTask, simulate

RATE = 10_000.0  # connections and calls a second
MEMBERS, PERIOD = 8, 2.0  # seconds
SETTINGS = (
    "members.start=8",
    "members.minimum=8",
    "members.lease=9",
    "members.reconnect=2",
    "rounds.inner_steps=200",
    "reduce.chunk=65536",
    "security.audit=0",  # members of the load have no chunks to look at
    "security.own_models=true",  # nor a model
)
MEMORY = 64 << 20  # bytes
SECONDS = float(os.environ.get("ATOLL_FLOOD", "20"))
MOST_BEFORE = 120.0  # seconds that are looked at without the flood, at most
# Times what they are without the flood, in the middle; on a quiet machine it is 1.1 at most.
MOST = 1.5

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.chaos]


@dataclass
class Seen:
    """What members saw for a while."""

    latencies: list[float] = field(default_factory=list)  # seconds, of heartbeats
    rounds: list[float] = field(default_factory=list)  # seconds, from commit to commit
    memory: int = 0  # bytes, the most
    busy: tuple[float, ...] = ()  # of a core: the coordinator, and its door

    def latency(self, percent: float) -> float:
        return sorted(self.latencies)[int(len(self.latencies) * percent / 100)]


def memory(pid: int) -> int:
    """Resident bytes of the coordinator and its door."""
    process = psutil.Process(pid)
    return sum(p.memory_info().rss for p in (process, *process.children()))


async def watch(stub: Any, session: str) -> None:
    async for _ in stub.Watch(pb.WatchRequest(session=session)):
        pass


def processor(pid: int) -> list[float]:
    """Seconds of processor time of the coordinator and of its door."""
    process = psutil.Process(pid)
    return [sum(p.cpu_times()[:2]) for p in (process, *process.children())]


async def look(stub: Any, session: str, pid: int, seconds: float, committed_at: Sequence[float]) -> Seen:
    """Be one member more for a while, and look at the others."""
    seen, ends, first = Seen(), time.monotonic() + seconds, len(committed_at)
    used = processor(pid)
    while (now := time.monotonic()) < ends:
        ack = await stub.Heartbeat(pb.HeartbeatRequest(session=session), timeout=9)
        assert ack.known, ack.reason
        seen.latencies.append(time.monotonic() - now)
        seen.memory = max(seen.memory, await asyncio.to_thread(memory, pid))
        await asyncio.sleep(0.1)
    seen.busy = tuple((now - before) / seconds for now, before in zip(processor(pid), used, strict=True))
    times = committed_at[first:]
    seen.rounds = [later - earlier for earlier, later in zip(times, times[1:], strict=False)]
    return seen


async def compare(
    run: Run, invite: Invite, seconds: float, committed_at: Sequence[float], ports: Sequence[Address]
) -> tuple[Seen, Seen, float]:
    """What one member more sees while a flood goes elsewhere, and while it comes here at that many a second."""
    pid = run.coordinator.pid
    async with grpc.aio.insecure_channel(invite.address, [("grpc.use_local_subchannel_pool", 1)]) as channel:
        stub: Any = pb_grpc.CoordinatorStub(channel)
        join = pb.JoinRequest(protocol=PROTOCOL, run=invite.run, token=invite.token, address="127.0.0.1:9")
        prove_join(join, PrivateKey.generate())
        session = (await stub.Join(join, timeout=30)).session
        views = asyncio.create_task(watch(stub, session))
        with sink() as elsewhere, flood([elsewhere], RATE):
            before = await look(stub, session, pid, min(seconds, MOST_BEFORE), committed_at)
        with flood(ports, RATE) as sent:
            during = await look(stub, session, pid, seconds, committed_at)
            rate = sent.value / seconds
        leave = pb.ReportRequest(session=session, leave=pb.Leave(reason="saw enough"))
        await ReportStream(stub).send(leave, 9)
        views.cancel()
    return before, during, rate


@pytest.mark.timeout(1200 + SECONDS)
def test_a_flood_of_strangers_is_not_noticed_by_members(run: Run) -> None:
    run.start(*SETTINGS)
    invite = parse(run.invite(100))
    here = SPAWN.Manager()
    words, committed_at = here.Queue(), here.list()
    task = LoadTask(invite.address, invite.run, invite.token, MEMBERS, 4, 10**6, PERIOD)
    members = SPAWN.Process(target=simulate, args=(task, words.put), daemon=True)
    follower = SPAWN.Process(target=follow, args=(words, committed_at), daemon=True)
    members.start()
    follower.start()
    try:
        until("the first rounds", lambda: len(committed_at) > 2)
        ports: list[Address] = [
            split_host_port(invite.address, ""),
            split_host_port(run.page.removeprefix("http://"), ""),
        ]
        before, during, rate = asyncio.run(compare(run, invite, SECONDS, committed_at, ports))
        shown = until("the page", run.run)
    finally:
        for process in (members, follower):
            process.kill()
            process.join()
        here.shutdown()
    told = [e["sentence"] for e in shown["events"] if "evicted" in e["sentence"] or "suspected" in e["sentence"]]
    print(f"{rate:,.0f} a second")
    for name, seen in (("elsewhere", before), ("here", during)):
        figures = f"p50 {1e3 * seen.latency(50):.1f} ms, p95 {1e3 * seen.latency(95):.1f} ms"
        lengths = f"rounds {min(seen.rounds):.2f}, {median(seen.rounds):.2f}, {max(seen.rounds):.2f} s"
        busy = " + ".join(f"{share:.2f}" for share in seen.busy)
        print(f"{name}: {figures}, {lengths}, {seen.memory / 1e6:.0f} MB, {busy} of a core")
    assert not told
    assert rate > RATE / 4, "what four processes make on a busy machine"
    assert median(during.rounds) < MOST * median(before.rounds)
    assert during.memory < before.memory + MEMORY
