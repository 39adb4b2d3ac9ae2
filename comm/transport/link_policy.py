"""Decides when a node dials a peer, and when it asks it what was lost. Pure: it is told what came of it, and
neither dials nor waits.

    enough links?  --yes--> Rest
        | no
    pauses, where they are due: the other side's turn to dial; after tries in vain; for a leaf, which dials itself
        |  (a link that comes meanwhile leads back to the beginning)
    Dial, or LeafMissing

`PeerLinks` has one for each peer, and the simulation, too.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LinkTimes:
    """The times of links, in seconds. The defaults are those of a run; tests have shorter ones."""

    other_side: float = 1.5  # without a link, after which the side that was not to dial does
    leaf: float = 20.0  # without a link, after which a leaf is lost
    redial: tuple[float, ...] = (0.2, 0.5, 1.0, 2.0, 5.0)  # between tries to dial, by the tries in vain
    min_life: float = 2.0  # of a link: one that broke sooner counts as a try in vain


LINK_TIMES = LinkTimes()


@dataclass(frozen=True, slots=True)
class Rest:
    """Wait until the number of links changes: there are enough."""


@dataclass(frozen=True, slots=True)
class Pause:
    """Wait for so many seconds; where there is no link, until there is one at the longest."""

    seconds: float


@dataclass(frozen=True, slots=True)
class LeafMissing:
    """Say that the peer, a leaf, has not dialled for so many seconds."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Dial:
    """Dial so many links at once, and tell `dial_failed` of each that came to nothing."""

    count: int


class LinkPolicy:
    """The links to one peer, from reduce to reduce."""

    def __init__(self, times: LinkTimes) -> None:
        self._times = times
        self.link_target = 1  # links that there should be
        self.primary = False  # this side dials first, and opens as many
        self.leaf = False  # nobody can dial the peer
        self.failed_dials = 0  # in a row
        self._resync_due = False  # no link is left, and what was on the last one may be lost
        self._links = 0
        self._pauses: list[float] | None = None  # still to come before this side dials; None: from the beginning

    def begin_reduce(self) -> None:
        """Take it that what was lost with earlier links is of no more use."""
        self._resync_due = False

    def expect(self, primary: bool, leaf: bool, replaced: bool) -> None:
        """Have links from now on. `primary`: this side dials first; `leaf`: the peer dials. `replaced`: it is
        another process than before: what came of that one says nothing."""
        self.primary, self.leaf, self._pauses = primary, leaf, None
        if replaced:
            self.failed_dials = 0

    def next_step(self, links: int) -> Rest | Pause | LeafMissing | Dial:
        """Decide what to do now that there are so many links, all that was asked for before being done."""
        wanted = self.link_target if self.primary else 1
        if links >= wanted or (links and not self._links):
            self._pauses = None
        self._links = links
        if links >= wanted:
            return Rest()
        if self._pauses is None:
            self._pauses = self._due_pauses()
        if self._pauses:
            return Pause(self._pauses.pop(0))
        self._pauses = None
        return LeafMissing(self._times.leaf) if self.leaf else Dial(wanted - links)

    def _due_pauses(self) -> list[float]:
        times, failed = self._times, self.failed_dials
        pauses = [] if self.primary or self.leaf else [times.other_side]
        pauses += [times.redial[min(failed, len(times.redial)) - 1]] if failed else []
        return pauses + [times.leaf] * self.leaf

    def dial_failed(self) -> None:
        """Count a try that came to nothing."""
        self.failed_dials += 1

    def link_opened(self) -> bool:
        """Take it that there is a link more; whether the peer is to be asked over it what it has."""
        due, self._resync_due = self._resync_due, False
        return due

    def link_broke(self, lived: float) -> None:
        """Take it that a link broke after `lived` seconds: before it was of use, or not."""
        self.failed_dials = 0 if lived > self._times.min_life else self.failed_dials + 1

    def link_closed(self, links: int) -> bool:
        """Take it that a link is closed, and so many are left; whether the peer is to be asked over another one
        what it has: what was on this one may be lost."""
        self._resync_due = not links
        return links > 0
