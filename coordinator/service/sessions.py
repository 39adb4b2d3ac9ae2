"""The directory of sessions: who speaks under one, and as whom a node is admitted. Pure.

A session is `secret.life`. The secret is the node's for good and brings it back under its id; the life counts its
joins, and only the latest one is a living member's. One node has one key, for its life, and one key is one node's:
who lost its session and still has its key is the node that it was, unless that is connected. Called by `rpc` for
every call, and by the simulation.
"""

from collections.abc import Callable
from dataclasses import dataclass

from atoll.comm.errors import Refused, RefusedForNow
from atoll.comm.ids import NO_KEY, NodeId, PublicKey
from atoll.comm.proto import atoll_pb2 as pb
from atoll.coordinator.state_machine.members import Member, Members
from atoll.coordinator.state_machine.state import State


@dataclass(frozen=True, slots=True)
class Admission:
    """The identity under which a node joins."""

    node: NodeId
    life: int  # the number of its joins, from 1
    secret: str


class SessionDirectory:
    """The node that each secret was given to. It is told the members as they are, and asks nobody.

    Invariant: a node has one secret, its newest.
    """

    def __init__(self, members: Members) -> None:
        """Enter the sessions of all members that are here, or may come back."""
        known = (*members.departed.values(), *members.here.values())
        self._nodes = {m.session: m.node for m in known}
        self._secrets = {m.node: m.session for m in known}

    def enter(self, secret: str, node: NodeId) -> None:
        """Enter a session in the place of the one that the node had; its member's join is durable."""
        self._nodes.pop(self._secrets.get(node, ""), None)
        self._nodes[secret], self._secrets[node] = node, secret

    def holder(self, session: str, members: Members) -> Member | None:
        """The node that has or had this session, in whichever life."""
        secret = session.partition(".")[0]
        if (node := self._nodes.get(secret)) is None:
            return None
        member = members.here.get(node) or members.departed.get(node)
        if member is None:
            del self._nodes[secret]  # forgotten
            self._secrets.pop(node, None)
        return member

    def member(self, session: str, members: Members) -> Member | None:
        """The living member that holds this session now."""
        secret, _, life = session.partition(".")
        member = members.here.get(self._nodes.get(secret, NodeId("")))
        return member if member is not None and str(member.life) == life else None

    def admission(self, session: str, key: PublicKey, members: Members, fresh: str) -> Admission:
        """The identity of who joins under a session with a key that it proved to have: the node that had the
        session, in its next life; or, with the secret `fresh`, the node that had the key and is not connected, or
        a new one. Raises `Refused` for a session with another key than its node's, `RefusedForNow` for a connected
        member's key.

        Ids and lives are given one at a time: the join must be durable before the next one."""
        if (before := self.holder(session, members)) is not None:
            if before.key not in (NO_KEY, key):
                raise Refused(
                    f"{before.node} has another key than the one in this state directory, and keeps it for life: "
                    "put its tls.pem back, or join as a new node with a new --state-dir and an invite"
                )
            return Admission(before.node, before.life + 1, before.session)
        if (owner := _owner(key, members)) is None:
            return Admission(NodeId(f"n{members.next_id}"), 1, fresh)
        if (here := members.here.get(owner.node)) is not None and here.connected:
            raise RefusedForNow(  # it may be a connection of which nobody knows yet that it broke
                f"{owner.node} ({owner.name}) is a member with the key of this state directory, and one key is "
                "one node: stop that one first, or give another --state-dir"
            )
        return Admission(owner.node, owner.life + 1, fresh)

    def ack(self, session: str, state: State, version: Callable[[NodeId], int]) -> pb.Ack:
        """The answer to a call: whether its session is a member's; if so, with the coordinator's incarnation and
        the version of the node's newest view, by which the node sees that its stream is behind; if not, why."""
        if (member := self.member(session, state.members)) is not None:
            return pb.Ack(known=True, incarnation=state.incarnation, version=version(member.node))
        before = self.holder(session, state.members)
        if before is None:
            reason = "the session is not a member's"
        elif before.node in state.members.here:
            reason = f"{before.node} has joined again since: this session is over"
        else:
            reason = before.reason
        return pb.Ack(known=False, reason=reason)


def _owner(key: PublicKey, members: Members) -> Member | None:
    """The node that has, or had, this key."""
    known = (*members.here.values(), *members.departed.values())
    return next((m for m in known if m.key == key), None) if key else None


def session_of(member: Member) -> str:
    """The session that the member's calls carry."""
    return f"{member.session}.{member.life}"
