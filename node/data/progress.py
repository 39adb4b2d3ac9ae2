"""Progress of a long command on stderr: a bar on a terminal, else a line for each tenth, or now and then."""

import time
from typing import Self

import click

LINE_INTERVAL = 30.0  # seconds between lines, where nobody knows how much is to come


class ProgressBar:
    """One bar, while the context lasts."""

    def __init__(self, label: str, total: int | None, quiet: bool = False) -> None:
        """`total`: the number that is all; None: unknown. `quiet`: shows nothing."""
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

        console = Console(stderr=True)
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.fields[note]}"),
        )
        self._bars = Progress(*columns, TimeRemainingColumn(), console=console, disable=quiet, transient=True)
        self._label, self._total, self._lines = label, total, not quiet and not console.is_terminal
        self._task = self._bars.add_task(label, total=total, note="")
        self._tenths, self._line_at = 0, time.monotonic()

    def __enter__(self) -> Self:
        if not self._lines:
            self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        if not self._lines:
            self._bars.stop()

    def show(self, done: int, note: str) -> None:
        """Show that `done` of the total is done; `note` says it in words."""
        self._bars.update(self._task, completed=done, note=note)
        if self._lines and (share := self._due(done)) is not None:
            click.echo(f"{self._label}: {share}{note}", err=True)

    def _due(self, done: int) -> str | None:
        """How a line begins that is to be written now."""
        if self._total:
            tenths = 10 * done // self._total
            due, self._tenths = tenths > self._tenths, max(tenths, self._tenths)
            return f"{10 * tenths} %, " if due else None
        now = time.monotonic()
        if now - self._line_at < LINE_INTERVAL:
            return None
        self._line_at = now
        return ""
