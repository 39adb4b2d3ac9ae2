"""`atoll node top`: the daemon's status in a terminal, asked for anew each second. The daemon has no part in it.

A daemon that is gone is asked on; meanwhile its last figures stay, and it is said how old they are. Keys alone,
for a terminal without a mouse, and one line for each thing, for 80 columns and 24 rows.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Any, ClassVar

from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.widgets import Footer, Static

from atoll.comm.errors import AtollError
from atoll.comm.terminal import visible
from atoll.node.status_panel import Sample, panel

EVERY_SECONDS = 1.0
RATE_SECONDS = 5.0  # over which rates are told


class Top(App[None]):
    """The view; `ask` is called in a thread, and raises `AtollError` where no daemon answers."""

    ENABLE_COMMAND_PALETTE = False
    CSS = """
    #body { height: 1fr; scrollbar-size-vertical: 1; }
    #gone { color: $text-warning; display: none; height: auto; max-height: 4; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [Binding("q", "quit", "quit")]

    def __init__(self, ask: Callable[[], dict[str, Any]], every: float = EVERY_SECONDS) -> None:
        super().__init__()
        self._ask, self._every = ask, every
        self._samples: list[Sample] = []  # of the last `RATE_SECONDS`, and the one before
        self._trouble = ""  # why there is no answer

    def compose(self) -> ComposeResult:
        yield Static(id="gone", markup=False)
        with VerticalScroll(id="body"):
            yield Static(id="panel", markup=False)
        yield Footer()

    def on_mount(self) -> None:
        self.query_one("#panel", Static).update("asks the daemon of this machine")
        self.run_worker(self._follow())

    def on_resize(self) -> None:
        self._show()

    async def _follow(self) -> None:
        """Ask for as long as the view is there."""
        while True:
            try:
                said = await asyncio.to_thread(self._ask)
            except AtollError as error:
                self._trouble = str(error)
            else:
                self._trouble = ""
                self._remember(Sample(time.monotonic(), said))
            self._show()
            await asyncio.sleep(self._every)

    def _remember(self, sample: Sample) -> None:
        recent = [s for s in self._samples if s.at > sample.at - RATE_SECONDS]
        self._samples = [*self._samples[-len(recent) - 1 :], sample]

    def _show(self) -> None:
        if not self.query("#panel"):  # the terminal's size is known first
            return
        gone = self.query_one("#gone", Static)
        gone.display = bool(self._trouble)
        newest = self._samples[-1] if self._samples else None
        if self._trouble:
            age = f"; what it said {time.monotonic() - newest.at:,.0f} s ago:" if newest is not None else ""
            gone.update(f"{visible(self._trouble)} - it is asked on{age}")
        if newest is not None:
            before = self._samples[0] if len(self._samples) > 1 else None
            lines = panel(before, newest, self.size.width - 1)  # without the scroll bar's column
            self.query_one("#panel", Static).update("\n".join(lines))
