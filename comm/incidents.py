"""The kinds of incidents that a node remembers of itself and of its peers, to account for a round: a list that
only grows. The number travels in reports; what it means for a round is for the coordinator to say.
"""

from collections.abc import Iterable
from enum import IntEnum


class IncidentKind(IntEnum):
    """What happened on a node. Numbers are for ever, and below 32: they are bits of `mask`."""

    TRAINER_DIED = 1  # value: its exit code, or minus the number of the signal that ended it
    OUT_OF_MEMORY = 2  # the same, where memory had run out; of the machine, a limit, or a device
    TRAINER_HUNG = 3  # the node ended it; value: seconds that it had made no progress
    WORK_DROPPED = 4  # steps whose arithmetic was of no use: the order began anew
    DATA_LATE = 5  # the trainer waits for data that the store does not give
    DISK_FULL = 6
    DISK_FAILED = 7
    BYTES_SPOILED = 8  # what came from the peer was not what it sent, or cannot be
    STATE_CHANGED = 9  # the node's state changed by itself; value: chunks
    STATE_DIFFERED = 10  # it was not the run's, and was fetched again
    PEER_LOST = 11  # no connection to the peer, or nothing came over it
    COORDINATOR_AWAY = 12  # value: seconds for which it did not answer
    PAUSED = 13  # value: the `PauseReason`
    CLOCK_OFF = 14  # value: seconds that the machine's clock is ahead of the coordinator's


# Those for which a round is looked into though it took no longer than others.
NOTABLE = frozenset(
    {
        IncidentKind.OUT_OF_MEMORY,
        IncidentKind.DISK_FULL,
        IncidentKind.DISK_FAILED,
        IncidentKind.BYTES_SPOILED,
        IncidentKind.STATE_CHANGED,
        IncidentKind.STATE_DIFFERED,
        IncidentKind.CLOCK_OFF,
    }
)

_KINDS = {kind.value: kind for kind in IncidentKind}


def mask(kinds: Iterable[IncidentKind]) -> int:
    """The kinds as bits of one number."""
    return sum(1 << kind for kind in set(kinds))


_NOTABLE_BITS = mask(NOTABLE)


def kind_of(number: int) -> IncidentKind | None:
    """The kind with this number; None: a newer version's."""
    return _KINDS.get(number)


def is_notable(bits: int) -> bool:
    """Whether one of the kinds in a `mask` is notable; those of newer versions are not."""
    return bool(bits & _NOTABLE_BITS)
