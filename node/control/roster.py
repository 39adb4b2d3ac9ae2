"""The members of the run, with their keys and addresses, as views say them bit by bit. Pure.

A stream brings what changed since the roster that is here, by whose digest it was opened, or all of it; then what
changed since. Each time the digest says whether what is here now is what the coordinator means. If it is not, as
when a message between was lost, the stream is to be opened again. `ControlClient` reads each view into it.
"""

from atoll.comm.ids import NodeId, Pin, PublicKey
from atoll.comm.proto import atoll_pb2 as pb
from atoll.comm.roster import RosterMember, roster_digest


class Roster:
    """The members whose connections this node accepts, and the run's key. What it has stays in force until a view
    brings another roster, also where the stream breaks."""

    def __init__(self) -> None:
        self.members: dict[NodeId, RosterMember] = {}
        self.data_key, self.number = b"", 0  # and how many were expelled before it
        self.digest = b""  # of all that; empty: none came yet
        self._view = 0  # version of the newest view in this stream; 0: none came yet

    @property
    def keys(self) -> dict[NodeId, PublicKey]:
        """The members' keys."""
        return {node: member.key for node, member in self.members.items()}

    def open_stream(self) -> bytes:
        """Expect the views of a stream that is opened now; returns the digest to open it by."""
        self._view = 0
        return self.digest

    def is_late(self, view: pb.View) -> bool:
        """Whether a newer view of the stream came before it."""
        return view.version < self._view

    def distrust(self) -> None:
        """Have the next stream bring all of the roster: what goes by it does not agree with what is here."""
        self.digest = b""

    def read(self, view: pb.View) -> bool | None:
        """Take in the roster of a view. Returns whether anything changed; None: it does not follow on what is
        here, and the stream is to be opened again. A view that is older than one before says nothing."""
        if not view.HasField("roster") or self.is_late(view):
            return False
        new = view.roster
        if new.digest != self.digest and (not new.data_key or new.since not in (b"", self.digest)):
            return None
        if new.digest == self.digest:
            self._view = view.version
            return False
        gone = set(new.gone)
        members = {} if not new.since else {n: m for n, m in self.members.items() if n not in gone}
        for m in new.members:
            members[NodeId(m.node_id)] = RosterMember(PublicKey(m.key), m.address, Pin(m.pin), m.leaf)
        if roster_digest(members, new.data_key, new.data_key_number) != new.digest:
            self.distrust()
            return None
        self.members, self.digest, self._view = members, new.digest, view.version
        self.data_key, self.number = new.data_key, new.data_key_number
        return True
