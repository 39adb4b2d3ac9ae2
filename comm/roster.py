"""The roster: the members of a run, with what others go by to reach each and to know it.

A node is told it once, and then what changed; what goes by it names it by a digest. Both ends take the digest of
what they have themselves, so who has it knows that it is whole, and the same as the other's. `coordinator/service`
tells it, `node/control` pieces it together, plans name what they go by (`proto/packed_plan.py`).
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import msgspec

from atoll.comm.digest import digest
from atoll.comm.ids import NO_KEY, NO_PIN, NodeId, Pin, PublicKey


class RosterMember(NamedTuple):
    """What the others must know of a member, for as long as it does not join again."""

    key: PublicKey = NO_KEY  # what it signs is verified with; its connections are accepted by it
    address: str = ""  # "host:port" of its data plane
    pin: Pin = NO_PIN  # of the certificate that it shows; empty: the run is not encrypted
    leaf: bool = False  # nobody can dial it


Members = Mapping[NodeId, RosterMember]


def digest_of(members: Iterable[tuple[NodeId, RosterMember]]) -> bytes:
    """The 16 bytes that stand for these members, in this order."""
    return digest(msgspec.msgpack.encode(list(members)))


def roster_digest(members: Members, data_key: bytes, number: int) -> bytes:
    """The 16 bytes that stand for a whole roster with the run's key, before which `number` were expelled; in which
    order the members came makes no difference."""
    return digest_of(sorted(members.items()) + [(NodeId(str(number)), RosterMember(PublicKey(data_key)))])
