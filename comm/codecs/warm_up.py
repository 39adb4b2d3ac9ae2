"""Compile what a run's codec calls before anybody waits for it.

A kernel that is compiled in the middle of a reduce holds up every peer for seconds. A node calls
`warm_up_in_thread` at its start, the demo `warm_up`; machine code that an earlier process left on the disk is only
loaded. Of several nodes on one machine one compiles, the others wait for it and load what it made.
"""

import asyncio
import fcntl
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np

from atoll.comm.codecs.codec import Codec
from atoll.comm.codecs.loaded import one_compiles

LOCK = Path(tempfile.gettempdir()) / f"atoll-kernels-{os.getuid()}.lock"
LOCK_PATIENCE = 60.0  # seconds; who has waited so long compiles, too
LOCK_POLL = 0.1  # seconds
ELEMENTS = 515  # several blocks, and a shorter one at the end


async def warm_up_in_thread(codec: Codec, say: Callable[[str], None], lock: Path = LOCK) -> None:
    """`warm_up` in a thread. When it is cancelled the thread waits no longer for another process, so that this one
    can end; what it compiles itself it compiles to the end."""
    stop = Event()
    try:
        await asyncio.to_thread(warm_up, codec, say, lock, stop)
    finally:
        stop.set()


def warm_up(codec: Codec, say: Callable[[str], None], lock: Path = LOCK, stop: Event | None = None) -> None:
    """Load or compile each kernel that `codec` calls; `say` is told when something must be compiled. Takes seconds
    of one core once in the life of an installation, a third of a second later on. Once `stop` is set it waits for
    no other process, and begins nothing."""
    stop = Event() if stop is None else stop
    from numba.core import event

    class _Told(event.Listener):
        def __init__(self) -> None:
            self.begun = 0.0

        def on_start(self, event: Any) -> None:
            if not self.begun:
                self.begun = time.monotonic()
                say("compiling kernels, once: the machine code is kept for the next start")

        def on_end(self, event: Any) -> None:
            pass

    with _claimed(lock, stop), one_compiles:
        if stop.is_set():
            return
        listener = _Told()
        with event.install_listener("numba:compile", listener):
            exercise(codec)
        if listener.begun:
            say(f"kernels compiled in {time.monotonic() - listener.begun:.1f} s")


def exercise(codec: Codec) -> None:
    """Call every method of a codec on a small vector."""
    x = np.linspace(-1, 1, ELEMENTS, dtype=np.float32)
    payload, out = np.empty(codec.size(x.size), np.uint8), np.empty_like(x)
    codec.encode(x, payload)
    codec.check(payload, x.size)
    codec.decode(payload, out)
    codec.decode(payload, out, far=True)
    codec.accumulate(payload, np.float32(0.5), out)
    codec.mean([payload, payload], [0.5, 0.5], out)
    codec.square(payload, x.size)


@contextmanager
def _claimed(lock: Path, stop: Event) -> Iterator[None]:
    """Alone among this user's processes; without it where the file cannot be had, another keeps it too long, or
    `stop` is set."""
    try:
        file = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError:
        yield
        return
    try:
        deadline = time.monotonic() + LOCK_PATIENCE
        while not _locked(file) and time.monotonic() < deadline and not stop.wait(LOCK_POLL):
            pass
        yield
    finally:
        os.close(file)


def _locked(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
