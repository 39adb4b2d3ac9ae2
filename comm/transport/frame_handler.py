"""The interface of a reduce to the links: the reduce under way says what is sent to the peers, and what their
frames mean, if they are of its round."""

from enum import Enum
from typing import Protocol

from atoll.comm.byte_view import U8, Octets
from atoll.comm.ids import NodeId, Round
from atoll.comm.transport.frames import FrameKind, Header, QueuedFrame


class RoundOrder(Enum):
    """A frame's round against that of the reduce under way."""

    CURRENT = "current"  # it is for this reduce
    AHEAD = "ahead"  # its reduce is to begin here, or may begin anew: the frame is held
    OVER = "over"  # it is of no more use


def round_order(reducing: Round | None, round: Round) -> RoundOrder:
    """Decide on a frame of `round`, by the round that is being reduced here; None: none is."""
    if reducing is None or reducing < round:
        return RoundOrder.AHEAD
    return RoundOrder.CURRENT if reducing == round else RoundOrder.OVER


class FrameHandler(Protocol):
    """A reduce, as the links know it: it says what the frames mean."""

    round: Round

    async def buffer_for(self, node: NodeId, header: Header) -> U8 | None:
        """Memory of `header.length` bytes for the payload of a frame of `node`; None: it is of no use. Waits while
        that cannot be told yet. Raises `LinkBroken` if the frame is not what such a peer may send."""

    def arrived(self, node: NodeId, header: Header, payload: U8) -> None:
        """Take a whole frame of `node` in."""

    async def frame(self, node: NodeId, queued: QueuedFrame) -> tuple[Header, memoryview] | None:
        """The frame that was posted for `node`, header and payload; None: there is nothing to be sent of it any
        more."""

    async def evidence(self, node: NodeId, kind: FrameKind, c: int) -> Octets | None:
        """What `node`, which audits chunk `c`, asks for: GET_INPUT, GET_RECEIPT; None: it is not here. It must not
        change while it is sent."""

    async def ask(self, node: NodeId, kind: FrameKind, c: int, size: int, exact: bool) -> Octets | None:
        """Ask `node`, over its links, for what it has of chunk `c` for an auditor: GET_INPUT, GET_RECEIPT, of
        `size` bytes, or if not `exact` of so many at most. None: it is not there, or not to be had this way."""

    def joined(self, node: NodeId) -> None:
        """Hear that a link to `node` broke and there is another: what was on the broken one may be lost."""

    def spoiled(self, node: NodeId, sentence: str) -> None:
        """Hear that a link to `node` broke, for what came over it was not what `node` can have sent."""

    def lost(self, node: NodeId, sentence: str) -> None:
        """Hear that there is no link to `node`; it is tried again. `sentence` says why."""
