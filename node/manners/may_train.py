"""Whether the machine may train now, and if not, why. Pure.

What the owner has said by hand comes first, then what they wish of the machine, in the order of `PauseReason`.
What goes up and down, as a temperature, has to be better by a margin before a pause for it ends.
"""

import math
from dataclasses import dataclass
from datetime import datetime

from atoll.comm.pause_reasons import PauseReason
from atoll.node.manners.hours import Hours

COOLER = 5.0  # degrees Celsius below its ceiling at which a GPU that was too hot is used again
BUSY_SHARE = 0.25  # of the processors' time for others' processes, from which on the machine is in use
QUIET_SHARE = 0.5 * BUSY_SHARE  # below which it no longer is
INPUT_SECONDS = 300.0  # since somebody typed, for which the machine is in use


@dataclass(frozen=True, slots=True)
class Wishes:
    """What the owner wishes of their machine. The defaults wish for nothing."""

    hours: Hours | None = None  # in which it trains; None: at any time
    daily: int = 0  # bytes a day of the exchange with peers, up and down; 0: no limit
    monthly: int = 0  # the same a month
    battery: bool = True  # it trains on battery
    metered: bool = True  # and on a metered link
    idle_only: bool = False  # it trains while nobody else uses the machine
    gpu_temperature: float = 0.0  # degrees Celsius, of the hottest GPU; 0: no limit


@dataclass(frozen=True, slots=True)
class Observations:
    """The machine as it is now. None is what is not known, for which no wish holds it back."""

    day_bytes: int = 0  # of this day, with peers, up and down
    month_bytes: int = 0
    round_bytes: int = 0  # that the round at hand will yet take, as those before it did
    on_battery: bool | None = None
    on_metered: bool | None = None
    others_share: float | None = None  # of the processors' time, that others' processes take, 0 to 1
    input_age: float | None = None  # seconds since somebody typed
    gpu_celsius: float | None = None  # of the hottest GPU


@dataclass(frozen=True, slots=True)
class Pause:
    """What the owner has said by hand: no training until then."""

    until: float | None = None  # seconds since 1970; None: until they say otherwise

    def holds(self, now: datetime) -> bool:
        return self.until is None or now.timestamp() < self.until


def may_train(
    wishes: Wishes,
    seen: Observations,
    pause: Pause | None,
    now: datetime,
    before: PauseReason | None = None,
    leaving: bool = False,
) -> PauseReason | None:
    """The first reason for which the machine may not train at `now`, in local time; None: it may. `before`: the
    reason a moment ago. `leaving`: it was told to end soon."""
    if leaving:
        return PauseReason.LEAVING
    if pause is not None and pause.holds(now):
        return PauseReason.TOLD
    if wishes.hours is not None and not wishes.hours.include(now):
        return PauseReason.HOURS
    if _is_spent(seen.day_bytes, seen.round_bytes, wishes.daily):
        return PauseReason.DAY_BYTES
    if _is_spent(seen.month_bytes, seen.round_bytes, wishes.monthly):
        return PauseReason.MONTH_BYTES
    if not wishes.battery and seen.on_battery:
        return PauseReason.BATTERY
    if not wishes.metered and seen.on_metered:
        return PauseReason.METERED
    if wishes.idle_only and _in_use(seen, before is PauseReason.IN_USE):
        return PauseReason.IN_USE
    if wishes.gpu_temperature and _too_hot(wishes, seen, before is PauseReason.GPU_HOT):
        return PauseReason.GPU_HOT
    return None


def byte_room(wishes: Wishes, seen: Observations) -> float:
    """The bytes that may yet pass between this node and its peers, up and down together. Where a round more would
    not fit, what is left is for following the run's state, and for giving it."""
    if not wishes.metered and seen.on_metered:
        return 0
    limits = (wishes.daily, seen.day_bytes), (wishes.monthly, seen.month_bytes)
    return min((max(limit - bytes_, 0) for limit, bytes_ in limits if limit > 0), default=math.inf)


def _is_spent(bytes_: int, round_bytes: int, limit: int) -> bool:
    """Whether the rest of the round would not fit. What a round takes may have been overrated, as by newcomers who
    fetched the state: it fits where half of it all is left."""
    return 0 < limit <= bytes_ or limit > 0 and bytes_ + min(round_bytes, limit // 2) > limit


def _in_use(seen: Observations, was: bool) -> bool:
    if seen.input_age is not None and seen.input_age < INPUT_SECONDS:
        return True
    return seen.others_share is not None and seen.others_share >= (QUIET_SHARE if was else BUSY_SHARE)


def _too_hot(wishes: Wishes, seen: Observations, was: bool) -> bool:
    ceiling = wishes.gpu_temperature - (COOLER if was else 0.0)
    return seen.gpu_celsius is not None and seen.gpu_celsius > ceiling
