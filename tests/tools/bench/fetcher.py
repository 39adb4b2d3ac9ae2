"""A joiner without a trainer, for `bench.beside`: while told to, it fetches the run's state from its members again
and again, as a node that joins does, and keeps nothing of it.

    python -m bench.fetcher URL NUMEL FOLDER      reads "on" and "off"; says after each how many bytes it has had
"""

import asyncio
import secrets
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from atoll.comm.byte_view import Octets
from atoll.comm.chunks import Chunks
from atoll.comm.config.run import from_json
from atoll.comm.ids import NodeId, Pin, Round, RunId
from atoll.comm.invite import parse
from atoll.comm.proto import atoll_pb2 as pb
from atoll.comm.signatures import PrivateKey
from atoll.comm.transport.data_plane import DataPlane
from atoll.comm.transport.key_ring import RunKey
from atoll.node.control.client import ControlClient, NodeIdentity
from atoll.node.outer.method import outer_schedule, seal_format
from atoll.node.outer.shared_vectors import SharedVectors
from atoll.node.outer.state import OuterState
from atoll.node.recovery.recovery import Donor, RoundMovedOn, Target, recover

BEAT = 1.0  # seconds


class Nothing:
    """It has nothing that peers may fetch."""

    async def sealed(self, round: Round, chunk: int) -> Octets | None:
        return None

    async def state(self, round: Round, chunk: int) -> Octets | None:
        return None

    async def digests(self, round: Round) -> None:
        return None


class Joiner:
    """A member that is for ever about to begin."""

    def __init__(self, url: str) -> None:
        self._invite = parse(url)
        self.control = ControlClient(self._invite)
        self.control.session = secrets.token_hex(16)
        self.on = asyncio.Event()
        self.view: pb.View | None = None

    async def join(self) -> None:
        run, key = RunId(self._invite.run), PrivateKey.generate()
        self.plane = await DataPlane.start("127.0.0.1:0", run, NodeId("?"), b"", Nothing(), identity=key)
        reply = await self.control.join(NodeIdentity("fetcher", self.plane.address, key=key), 60.0)
        self.run = from_json(reply.config)
        self.plane.identify(NodeId(reply.node_id), RunKey(reply.data_key_number, reply.data_key))

    async def watch(self) -> None:
        async for view in self.control.watch():
            self.view = view

    async def beat(self) -> None:
        while True:
            await self.control.heartbeat(pb.HeartbeatRequest(phase="recovering"))
            await asyncio.sleep(BEAT)

    async def fetch(self, numel: int, folder: Path) -> None:
        vectors = SharedVectors.create(numel, folder)
        chunks = Chunks(numel, self.run.reduce.chunk)
        outer = OuterState(vectors, chunks, seal_format(self.run), outer_schedule(self.run))
        try:
            with ThreadPoolExecutor(1) as worker:
                while True:
                    await self.on.wait()
                    if (view := self.view) is None or not view.donors or not view.state_digest:
                        await asyncio.sleep(0.05)
                        continue
                    donors = tuple(Donor(NodeId(d.node_id), d.address, Pin(d.pin)) for d in view.donors)
                    target = Target(Round(view.committed), view.state_digest, donors)
                    outer.clear()
                    try:
                        await recover(outer, target, self.plane, worker, lambda _: None)
                    except RoundMovedOn:
                        await asyncio.sleep(0.05)
        finally:
            vectors.close()

    async def obey(self) -> None:
        while word := (await asyncio.to_thread(sys.stdin.readline)).strip():
            self.on.set() if word == "on" else self.on.clear()
            print(self.plane.bytes_down, flush=True)
        raise EOFError


async def live(url: str, numel: int, folder: Path) -> None:
    joiner = Joiner(url)
    await joiner.join()
    try:
        async with asyncio.TaskGroup() as group:
            for work in (joiner.watch(), joiner.beat(), joiner.fetch(numel, folder), joiner.obey()):
                group.create_task(work)
    except* EOFError:
        pass
    finally:
        await joiner.plane.close()
        await joiner.control.close()


if __name__ == "__main__":
    asyncio.run(live(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])))
