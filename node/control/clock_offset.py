"""How far a machine's clock is from the coordinator's, as far as that can be told. Pure, but for `asked` and
`answered`, which read the clock: nobody else is told of it, and only a verdict on a round has a part for it.

A call's answer carries the coordinator's time. It was made between the call and the answer, so half the round trip
is what the clocks may differ by without anybody knowing (Cristian 1989). Of the latest calls the quickest counts:
it leaves the least doubt.
"""

import time
from collections import deque

CALLS = 4  # latest ones
MIN_OFFSET_SECONDS = 5.0  # beyond doubt: a clock that is less off is right


class ClockOffset:
    """The offset of this machine's clock."""

    def __init__(self) -> None:
        self._calls = deque[tuple[float, float]]((), CALLS)  # (round trip, ahead), seconds

    @staticmethod
    def asked() -> tuple[float, float]:
        """The time now, when a call is about to be made: by this machine's clock, and by one that does not go
        back, in seconds."""
        return time.time(), time.monotonic()

    def answered(self, asked: tuple[float, float], told: float) -> None:
        """Take the answer that came now; `asked`: when it was asked for, `told`: the coordinator's time, in
        seconds."""
        (asked_at, began), (now, ended) = asked, self.asked()
        self.add(asked_at, now, ended - began, told)

    def add(self, asked_at: float, answered_at: float, round_trip: float, told: float) -> None:
        """Take the answer of a call: made at `asked_at` and answered at `answered_at` by this machine's clock, in
        `round_trip` seconds of one that does not go back; `told`: the coordinator's time. All in seconds."""
        jumped = abs((answered_at - asked_at) - round_trip) > 1.0  # the clock was set meanwhile
        if told > 0 and round_trip >= 0 and not jumped:
            self._calls.append((round_trip, (asked_at + answered_at) / 2 - told))
        elif jumped:
            self._calls.clear()

    @property
    def seconds(self) -> float:
        """Seconds that the clock is ahead of the coordinator's; 0: as far as can be told it is right."""
        if not self._calls:
            return 0.0
        latest = self._calls[-1][1]
        # A clock that was set since: the earlier calls say nothing any more.
        alike = [
            (trip, ahead)
            for trip, ahead in self._calls
            if abs(ahead - latest) <= (trip + self._calls[-1][0]) / 2 + 1
        ]
        trip, ahead = min(alike)
        return ahead if abs(ahead) - trip / 2 > MIN_OFFSET_SECONDS else 0.0
