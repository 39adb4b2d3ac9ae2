"""How long a node was in each phase, by its own clock: for its `/metrics`, and for a coordinator that did not
answer.

The coordinator sees phases change as they do, and counts by its own clock. Only of a time in which it answered no
heartbeat does it ask how the node has divided it.
"""


class PhaseClock:
    """The seconds of a node in each phase. Told the time, in seconds of a clock that does not go back."""

    def __init__(self, now: float, phase: str) -> None:
        self._phase, self._since = phase, now
        self._spent = dict[str, float]()
        # what had been spent when the latest heartbeat was sent, and when the latest was that was answered
        self._sent, self._answered = dict[str, float](), dict[str, float]()
        self._missed = False  # the latest heartbeat was not answered

    def enter(self, phase: str, now: float) -> None:
        """Another phase begins, or the same goes on."""
        self._spent[self._phase] = self._spent.get(self._phase, 0.0) + now - self._since
        self._phase, self._since = phase, now

    def seconds(self, now: float) -> dict[str, float]:
        """All seconds so far, by phase."""
        self.enter(self._phase, now)
        return dict(self._spent)

    def beat(self, now: float) -> dict[str, float]:
        """A heartbeat is sent. Returns how the time since one was last answered was spent; empty: the last one
        was."""
        self._sent = self.seconds(now)
        if not self._missed:
            return {}
        return {phase: spent - self._answered.get(phase, 0.0) for phase, spent in self._sent.items()}

    def heard(self, answered: bool) -> None:
        """The latest heartbeat was answered, or was not."""
        self._missed = not answered
        if answered:
            self._answered = self._sent
