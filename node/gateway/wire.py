"""What a node's daemon and the gateway beside it say to each other: JSON, a line each, over a socket of their own.

The daemon asks, the gateway answers each question with its number, and says by itself (number 0) how much it has
relayed. When the wire ends, the gateway does.
"""

import msgspec

MAX_LINE_BYTES = 1 << 16


class ServeData(msgspec.Struct, frozen=True, tag=True):
    """Let others reach the node's data plane. Answered with the host under which they do."""

    address: str  # host:port of this machine


class ReachCoordinator(msgspec.Struct, frozen=True, tag=True):
    """Lead what comes in at the entrance, the socket that the gateway was started with, to a run's coordinator.
    Answered when that was found."""

    run: str
    pin: str


class ReachPeer(msgspec.Struct, frozen=True, tag=True):
    """Open a port that leads to the data plane behind a host of a peer's."""

    host: str


class UseGateways(msgspec.Struct, frozen=True, tag=True):
    """Be reached, and reach others, through the gateways at these multiaddrs, too, now and after the next
    start."""

    multiaddrs: tuple[str, ...]


class AwaitPlace(msgspec.Struct, frozen=True, tag=True):
    """Answered when others can reach this gateway: through a relay, or, if that is enough, because it listens."""

    by_relay: bool = False


class RelayWithin(msgspec.Struct, frozen=True, tag=True):
    """Pass on so much for others from now on."""

    streams: int  # at once; 0: nothing
    rate: float  # bytes a second; 0: no limit


class Question(msgspec.Struct, frozen=True):
    """A question with its number, from 1 on."""

    number: int
    ask: ServeData | ReachCoordinator | ReachPeer | UseGateways | AwaitPlace | RelayWithin


class Reply(msgspec.Struct, frozen=True):
    """The answer to the question of this number; 0: to none."""

    number: int
    value: str = ""
    found: str = ""  # of a coordinator: the address in its record
    error: str = ""  # why there is no value
    relayed: int = 0  # bytes passed on for others since the process began
