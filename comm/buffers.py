"""Memory that is used again: the kernel clears what it gives anew, which can take longer than encoding.

The encoder and the reduction take buffers for frames from a `BufferPool`, and scratch vectors of their thread.
"""

import threading

import numpy as np

from atoll.comm.byte_view import F32, U8

_thread = threading.local()


class BufferPool:
    """Free buffers of one size, from whose fronts smaller ones are handed out. For one thread."""

    def __init__(self) -> None:
        self._size = 0  # bytes of each
        self._free: list[U8] = []

    def take(self, size: int, largest: int) -> U8:
        """Hand out (size,) bytes of undefined content, of a buffer that has place for `largest` bytes."""
        if largest > self._size:
            self._size = largest
            self._free.clear()
        whole = self._free.pop() if self._free else np.empty(self._size, np.uint8)
        return whole[:size]

    def give(self, part: U8) -> None:
        """Take back what `take` handed out, once nobody reads or writes it. Memory from elsewhere is ignored."""
        if isinstance(whole := part.base, np.ndarray) and whole.base is None and whole.size == self._size:
            self._free.append(whole)

    def __len__(self) -> int:
        return len(self._free)


def thread_scratch(size: int) -> F32:
    """Scratch memory of this thread, (size,) fp32 of undefined content: valid until this thread asks again."""
    if len(getattr(_thread, "room", ())) < size:
        _thread.room = np.empty(size, np.float32)
    whole: F32 = _thread.room
    return whole[:size]
