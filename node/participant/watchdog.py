"""Ends a trainer whose step does not end: a collective that waits for a rank that is gone, a device that hangs.
The stacks of all threads are in the trainer's log then, and the daemon starts it again."""

import faulthandler
import os
import sys
import time

from atoll.comm.child_process import GRACE_SECONDS

REARM_INTERVAL = 1.0  # seconds between two settings of the alarm, at most that much too early is it


class StepWatchdog:
    """An alarm clock that `tick` sets back. It rings also where a thread in C code holds the interpreter's
    lock."""

    def __init__(self, deadline: float) -> None:
        """`deadline`: seconds from a `tick` after which the process is ended."""
        self._deadline = deadline
        self._set_at: float | None = None

    def tick(self) -> None:
        """Something goes on: the deadline begins anew."""
        now = time.monotonic()
        if self._set_at is None or now - self._set_at > REARM_INTERVAL:
            faulthandler.dump_traceback_later(self._deadline, exit=True, file=sys.stderr)
            self._set_at = now

    def rest(self) -> None:
        """What follows may take as long as it likes."""
        faulthandler.cancel_dump_traceback_later()
        self._set_at = None


def end_late_script() -> None:
    """End this process if it still runs `GRACE_SECONDS` from now, with the stacks of all threads in the trainer's
    log: for a thread that has seen the daemon go."""
    time.sleep(GRACE_SECONDS)
    print(f"the node is gone for {GRACE_SECONDS:g} s, and this script still runs: it is ended", file=sys.stderr)
    faulthandler.dump_traceback(sys.stderr)
    os._exit(1)
