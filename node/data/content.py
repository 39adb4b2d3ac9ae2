"""A source file's content as bytes, decompressed on the way, with memory that does not depend on the file."""

import gzip
import io
import zlib
from typing import Any, BinaryIO, Self

import zstandard

from atoll.comm.errors import ResourceError

SKIP_BYTES = 1 << 20  # that are read at once when a stream is wound forward
ZSTD_INPUT_BYTES = 2 << 10  # fed at once: the densest frame makes 64 MiB of them


class Content:
    """The content of a file, read from its beginning to its end. Errors are `ResourceError`s that name it."""

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            self._raw = open(path, "rb")
        except OSError as error:
            raise ResourceError(f"cannot read {path}: {error.strerror}") from error
        self._stream: Any = self._raw
        if path.endswith(".gz"):
            self._stream = gzip.GzipFile(fileobj=self._raw)
        elif path.endswith(".zst"):
            self._stream = _ZstdStream(self._raw)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._raw.close()

    @property
    def consumed(self) -> int:
        """Bytes of the file that were read, as they lie on the disk."""
        return self._raw.tell()

    def read(self, count: int) -> bytes:
        """Read `count` bytes of the content; fewer only at its end."""
        parts = list[bytes]()
        try:
            while count and (part := self._stream.read(count)):
                parts.append(part)
                count -= len(part)
        except (EOFError, zlib.error, gzip.BadGzipFile, zstandard.ZstdError) as error:
            raise ResourceError(
                f"{self.path} is damaged or cut short near byte {self.consumed}, {error}: get it again, or leave "
                "it out"
            ) from error
        except OSError as error:
            raise ResourceError(f"cannot read {self.path}: {error.strerror or error}") from error
        return b"".join(parts)

    def skip(self, count: int) -> None:
        """Go `count` bytes of the content forward. Raises `ResourceError` if it has fewer."""
        if self._stream is self._raw:
            self._raw.seek(count, io.SEEK_CUR)
            return
        while count:
            if not (part := self.read(min(count, SKIP_BYTES))):
                raise ResourceError(f"{self.path} became shorter since it was read")
            count -= len(part)


class _ZstdStream:
    """The content of zstd frames, one after the other. Raises `EOFError` in a frame that is cut short, which
    zstandard's own reader takes for an end."""

    def __init__(self, raw: BinaryIO) -> None:
        self._raw, self._frame, self._ready, self._rest = raw, None, memoryview(b""), b""

    def read(self, count: int) -> bytes:
        while not self._ready:
            data = self._rest or self._raw.read(ZSTD_INPUT_BYTES)
            if not data:
                if self._frame is not None:
                    raise EOFError("its last zstd frame has no end")
                return b""
            frame: Any = self._frame or zstandard.ZstdDecompressor(max_window_size=1 << 27).decompressobj()
            self._ready = memoryview(frame.decompress(data))
            self._rest, self._frame = (frame.unused_data, None) if frame.eof else (b"", frame)
        part, self._ready = self._ready[:count], self._ready[count:]
        return bytes(part)
