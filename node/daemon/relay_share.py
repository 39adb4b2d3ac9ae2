"""Divides what a node may send between its own exchange with peers and what it passes on for others. Pure."""

from dataclasses import dataclass

BUSY_SECONDS = 10.0  # after the last byte that was passed on, for which the relay's part is kept for it


@dataclass(frozen=True, slots=True)
class Shares:
    """Bytes a second; 0: no limit."""

    exchange: float
    relay: float


class RelayShare:
    """Knows whether something is being passed on. The owner's upload is for both: half of it at most, or `rate`,
    is the relay's, and the exchange's while nothing is passed on."""

    def __init__(self, rate: float) -> None:
        """`rate`: bytes a second that the relay may pass on at most; 0: no limit but the owner's upload."""
        self._rate = rate
        self._passed, self._busy_until = 0, 0.0

    def divide(self, upload: float, passed: int, now: float) -> Shares:
        """The shares at `now` (seconds) of an `upload` (bytes a second; 0: no limit), where so many bytes were
        `passed` on so far."""
        if passed > self._passed:
            self._busy_until = now + BUSY_SECONDS
        self._passed = passed
        if not upload:
            return Shares(0.0, self._rate)
        relay = min(self._rate or upload, upload / 2)
        return Shares(upload - relay if now < self._busy_until else upload, relay)
