"""The choice of a micro-batch: how many sequences a rank takes in one forward pass, and what their backward pass
computes again instead of keeping it.

It is measured once: from one sequence on, twice as many while that pays and fits. A node keeps what it found in
its cache (`MicroBatchStore`), and what it is just trying, too: of a process that the kernel has ended for memory,
or whose rank ran out of it, nothing else is heard. One that is told to end (SIGTERM) takes that back: it says
nothing about memory. What runs out of memory later is halved there.
"""

import hashlib
import math
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from atoll.comm.decode_errors import DECODE_ERRORS
from atoll.comm.files import atomic_write
from atoll.node.config import Checkpointing

MIN_GAIN = 1.03  # of the throughput, for which a micro-batch is made twice as large
SMALL_SHARE_TOKENS = 8192  # on a CPU a share of so many tokens is one micro-batch: a larger one gains nothing
SEARCH_SECONDS = 60.0  # after which nothing larger is tried
LEVELS = (Checkpointing.NONE, Checkpointing.SELECTIVE, Checkpointing.FULL)
# Searches that may be told to end before that says something, too: there are killers for memory that ask first.
MAX_STOPS = 3
KEPT_RECORDS = 32  # of other runs and settings, in one file


@dataclass(frozen=True)
class StepPlan:
    """The way in which a rank computes the gradient of its share."""

    size: int  # sequences of a micro-batch
    level: Checkpointing = Checkpointing.NONE

    def __str__(self) -> str:
        more = "" if self.level is Checkpointing.NONE else f" with {self.level} checkpointing"
        return f"micro-batches of {self.size} sequence{'s' if self.size > 1 else ''}{more}"


class Record(msgspec.Struct, frozen=True):
    """A node's knowledge of one machine, model and settings."""

    plan: StepPlan | None = None  # to train with
    reason: str = ""  # of the plan
    attempt: StepPlan | None = None  # under way, or of a process that has not come back from it
    stops: int = 0  # of processes that were told to end in the middle of a search


class NothingFits(MemoryError):
    """Not even one sequence at the highest level of checkpointing."""


@dataclass(frozen=True)
class Cost:
    """The cost of a plan, as all ranks agree."""

    seconds: float  # a sequence
    growth: float = 0.0  # bytes of memory, of all ranks, beyond what they had; 0: not known
    available: float = math.inf  # bytes
    elapsed: float = 0.0  # seconds since the search began


def levels_of(setting: Checkpointing, has_blocks: bool) -> tuple[Checkpointing, ...]:
    """The levels that may be taken, one after the other."""
    if setting is not Checkpointing.AUTO:
        return (setting,)
    return LEVELS if has_blocks else LEVELS[:1]


def smaller(plan: StepPlan, levels: Sequence[Checkpointing]) -> StepPlan | None:
    """The next plan that takes less memory: half the micro-batch, then a higher level. None: there is none."""
    if plan.size > 1:
        return StepPlan(plan.size // 2, plan.level)
    higher = levels[levels.index(plan.level) + 1 :] if plan.level in levels else ()
    return StepPlan(1, higher[0]) if higher else None


def least_memory(plan: StepPlan | None) -> tuple[float, float]:
    """Sorts plans by the memory that they take, the least first; None is last."""
    return (math.inf, math.inf) if plan is None else (-LEVELS.index(plan.level), plan.size)


def search(share: int, levels: Sequence[Checkpointing], measure: Callable[[StepPlan], Cost | None]) -> Record:
    """The plan for a share of so many sequences, at the first of `levels` at which one of them fits. `measure`
    returns None for a plan that does not fit. Raises `NothingFits`."""
    for level in levels:
        best: tuple[StepPlan, Cost] | None = None
        size, reason = 1, ""
        while True:
            plan = StepPlan(size, level)
            cost = measure(plan)
            if cost is None:
                reason = f"{size} at a time did not fit into memory"
                break
            if best is not None and best[1].seconds < MIN_GAIN * cost.seconds:
                reason = f"{size} at a time were not {MIN_GAIN - 1:.0%} faster"
                break
            best = plan, cost
            if size == share:
                reason = "a rank's whole share of a batch"
            elif cost.elapsed > SEARCH_SECONDS:
                reason = f"larger ones were not tried after {cost.elapsed:.0f} s"
            elif 2 * cost.growth > cost.available:
                reason = "twice as many would not fit into memory"
            if reason:
                break
            size = min(2 * size, share)
        if best is not None:
            return Record(best[0], f"{reason}; {1 / best[1].seconds:,.1f} sequences/s")
    raise NothingFits("not even one sequence at a time fits")


def after_death(record: Record, levels: Sequence[Checkpointing]) -> Record:
    """The record when a process has not come back from an attempt: the plan below it. A record without a plan
    where there is none below."""
    attempt = record.attempt
    if attempt is None:
        return record
    below = smaller(attempt, levels)
    return Record(below, f"a process that tried {attempt} did not come back") if below else Record()


class MicroBatchStore:
    """Records of one node, by what they are true of, in a file of JSON. What cannot be written is forgotten."""

    def __init__(self, folder: Path, facts: Any) -> None:
        """`facts`: what the record is true of, as JSON can say it."""
        self._path = folder / "micro_batch.json"
        self._lock = threading.Lock()  # held while the file is written, and from `take_back` on
        self._key = hashlib.sha256(msgspec.json.encode(facts, order="sorted")).hexdigest()[:16]

    def read(self) -> Record:
        """The record; an empty one where there is none that can be read."""
        return self._records().get(self._key, Record())

    def write(self, record: Record) -> None:
        """Replace the record. Several ranks may do so at the same time, with the same one."""
        with self._lock:
            self._write(record)

    def take_back(self) -> None:
        """Forget an attempt under way, for this process is about to end by its operator's will: no other record is
        written any more."""
        self._lock.acquire()
        if (record := self.read()).attempt is not None and record.stops < MAX_STOPS:
            self._write(Record(stops=record.stops + 1))

    def _write(self, record: Record) -> None:
        records = self._records()
        records.pop(self._key, None)
        records[self._key] = record  # the newest last
        kept = dict(list(records.items())[-KEPT_RECORDS:])
        with suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with atomic_write(self._path, None) as file, open(file, "wb", closefd=False) as out:
                out.write(msgspec.json.encode(kept))

    def _records(self) -> dict[str, Record]:
        with suppress(OSError, *DECODE_ERRORS):
            return msgspec.json.decode(self._path.read_bytes(), type=dict[str, Record])
        return {}
