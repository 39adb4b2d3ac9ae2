"""A member's account of a round: what it says it did, waited for and saw, asked for when the round was slow or
failed.

It is a member's word. What it says of itself nobody else may be able to see; what it says of a link its other end
sees, too (`links`). Nothing is held against anybody for it: it explains a round to people.
"""

from dataclasses import dataclass

from atoll.comm.ids import NodeId
from atoll.comm.incidents import IncidentKind


@dataclass(frozen=True, slots=True)
class Incident:
    """Something that happened on the member, or that it saw of a peer."""

    kind: IncidentKind
    age: float  # seconds, when the account was given
    peer: NodeId | None = None
    value: float = 0.0  # what it is, `IncidentKind` says


@dataclass(frozen=True, slots=True)
class LinkAccount:
    """The member's connections to one peer in the round, by its kernel's counters."""

    peer: NodeId
    sent: int = 0  # bytes that reached the peer
    received: int = 0  # bytes that came from it
    busy: float = 0.0  # seconds in which bytes were on their way to the peer, and it had room for them
    usual: float = 0.0  # bytes a second while they were, in the rounds before; 0: not known
    segments: int = 0  # that were sent
    resent: int = 0  # of these, because they were lost
    rtt: float = 0.0  # seconds of round trip without a queue; 0: not known
    queue: float = 0.0  # seconds by which it was longer while bytes were on their way, on average
    mute: float = 0.0  # the longest time, seconds, in which nothing that was sent was acknowledged
    deaf: float = 0.0  # of such times, the longest in which nothing at all came from the peer's machine

    @property
    def rate(self) -> float:
        """Bytes a second while they were on their way; 0: none were."""
        return self.sent / self.busy if self.busy > 0 else 0.0

    @property
    def lost(self) -> float:
        """Share of the segments that had to be sent again."""
        return self.resent / self.segments if self.segments else 0.0


@dataclass(frozen=True, slots=True)
class Account:
    """One member's account of one round. Times are seconds."""

    steps: int = 0  # inner steps taken in the round
    computing: float = 0.0  # in them, waits for data aside
    data: float = 0.0  # in which the trainer waited for data
    still: float = 0.0  # the longest time in which the trainer took no step that it owed
    paused: float = 0.0
    away: float = 0.0  # the longest time in which the coordinator did not answer
    clock: float = (
        0.0  # that the machine's clock is ahead of the coordinator's; 0: as far as can be told it is right
    )
    incidents: tuple[Incident, ...] = ()
    links: tuple[LinkAccount, ...] = ()
    sent: int = 0  # bytes that reached other members, all of them
    received: int = 0  # bytes that came from them
    limit_up: float = 0.0  # bytes a second that its owner lets it send; 0: no limit
    limit_down: float = 0.0  # bytes a second that its owner lets it take in; 0: no limit

    def had(self, *kinds: IncidentKind) -> Incident | None:
        """The latest incident of one of these kinds; None: there was none."""
        return min((i for i in self.incidents if i.kind in kinds), key=lambda i: i.age, default=None)

    def link(self, peer: NodeId) -> LinkAccount | None:
        """The account of the connections to this peer; None: it says nothing of them."""
        return next((link for link in self.links if link.peer == peer), None)
