"""The members of the run, with their keys, as the views of one stream say them bit by bit. Pure.

A stream brings the whole list first, then what changed since. A list that does not follow on what is here, as when
a message between was lost, is of no use: the stream is then to be opened again, and brings the whole one.
`ControlClient` reads each view into it.
"""

from atoll.comm.ids import NodeId, PublicKey
from atoll.comm.proto import atoll_pb2 as pb


class Roster:
    """The members whose connections this node accepts, and the run's key. What it has stays in force until a view
    brings another list, also where the stream breaks."""

    def __init__(self) -> None:
        self.members: dict[NodeId, PublicKey] = {}
        self.data_key, self.number = b"", 0  # and how many were expelled before it
        self._version = self._view = 0  # of the list in this stream, and of the newest view; 0: none came yet

    def open_stream(self) -> None:
        """Expect the whole list, with the first view of a stream that is opened now."""
        self._version = self._view = 0

    def read(self, view: pb.View) -> bool | None:
        """Take in the list of a view. Returns whether anything changed; None: it does not follow on what is here,
        and the stream is to be opened again. A view that is older than one before says nothing."""
        if not view.HasField("admission") or view.version < self._view:
            return False
        new = view.admission
        if new.version != self._version and (not new.data_key or new.since not in (0, self._version)):
            return None
        self._view = view.version
        if new.version == self._version:
            return False
        members = {} if new.since == 0 else {n: k for n, k in self.members.items() if n not in set(new.gone)}
        self.members = members | {NodeId(m.node_id): PublicKey(m.key) for m in new.members}
        self.data_key, self.number, self._version = new.data_key, new.data_key_number, new.version
        return True
