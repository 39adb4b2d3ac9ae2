"""The residual: what a lossy wire left out of this node's deltas, to be added to its next ones (error feedback,
`atoll.outer_opt.feedback`).

    offered = beta residual + (anchor - local)      what is encoded; nothing changes, so it can be computed again
    residual <- offered - decoded(encoded)          when a round is committed that has the node's bytes

The second line goes chunk by chunk. A chunk of a committed round that the node's bytes are not in, though they are
in others (its owner died, say), keeps all that was offered. A round that has nothing of the node changes nothing:
the node keeps its progress, and the next delta holds this one. So what was sent in rounds that used it, and the
residual, is at any time what was trained and is not in the local parameters any more (with a decay of 1).

The residual is the node's own: peers do not know it, and who joins begins with none. `round` is the last committed
round that has the node's bytes and that the residual knows of. The coordinator tells a node which round that is;
so one that came back from the disk is used only if no later round has used it, and nothing is sent twice.

    magic 8 | run 16 | round i64 | elements u64 | digest of all the rest, 16 | residual, fp32
    (little-endian)

On disk it is one file, replaced after each such round.
"""

import logging
import struct
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from atoll.comm.bitmap import bit
from atoll.comm.byte_view import U8
from atoll.comm.chunks import Chunks
from atoll.comm.codecs.codec import Codec
from atoll.comm.digest import DIGEST_SIZE, digest
from atoll.comm.files import atomic_write, write_all
from atoll.comm.fragment_schedule import FragmentSchedule
from atoll.node.outer.shared_vectors import SharedVectors
from atoll.outer_opt.feedback import ErrorFeedback

log = logging.getLogger("atoll.node")
MAGIC, FILE_NAME = b"atollrs1", "residual"
_HEAD = struct.Struct(f"<8s16sqQ{DIGEST_SIZE}s")
F32 = NDArray[np.float32]


class Residual:
    """The residual vector and its file. Arithmetic is called from one worker thread at a time, but for `offer`."""

    def __init__(
        self,
        feedback: ErrorFeedback,
        vectors: SharedVectors,
        chunks: Chunks,
        codec: Codec,
        location: tuple[Path, bytes] | None = None,
    ) -> None:
        """`location`: a folder, and what tells the run from others (16 bytes); None: nothing is written."""
        self._location = location
        self._feedback, self._vectors, self._chunks, self._codec = feedback, vectors, chunks, codec
        self.vector: F32 = np.zeros(chunks.numel, np.float32)  # (numel,)
        self.round = 0  # the last that used this node's bytes, as far as is known here
        self._saving: Future[None] | None = None
        self._thread = ThreadPoolExecutor(1, "residual")

    def offer(self, span: slice, delta: F32) -> None:
        """Add the residual of the elements `span` to their delta, (n,) fp32, in place: what is to be encoded."""
        offered = np.empty_like(delta)
        self._feedback.offer(self.vector[span], delta, offered)
        delta[...] = offered

    def commit(self, round_: int, encoded: Sequence[U8 | None], lacking: bytes) -> None:
        """Update the residual for the committed round `round_`, while anchor and local vector are still what the
        round's delta was encoded from. `encoded`: this node's bytes of each chunk of the round's fragment;
        `lacking`: a bitmap of the chunks in which the round has none of them, which may have never been made."""
        if round_ <= self.round:
            return
        fragment = FragmentSchedule(self._chunks.fragment_count).fragment(round_)
        for i, c in enumerate(self._chunks.fragment_range(fragment)):
            span = self._chunks.span(c)
            offered, sent = np.zeros((2, self._chunks.size(c)), np.float32)
            np.subtract(self._vectors.anchor[span], self._vectors.local[span], out=offered)
            self.offer(span, offered)
            if not bit(lacking, i):
                payload = encoded[i]
                assert payload is not None, "the round has bytes of a chunk that was never made"
                self._codec.decode(payload, sent)
            self._feedback.commit(self.vector[span], offered, sent)
        self.round = round_

    def reset_to(self, round_: int) -> None:
        """Begin anew with an empty residual: `round_` has this node's bytes, and it is not known any more what was
        offered then, so nothing of the residual is sure not to have been sent. No effect if that is known."""
        if round_ > self.round:
            if self.vector.any():
                log.info(f"round {round_} has used what the wire had left out before; that begins anew")
            self.vector[:] = 0.0
            self.round = round_

    # On disk

    def save(self) -> None:
        """Write the residual in a thread, unless the thread is still at the last one: then the disk has none that
        is of use."""
        if self._location is not None and (self._saving is None or self._saving.done()):
            self._saving = self._thread.submit(_write, *self._location, self.round, self.vector.copy())

    def close(self) -> None:
        """Finish what is being written, and end the thread."""
        self._thread.shutdown()

    def restore(self) -> None:
        """Take the residual that an earlier life of this node left on the disk, if it is whole."""
        if self._location is None:
            return
        folder, run = self._location
        try:
            data = (folder / FILE_NAME).read_bytes()
            magic, stored_run, round_, numel, stored_digest = _HEAD.unpack(data[: _HEAD.size])
        except (OSError, struct.error):
            return
        body = memoryview(data)[_HEAD.size :]
        if (magic, stored_run, numel) != (MAGIC, run, self._chunks.numel) or len(body) != 4 * numel:
            return
        if _digest(run, round_, body) == stored_digest:
            self.vector[:] = np.frombuffer(body, np.float32)
            self.round = round_


def _write(folder: Path, run: bytes, round_: int, vector: F32) -> None:
    body = vector.data.cast("B")
    head = _HEAD.pack(MAGIC, run, round_, vector.size, _digest(run, round_, body))
    try:
        with atomic_write(folder / FILE_NAME, len(head) + len(body)) as file:
            write_all(file, [memoryview(head), body], 0)
    except OSError as error:
        log.warning(f"what the wire left out is not kept on disk: {error.strerror or error}")


def _digest(run: bytes, round_: int, body: memoryview) -> bytes:
    return digest(run + struct.pack("<q", round_), body)
