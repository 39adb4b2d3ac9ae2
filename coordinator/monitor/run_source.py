"""What answers about a run are made of: its records, and what is known of it beside them."""

from collections.abc import Generator, Iterator, Sequence
from math import inf
from typing import Any, Protocol

from atoll.comm.ids import NodeId
from atoll.coordinator.history.record_codec import RecordView
from atoll.coordinator.history.series import SeriesTable
from atoll.coordinator.monitor.members import AtWork
from atoll.coordinator.monitor.recorded import RecordedRun
from atoll.coordinator.state_machine.events import CommitRecord, Decision, Failure, Note

Answer = dict[str, Any]


class Records(Protocol):
    """All records of a run, to read. All calls block, and may raise `ResourceError`."""

    def iter_rounds(self, since: int = 0, limit: int = 0) -> Generator[CommitRecord, None, None]: ...
    def iter_notes(self, before: float = inf) -> Iterator[tuple[float, Note]]: ...
    def decisions(self, since: float = -inf, until: float = inf) -> list[tuple[float, Decision]]: ...
    def series(self) -> SeriesTable: ...
    def views(self, rounds: Sequence[int]) -> Iterator[RecordView]: ...


class RunSource(Protocol):
    """A run to show: a living one (`http`) or a recorded one (`replay`)."""

    @property
    def records(self) -> Records: ...

    @property
    def live(self) -> bool:
        """Whether it goes on."""
        ...

    def facts(self) -> RecordedRun:
        """What is known beside the records."""
        ...

    def snapshot(self) -> Answer | None:
        """The run now, in the event loop's thread; None: as of its last record."""
        ...

    def decisions(self, since: float, until: float) -> list[tuple[float, Decision]]:
        """The decisions against members from `since` to `until` (seconds since 1970), with their times; blocks."""
        ...

    def pending(self) -> CommitRecord | None:
        """The record of the last commit, while it is not complete and not among `records` yet."""
        ...

    def at_work(self) -> dict[str, AtWork]:
        """What each node told of its inner steps, when it last took some."""
        ...

    def now(self) -> float:
        """Seconds since 1970."""
        ...

    def failures(self) -> list[Failure]:
        """The failures of members that are not over, or were over lately; in the event loop's thread."""
        ...

    def round_trips(self) -> dict[NodeId, dict[NodeId, float]]:
        """Seconds between members, as far as they are known."""
        ...

    def contributions(self, limit: int, offset: int) -> Answer:
        """Who contributed how much: so many accounts of owners and of nodes, behind the first `offset`; blocks."""
        ...

    def account(self, node: NodeId) -> Answer | None:
        """What one node contributed; None: it has no account. Blocks."""
        ...

    def over(self) -> bool:
        """Whether the process is about to end: streams end."""
        ...

    def crowded(self) -> bool:
        """Whether members wait for what the process does beside answering here: then answers wait for a while."""
        ...
