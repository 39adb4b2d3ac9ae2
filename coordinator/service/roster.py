"""The part of a view that says whose connections a member accepts and how each is reached: the members that are
here, and the run's key. Pure.

A stream of views brings what changed since the roster that its node said it has, if that is the one at hand, or
all of it; then what changed since the roster that it brought before. With a thousand members it is a hundred
kilobytes long. `view` and `view_dispatch` call.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

from atoll.comm.ids import NodeId
from atoll.comm.proto import atoll_pb2 as pb
from atoll.comm.roster import RosterMember, roster_digest
from atoll.coordinator.state_machine.state import State


def no_key(number: int) -> bytes:
    """The key of a run that has none: members told so accept nobody."""
    return b""


@dataclass(frozen=True)
class Roster:
    """The members whose connections a member accepts, and the run's key."""

    members: dict[NodeId, RosterMember]
    number: int  # of the run's key: how many were expelled before it
    data_key: bytes
    encoded: dict[bytes, bytes] = field(default_factory=dict, compare=False, repr=False)  # by the digest before

    @cached_property
    def digest(self) -> bytes:
        """The 16 bytes that stand for all of it."""
        return roster_digest(self.members, self.data_key, self.number)

    def encode(self, known: "Roster | None") -> bytes:
        """The bytes of a `pb.View` that has nothing but this roster, for a node that has `known`; None: none."""
        since = known.digest if known is not None else b""
        if since not in self.encoded:
            self.encoded[since] = pb.View(roster=self._message(known)).SerializeToString()
        return self.encoded[since]

    def _message(self, known: "Roster | None") -> pb.Roster:
        message = pb.Roster(digest=self.digest)
        if known is not None and known.digest == self.digest:
            return message
        before = known.members if known is not None else {}
        message.since = known.digest if known is not None else b""
        message.data_key, message.data_key_number = self.data_key, self.number
        for node, member in self.members.items():
            if before.get(node) != member:
                key, address, pin, leaf = member
                message.members.add(node_id=node, key=key, address=address, pin=pin, leaf=leaf)
        message.gone.extend(before.keys() - self.members.keys())
        return message


def roster_of(state: State, before: Roster | None, data_key: Callable[[int], bytes] = no_key) -> Roster:
    """The roster of this state, the same object as `before` where nothing of it changed. `data_key`: the run's key
    by how many were expelled."""
    members = {node: RosterMember(m.key, m.address, m.pin, m.leaf) for node, m in state.members.here.items()}
    new = Roster(members, state.expulsions, data_key(state.expulsions))
    return before if before is not None and before == new else new
