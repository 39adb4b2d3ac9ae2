"""The replay of a contributor's round by a verifier: what the contributor sent is fetched while the round is
reduced, the same samples are trained from the same anchor, and the two deltas are compared.

The coordinator keeps the verifier's view at the state that the round began with, so that training is ordered as
for any member (`atoll.coordinator.state_machine.replay`); what is here follows that view. Deltas of other
contributors are fetched, too: how alike deltas are anyway only they can tell.
"""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any

import numpy as np

from atoll.comm.allreduce.auditor import Auditor, AuditOrder
from atoll.comm.byte_view import U8
from atoll.comm.codecs.codec import F32, Codec
from atoll.comm.errors import AtollError
from atoll.comm.ids import NodeId
from atoll.comm.plan import Plan
from atoll.comm.proto import atoll_pb2 as pb
from atoll.node.control.reports import ReplayFinding, Reports, plan_of
from atoll.node.outer.state import OuterState
from atoll.node.state_machine.state import At, Idle, State

log = logging.getLogger("atoll.node")
Shown = Mapping[int, Mapping[int, U8]]  # by chunk and place: encoded contributions


class Replays:
    """One verifier's replays, one at a time."""

    def __init__(
        self,
        reports: Reports,
        outer: OuterState,
        codec: Codec,
        compute: Callable[[Callable[[], Any]], Awaitable[Any]],
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
        auditor: Callable[[Plan], Auditor],
    ) -> None:
        """`compute` calls a function in the thread that does the state's arithmetic; `spawn` starts a task;
        `auditor` makes who fetches contributions of the plan's round."""
        self._reports, self._outer, self._codec = reports, outer, codec
        self._compute, self._spawn, self._auditor = compute, spawn, auditor
        self._key: tuple[int, str] | None = None  # round and contributor
        self._fetching: asyncio.Task[None] | None = None
        self._comparing: asyncio.Task[None] | None = None
        self._shown: Shown | None = None

    def follow(self, state: State) -> None:
        """Do what the node's view asks for, as far as it can be done now."""
        view = state.view
        order = view.replay if view is not None and view.HasField("replay") else None
        key = None if order is None else (order.round, order.node_id)
        if key != self._key:
            self.stop()
            self._key = key
        if view is None or order is None:
            return
        if order.chunks and self._fetching is None:
            self._fetching = self._spawn(self._fetch(order))
        trained = state.ready is not None and isinstance(state.trainer, Idle) and isinstance(state.outer, At)
        there = trained and state.ready is not None and state.ready.round == order.round == state.round + 1
        samples = sum(r.count for r in view.train.lease)
        whole = there and state.ready is not None and state.ready.claimed == samples
        if whole and self._shown is not None and self._comparing is None:
            self._comparing = self._spawn(self._compare(order, self._shown))

    def stop(self) -> None:
        """End the replay at hand: nobody asks for it any more."""
        for task in (self._fetching, self._comparing):
            if task is not None:
                task.cancel()
        self._key = self._fetching = self._comparing = self._shown = None

    async def _fetch(self, order: pb.Replay) -> None:
        node, round_ = NodeId(order.node_id), order.round
        try:
            plan = plan_of(order.plan)
            plan.validate()
            auditor = self._auditor(plan)
            asked = [AuditOrder(c.chunk, c.since, tuple(order.places), order.seconds) for c in order.chunks]
            found = await asyncio.gather(*(auditor.contributions(one, plan) for one in asked))
        except AtollError as error:
            log.warning(f"round {round_}, replay of {node}: {error}")
            return
        by_chunk = {one.chunk: inputs for one, inputs in zip(asked, found, strict=True) if inputs}
        if not by_chunk:  # no owner gave a receipt: that is not the contributor's fault
            log.warning(f"round {round_}, replay of {node}: nobody shows what was contributed")
            return
        shown = all(order.places[0] in inputs for inputs in by_chunk.values())
        if shown:
            self._shown = by_chunk
        self._reports.replay_shown(round_, node, shown)

    async def _compare(self, order: pb.Replay, shown: Shown) -> None:
        try:
            found = await self._compute(lambda: self._likenesses(list(order.places), shown))
        except AtollError as error:  # what was signed and shown cannot be decoded: no owner merged it
            log.warning(f"round {order.round}, replay of {order.node_id}: {error}")
            return
        log.info(f"round {order.round}: replayed {order.node_id}, cosine {found[0][0]:.3f}")
        self._reports.replayed(order.round, NodeId(order.node_id), found)

    def _likenesses(self, places: list[int], shown: Shown) -> ReplayFinding:
        """The likeness to the contributor's delta of this node's, then of the others' that are whole here."""
        vectors, chunks = self._outer.vectors, self._outer.chunks
        whole = [p for p in places[1:] if all(p in inputs for inputs in shown.values())]
        products, squares = np.zeros(1 + len(whole)), np.zeros(1 + len(whole))
        square = 0.0
        for chunk, inputs in shown.items():
            span = chunks.span(chunk)
            work = self._decoded(inputs[places[0]], chunks.size(chunk))
            square += _dot(work, work)
            replayed = vectors.anchor[span] - vectors.local[span]
            for i in range(1 + len(whole)):
                other = replayed if i == 0 else self._decoded(inputs[whole[i - 1]], work.size)
                products[i] += _dot(work, other)
                squares[i] += _dot(other, other)
        return [likeness(p, square, q) for p, q in zip(products.tolist(), squares.tolist(), strict=True)]

    def _decoded(self, payload: U8, numel: int) -> F32:
        out = np.empty(numel, np.float32)
        self._codec.decode(payload, out)
        return out


def likeness(product: float, square: float, other: float) -> tuple[float, float]:
    """The cosine of two vectors and the ratio of the second's l2 norm to the first's, from their inner product and
    their squared norms; of a vector of zeros the cosine is 0, and to it the ratio is 1e30."""
    lengths = math.sqrt(square) * math.sqrt(other)
    cosine = min(max(product / lengths, -1.0), 1.0) if lengths > 0 else 0.0
    return cosine, min(math.sqrt(other) / math.sqrt(square), 1e30) if square > 0 else 1e30


def _dot(a: F32, b: F32) -> float:
    return float(np.dot(a.astype(np.float64), b.astype(np.float64)))
