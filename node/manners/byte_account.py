"""What a node has exchanged with its peers this day and this month, by the calendar of where it stands; kept in
its state directory.

The calendar is the machine's clock, which may be wrong. An account never shrinks because that is set back: what it
said then goes on to count, for the day and for the month that the clock says it is now. Nor does it stand still
after the clock was far ahead: the next day begins anew, whatever the clock has said before.
"""

from dataclasses import dataclass, field
from datetime import date
from pathlib import Path

import msgspec

from atoll.comm.decode_errors import DECODE_ERRORS
from atoll.comm.files import atomic_write, write_all

NAME = "bytes.json"
MAX_DAYS = 100  # that are remembered; a month has 31


@dataclass(frozen=True, slots=True)
class ByteAccount:
    """The bytes of each day of late, as the clock called it."""

    today: str = ""  # as 2026-11-24; the day that the clock last said
    days: dict[str, int] = field(default_factory=dict)  # bytes; the latest that was counted on last
    # Bytes that count for `today`, and for its month, though the clock had another name for the day then.
    more_today: int = 0
    more_this_month: int = 0

    @property
    def day_bytes(self) -> int:
        return self.days.get(self.today, 0) + self.more_today

    @property
    def month_bytes(self) -> int:
        month = self.today[:7]
        return sum(count for day, count in self.days.items() if day[:7] == month) + self.more_this_month

    def at(self, today: date) -> "ByteAccount":
        """The account as it stands on that day."""
        day = today.isoformat()
        if day == self.today:
            return self
        same_month = day[:7] == self.today[:7]
        if day > self.today:
            return ByteAccount(day, self.days, 0, self.more_this_month if same_month else 0)
        return ByteAccount(
            day, self.days, self.day_bytes, self.more_this_month if same_month else self.month_bytes
        )

    def add(self, count: int, today: date) -> "ByteAccount":
        """The account with so many bytes more."""
        now = self.at(today)
        others = {day: bytes_ for day, bytes_ in now.days.items() if day != now.today}
        days = others | {now.today: now.days.get(now.today, 0) + count}
        kept = dict(list(days.items())[-MAX_DAYS:])
        return ByteAccount(now.today, kept, now.more_today, now.more_this_month)


def load_account(state_dir: Path) -> ByteAccount:
    """The account of an earlier life; an empty one where there is none, or none that can be read."""
    try:
        return msgspec.json.decode((state_dir / NAME).read_bytes(), type=ByteAccount)
    except (OSError, *DECODE_ERRORS):
        return ByteAccount()


def save_account(state_dir: Path, account: ByteAccount) -> None:
    """Keep the account. Raises `OSError`."""
    with atomic_write(state_dir / NAME, None) as out:
        write_all(out, [memoryview(msgspec.json.encode(account))], 0)
