"""What auditors ask of each other over the links of the reduce that is under way.

    auditor   GET_INPUT, GET_RECEIPT -->  contributor, owner, relay
              <--     INPUT, RECEIPT      without a payload: it is not here, or this member had its share

These links are there already, and as fast as the path: a commit does not wait for a connection's beginning. What
is asked goes before what the reduce sends, so each member gets only so much of it in a round; the rest is fetched
over a connection of its own, as by those that have no link.
"""

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from atoll.comm.byte_view import U8
from atoll.comm.ids import NodeId
from atoll.comm.transport.frames import FrameKind, QueuedFrame

MAX_ANSWERS = 32  # to one member in a round, over its links
ANSWERS = {FrameKind.GET_INPUT: FrameKind.INPUT, FrameKind.GET_RECEIPT: FrameKind.RECEIPT}
REQUESTS = {answer: request for request, answer in ANSWERS.items()}

Key = tuple[NodeId, FrameKind, int]  # who is asked, for what kind of answer, of which chunk


@dataclass
class _Request:
    size: int  # bytes of the answer
    exact: bool  # False: at most so many
    answer: asyncio.Future[U8 | None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class EvidenceRequests:
    """One member's requests, and the count of what it answered."""

    def __init__(self, post: Callable[[NodeId, QueuedFrame], None]) -> None:
        """`post` queues a frame for a member."""
        self._post, self._answered = post, Counter[NodeId]()
        self._asked: dict[Key, _Request] = {}

    async def ask(self, node: NodeId, request: FrameKind, c: int, size: int, exact: bool) -> U8 | None:
        """What `node` has of chunk `c`; None: it is not there, or is being asked for already."""
        key = node, ANSWERS[request], c
        if key in self._asked:
            return None
        asked = self._asked[key] = _Request(size, exact)
        self._post(node, (request, c, 0))
        try:
            return await asked.answer
        finally:
            del self._asked[key]

    def ask_again(self, node: NodeId) -> None:
        """Repeat what is not answered yet: it may be lost with a link."""
        for other, kind, c in self._asked:
            if other == node:
                self._post(node, (REQUESTS[kind], c, 0))

    def buffer_for(self, node: NodeId, kind: FrameKind, c: int, length: int) -> U8 | None:
        """Memory for an answer; None: nobody asked for it, or not for so much."""
        asked = self._asked.get((node, kind, c))
        if asked is None or not (length == asked.size or length == 0 or (length < asked.size and not asked.exact)):
            return None
        return np.empty(length, np.uint8)

    def arrived(self, node: NodeId, kind: FrameKind, c: int, payload: U8) -> None:
        """Take an answer in."""
        asked = self._asked.get((node, kind, c))
        if asked is not None and not asked.answer.done():
            asked.answer.set_result(payload if payload.size else None)

    def asked_by(self, node: NodeId, request: FrameKind, c: int) -> None:
        """Queue the answer to what `node` asks for."""
        self._post(node, (ANSWERS[request], c, 0))

    def may_answer(self, node: NodeId) -> bool:
        """Whether `node` may have one more of them over its links; counts it."""
        self._answered[node] += 1
        return self._answered[node] <= MAX_ANSWERS

    def end(self) -> None:
        """The reduce is over: nobody answers any more."""
        for asked in self._asked.values():
            if not asked.answer.done():
                asked.answer.set_result(None)
