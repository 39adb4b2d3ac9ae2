"""Memory that is used again: the kernel clears what it gives anew, which can take longer than encoding."""

import threading

import numpy as np

from atoll.comm.byte_view import F32, U8

_thread = threading.local()


class BufferPool:
    """Buffers of one size at least; parts of them are handed out."""

    def __init__(self) -> None:
        self._size = 0  # bytes of each
        self._free: list[U8] = []

    def take(self, size: int, largest: int) -> U8:
        """`size` bytes, of a buffer that has place for `largest`; what is in it is anything."""
        if largest > self._size:
            self._size = largest
            self._free.clear()
        whole = self._free.pop() if self._free else np.empty(self._size, np.uint8)
        return whole[:size]

    def give(self, part: U8) -> None:
        """It is no longer read or written by anybody. What did not come from here is left alone."""
        if isinstance(whole := part.base, np.ndarray) and whole.base is None and whole.size == self._size:
            self._free.append(whole)

    def __len__(self) -> int:
        return len(self._free)


def room(size: int) -> F32:
    """Memory of this thread's own, (size,); what is in it is anything, until this is called again."""
    if len(getattr(_thread, "room", ())) < size:
        _thread.room = np.empty(size, np.float32)
    whole: F32 = _thread.room
    return whole[:size]
