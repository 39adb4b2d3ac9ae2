"""The outer state of a node: anchor and momentum at some round.

`state_k = apply(state_{k-1}, sealed_k)`, chunk by chunk, so a chunk that lags can be brought forward with sealed
bytes alone. Where fragments take turns, a round changes the chunks of its fragment and leaves the others what they
are (`advance_unchanged`).

    moving (peers get nothing) --- finalize: its digests are known ---> final (peers may read it)
        ^                                                                 |
        +---- apply, replace_chunk, initialise, distrust, clear ----------+

Methods that do arithmetic are called from one worker thread at a time; another may copy chunks meanwhile
(`copy_chunk`), and neither waits for longer than a chunk takes.
"""

import threading
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from atoll.comm.allreduce.delta_samples import DeltaSamples
from atoll.comm.allreduce.sealing import SealFormat
from atoll.comm.byte_view import Octets
from atoll.comm.chunks import Chunks
from atoll.comm.digest import digest, root
from atoll.comm.fragment_schedule import FragmentSchedule
from atoll.comm.ids import Round
from atoll.node.outer.partial_chunks import PartialChunks
from atoll.node.outer.shared_vectors import SharedVectors
from atoll.node.outer.staleness import StalenessTracker
from atoll.outer_opt.arrays import norm
from atoll.outer_opt.overlap import Adopt, rebase
from atoll.outer_opt.schedule import Schedule

STEP_ELEMENTS = 1 << 16  # that are stepped at once: a rule works on each alone, and its scratch stays small


class CorruptChunk(Exception):
    """A chunk is not what it was when the state was finalized."""


class OuterState:
    """Anchor and momentum, (n_params,) fp32 each, of which every chunk stands at a round of its own while the
    state moves, and all at one when it is final."""

    def __init__(
        self,
        vectors: SharedVectors,
        chunks: Chunks,
        sealing: SealFormat,
        schedule: Schedule,
        staleness: StalenessTracker | None = None,
        adopt_left_out: Adopt = rebase,
    ) -> None:
        """`staleness` is told how far the anchor goes. `adopt_left_out`: how local work that is set aside takes a
        new anchor."""
        self.staleness, self._adopt_left_out = staleness, adopt_left_out
        self.vectors, self.chunks, self.sealing, self._schedule = vectors, chunks, sealing, schedule
        self.fragment_schedule = FragmentSchedule(chunks.fragment_count)
        self.chunk_rounds: list[int] = [-1] * chunks.count  # the round each chunk stands at; -1: nothing
        # (chunks,) the same and 1, for the next daemon; 0: nothing
        self._stored_rounds = vectors.counters("rounds", chunks.count)
        self.partial_chunks = PartialChunks(vectors, chunks, lambda c: self.chunk_rounds[c] < 0)
        self._digests: list[bytes] = [b""] * chunks.count  # when the state was final last
        self._changed = set(range(chunks.count))  # chunks of which that is not so any more
        self._lock = threading.Lock()  # held while a chunk changes or is copied
        self._delta = np.empty(chunks.largest, np.float32)
        self._scratch = np.empty(chunks.largest, np.float32)
        self._final = False
        # The local vector has work in it that is to be kept; where it is rebased, its distance from the anchor.
        self._work_aside = False
        self.samples: DeltaSamples | None = None  # of what the latest rounds sealed; None: nobody asks

    @property
    def round(self) -> int:
        """The round the whole state stands at; -1 while its chunks differ or there is none."""
        return self.chunk_rounds[0] if len(set(self.chunk_rounds)) == 1 else -1

    @property
    def newest(self) -> int:
        """The newest round that a chunk stands at."""
        return max(self.chunk_rounds)

    def initialise(self, with_momentum: bool = False) -> None:
        """Declare the anchor, which the trainer or a file has written, to be state_0, and finalize it.
        `with_momentum`: the momentum was written, too; else it becomes zero."""
        with self._lock:
            self._final = False
            self._changed = set(range(self.chunks.count))
            if not with_momentum:
                self.vectors.momentum[:] = 0.0
            self._set_all_rounds(0)
        self.finalize()

    def clear(self) -> None:
        """Forget all chunks: the vectors are about to be replaced as a whole."""
        with self._lock:
            self._final = False
            self._changed = set(range(self.chunks.count))
            self._set_all_rounds(-1)
        if self.samples is not None:
            self.samples.discard_all()

    def resume(self, after: int = -1) -> None:
        """Go on with the chunks of rounds after `after` that an earlier daemon left in the vectors, where there is
        nothing else: digests tell whether they are right."""
        with self._lock:
            stored = [int(k) - 1 for k in self._stored_rounds]
            self.chunk_rounds = [
                left if here < 0 and left > after else here
                for here, left in zip(self.chunk_rounds, stored, strict=True)
            ]
            self._changed = set(range(self.chunks.count))

    def apply(self, c: int, payload: Octets) -> None:
        """Bring chunk `c` forward with the sealed bytes of the next round of its fragment, to that round. Raises
        `Malformed`; then nothing changed."""
        before = None if self.staleness is None else self.vectors.anchor[self.chunks.span(c)].copy()
        self._step(c, payload)
        self._record_move(c, before)

    def _step(self, c: int, payload: Octets) -> None:
        span, size = self.chunks.span(c), self.chunks.size(c)
        delta = self._delta[:size]
        length = self.sealing.decode(c, payload, delta)
        round_ = self._next_round(c)
        rule = self._schedule.at(self.fragment_schedule.turn(round_), length)
        with self._lock:
            self._begin_change(c)
            anchor, momentum = self.vectors.anchor[span], self.vectors.momentum[span]
            for i in range(0, size, STEP_ELEMENTS):
                part, scratch = slice(i, i + STEP_ELEMENTS), self._scratch[: min(STEP_ELEMENTS, size - i)]
                rule.step(anchor[part], momentum[part], delta[part], scratch)
            self._set_round(c, round_)
        if self.samples is not None:
            self.samples.take(c, delta)

    def advance_unchanged(self, round_: int, chunks: Iterable[int] | None = None) -> None:
        """Advance chunks to `round_` that no round up to it changes any more, and that are here: their elements
        stay as they are. `chunks`: those to look at; None: all."""
        with self._lock:
            for c in range(self.chunks.count) if chunks is None else chunks:
                if 0 <= self.chunk_rounds[c] < round_ < self._next_round(c):
                    self._final = False
                    self._set_round(c, round_)

    def adopt_fragment(self, fragment: int, adopt: Adopt) -> None:
        """Adopt this fragment's new anchor in the local vector, as if nothing were trained since it was sent."""
        local, anchor = self.vectors.local, self.vectors.anchor
        for c in self.chunks.fragment_range(fragment):
            span, scratch = self.chunks.span(c), self._scratch[: self.chunks.size(c)]
            adopt(local[span], anchor[span], local[span].copy(), scratch)

    def replace_chunk(self, c: int, round_: int, data: bytes | bytearray) -> None:
        """Take chunk `c` of state `round_` from a peer or a snapshot: its anchor, then its momentum, fp32."""
        unmoved = self.staleness is None or self.chunk_rounds[c] < 0
        before = None if unmoved else self.vectors.anchor[self.chunks.span(c)].copy()
        self._replace(c, round_, data)
        self._record_move(c, before)

    def _replace(self, c: int, round_: int, data: bytes | bytearray) -> None:
        span, size = self.chunks.span(c), self.chunks.size(c)
        both = np.frombuffer(data, np.float32)
        if self.samples is not None:
            self.samples.discard(c)
        with self._lock:
            self._begin_change(c)
            self.vectors.anchor[span] = both[:size]
            self.vectors.momentum[span] = both[size:]
            self._set_round(c, round_)
            self.partial_chunks.discard(c)  # not before: who is killed meanwhile has what came

    def mark_missing(self, c: int) -> None:
        """Mark chunk `c` as missing: the vectors do not have the run's."""
        self.chunk_rounds[c] = -1

    def copy_chunk(self, c: int) -> tuple[int, NDArray[np.float32], bytes]:
        """Round, anchor and then momentum, (2 size,) fp32, and digest of chunk `c` as it is now. Raises
        `CorruptChunk`."""
        span = self.chunks.span(c)
        with self._lock:
            round_ = self.chunk_rounds[c]
            both = np.concatenate([self.vectors.anchor[span], self.vectors.momentum[span]])
            expected = self._digests[c] if self._final else None
        found = digest(both)
        if expected is not None and found != expected:
            raise CorruptChunk(f"chunk {c} of the state of round {round_} changed in memory by itself")
        return round_, both, found

    def is_intact(self, c: int) -> bool:
        """Whether chunk `c` is what it was when the state was finalized. If not, the next `finalize` digests
        it."""
        with self._lock:
            if not self._final or self.chunk_digest(c) == self._digests[c]:
                return True
            self._changed.add(c)
            return False

    def rebuild_chunk(self, c: int, round_: int, data: bytes, payloads: Sequence[Octets]) -> bool:
        """Make chunk `c` of the final state anew: from its anchor and momentum in `round_` and the sealed bytes of
        its fragment's rounds since. False: that did not give what it was when the state was finalized."""
        target, fragment = self.chunk_rounds[c], self.chunks.place(c)[0]
        missed = self.fragment_schedule.rounds(fragment, round_, target)
        assert len(payloads) == len(missed), "these are of other rounds"
        self._replace(c, round_, data)
        for payload in payloads:
            self._step(c, payload)
        with self._lock:
            self._set_round(c, target)
            self._final = True
            right = self.chunk_digest(c) == self._digests[c]
            if right:
                self._changed.discard(c)
            return right

    def renumber(self, round_: int) -> None:
        """Declare the same state to be that of `round_`, all chunks: the rounds in between are void."""
        with self._lock:
            self._set_all_rounds(round_)

    def set_work_aside(self) -> None:
        """Keep the local vector's work while the anchor moves; `finalize` has it take the new anchor. To be called
        before the anchor moves; a second call has no effect."""
        if not self._work_aside and self._adopt_left_out is rebase:
            np.subtract(self.vectors.local, self.vectors.anchor, out=self.vectors.local)
        self._work_aside = True

    def distrust(self) -> None:
        """Close the state to peers and forget work set aside: the state is not the run's. Digests tell which
        chunks differ."""
        with self._lock:
            self._final = False
            self._changed = set(range(self.chunks.count))
        self._work_aside = False

    def finalize(self) -> bytes:
        """Digest what changed, open the state to peers, return the root digest: the state stands still until the
        next commit. Work that was set aside now takes the new anchor."""
        if self.staleness is not None:
            self.staleness.finalized(owed=self._work_aside)
        if self._work_aside:
            self._adopt_work_aside()
            self._work_aside = False
        digests = [self.chunk_digest(c) if c in self._changed else known for c, known in enumerate(self._digests)]
        with self._lock:
            self._digests, self._final = digests, True
            self._changed.clear()
        return root(digests)

    def _adopt_work_aside(self) -> None:
        vectors = self.vectors
        if self._adopt_left_out is rebase:
            np.add(vectors.local, vectors.anchor, out=vectors.local)
            return
        for c in self._changed:  # the others have the anchor that the work was begun from
            span, scratch = self.chunks.span(c), self._scratch[: self.chunks.size(c)]
            self._adopt_left_out(vectors.local[span], vectors.anchor[span], vectors.anchor[span], scratch)

    def chunk_digest(self, c: int) -> bytes:
        """Digest of chunk `c` as the vectors have it now."""
        span = self.chunks.span(c)
        return digest(self.vectors.anchor[span], self.vectors.momentum[span])

    # What peers may read (atoll.node.daemon.state_server)

    def final_chunk(self, round: Round, c: int) -> bytes | None:
        """Anchor, then momentum of chunk `c`, fp32, of the final state of `round`; None: there is no such."""
        if not self._final or self.round != round or not 0 <= c < self.chunks.count:
            return None
        span, digests = self.chunks.span(c), self._digests
        data = self.vectors.anchor[span].tobytes() + self.vectors.momentum[span].tobytes()
        # The worker may have gone on meanwhile: peers would take what is torn for a lie.
        return data if self._final and self._digests is digests else None

    def final_digests(self, round: Round) -> Sequence[bytes] | None:
        """The digests of the chunks of the final state of `round`; None: there is no such."""
        return self._digests if self._final and self.round == round else None

    # Rounds of chunks, here and for the next daemon

    def _next_round(self, c: int) -> int:
        """The round after its own that changes chunk `c`."""
        return self.fragment_schedule.next(self.chunks.place(c)[0], self.chunk_rounds[c])

    def _begin_change(self, c: int) -> None:
        self._final = False
        self._stored_rounds[c] = 0
        self._changed.add(c)

    def _set_round(self, c: int, round_: int) -> None:
        self.chunk_rounds[c] = round_
        self._stored_rounds[c] = round_ + 1

    def _set_all_rounds(self, round_: int) -> None:
        self.chunk_rounds = [round_] * self.chunks.count
        self._stored_rounds[:] = round_ + 1
        self.partial_chunks.discard_all()

    def _record_move(self, c: int, before: NDArray[np.float32] | None) -> None:
        if self.staleness is not None and before is not None:
            before -= self.vectors.anchor[self.chunks.span(c)]
            self.staleness.record_move(self.chunks.place(c)[0], self.chunk_rounds[c], norm(before))
