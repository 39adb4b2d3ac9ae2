"""Ends a trainer whose step does not end: a collective that waits for a rank that is gone, a device that hangs.
The stacks of all threads are in the trainer's log then, and the daemon starts it again.

Who finds a hang, in this order: the timeout of the process group whose collective it is (NCCL writes its flight
record then, `atoll.node.trainer.launcher`), this watchdog, the daemon (`STALL_SHARE` of the node's machine), the
coordinator (`members.stall`). A trainer's first step may compile, and takes minutes: the first three let it.
"""

import faulthandler
import os
import sys
import time

from atoll.comm import log
from atoll.comm.child_process import GRACE_SECONDS

REARM_INTERVAL = 1.0  # seconds between two settings of the alarm; at most that much too early is it
REARM_SHARE = 0.05  # of the deadline: the same, where that is less


class StepWatchdog:
    """An alarm clock that `tick` sets back. It rings also where a thread in C code holds the interpreter's
    lock."""

    def __init__(self, deadline: float, first: float) -> None:
        """`deadline`: seconds from a `tick` after which the process is ended; `first`: from the first one, which
        begins the first step."""
        self._deadline, self._first = deadline, first
        self._interval = min(REARM_INTERVAL, REARM_SHARE * deadline)
        self._ticks = 0
        self._set_at: float | None = None

    def tick(self) -> None:
        """A step begins, and with it the deadline."""
        now, self._ticks = time.monotonic(), self._ticks + 1
        if self._set_at is None or self._ticks == 2 or now - self._set_at > self._interval:
            seconds = self._first if self._ticks == 1 else self._deadline
            faulthandler.dump_traceback_later(seconds, exit=True, file=sys.stderr)
            self._set_at = now

    def rest(self) -> None:
        """Stop the alarm until the next tick: what comes before that may take as long as it likes."""
        if self._set_at is not None:
            faulthandler.cancel_dump_traceback_later()
            self._set_at = None


def end_late_script() -> None:
    """End this process if it still runs `GRACE_SECONDS` from now, with the stacks of all threads in the trainer's
    log: for a thread that has seen the daemon go."""
    time.sleep(GRACE_SECONDS)
    log.complain("trainer", f"the node is gone for {GRACE_SECONDS:g} s, and this script still runs: it is ended")
    faulthandler.dump_traceback(sys.stderr)
    os._exit(1)
