"""A member that is honest until a file is there, and from then on does what a member can do to harm a run.

`main` is the command `atoll`; in its process one part of the real daemon is exchanged, as in `e2e.lying_node`,
which has the lies of deltas and seals. Everything else is as in anybody's node, its trainer too.
"""

import asyncio
import atexit
import os
import secrets
import socket
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path
from typing import Any

import grpc
from attacks.strangers import OPTIONS, answer, join_request, often
from attacks.tally import Tally
from e2e import lying_node

from atoll.comm.allreduce.effects import MergeChunk
from atoll.comm.allreduce.reduction import Reduction
from atoll.comm.cli import main as atoll
from atoll.comm.codecs import zstd
from atoll.comm.digest import digest
from atoll.comm.errors import Unreachable
from atoll.comm.ids import NodeId, RunId
from atoll.comm.proto import atoll_pb2 as pb
from atoll.comm.receipts import sign_input
from atoll.comm.signatures import SIGNATURE_BYTES, PrivateKey
from atoll.comm.transport import frames
from atoll.comm.transport.connection import ByteCounter, Link, LinkBroken
from atoll.comm.transport.data_plane import DataPlane
from atoll.comm.transport.frames import FrameKind, Header
from atoll.comm.transport.key_ring import KeyRing
from atoll.node.control.reports import Reports
from atoll.node.daemon.daemon import Daemon
from atoll.node.daemon.outer_loop import OuterLoop
from atoll.node.daemon.pulse import Pulse
from atoll.node.daemon.session import CoordinatorSession
from atoll.node.trainer_channel import Progress

BOMB_BYTES = 1 << 26  # that a frame of two thousand unpacks to
REPORTS_PER_SECOND = 500.0
CALLERS = 8  # that make them
NAMES_AT_ONCE, NAMES_PAUSE = 64, 0.1  # seconds until so many more
NAMES_FROM = "127.0.0.2"
RETURNS_PER_SECOND = 20.0
STAY = 2.0  # rounds at one address: it takes part in an exchange or two
NOWHERE, A_THIRDS = "127.0.0.1:9", "127.0.0.9"  # where nobody listens; where somebody does who has no part in it
PARAMETERS = 1 << 42  # 18 TB of them, at 4 bytes each


@dataclass(frozen=True)
class Target:
    """What is told to who is to do harm."""

    flag: str  # a file: it does harm while it is there
    tally: str  # a file for what it counts
    page: str  # the coordinator's, "host:port"
    address: str = ""  # of an honest member's data plane, and its node, once there is one
    node: str = ""
    seconds: float = 0.0  # that a round takes, about

    def now(self) -> bool:
        """Whether to do harm."""
        return os.path.exists(self.flag)


Habit = Callable[[Target], None]


def main(word: str, *told: Any) -> None:
    """`atoll`, in a process that does the harm which `word` names, one of `HABITS` or a lie of `lying_node`'s;
    `told`: the fields of its target."""
    target = Target(*told)
    if word in HABITS:
        HABITS[word](target)
    else:
        lying_node.install(word, target.now)
    atoll()


# In what it sends others


def contributions(target: Target, other: Callable[[Any, Header, bytes], tuple[Header, bytes]]) -> None:
    """Send another frame in place of each contribution: `other` is given the reduction, the header and the payload
    without its signature."""
    honest = Reduction.frame

    async def frame(self: Any, node: NodeId, queued: Any) -> Any:
        found = await honest(self, node, queued)
        if found is None or queued[0] is not FrameKind.CONTRIBUTION or not target.now():
            return found
        header, payload = found
        signed = self._payloads.signature_size(FrameKind.CONTRIBUTION, self.plan)
        header, sent = other(self, header, bytes(payload)[: len(payload) - signed])
        return replace(header, length=len(sent)), memoryview(sent)

    exchanged: Any = Reduction
    exchanged.frame = frame


def nan(target: Target) -> None:
    """Bytes that are no numbers, signed as what they are."""

    def other(reduction: Any, header: Header, payload: bytes) -> tuple[Header, bytes]:
        spoiled = b"\xff\xff\xff\xff" + payload[4:]  # the first scale: NaN
        plan, key = reduction.plan, reduction._evidence._signer.key
        place = plan.index(reduction.me)
        record = sign_input(key, plan.salt, header.chunk, place, digest(spoiled), ())
        return header, spoiled + record.signature

    contributions(target, other)


def bomb(target: Target) -> None:
    """A small frame that unpacks to very much."""
    frame, counted = zstd.pack(bytes(BOMB_BYTES)), Tally(Path(target.tally))

    def other(reduction: Any, header: Header, payload: bytes) -> tuple[Header, bytes]:
        assert len(frame) < len(payload), "it has to be shorter than the chunk"
        counted.note("bombs")
        return replace(header, packed=True), frame + bytes(SIGNATURE_BYTES)

    contributions(target, other)


def never_seals(target: Target) -> None:
    honest = Reduction._do

    def do(self: Any, effects: Sequence[Any]) -> None:
        honest(self, [e for e in effects if not (isinstance(e, MergeChunk) and target.now())])

    exchanged: Any = Reduction
    exchanged._do = do


def accuses(target: Target) -> None:
    honest = Reduction.replan

    def replan(self: Any, plan: Any) -> None:
        honest(self, plan)
        if target.now():
            others = [m.node for m in plan.members if m.node != self.me and not m.gone]
            self._listener.lost(plan, max(others), "it does not answer")  # the same one each time

    exchanged: Any = Reduction
    exchanged.replan = replan


# In what it reports of its part


def told_contributions(target: Target, change: Callable[[pb.ContributionReady], None]) -> None:
    """Say something else of each contribution."""
    honest = Reports.contribution

    def contribution(self: Reports, round_: int, told: pb.ContributionReady) -> None:
        other = pb.ContributionReady()
        other.CopyFrom(told)
        if target.now():
            change(other)
        honest(self, round_, other)

    exchanged: Any = Reports
    exchanged.contribution = contribution


def weight(target: Target) -> None:
    def change(told: pb.ContributionReady) -> None:
        told.samples *= 8

    told_contributions(target, change)


def rate(target: Target) -> None:
    honest = Reports.reduce_complete

    def complete(self: Reports, plan: Any, told: pb.ReduceComplete) -> None:
        if target.now():
            told.rate_up = told.rate_down = told.rate_inside = told.rate_outside = 1e15
        honest(self, plan, told)

    exchanged: Any = Reports
    exchanged.reduce_complete = complete


def short_norm(target: Target) -> None:
    """Ten times its delta, the other way, of which it says that it is as long as it was."""

    def change(told: pb.ContributionReady) -> None:
        told.delta_norm /= 10

    lying_node.install("flip:10", target.now)
    told_contributions(target, change)


def other_bytes(target: Target) -> None:
    """It holds other bytes than were sealed, it says."""
    honest = Reports.reduce_complete

    def complete(self: Reports, plan: Any, told: pb.ReduceComplete) -> None:
        if target.now():
            told.digest = os.urandom(len(told.digest))
        honest(self, plan, told)

    exchanged: Any = Reports
    exchanged.reduce_complete = complete


def other_state(target: Target) -> None:
    """It has another state than all others, it says."""
    honest = Reports.state

    def state(self: Reports, round_: int, told: bytes) -> None:
        honest(self, round_, os.urandom(len(told)) if target.now() else told)

    exchanged: Any = Reports
    exchanged.state = state


def never_holds(target: Target) -> None:
    honest = Reports.reduce_complete

    def complete(self: Reports, plan: Any, told: pb.ReduceComplete) -> None:
        if not target.now():
            honest(self, plan, told)

    exchanged: Any = Reports
    exchanged.reduce_complete = complete


# Beside its part


def beside(target: Target, work: Callable[[CoordinatorSession, Tally], Awaitable[None]]) -> None:
    """Have a session do this, too, while harm is to be done."""
    honest = CoordinatorSession.maintain
    counted = Tally(Path(target.tally))

    async def maintain(self: CoordinatorSession, on_rejoin: Callable[[], None], *duties: Any) -> None:
        async def duty() -> None:
            while True:
                if target.now():
                    await work(self, counted)
                else:
                    await asyncio.sleep(0.1)

        await honest(self, on_rejoin, *duties, duty)

    exchanged: Any = CoordinatorSession
    exchanged.maintain = maintain


async def _call_often(session: CoordinatorSession, counted: Tally, made: Callable[[pb.View], Any]) -> None:
    """So many reports for a second, beside those of its part."""
    control: Any = session.control

    async def some() -> None:
        for _ in range(int(REPORTS_PER_SECOND / CALLERS)):
            request = made(session.reports.view or pb.View())
            request.session = control.session
            try:
                ack = await control._tell(request, 5.0)
                counted.note("taken" if ack.known else ack.reason)
            except grpc.aio.AioRpcError as error:
                counted.note(error.code().name)
            except Unreachable:
                counted.note("not answered")
            await asyncio.sleep(CALLERS / REPORTS_PER_SECOND)

    await asyncio.gather(*(some() for _ in range(CALLERS)))


def _fence(view: pb.View) -> pb.Fence:
    """Of the round at hand."""
    attempt = view.plan.attempt if view.HasField("plan") else 1
    fence = {"incarnation": view.incarnation, "epoch": view.epoch}
    return pb.Fence(**fence, round=view.committed + 1, attempt=attempt)


def orphans(target: Target) -> None:
    def made(view: pb.View) -> pb.ReportRequest:
        chunks = len(view.plan.owners) or 8
        here = [pb.Seal(chunk=c, digest=os.urandom(16)) for c in range(chunks)]
        return pb.ReportRequest(fence=_fence(view), orphans_found=pb.OrphansFound(here=here))

    beside(target, lambda session, counted: _call_often(session, counted, made))


def mended(target: Target) -> None:
    def made(view: pb.View) -> pb.ReportRequest:
        report = pb.StateRepaired(round=view.committed, chunks=1, whole=True)
        return pb.ReportRequest(fence=_fence(view), state_repaired=report)

    beside(target, lambda session, counted: _call_often(session, counted, made))


def invented(session: CoordinatorSession) -> list[str]:
    return [f"x{i}" for i in range(NAMES_AT_ONCE)]


def others(session: CoordinatorSession) -> list[str]:
    found = sorted(str(node) for node in session.control.roster.members if node != session.me)
    return (found * NAMES_AT_ONCE)[:NAMES_AT_ONCE]


def names(target: Target, chosen: Callable[[CoordinatorSession], list[str]]) -> None:
    """Links under names that are not its own, or nobody's, at a member's data port, by one who knows the run's
    key."""
    host, _, port = target.address.rpartition(":")

    async def once(session: CoordinatorSession, name: str) -> str:
        sock = socket.socket()
        sock.setblocking(False)
        sock.bind((NAMES_FROM, 0))
        try:
            await asyncio.get_running_loop().sock_connect(sock, (host, int(port)))
        except OSError:
            sock.close()
            return "no connection"
        link, keys = Link(sock, ByteCounter()), KeyRing(PrivateKey.generate())
        keys.change_key(session.plane.keys.key, 0.0)
        try:
            await frames.greet(link, RunId(session.invite.run), NodeId(name), NodeId(target.node), keys)
            await frames.send(link, frames.unfenced(FrameKind.LINK))
            answer = await frames.receive(link, 10)
            said = await frames.sentence(link, answer) if answer.kind is FrameKind.REFUSED else "let in"
            return next((word for word in ("is no member", "does not have its key") if word in said), said)
        except LinkBroken:
            return "not greeted"
        finally:
            link.close()

    async def many(session: CoordinatorSession, counted: Tally) -> None:
        told = await asyncio.gather(*(once(session, name) for name in chosen(session)))
        for word in told:
            counted.note(word)
        await asyncio.sleep(NAMES_PAUSE)

    beside(target, many)


def elsewhere(target: Target) -> None:
    """It tells others' addresses for its data plane, one after the other, and dials nobody: who has something for
    it dials there."""
    honest, lost = DataPlane._dial_link, Reports.lost
    places: Iterator[str] | None = None

    async def dial_link(self: Any, *to: Any) -> Link:
        if target.now():
            raise LinkBroken("it dials nobody")
        return await honest(self, *to)

    def silent(self: Reports, plan: Any, node: NodeId, sentence: str) -> None:
        if not target.now():
            lost(self, plan, node, sentence)

    async def move(session: CoordinatorSession, counted: Tally) -> None:
        nonlocal places

        def dialled(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            counted.note("dialled at a third's")
            writer.close()

        if places is None:
            third = await asyncio.start_server(dialled, A_THIRDS, 0)
            port = third.sockets[0].getsockname()[1]
            places = cycle((f"{A_THIRDS}:{port}", target.page, target.address, NOWHERE))
        else:
            await asyncio.sleep(STAY * target.seconds)
        member: Any = session
        for other, _ in session.plane.peers.links():
            session.plane.peers.drop(other)
        counted.note("addresses told")
        member._identity = replace(member._identity, address=next(places))
        member._moved.set()
        await asyncio.sleep(STAY * target.seconds)  # it joins again, and begins anew with this

    exchanged: Any = DataPlane
    exchanged._dial_link = dial_link
    exchanged = Reports
    exchanged.lost = silent
    beside(target, move)


# When it is out


def returns(target: Target) -> None:
    """It seals 1e30, for which it is banned; then it joins again and again: under its session, by its key, and by
    other keys with its invite."""
    lying_node.install(lying_node.VAST, target.now)
    honest = CoordinatorSession.join

    async def join(self: CoordinatorSession, role: str = "") -> pb.JoinReply:
        reply = await honest(self, role)
        atexit.register(lambda: asyncio.run(_come_back(self, target)))
        return reply

    exchanged: Any = CoordinatorSession
    exchanged.join = join


async def _come_back(session: CoordinatorSession, target: Target) -> None:
    invite, counted = session.invite, Tally(Path(target.tally))
    ways: dict[str, tuple[str, Callable[[], PrivateKey]]] = {
        "its session": (session.control.session, lambda: session.key),
        "its key": ("", lambda: session.key),
        "another key": ("", PrivateKey.generate),
    }
    channels = {way: grpc.aio.insecure_channel(invite.address, OPTIONS) for way in ways}

    async def once(number: int) -> None:
        way = list(ways)[number % len(ways)]
        secret, key = ways[way]
        request = join_request(invite.run, invite.token, secret or secrets.token_hex(16), key())
        counted.note(f"{way}: {await answer(channels[way], request)}")

    await often(RETURNS_PER_SECOND, once)


# Where it is the first to come


def counts(target: Target) -> None:
    """Told to make state 0, it says that it makes progress, for ever."""
    honest = Daemon._initialise

    async def count(self: Any) -> None:
        step = 0
        while target.now():
            self._pulse, step = Pulse(time.monotonic(), Progress(0, step, 0.0)), step + 1
            await asyncio.sleep(0.5)

    def initialise(self: Any, witness: bool) -> None:
        if target.now():
            self._spawn(count(self))
        else:
            honest(self, witness)

    exchanged: Any = Daemon
    exchanged._initialise = initialise


def makes_up(target: Target) -> None:
    """It makes another state 0 than the run's seed says, and has it to give."""
    honest = OuterLoop.initialised

    async def initialised(self: OuterLoop, momentum: bool = False) -> None:
        if target.now():
            self.outer.vectors.anchor[:] *= 2
        await honest(self, momentum)

    exchanged: Any = OuterLoop
    exchanged.initialised = initialised


def vast_model(target: Target) -> None:
    """Its model has 2^42 parameters, it says."""
    honest = Reports.layout

    def layout(self: Reports, told: pb.LayoutReported) -> None:
        if target.now():
            told.numel = PARAMETERS
        honest(self, told)

    exchanged: Any = Reports
    exchanged.layout = layout


HABITS: dict[str, Habit] = {
    "nan": nan,
    "bomb": bomb,
    "never seals": never_seals,
    "accuses": accuses,
    "weight": weight,
    "rate": rate,
    "never holds": never_holds,
    "orphans": orphans,
    "mended": mended,
    "names": lambda target: names(target, invented),
    "poses": lambda target: names(target, others),
    "short norm": short_norm,
    "other bytes": other_bytes,
    "other state": other_state,
    "elsewhere": elsewhere,
    "returns": returns,
    "counts": counts,
    "makes up": makes_up,
    "vast model": vast_model,
    "honest": lambda target: None,
}
