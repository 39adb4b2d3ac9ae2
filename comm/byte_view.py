"""Bytes that are passed on without being copied."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    U8 = NDArray[np.uint8]
    F32 = NDArray[np.float32]
    Octets = bytes | bytearray | memoryview | U8
else:  # the coordinator digests bytes, and has no use for numpy
    U8 = F32 = Octets = Any


def view(data: "Octets | NDArray[Any]") -> memoryview:
    """The bytes of a contiguous buffer, not copied. Raises `TypeError` where it is not contiguous."""
    whole = memoryview(data)  # type: ignore[arg-type]
    return whole.cast("B") if whole.nbytes else memoryview(b"")
