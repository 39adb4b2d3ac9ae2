"""The limits of the coordinator's two public ports, as their door enforces them.

The figures that nodes must fit: a join with TLS is about 4 KiB upstream (with a post-quantum key share) and three
round trips, its proof the first call that shows a token or a session. A page's reader proves nothing, ever.
"""

from dataclasses import dataclass

from atoll.comm.log import LogSetup
from atoll.comm.rate_limits import RateLimit
from atoll.comm.strangers import StrangerLimits


@dataclass(frozen=True, slots=True)
class PortLimits:
    """The limits at one port. Bytes are those that come in."""

    strangers: StrangerLimits  # of addresses that nobody has proved anything from
    regulars: StrangerLimits  # of addresses from which a member came before
    newcomers: RateLimit  # connections of all addresses
    deadline: float  # seconds until a connection must have proved whose it is
    connection_bytes: int  # until then; who sends more is closed
    address_bytes: RateLimit  # of the strangers of one address; more is read later
    stranger_bytes: RateLimit  # of all strangers together
    tells_origin: bool = True  # whoever listens behind the door is told where a connection comes from
    invitees: StrangerLimits = StrangerLimits(1024, 1024, RateLimit(1024, 1024))  # shown a token, have no id yet
    invitee_deadline: float = 60.0  # seconds
    member_connections: int = 4  # of one member; the oldest is closed
    member_bytes: RateLimit = RateLimit(4 << 20, 32 << 20)  # of one member; more is read later


CONTROL = PortLimits(
    strangers=StrangerLimits(64, 32, RateLimit(5, 64)),
    regulars=StrangerLimits(256, 64, RateLimit(20, 256)),
    newcomers=RateLimit(1000, 2000),
    deadline=10.0,
    connection_bytes=16 << 10,
    address_bytes=RateLimit(8 << 10, 24 << 10),
    stranger_bytes=RateLimit(64 << 10, 256 << 10),
)
PAGE = PortLimits(
    strangers=StrangerLimits(64, 32, RateLimit(100, 400)),
    regulars=StrangerLimits(64, 32, RateLimit(100, 400)),
    newcomers=RateLimit(60, 500),
    deadline=60.0,
    connection_bytes=64 << 10,
    address_bytes=RateLimit(16 << 10, 128 << 10),
    stranger_bytes=RateLimit(32 << 10, 256 << 10),
    tells_origin=False,
)


@dataclass(frozen=True, slots=True)
class PortSpec:
    """One port for the door's process: inherited, and bound already."""

    descriptor: int  # of the listening socket
    path: str  # of the Unix socket where the service listens
    limits: PortLimits


@dataclass(frozen=True, slots=True)
class DoorSpec:
    """The order for the door's process, its one argument (JSON)."""

    generation: int  # of the process: the first part of its connections' numbers
    folder: str  # for the names of connections to the service
    wire: int  # descriptor of the wire to the service
    ports: tuple[PortSpec, ...]
    log: LogSetup
