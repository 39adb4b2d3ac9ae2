"""The part of a view that says whose connections a member accepts: the members that are here, with their keys, and
the run's key. Pure.

A stream of views brings the whole list once, and then what changed since the list that it brought before: with a
thousand members it is 40 KB long. `view` and `view_dispatch` call.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from atoll.comm.ids import NodeId, PublicKey
from atoll.comm.proto import atoll_pb2 as pb
from atoll.coordinator.state_machine.state import State


def no_key(number: int) -> bytes:
    """The key of a run that has none: members told so accept nobody."""
    return b""


@dataclass(frozen=True, slots=True)
class AdmissionList:
    """The members whose connections a member accepts, and the run's key."""

    members: dict[NodeId, PublicKey]
    number: int  # of the run's key: how many were expelled before it
    data_key: bytes
    version: int = field(default=1, compare=False)  # counts the lists that streams were shown, from 1
    changes: int = field(default=0, compare=False)  # `Members.changes` that it follows from
    encoded: dict[int, bytes] = field(default_factory=dict, compare=False, repr=False)  # by the version before

    def encode(self, known: "AdmissionList | None") -> bytes:
        """The bytes of a `pb.View` that has nothing but this list, for a stream that brought `known` before; None:
        it brought none."""
        since = known.version if known is not None else 0
        if since not in self.encoded:
            self.encoded[since] = pb.View(admission=self._message(known)).SerializeToString()
        return self.encoded[since]

    def _message(self, known: "AdmissionList | None") -> pb.Admission:
        message = pb.Admission(version=self.version)
        if known is not None and known.version == self.version:
            return message
        before = known.members if known is not None else {}
        message.since = known.version if known is not None else 0
        message.data_key, message.data_key_number = self.data_key, self.number
        for node, key in self.members.items():
            if before.get(node) != key:
                message.members.add(node_id=node, key=key)
        message.gone.extend(before.keys() - self.members.keys())
        return message


def admission_list(
    state: State, before: AdmissionList | None, data_key: Callable[[int], bytes] = no_key
) -> AdmissionList:
    """The list of this state, the same object as `before` where nothing of it changed. `data_key`: the run's key
    by how many were expelled."""
    changes = state.members.changes
    if before is not None and (before.changes, before.number) == (changes, state.expulsions):
        return before
    members = {node: member.key for node, member in state.members.here.items()}
    version = before.version + 1 if before is not None else 1
    new = AdmissionList(members, state.expulsions, data_key(state.expulsions), version, changes)
    return before if before is not None and before == new else new
