"""The outer state of a node: anchor and momentum at some round, and the sealed bytes of the last few rounds.

`state_k = apply(state_{k-1}, sealed_k)`, chunk by chunk, so a chunk that lags can be brought forward with sealed
bytes alone. The state may be read by peers (it is the data plane's shelf) whenever it stands still.
Methods that do arithmetic are called from one worker thread at a time.
"""

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from atoll.comm.chunks import Chunks
from atoll.comm.codec import Codec
from atoll.comm.digest import digest, root
from atoll.comm.ids import Round
from atoll.comm.octets import U8, Octets
from atoll.node.vectors import Vectors
from atoll.outer_opt.ramp import Rule

KEEP = 4  # rounds of sealed bytes that peers may ask for


class OuterState:
    def __init__(self, vectors: Vectors, chunks: Chunks, codec: Codec, rule: Rule) -> None:
        self.vectors, self.chunks, self._codec, self._rule = vectors, chunks, codec, rule
        self.at: list[int] = [-1] * chunks.count  # the round each chunk of the state stands at; -1: nothing
        self._digests: list[bytes] = []
        self._sealed: OrderedDict[int, Sequence[U8]] = OrderedDict()
        self._delta = np.empty(chunks.size(0), np.float32)
        self._scratch = np.empty(chunks.size(0), np.float32)
        self._still = False
        self._aside = False  # the local vector holds its distance from the anchor instead of parameters

    @property
    def round(self) -> int:
        """The round the whole state stands at; -1 while its chunks differ or there is none."""
        return self.at[0] if len(set(self.at)) == 1 else -1

    def initialised(self) -> None:
        """The anchor was written by the trainer: this is state_0."""
        self.vectors.momentum[:] = 0.0
        self.at = [0] * self.chunks.count
        self.settle()

    def apply(self, c: int, payload: Octets) -> None:
        """Bring chunk `c` one round forward with its sealed bytes. Raises `Malformed`; then nothing changed."""
        span, size = self.chunks.span(c), self.chunks.size(c)
        delta, scratch = self._delta[:size], self._scratch[:size]
        self._codec.decode(payload, delta)
        self._still = False
        rule = self._rule.at(self.at[c] + 1)
        rule.step(self.vectors.anchor[span], self.vectors.momentum[span], delta, scratch)
        self.at[c] += 1

    def put(self, c: int, round_: int, data: bytes) -> None:
        """Take chunk `c` of state `round_` as a peer sent it: anchor, then momentum."""
        span, size = self.chunks.span(c), self.chunks.size(c)
        both = np.frombuffer(data, np.float32)
        self._still = False
        self.vectors.anchor[span] = both[:size]
        self.vectors.momentum[span] = both[size:]
        self.at[c] = round_

    def set_aside(self) -> None:
        """Before the anchor moves: what the local vector has beyond it is to be kept (`settle` rebases it)."""
        if not self._aside:
            np.subtract(self.vectors.local, self.vectors.anchor, out=self.vectors.local)
            self._aside = True

    def distrust(self) -> None:
        """Nothing of the state is worth keeping: every chunk is to be fetched."""
        self.at = [-1] * self.chunks.count
        self._aside = False

    def keep(self, round_: int, payloads: Sequence[U8]) -> Sequence[U8]:
        """Remember the sealed bytes of a committed round; returns those that are forgotten instead."""
        self._sealed[round_] = payloads
        return self._sealed.popitem(last=False)[1] if len(self._sealed) > KEEP else ()

    def settle(self) -> bytes:
        """The state stands still until the next commit: digest it, open it to peers, return the root digest.
        Work that was set aside now starts from the new anchor."""
        if self._aside:
            np.add(self.vectors.local, self.vectors.anchor, out=self.vectors.local)
            self._aside = False
        self._digests = [self.chunk_digest(c) for c in range(self.chunks.count)]
        self._still = True
        return root(self._digests)

    def chunk_digest(self, c: int) -> bytes:
        span = self.chunks.span(c)
        return digest(self.vectors.anchor[span], self.vectors.momentum[span])

    # What peers may read (atoll.comm.plane.Shelf)

    def sealed(self, round: Round, chunk: int) -> bytes | None:
        payloads = self._sealed.get(round)  # a copy: the memory is used again, when it is forgotten
        return payloads[chunk].tobytes() if payloads is not None and chunk < len(payloads) else None

    def state(self, round: Round, chunk: int) -> bytes | None:
        if not self._still or self.round != round or not 0 <= chunk < self.chunks.count:
            return None
        span = self.chunks.span(chunk)
        return self.vectors.anchor[span].tobytes() + self.vectors.momentum[span].tobytes()

    def digests(self, round: Round) -> Sequence[bytes] | None:
        return self._digests if self._still and self.round == round else None
