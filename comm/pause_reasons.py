"""The reasons for which a node takes no inner steps though the run would have it do so: a list that only grows.

The number travels in a heartbeat, the words are shown to people.
"""

from enum import IntEnum


class PauseReason(IntEnum):
    """Why a node may take no inner steps for now. Numbers are for ever."""

    TOLD = 1
    LEAVING = 2
    HOURS = 3
    DAY_BYTES = 4
    MONTH_BYTES = 5
    BATTERY = 6
    METERED = 7
    IN_USE = 8
    GPU_HOT = 9
    MEMORY = 10
    RESTS = 11

    @property
    def words(self) -> str:
        """The reason, for people."""
        return _WORDS[self]


_WORDS = {
    PauseReason.TOLD: "its owner told it to",
    PauseReason.LEAVING: "it leaves",
    PauseReason.HOURS: "outside its hours",
    PauseReason.DAY_BYTES: "the bytes of this day are spent",
    PauseReason.MONTH_BYTES: "the bytes of this month are spent",
    PauseReason.BATTERY: "on battery",
    PauseReason.METERED: "on a metered link",
    PauseReason.IN_USE: "its owner uses the machine",
    PauseReason.GPU_HOT: "its GPU is too hot",
    PauseReason.MEMORY: "it takes more memory than it may",
    PauseReason.RESTS: "it rests after a step",
}


def words_of(number: int) -> str:
    """The words of a reason as a heartbeat has it, which may be one of a newer version; empty: there is none."""
    if not number:
        return ""
    return PauseReason(number).words if number in _WORDS else "paused"
