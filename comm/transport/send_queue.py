"""The queue of what waits to be sent to one peer, for whichever of its links is free next.

    urgent           what others wait for, or what frees memory: MERGED, WANT, LACK, RESYNC, PARTIAL, and what
                     audits ask and answer
    contributions    others wait for their merge
    sealed chunks

Each goes in the order in which it was posted, and as long as there is anything of the one before, nothing of the
next. Over a long path a payload is cut into pieces, which all links to the peer carry at once.
"""

import asyncio
from collections import deque
from dataclasses import replace

from atoll.comm.transport.frames import FrameKind, Header, QueuedFrame

DIVISIBLE_KINDS = (  # payloads that may be cut
    *(FrameKind.CONTRIBUTION, FrameKind.PARTIAL, FrameKind.SEALED),
    FrameKind.INPUT,
)


class OutgoingFrame:
    """A frame on its way over several links."""

    def __init__(self, queued: QueuedFrame, header: Header, payload: memoryview) -> None:
        self.queued, self.header, self.payload = queued, header, payload
        self.offset = 0  # bytes; what lies behind no link has taken yet
        self.taken = False

    def piece(self, size: int) -> tuple[Header, memoryview]:
        """Cut off the next piece and make its header: `size` bytes, the last piece fewer; all of the payload if
        `size` is 0, or a frame of this kind may not be cut."""
        if not size or self.header.kind not in DIVISIBLE_KINDS:
            self.taken = True
            return self.header, self.payload
        part = self.payload[self.offset : self.offset + size]
        header = replace(self.header, length=len(part), offset=self.offset, whole=len(self.payload))
        self.offset += len(part)
        self.taken = self.offset >= len(self.payload)
        return header if len(part) < len(self.payload) else self.header, part


class SendQueue:
    """The frames for one peer. Each of its links has a task that takes `next`, and `share`s what it opened."""

    def __init__(self) -> None:
        self.piece_size = 0  # bytes that one link carries at once, of what several can; 0: whole payloads
        self._pieces = deque[OutgoingFrame]()  # of which several links take parts
        self._urgent: dict[QueuedFrame, None] = {}
        self._contributions: dict[QueuedFrame, None] = {}
        self._sealed: dict[QueuedFrame, None] = {}
        self._idle: deque[asyncio.Future[None]] = deque()
        self._opening = False  # a link is about to share what it took

    def post(self, queued: QueuedFrame) -> None:
        """Queue a frame, to be sent when its turn comes; once, however often it was posted before that."""
        self._queue_of(queued)[queued] = None
        self._wake()

    def put_back(self, queued: QueuedFrame) -> None:
        """Requeue a frame that a link took and could not send, before all others of its queue."""
        queue = self._queue_of(queued)
        later = [other for other in queue if other != queued]
        queue.clear()
        queue.update(dict.fromkeys([queued, *later]))
        self._wake()

    def clear(self) -> None:
        """Drop all that waits, as another round begins."""
        for queue in (self._urgent, self._contributions, self._sealed):
            queue.clear()
        self._pieces.clear()

    @property
    def empty(self) -> bool:
        """Whether nothing waits that no link has begun to send."""
        return not (self._urgent or self._contributions or self._sealed)

    def share(self, queued: QueuedFrame, outgoing: OutgoingFrame | None) -> None:
        """Let other links take pieces of what a link took with `next`, or what comes behind it. None: it is not to
        be sent any more."""
        if (
            outgoing is not None
            and self.piece_size
            and len(outgoing.payload) > self.piece_size
            and outgoing.header.kind in DIVISIBLE_KINDS
        ):
            if self._queue_of(queued) is self._urgent:
                self._pieces.appendleft(outgoing)
            else:
                self._pieces.append(outgoing)
        if self._queue_of(queued) is not self._urgent:
            self._opening = False
        self._wake()

    async def next(self) -> QueuedFrame | OutgoingFrame:
        """Wait for what a link that is free is to send: a frame that was posted, or one of which other links send
        pieces."""
        while True:
            while self._pieces and self._pieces[0].taken:
                self._pieces.popleft()
            if self._pieces and not self._urgent:
                self._wake()
                return self._pieces[0]
            # One payload after the other, over all links: who waits for the first one has it soonest.
            for queue in (self._urgent, self._contributions, self._sealed):
                if queue and (queue is self._urgent or not self._opening):
                    queued = next(iter(queue))
                    del queue[queued]
                    if queue is not self._urgent:
                        self._opening = self.piece_size > 0
                    return queued
            idle = asyncio.get_running_loop().create_future()
            self._idle.append(idle)
            try:
                await idle
            except asyncio.CancelledError:
                self._wake()  # it may have been this one's turn
                raise

    def _queue_of(self, queued: QueuedFrame) -> dict[QueuedFrame, None]:
        match queued[0]:
            case FrameKind.CONTRIBUTION:
                return self._contributions
            case FrameKind.SEALED:
                return self._sealed
            case _:
                return self._urgent

    def _wake(self) -> None:
        """Have one link look."""
        while self._idle:
            if not (idle := self._idle.popleft()).done():
                idle.set_result(None)
                return
