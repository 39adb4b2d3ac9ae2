"""Notices at once that a process is told to end, though its main thread is in the middle of native code."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@contextmanager
def on_stop(note: Callable[[], None]) -> Iterator[None]:
    """Call `note` in a thread when one of `STOP_SIGNALS` comes, and end the process with exit code 128 + N. To be
    used in the main thread."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)  # or Python refuses it

    def watch() -> None:
        while number := os.read(reading, 1):
            if number[0] in STOP_SIGNALS:
                note()
                os._exit(128 + number[0])
        os.close(reading)

    # A handler of Python's own waits for the main thread; the number of the signal is written before, by C.
    before = {number: signal.signal(number, _wait_for_watcher) for number in STOP_SIGNALS}
    earlier = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    threading.Thread(target=watch, name="stop signals", daemon=True).start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(earlier)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(writing)


def _wait_for_watcher(*_: Any) -> None:
    """Do nothing: the thread ends the process."""
