"""The outer state of a node: anchor and momentum at some round.

`state_k = apply(state_{k-1}, sealed_k)`, chunk by chunk, so a chunk that lags can be brought forward with sealed
bytes alone. Where fragments take turns, a round changes the chunks of its fragment and leaves the others what they
are (`pass_over`). The state may be read by peers whenever it stands still. Methods that do arithmetic are called
from one worker thread at a time; another may `copy` chunks meanwhile, and neither waits for longer than a chunk
takes.
"""

import threading
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from atoll.comm.allreduce.sealing import SealFormat
from atoll.comm.byte_view import Octets
from atoll.comm.chunks import Chunks
from atoll.comm.digest import digest, root
from atoll.comm.fragment_schedule import FragmentSchedule
from atoll.comm.ids import Round
from atoll.node.outer.shared_vectors import SharedVectors
from atoll.node.outer.staleness import StalenessTracker
from atoll.outer_opt.arrays import norm
from atoll.outer_opt.overlap import Adopt, rebase
from atoll.outer_opt.schedule import Schedule

STEP = 1 << 16  # elements that are stepped at once: a rule works on each alone, and its scratch stays small


class CorruptChunk(Exception):
    """A chunk is not what it was when the state was settled."""


class OuterState:
    def __init__(
        self,
        vectors: SharedVectors,
        chunks: Chunks,
        sealing: SealFormat,
        schedule: Schedule,
        gap: StalenessTracker | None = None,
        left_out: Adopt = rebase,
    ) -> None:
        """`gap`: is told how far the anchor goes. `left_out`: how work that is set aside takes it."""
        self.gap, self._left_out = gap, left_out
        self.vectors, self.chunks, self.sealing, self._schedule = vectors, chunks, sealing, schedule
        self.turns = FragmentSchedule(chunks.fragment_count)
        self.at: list[int] = [-1] * chunks.count  # the round each chunk of the state stands at; -1: nothing
        # (chunks,) the same and 1, for the next daemon; 0: nothing
        self._noted = vectors.notes("notes", chunks.count)
        # (chunks, 2) whose bytes of a chunk have come, and how many
        self._landed = vectors.notes("landed", 2 * chunks.count).reshape(-1, 2)
        self._digests: list[bytes] = [b""] * chunks.count  # when it was settled last
        self._changed = set(range(chunks.count))  # chunks of which that is not so any more
        self._turn = threading.Lock()  # held while a chunk changes or is copied
        self._delta = np.empty(chunks.largest, np.float32)
        self._scratch = np.empty(chunks.largest, np.float32)
        self._still = False
        self._aside = (
            False  # the local vector has work in it; to be rebased, it holds the distance from the anchor
        )

    @property
    def round(self) -> int:
        """The round the whole state stands at; -1 while its chunks differ or there is none."""
        return self.at[0] if len(set(self.at)) == 1 else -1

    @property
    def newest(self) -> int:
        """The newest round that a chunk stands at."""
        return max(self.at)

    def initialised(self, momentum: bool = False) -> None:
        """The anchor was written, by the trainer or from a file: this is state_0. `momentum`: it was, too."""
        with self._turn:
            self._still = False
            self._changed = set(range(self.chunks.count))
            if not momentum:
                self.vectors.momentum[:] = 0.0
            self._all_at(0)
        self.settle()

    def emptied(self) -> None:
        """What the vectors hold is about to be replaced as a whole."""
        with self._turn:
            self._still = False
            self._changed = set(range(self.chunks.count))
            self._all_at(-1)

    def resume(self, after: int = -1) -> None:
        """Go on with the chunks of rounds after `after` that an earlier daemon left in the vectors, where there is
        nothing else: digests tell whether they are right."""
        with self._turn:
            left = (int(noted) - 1 for noted in self._noted)
            self.at = [k if at < 0 and k > after else at for at, k in zip(self.at, left, strict=True)]
            self._changed = set(range(self.chunks.count))

    def apply(self, c: int, payload: Octets) -> None:
        """Bring chunk `c` forward with the sealed bytes of the next round of its fragment, to that round. Raises
        `Malformed`; then nothing changed."""
        before = None if self.gap is None else self.vectors.anchor[self.chunks.span(c)].copy()
        self._step(c, payload)
        self._moved(c, before)

    def _step(self, c: int, payload: Octets) -> None:
        span, size = self.chunks.span(c), self.chunks.size(c)
        delta = self._delta[:size]
        length = self.sealing.decode(c, payload, delta)
        round_ = self.turns.next(self.chunks.place(c)[0], self.at[c])
        rule = self._schedule.at(self.turns.turn(round_), length)
        with self._turn:
            self._changes(c)
            anchor, momentum = self.vectors.anchor[span], self.vectors.momentum[span]
            for i in range(0, size, STEP):
                part, scratch = slice(i, i + STEP), self._scratch[: min(STEP, size - i)]
                rule.step(anchor[part], momentum[part], delta[part], scratch)
            self.at[c] = round_
            self._noted[c] = round_ + 1

    def pass_over(self, round_: int, chunks: Iterable[int] | None = None) -> None:
        """Of these chunks, or all: what no round up to `round_` changes any more is as it is in `round_`, too."""
        with self._turn:
            for c in range(self.chunks.count) if chunks is None else chunks:
                if 0 <= self.at[c] < round_ < self.turns.next(self.chunks.place(c)[0], self.at[c]):
                    self._still = False
                    self.at[c] = round_
                    self._noted[c] = round_ + 1

    def take(self, fragment: int, adopt: Adopt) -> None:
        """The local vector takes the new anchor of this fragment, as if nothing were trained since it was sent."""
        local, anchor = self.vectors.local, self.vectors.anchor
        for c in self.chunks.fragment_range(fragment):
            span, scratch = self.chunks.span(c), self._scratch[: self.chunks.size(c)]
            adopt(local[span], anchor[span], local[span].copy(), scratch)

    def put(self, c: int, round_: int, data: bytes | bytearray) -> None:
        """Take chunk `c` of state `round_` as a peer sent it: anchor, then momentum."""
        unmoved = self.gap is None or self.at[c] < 0
        before = None if unmoved else self.vectors.anchor[self.chunks.span(c)].copy()
        self._replace(c, round_, data)
        self._moved(c, before)

    def _replace(self, c: int, round_: int, data: bytes | bytearray) -> None:
        span, size = self.chunks.span(c), self.chunks.size(c)
        both = np.frombuffer(data, np.float32)
        with self._turn:
            self._changes(c)
            self.vectors.anchor[span] = both[:size]
            self.vectors.momentum[span] = both[size:]
            self.at[c] = round_
            self._noted[c] = round_ + 1
            self._landed[c] = 0  # not before: who is killed meanwhile has what came

    # A chunk that comes in parts, in the place of one that is not here

    def land(self, c: int, sum_: bytes, at: int, part: bytes) -> None:
        """Bytes of the chunk whose digest is `sum_`, from `at` on; an earlier daemon may have had those before."""
        self._land(c, sum_, at, part)

    def land_more(self, c: int, sum_: bytes, data: bytearray, end: int) -> None:
        """What follows on it, up to `end`, came before."""
        if 0 < (here := self._here(c, sum_)) < end:
            self._land(c, sum_, here, bytes(data[here:end]))

    def _land(self, c: int, sum_: bytes, at: int, part: bytes) -> None:
        if self.at[c] >= 0 or self._here(c, sum_) != at:
            return
        span, half = self.chunks.span(c), 4 * self.chunks.size(c)
        first = part[: max(half - at, 0)]
        anchor, momentum = (v[span].view(np.uint8) for v in (self.vectors.anchor, self.vectors.momentum))
        anchor[at : at + len(first)] = np.frombuffer(first, np.uint8)
        rest = max(at - half, 0)
        momentum[rest : rest + len(part) - len(first)] = np.frombuffer(part, np.uint8, offset=len(first))
        self._landed[c] = int.from_bytes(sum_[:8], "little", signed=True), at + len(part)

    def landed(self, c: int, sum_: bytes) -> bytearray:
        """What is here of the chunk whose digest is `sum_`."""
        if self.at[c] >= 0 or not (here := self._here(c, sum_)):
            return bytearray()
        span = self.chunks.span(c)
        return bytearray(self.vectors.anchor[span].tobytes() + self.vectors.momentum[span].tobytes())[:here]

    def _here(self, c: int, sum_: bytes) -> int:
        whose, size = self._landed[c]
        return int(size) if whose == int.from_bytes(sum_[:8], "little", signed=True) else 0

    def unland(self, c: int) -> None:
        """What is here of it is wrong."""
        self._landed[c] = 0

    def copy(self, c: int) -> tuple[int, NDArray[np.float32], bytes]:
        """Round, anchor and momentum (2, size) and digest of chunk `c` as it is now. Raises `CorruptChunk`."""
        span = self.chunks.span(c)
        with self._turn:
            round_, both = self.at[c], np.concatenate([self.vectors.anchor[span], self.vectors.momentum[span]])
            known = self._digests[c] if self._still else None
        sum_ = digest(both)
        if known is not None and sum_ != known:
            raise CorruptChunk(f"chunk {c} of the state of round {round_} changed in memory by itself")
        return round_, both, sum_

    def sound(self, c: int) -> bool:
        """Chunk `c` is what it was when the state was settled. If not, it is digested anew the next time."""
        with self._turn:
            if not self._still or self.chunk_digest(c) == self._digests[c]:
                return True
            self._changed.add(c)
            return False

    def remake(self, c: int, round_: int, data: bytes, payloads: Sequence[Octets]) -> bool:
        """Make chunk `c` of the settled state anew: as it was in `round_`, brought forward. False: that did not
        give what it was when it was settled."""
        at, p = self.at[c], self.chunks.place(c)[0]
        assert len(payloads) == len(self.turns.rounds(p, round_, at)), "these are of other rounds"
        self._replace(c, round_, data)
        for payload in payloads:
            self._step(c, payload)
        with self._turn:
            self.at[c], self._noted[c], self._still = at, at + 1, True
            right = self.chunk_digest(c) == self._digests[c]
            if right:
                self._changed.discard(c)
            return right

    def renumber(self, round_: int) -> None:
        """The same state is that of `round_`: the rounds in between are void."""
        with self._turn:
            self._all_at(round_)

    def _moved(self, c: int, before: NDArray[np.float32] | None) -> None:
        if self.gap is not None and before is not None:
            before -= self.vectors.anchor[self.chunks.span(c)]
            self.gap.moved(self.chunks.place(c)[0], self.at[c], norm(before))

    def _changes(self, c: int) -> None:
        self._still = False
        self._noted[c] = 0
        self._changed.add(c)

    def _all_at(self, round_: int) -> None:
        self.at = [round_] * self.chunks.count
        self._noted[:] = round_ + 1
        self._landed[:] = 0

    def set_aside(self) -> None:
        """Before the anchor moves: what the local vector has beyond it is to be kept (until `settle`)."""
        if not self._aside and self._left_out is rebase:
            np.subtract(self.vectors.local, self.vectors.anchor, out=self.vectors.local)
        self._aside = True

    def distrust(self) -> None:
        """The state is not the run's: peers get nothing of it, and no work is beyond it. Digests tell which chunks
        differ."""
        with self._turn:
            self._still = False
            self._changed = set(range(self.chunks.count))
        self._aside = False

    def settle(self) -> bytes:
        """The state stands still until the next commit: digest what changed, open it to peers, return the root
        digest. Work that was set aside now takes the new anchor."""
        if self.gap is not None:
            self.gap.settled(owed=self._aside)
        if self._aside:
            self._take_aside()
            self._aside = False
        digests = [self.chunk_digest(c) if c in self._changed else known for c, known in enumerate(self._digests)]
        with self._turn:
            self._digests, self._still = digests, True
            self._changed.clear()
        return root(digests)

    def _take_aside(self) -> None:
        vectors = self.vectors
        if self._left_out is rebase:
            np.add(vectors.local, vectors.anchor, out=vectors.local)
            return
        for c in self._changed:  # the others have the anchor that the work was begun from
            span, scratch = self.chunks.span(c), self._scratch[: self.chunks.size(c)]
            self._left_out(vectors.local[span], vectors.anchor[span], vectors.anchor[span], scratch)

    def chunk_digest(self, c: int) -> bytes:
        span = self.chunks.span(c)
        return digest(self.vectors.anchor[span], self.vectors.momentum[span])

    # What peers may read (atoll.node.daemon.state_server)

    def state(self, round: Round, chunk: int) -> bytes | None:
        if not self._still or self.round != round or not 0 <= chunk < self.chunks.count:
            return None
        span, settled = self.chunks.span(chunk), self._digests
        data = self.vectors.anchor[span].tobytes() + self.vectors.momentum[span].tobytes()
        # The worker may have gone on meanwhile: peers would take what is torn for a lie.
        return data if self._still and self._digests is settled else None

    def digests(self, round: Round) -> Sequence[bytes] | None:
        return self._digests if self._still and self.round == round else None
