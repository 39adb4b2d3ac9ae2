"""Faults as data, for tests with real processes: `ATOLL_FAULTS="point=action,..."` in a process's environment.

`coordinator.plan.written=crash` ends the process by SIGKILL when it gets to that point, `point@3=crash` the
third time, `trainer.step=stall:0.05` holds it up for so many seconds every time, `point=memory` raises the
`MemoryError` of a process that has no more. Without the variable `fault_point` does nothing.
"""

import os
import signal
import time
from dataclasses import dataclass


@dataclass
class Fault:
    """One fault of this process, and how often its point was reached."""

    point: str
    action: str  # crash, stall or memory
    nth: int = 0  # of the hits; 0: every one
    seconds: float = 0.0  # of a stall
    hits: int = 0


def parse(text: str) -> dict[str, Fault]:
    """Read faults, by their points. Raises `ValueError` with a sentence."""
    faults = {}
    for entry in filter(None, text.split(",")):
        where, equals, what = entry.partition("=")
        point, _, nth = where.partition("@")
        action, _, seconds = what.partition(":")
        if not equals or action not in ("crash", "stall", "memory"):
            raise ValueError(f"ATOLL_FAULTS holds {entry!r}: write point=crash, point@3=crash or point=stall:0.5")
        faults[point] = Fault(point, action, int(nth or 0), float(seconds or 0.0))
    return faults


FAULTS = parse(os.environ.get("ATOLL_FAULTS", ""))


def fault_point(point: str) -> None:
    """Carry out the fault of this point of the program, if there is one: stall, end the process, or raise
    `MemoryError`."""
    fault = FAULTS.get(point) if FAULTS else None
    if fault is None:
        return
    fault.hits += 1
    if fault.nth not in (0, fault.hits):
        return
    if fault.action == "crash":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault.action == "memory":
        raise MemoryError(f"ATOLL_FAULTS has it run out at {point}")
    time.sleep(fault.seconds)
