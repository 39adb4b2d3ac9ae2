"""Detection of a stream of views that has silently fallen behind. Pure: told the time, in seconds of any clock
that does not go back.

A half-open connection brings no views and no error. But the coordinator's acknowledgements say how new the node's
view should be: a stream that has not brought that view for too long is to be given up, and another one opened.
`ControlClient` asks after every heartbeat.
"""

STALE_STREAM_SECONDS = 3.0  # seconds for which a stream may be behind the newest view

ViewVersion = tuple[int, int]  # incarnation of the coordinator, and number of the view within it


class StreamFreshness:
    """The views that the stream has brought, against what the acknowledgements name."""

    def __init__(self) -> None:
        self._seen: ViewVersion = (0, 0)  # the newest
        self._behind_since: float | None = None  # seconds

    def begin_session(self) -> None:
        """Forget what earlier sessions have seen."""
        self._seen, self._behind_since = (0, 0), None

    def open_stream(self) -> None:
        """Give a stream that is opened now its time to bring the newest view."""
        self._behind_since = None

    def see(self, version: ViewVersion) -> None:
        """Take in that the stream brought a view."""
        if version >= self._seen:
            self._seen, self._behind_since = version, None

    def is_stale(self, newest: ViewVersion, now: float) -> bool:
        """Take in which view is the node's newest; returns whether the stream is to be given up."""
        if newest <= self._seen:
            self._behind_since = None
        elif self._behind_since is None:
            self._behind_since = now
        return self._behind_since is not None and now - self._behind_since > STALE_STREAM_SECONDS
