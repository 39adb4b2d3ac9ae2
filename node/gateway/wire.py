"""What a node's daemon and the gateway beside it say to each other: JSON, a line each, over a socket of their own.

The daemon asks, the gateway answers each question with its number. When the wire ends, the gateway does.
"""

import msgspec

MAX_LINE_BYTES = 1 << 16


class ServeData(msgspec.Struct, frozen=True, tag=True):
    """Let others reach the node's data plane. Answered with the host under which they do."""

    address: str  # host:port of this machine


class ReachCoordinator(msgspec.Struct, frozen=True, tag=True):
    """Open a port that leads to a run's coordinator. Answered when it was found."""

    run: str
    pin: str
    port: int = 0  # to have; 0: any


class ReachPeer(msgspec.Struct, frozen=True, tag=True):
    """Open a port that leads to the data plane behind a host of a peer's."""

    host: str


class Question(msgspec.Struct, frozen=True):
    """A question with its number."""

    number: int
    ask: ServeData | ReachCoordinator | ReachPeer


class Reply(msgspec.Struct, frozen=True):
    """The answer to the question of this number."""

    number: int
    value: str = ""
    found: str = ""  # of a coordinator: the address in its record
    error: str = ""  # why there is no value
