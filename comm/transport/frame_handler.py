"""What the links to the peers ask of the reduce that is under way."""

from typing import Protocol

from atoll.comm.byte_view import U8
from atoll.comm.ids import NodeId, Round
from atoll.comm.transport.frames import Header
from atoll.comm.transport.send_queue import QueuedFrame


class FrameHandler(Protocol):
    """A reduce, as the links know it: it says what the frames mean."""

    round: Round

    async def place(self, node: NodeId, header: Header) -> U8 | None:
        """Where the payload of a frame of `node` belongs; None: it is of no use. Waits while that cannot be told
        yet. `LinkBroken` if the frame is not what such a peer may send."""

    def arrived(self, node: NodeId, header: Header, payload: U8) -> None:
        """A whole frame of `node` is here."""

    async def frame(self, node: NodeId, queued: QueuedFrame) -> tuple[Header, memoryview] | None:
        """What `node` is to be sent of what was posted; None: nothing any more."""

    def joined(self, node: NodeId) -> None:
        """A link to `node` broke and there is another: what was on it may be lost."""

    def lost(self, node: NodeId, sentence: str) -> None:
        """There is no link to `node`, and dialling failed; it is tried again."""
