"""Hours of the day, as `22:00-07:00`. Pure. They are those of the clock on the wall where the machine stands, when
it is put forward or back as well."""

import re
from dataclasses import dataclass
from datetime import datetime, time, timedelta

from atoll.comm.errors import ConfigError

_SPAN = re.compile(r"(\d\d?):(\d\d)-(\d\d?):(\d\d)")
MINUTES = 24 * 60  # of a day


@dataclass(frozen=True, slots=True)
class Hours:
    """A span of each day, from `first` on and without `last`, in minutes since midnight. It may cross midnight;
    where the two are the same it is the whole day."""

    first: int
    last: int

    def include(self, now: datetime) -> bool:
        """Whether the wall clock of `now` is within them."""
        minute = now.hour * 60 + now.minute
        if self.first == self.last:
            return True
        if self.first < self.last:
            return self.first <= minute < self.last
        return minute >= self.first or minute < self.last

    def next_begin(self, now: datetime) -> datetime:
        """When the wall clock says next that they begin."""
        begin = time(self.first // 60, self.first % 60)
        day = now.date() + timedelta(days=now.time().replace(tzinfo=None) >= begin)
        return datetime.combine(day, begin, tzinfo=now.tzinfo)


def parse_hours(text: str) -> Hours | None:
    """The hours that `text` names; None for an empty one: the whole day. Raises `ConfigError`."""
    if not text:
        return None
    found = _SPAN.fullmatch(text.replace(" ", ""))
    if found is None:
        raise ConfigError(f"hours is {text!r}: write them like 22:00-07:00, by the clock of this machine")
    first, first_minute, last, last_minute = map(int, found.groups())
    if max(first_minute, last_minute) > 59 or first > 23 or last > 24 or (last == 24 and last_minute):
        raise ConfigError(f"hours is {text!r}: a day has hours from 00:00 to 24:00")
    return Hours(first * 60 + first_minute, (last * 60 + last_minute) % MINUTES)
