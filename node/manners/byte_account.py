"""What a node has exchanged with its peers this day and this month, by the calendar of where it stands; kept in
its state directory."""

from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path

import msgspec

from atoll.comm.decode_errors import DECODE_ERRORS
from atoll.comm.files import atomic_write, write_all

NAME = "bytes.json"


@dataclass(frozen=True, slots=True)
class ByteAccount:
    """The bytes of a day and of its month."""

    day: str = ""  # as 2026-11-24
    day_bytes: int = 0
    month_bytes: int = 0

    def add(self, count: int, today: date) -> "ByteAccount":
        """The account with so many bytes more; it begins anew with each day, and with each month."""
        day = today.isoformat()
        same_day, same_month = self.day == day, self.day[:7] == day[:7]
        before_day, before_month = self.day_bytes * same_day, self.month_bytes * same_month
        return ByteAccount(day, before_day + count, before_month + count)

    def at(self, today: date) -> "ByteAccount":
        """The account as it stands on that day."""
        return replace(self) if self.day == today.isoformat() else self.add(0, today)


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
