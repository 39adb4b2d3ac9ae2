"""What a node did in each of the latest rounds, as it will account for it: its trainer's steps and waits, its
pauses. Pure: told the time, in seconds of a clock that does not go back.

A round is here the time from one commit that the node hears of to the next: that much the coordinator and the node
both know of it.

    order --> owes steps --progress--> ... --> handed over, or dropped: owes none
                |  no progress for long: `still`, however the trainer is
"""

from dataclasses import dataclass

ROUNDS = 4  # latest ones that are remembered


@dataclass(slots=True)
class RoundEntry:
    """One round. Times are seconds."""

    round: int
    began: float
    ended: float | None = None  # None: it is under way
    steps: int = 0
    computing: float = 0.0  # in steps, waits for data aside
    data: float = 0.0  # in which the trainer waited for data
    still: float = 0.0  # the longest time without a step that was owed
    paused: float = 0.0


class RoundBook:
    """The entries of the latest rounds."""

    def __init__(self) -> None:
        self._entries: list[RoundEntry] = []
        self._owes_since: float | None = None  # when the order came; None: no steps are owed
        self._moved_at = 0.0  # when the trainer last made progress
        self._told_at = 0.0  # when it last said anything of its steps
        self._step = (0, 0)  # (round, inner step) of that
        self._paused_since: float | None = None

    def committed(self, round_: int, now: float) -> None:
        """Take it that so many rounds are committed: the next one is under way."""
        if self._entries and round_ < self._entries[-1].round:
            return
        if self._entries:
            self._look(now)
            self._entries[-1].ended = now
            if self._paused_since is not None:
                self._entries[-1].paused += now - max(self._paused_since, self._entries[-1].began)
        self._entries = [*self._entries, RoundEntry(round_ + 1, now)][-ROUNDS:]

    def entry(self, round_: int, now: float) -> RoundEntry | None:
        """The entry of a round, as it is by now; None: nothing is remembered of it."""
        self._look(now)
        return next((e for e in self._entries if e.round == round_), None)

    @property
    def latest(self) -> RoundEntry | None:
        """The entry of the round under way; None: nothing was heard of one."""
        return self._entries[-1] if self._entries else None

    # The trainer

    def ordered(self, round_: int, now: float, continues: bool) -> None:
        """The trainer was told to take the round's steps; `continues`: some are taken."""
        self._look(now)
        self._owes_since = now
        self._moved_at = self._told_at = now
        if not continues:
            self._step = (round_, 0)

    def progress(self, round_: int, step: int, data_share: float, now: float) -> None:
        """The trainer says that it has taken so many steps, or that it waits; for `data_share` of the time since
        it said anything it waited for data."""
        entry, before = self.latest, self._step
        moved = (round_, step) != before
        if entry is not None:
            taken = step - before[1] if round_ == before[0] else step
            seconds = max(now - max(self._told_at, entry.began), 0.0)
            entry.steps += max(taken, 0)
            entry.data += data_share * seconds
            entry.computing += (1 - data_share) * seconds if moved else 0.0
        self._look(now)
        self._told_at, self._step = now, (round_, step)
        if moved:
            self._moved_at = now

    def handed_over(self, now: float) -> None:
        """No more steps are owed: the trainer has handed over, or what it had is dropped."""
        self._look(now)
        self._owes_since = None

    def paused(self, paused: bool, now: float) -> None:
        """The node pauses, as its owner wants, or no longer."""
        if paused and self._paused_since is None:
            self._paused_since = now
        elif not paused and self._paused_since is not None:
            if (entry := self.latest) is not None:
                entry.paused += now - max(self._paused_since, entry.began)
            self._paused_since = None

    def _look(self, now: float) -> None:
        """Enter for how long no step that is owed was taken."""
        if (entry := self.latest) is not None and self._owes_since is not None:
            entry.still = max(entry.still, now - max(self._moved_at, self._owes_since))
