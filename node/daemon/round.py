"""A node's participation in the reduces: what it brings to a round, the reduce under way, and what becomes of
the rest.

    encode              anchor - local of the round's fragment, once a round, whatever the number of attempts;
                        with error feedback, what the wire left out before is added
    begin               take part under the round's first plan, or go on under a newer one
    verify_seals        the ledger's digests, where what is here was found to be something else
    sealed              every sealed chunk, once the round is committed
    residual_update     with error feedback: what the wire has left out this time

The outer loop says when; nothing here decides.
"""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from atoll.comm.allreduce.auditor import Auditor
from atoll.comm.allreduce.delta_encoder import DeltaEncoder, EncodedVector, encoded_norm
from atoll.comm.allreduce.delta_samples import DeltaSample
from atoll.comm.allreduce.input_signer import InputSigner
from atoll.comm.allreduce.listener import ReduceListener
from atoll.comm.allreduce.reduction import Reduction, SealedVector
from atoll.comm.allreduce.sealing import SealFormat
from atoll.comm.byte_view import U8
from atoll.comm.chunks import Chunks
from atoll.comm.codecs.codec import F32, Codec, NonFinite
from atoll.comm.digest import DIGEST_SIZE
from atoll.comm.errors import AtollError
from atoll.comm.ids import NodeId
from atoll.comm.plan import InvalidPlan, Plan
from atoll.comm.proto import atoll_pb2 as pb
from atoll.comm.transport.data_plane import DataPlane
from atoll.node.outer.layout import Shapes
from atoll.node.outer.residual import Residual
from atoll.node.outer.state import OuterState
from atoll.node.state_machine.state import Work

log = logging.getLogger("atoll.node")


@dataclass(slots=True)
class RoundBuffers:
    """The encoded delta of the round at hand."""

    encoded: EncodedVector | None = None  # or being encoded
    encoded_for: tuple[int, int] = (-1, -1)  # (round, front of the lease)
    encoding: asyncio.Task[None] | None = None
    norm: float | None = None  # l2, of what it says; None: not known yet
    norming: asyncio.Lock = field(default_factory=asyncio.Lock)  # held by who finds it out
    up: int = 0  # the data plane's counters when the delta began to be encoded
    down: int = 0


@dataclass(slots=True)
class RunningReduce:
    """The reduce under way."""

    round: int
    task: asyncio.Task[None] | None = None
    reduction: Reduction | None = None  # None: it is about to begin


class RoundParticipation:
    """One node in reduce after reduce, a round at a time. `stop` and `forget` end what is under way."""

    def __init__(
        self,
        plane: DataPlane,
        outer: OuterState,
        codec: Codec,
        sealings: Sequence[SealFormat],
        layout: Shapes,
        residual: Residual | None,
        listener: ReduceListener,
        compute: Callable[[Callable[[], Any]], Awaitable[Any]],
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
        on_unusable: Callable[[Work, str], None],
        signer: InputSigner | None = None,
    ) -> None:
        """`sealings`: of each fragment alone. `compute` calls a function in the thread that does the state's
        arithmetic; `spawn` starts a task. `on_unusable` is called with work whose delta holds NaN or infinity, and
        with what is wrong with it. `signer`: for what the node sends."""
        self._plane, self._outer, self._codec, self._layout = plane, outer, codec, layout
        self._sealings = sealings
        self._residual, self._listener, self._compute, self._spawn = residual, listener, compute, spawn
        self._on_unusable, self._signer = on_unusable, signer
        self._round = RoundBuffers()
        self._reducing: RunningReduce | None = None
        self._plan: Plan  # the latest one
        self.on_sealed: Callable[[int, U8], None] | None = None  # called with sealed chunks before the commit

    # What it brings

    def encode(self, ready: Work) -> EncodedVector:
        """The round's delta; from now on, if it was not begun."""
        key = (ready.round, ready.front)
        if self._round.encoded is None or self._round.encoded_for != key:
            vectors, within = self._outer.vectors, self._within(ready.round)
            anchor, local, chunks = vectors.anchor[within], vectors.local[within], self._chunks(ready.round)
            offer = None if self._residual is None else _behind(within.start, self._residual.offer)
            buffers, keep = self._plane.peers.buffers, self._residual is not None
            signed = self._signer is not None
            encoder = DeltaEncoder(anchor, local, self._codec, chunks, buffers, offer, keep, signed)
            up, down = self._plane.bytes_up, self._plane.bytes_down
            self._new_round(RoundBuffers(encoder.encoded, key, up=up, down=down))
            self._round.encoding = self._spawn(self._encode(encoder, within.start, ready))
        assert self._round.encoded is not None
        return self._round.encoded

    async def norm(self, ready: Work) -> float | None:
        """The l2 norm of what the encoded delta says, once it is there; None: it is of no more use."""
        encoded, encoding = self._round.encoded, self._round.encoding
        if encoded is None or encoding is None or self._round.encoded_for != (ready.round, ready.front):
            return None
        await asyncio.wait([encoding])
        if encoding.cancelled() or encoding.exception() is not None or self._round.encoded is not encoded:
            return None
        buffers = self._round
        async with buffers.norming:
            if buffers.norm is None:  # nobody was told it: no chunk of it was let go of
                chunks, payloads = self._chunks(ready.round), encoded.whole
                buffers.norm = await self._compute(lambda: encoded_norm(self._codec, chunks, payloads))
        return buffers.norm if self._round is buffers else None

    def forget(self) -> None:
        """Drop what was encoded: the local vector is about to change, or the anchor is."""
        self._new_round(RoundBuffers())

    @property
    def members(self) -> int:
        """The number of members under the latest plan that are not gone."""
        return sum(not m.gone for m in self._plan.members)

    @property
    def bytes_up(self) -> int:
        """Bytes that the data plane sent since the round's delta began to be encoded."""
        return self._plane.bytes_up - self._round.up

    @property
    def bytes_down(self) -> int:
        """Bytes that the data plane received since the round's delta began to be encoded."""
        return self._plane.bytes_down - self._round.down

    def _within(self, round_: int) -> slice:
        """Where the round's fragment lies in the flat vector, in elements."""
        return self._outer.chunks.fragment_slice(self._outer.fragment_schedule.fragment(round_))

    def _chunks(self, round_: int) -> Chunks:
        """The chunks of the round's fragment."""
        return self._outer.chunks.fragment_chunks(self._outer.fragment_schedule.fragment(round_))

    async def _encode(self, encoder: DeltaEncoder, start: int, ready: Work) -> None:
        try:
            await encoder.run(self._compute)
        except NonFinite as error:
            encoder.encoded.end()  # who waits for a chunk of it waits in vain
            if self._round.encoded is encoder.encoded:
                self._round = RoundBuffers()
            self._on_unusable(ready, f"training diverged: {error} in {self._parameter(start + error.element)}")

    def _new_round(self, buffers: RoundBuffers) -> None:
        """The worker is at most in the middle of a few chunks of what was encoded, and does whatever else it is
        told to, as to move the anchor, after that."""
        if self._round.encoding is not None:
            self._round.encoding.cancel()
        if self._round.encoded is not None:
            self._round.encoded.end()
        self._round = buffers

    def _parameter(self, element: int) -> str:
        """The name of the parameter that this element of the flat vector belongs to."""
        for name, shape in self._layout:
            element -= math.prod(shape)
            if element < 0:
                return name
        return "no parameter"

    # The reduce

    @property
    def reduction(self) -> Reduction | None:
        return self._reducing.reduction if self._reducing is not None else None

    def begin(self, plan: Plan, me: NodeId, ready: Work) -> None:
        """Take part in the reduce of the plan's round, or go on under the plan if that reduce is under way."""
        self._plan = plan
        if self._reducing is not None and self._reducing.round == plan.round:
            self._follow(plan)
            return
        self.stop()
        reducing = self._reducing = RunningReduce(plan.round)
        reducing.task = self._spawn(self._reduce(reducing, me, ready))

    def stop(self) -> None:
        """End this node's part in the reduce under way, if there is one."""
        if self._reducing is not None and self._reducing.task is not None:
            self._reducing.task.cancel()
        self._reducing = None

    def verify_seals(self, round_: int, ledger: bytes) -> None:
        """Hold the round's sealed chunks to the ledger's digests, one after the other in `ledger`: members were
        found to hold others."""
        if (reduction := self.reduction) is not None and reduction.round == round_:
            reduction.prove([ledger[i : i + DIGEST_SIZE] for i in range(0, len(ledger), DIGEST_SIZE)])

    def sealed(self, root: bytes) -> SealedVector | None:
        """The sealed chunks, if all are here and are `root`'s."""
        reduction = self.reduction
        return reduction.result if reduction is not None and reduction.holds(root) else None

    def _follow(self, plan: Plan) -> None:
        """Go on under a newer plan, once the reduce has begun."""
        if (reduction := self.reduction) is not None:
            try:
                reduction.replan(plan)
            except InvalidPlan as error:
                log.warning(str(error))  # the coordinator's clock decides

    async def _reduce(self, reducing: RunningReduce, me: NodeId, ready: Work) -> None:
        """This node's part in the reduce of a round, until it is committed or the node is out of it."""
        encoded, peers, chunks = self.encode(ready), self._plane.peers, self._chunks(reducing.round)
        try:
            sealing = self._sealings[self._outer.fragment_schedule.fragment(reducing.round)]
            terms = self._codec, chunks, self._plan, self._listener, sealing
            more = self.on_sealed, self._signer, self._samples(reducing.round)
            reducing.reduction = Reduction(peers, me, encoded, *terms, *more)
            await reducing.reduction.run()
        except AtollError as error:
            log.warning(f"round {reducing.round}: {error}")  # nobody to blame: the coordinator's clock decides

    def _samples(self, round_: int) -> Callable[[int], DeltaSample | None] | None:
        """The samples of what earlier rounds sealed, by chunk of the round's fragment."""
        samples, outer = self._outer.samples, self._outer
        if samples is None:
            return None
        first = outer.chunks.fragment_range(outer.fragment_schedule.fragment(round_)).start
        return lambda c: samples.get(first + c)

    def auditor(self, plan: Plan, me: NodeId) -> Auditor:
        """Who recomputes sealed chunks of the plan's round here."""
        sealing = self._sealings[self._outer.fragment_schedule.fragment(plan.round)]
        return Auditor(self._plane, me, self._codec, self._chunks(plan.round), sealing)

    # What the wire left out

    def residual_update(self, view: pb.View) -> Callable[[], None] | None:
        """Make the function that brings the residual of error feedback up to date, for the worker to call before
        the anchor moves or training starts anew; None: the view tells of no newer round that has this node's
        bytes, or there is no error feedback."""
        residual, buffers = self._residual, self._round
        if residual is None or view.counted <= residual.round:
            return None
        counted, lacking = view.counted, view.lacking
        encoded = buffers.encoded if buffers.encoded_for[0] == counted == view.committed else None

        def work() -> None:
            if encoded is not None:
                residual.commit(counted, encoded.chunks, lacking)
            else:
                residual.reset_to(counted)
            residual.save()

        return work


def _behind(start: int, offer: Callable[[slice, F32], None]) -> Callable[[slice, F32], None]:
    """The same for a part of the vector that begins at `start`."""
    return lambda span, delta: offer(slice(start + span.start, start + span.stop), delta)
