"""A member with the project's own sockets tries, against real nodes, to be another one; and is a stranger once it
left."""

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
from e2e.harness import Run, until

from atoll.comm.ids import NodeId, Pin, Round, RunId
from atoll.comm.invite import parse
from atoll.comm.proto import atoll_pb2 as pb
from atoll.comm.transport.certificates import load_or_make
from atoll.comm.transport.data_plane import DataPlane
from atoll.comm.transport.fetch_client import DonorLost, FetchItem, NotAvailable
from atoll.comm.transport.key_ring import RunKey
from atoll.comm.transport.tls import TlsContexts
from atoll.node.control.client import ControlClient, NodeIdentity
from atoll.node.control.outbox import SessionLost

pytestmark = [pytest.mark.e2e, pytest.mark.long]


class Nothing:
    async def sealed(self, round: Round, chunk: int) -> None: ...
    async def state(self, round: Round, chunk: int) -> None: ...
    async def digests(self, round: Round) -> None: ...


class Eve:
    """A member whose daemon is of her own making."""

    def __init__(self, control: ControlClient, plane: DataPlane, reply: pb.JoinReply) -> None:
        self.control, self.plane, self._reply = control, plane, reply
        self.says_she_is(NodeId(reply.node_id))

    def says_she_is(self, node: NodeId) -> None:
        self.plane.identify(node, RunKey(self._reply.data_key_number, self._reply.data_key))

    async def asks(self, donor: pb.Donor) -> str:
        """What she is told when she asks for something: empty, if she is let in."""
        item, where = FetchItem.SEALED, (NodeId(donor.node_id), donor.address)
        try:
            await self.plane.fetch(*where, item, Round(1 << 40), 0, 1, 20.0, Pin(donor.pin))
        except NotAvailable:
            return ""
        except DonorLost as lost:
            return lost.sentence
        raise AssertionError("nobody has that round")


@asynccontextmanager
async def joined(url: str, folder: Path) -> AsyncIterator[Eve]:
    folder.mkdir()
    invite, own = parse(url), load_or_make(folder)
    key, contexts = own.signing_key(), TlsContexts(own) if parse(url).pin else None
    plane = await DataPlane.start(
        "127.0.0.1:0", RunId(invite.run), NodeId("?"), b"", Nothing(), tls=contexts, identity=key
    )
    control = ControlClient(invite)
    control.session = secrets.token_hex(16)
    try:
        reply = await control.join(NodeIdentity("eve", plane.address, pin=plane.pin, key=key), 60.0)
        yield Eve(control, plane, reply)
    finally:
        await control.close()
        await plane.close()


async def follow(eve: Eve, donors: "asyncio.Queue[pb.Donor]") -> None:
    async for view in eve.control.watch():
        for donor in view.donors:
            donors.put_nowait(donor)


@pytest.mark.parametrize("tls", ["on", pytest.param("off", marks=pytest.mark.chaos)])
def test_a_member_is_let_in_as_itself_alone_and_only_while_it_is_one(run: Run, tls: str) -> None:
    run.start(f"security.tls={tls}")
    url = run.invite(3)
    for name in ("one", "two"):
        run.join(url, name)
    until("a commit", lambda: run.committed() >= 1)

    async def story() -> None:
        async with joined(url, run.folder / "eve") as eve:
            donors = asyncio.Queue[pb.Donor]()
            following = asyncio.create_task(follow(eve, donors))
            donor = await asyncio.wait_for(donors.get(), 60)
            assert await eve.asks(donor) == ""
            others = [run.member(name)["node_id"] for name in ("one", "two")]
            (other,) = (NodeId(node) for node in others if node != donor.node_id)
            me = eve.plane.node
            eve.says_she_is(other)
            assert f"it is not {other}: it does not have its key" in await eve.asks(donor)
            eve.says_she_is(me)
            assert await eve.asks(donor) == ""
            await eve.control.leave("bye")
            with suppress(SessionLost):
                await following
            async with asyncio.timeout(60):
                while not (told := await eve.asks(donor)):  # its view comes when it comes
                    pass
            assert f"{me} is no member of the run" in told

    asyncio.run(story())
    run.commit_after(run.committed())
