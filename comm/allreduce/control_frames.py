"""The frames of a reduce that bring no chunk: what a member makes of each, and what it answers. Pure.

    MERGED, WANT, LACK    about one chunk
    RESYNC                what is here, as three bitmaps (`ReduceProtocol.resync_state`), for one `Resync` purpose

Of what is on its way, only what was lost with a link is sent again: a RESYNC that merely asks whether the other
side is there changes nothing. `Reduction` and the simulation call this.
"""

from enum import IntEnum

from atoll.comm.allreduce.effects import Effect, SendFrame
from atoll.comm.allreduce.protocol import ReduceProtocol
from atoll.comm.ids import NodeId
from atoll.comm.transport.frames import FrameKind

CONTROL_KINDS = frozenset({FrameKind.MERGED, FrameKind.WANT, FrameKind.LACK, FrameKind.RESYNC})


class Resync(IntEnum):
    """Purposes of a RESYNC frame; one stands in the place of its chunk."""

    TELL = 0  # after a break: send again what is missing here
    TELL_AND_ASK = 1  # the same, and tell what is missing there
    PING = 2  # only to be answered
    PONG = 3  # the answer


ANSWERS: dict[int, Resync] = {Resync.TELL_AND_ASK: Resync.TELL, Resync.PING: Resync.PONG}


def ask_state(node: NodeId) -> SendFrame:
    """Tell `node`, to which a link broke, what is here, and ask what it has."""
    return SendFrame(node, FrameKind.RESYNC, Resync.TELL_AND_ASK)


def ping(node: NodeId) -> SendFrame:
    """Ask `node` whether it is there."""
    return SendFrame(node, FrameKind.RESYNC, Resync.PING)


def receive(
    exchange: ReduceProtocol, node: NodeId, kind: FrameKind, c: int, attempt: int, payload: bytes
) -> list[Effect]:
    """Take in a frame of `node`, of one of `CONTROL_KINDS`: about chunk `c`, its verdict being TAKE, or a RESYNC
    made under `attempt`, with `c` for its purpose. `payload`: a RESYNC's bitmaps, one after the other."""
    match kind:
        case FrameKind.MERGED:
            return exchange.peer_merged(node, c)
        case FrameKind.WANT:
            return exchange.chunk_wanted(node, c)
        case FrameKind.LACK:
            return exchange.chunk_lacked(node, c)
        case FrameKind.RESYNC:
            out: list[Effect] = []
            if c in (Resync.TELL, Resync.TELL_AND_ASK):
                size = len(payload) // 3
                here, merged, sealed = (payload[i * size : (i + 1) * size] for i in range(3))
                out += exchange.resync(node, attempt, here, merged, sealed)
            if (answer := ANSWERS.get(c)) is not None:
                out.append(SendFrame(node, FrameKind.RESYNC, answer))
            return out
        case _:
            raise ValueError(f"a frame {kind.name} brings a chunk, or is none of a reduce")
