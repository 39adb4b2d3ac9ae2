"""The places at a port for connections that have proved nothing yet, fairly shared between addresses. Pure.

    admit --> a place and one of the address's tokens; whoever loses its place to the newcomer is closed
    prove --> no stranger any more: the place is free, the address has its token back
    leave --> the place is free, the token is gone: an address that comes in vain comes seldom

Whatever one address does, another one's handshake loses its place only when more addresses than there are places
come at once. Asked by the data plane and by the coordinator's door; an IPv6 address stands for its /64.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from functools import lru_cache
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Generic, TypeVar

from atoll.comm.rate_limits import RateLimit, TokenBuckets

PREFIX_BITS = 64  # of an IPv6 address: what one customer has at least
C = TypeVar("C", bound=Hashable)


@dataclass(frozen=True, slots=True)
class StrangerLimits:
    """The limits on the strangers at one port."""

    places: int  # strangers at a time
    per_address: int  # of these
    rate: RateLimit  # connections of one address that prove nothing


@dataclass(frozen=True, slots=True)
class Admission(Generic[C]):
    """The answer to a new connection: whether it has a place, and who lost one to it."""

    admitted: bool
    displaced: C | None = None


class Strangers(Generic[C]):
    """The connections at one port that have proved nothing yet."""

    def __init__(self, limits: StrangerLimits) -> None:
        self._limits, self._tokens = limits, TokenBuckets(limits.rate)
        self._address: dict[C, str] = {}  # the oldest first
        self._of: dict[str, dict[C, None]] = {}  # each address's, the oldest first

    def __len__(self) -> int:
        return len(self._address)

    def __contains__(self, connection: C) -> bool:
        return connection in self._address

    def count(self, address: str) -> int:
        """The number of strangers from `address`."""
        return len(self._of.get(address, ()))

    def of(self, address: str) -> tuple[C, ...]:
        """The strangers from `address`, the oldest first."""
        return tuple(self._of.get(address, ()))

    def exhausted(self, address: str, now: float) -> bool:
        """Whether the address has no token left at `now` (seconds), so that a connection would not be admitted."""
        return self._tokens.empty(address, now)

    def admit(self, connection: C, address: str, now: float, charge: bool = True) -> Admission[C]:
        """Give a connection from `address` (see `network_of`) a place at `now` (seconds), and take one of the
        address's tokens if `charge`. Not admitted: the address has no token left."""
        if charge and not self._tokens.take(address, now):
            return Admission(False)
        self._address[connection] = address
        mine = self._of.setdefault(address, {})
        mine[connection] = None
        crowd = mine if len(mine) > self._limits.per_address else None
        if crowd is None and len(self._address) > self._limits.places:
            crowd = max(self._of.values(), key=len)
            if len(crowd) == 1:  # all have one: the oldest of all
                crowd = dict.fromkeys(self._address)
        if crowd is None:
            return Admission(True)
        oldest = next(iter(crowd))
        self.leave(oldest)
        return Admission(True, oldest)

    def prove(self, connection: C, now: float) -> None:
        """Take a connection out: it has proved whose it is."""
        if (address := self.leave(connection)) is not None:
            self._tokens.refund(address, now)

    def leave(self, connection: C) -> str | None:
        """Take a connection out that ended, or is closed; returns its address, None: it has no place here."""
        if (address := self._address.pop(connection, None)) is None:
            return None
        mine = self._of[address]
        del mine[connection]
        if not mine:
            del self._of[address]
        return address


@lru_cache(1 << 12)
def network_of(host: str, bits: int = 32) -> str:
    """The address whose connections are counted together: the first `bits` of an IPv4 address, or the /64 of an
    IPv6 one; anything else stands for itself."""
    try:
        found = ip_address(host.partition("%")[0])
    except ValueError:
        return host
    found = (found.ipv4_mapped or found) if isinstance(found, IPv6Address) else found
    if isinstance(found, IPv4Address):
        return str(IPv4Address(int(found) >> 32 - bits << 32 - bits))
    return str(IPv6Address(int(found) >> PREFIX_BITS << PREFIX_BITS))
