"""A terminal that remembers what was written to it."""

import io
import re

from atoll.comm.status_line import CLEAR


class Terminal(io.StringIO):
    """What a status line writes to, and its lines as somebody sees them."""

    def isatty(self) -> bool:
        return True

    @property
    def screen(self) -> list[str]:
        return [re.split(re.escape(CLEAR), line)[-1] for line in self.getvalue().split("\n")]
