"""Where the figures of rounds go: one implementation a file (`wandb_run`, `tensorboard`, `json_lines`), and one
test that all pass.

A sink knows by what is there already which round it goes on with, so a writer that was killed at any instant, and
is started again, writes each round once: it hands over all rounds after `last`, which the journal has for good.
"""

from enum import StrEnum
from typing import Protocol

from atoll.coordinator.tracking.figures import Row


class SinkKind(StrEnum):
    """The kinds of sinks."""

    WANDB = "wandb"
    TENSORBOARD = "tensorboard"
    JSONL = "jsonl"


class Sink(Protocol):
    """One place that rows go to. Calls block for as long as the place takes."""

    @property
    def last(self) -> int:
        """The last round that is there, or is on its way; 0: none."""
        ...

    def write(self, row: Row) -> None:
        """Add the row of a round after `last`."""
        ...

    def flush(self) -> None:
        """Have what was written survive this process, where that is not so at once."""
        ...

    def close(self) -> None:
        """Finish what was written."""
        ...
