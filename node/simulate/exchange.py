"""A fragment's shared state, and one round of it over the wire: encode, merge, seal, apply.

All that real nodes do to the numbers is done, chunk by chunk: each member's delta is encoded once, the owner
decodes and merges them and encodes the result once, and every replica decodes that. A sparse codec's payloads are
gathered instead: everybody decodes all of them and merges by itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from atoll.comm.chunks import Chunks
from atoll.comm.codecs.codec import Codec, Malformed
from atoll.comm.codecs.factory import make_codec
from atoll.comm.config.run import CodecName, RunConfig
from atoll.node.outer.method import chunk_pieces, merge_pieces
from atoll.node.simulate.defence import Seals
from atoll.node.simulate.method import Method
from atoll.outer_opt.arrays import norm
from atoll.outer_opt.clip import clip_factors
from atoll.outer_opt.fragments import Fragment
from atoll.outer_opt.weights import bounded, shares

F32 = NDArray[np.float32]


@dataclass(frozen=True)
class MemberDelta:
    """The contribution of one member to a round of a fragment."""

    decoded: F32  # (numel,) what its encoded bytes say
    tokens: int
    steps: int  # inner steps behind the delta
    damping: float = 1.0


class ReplicatedState:
    """The anchor and momentum of a fragment, the same on every node: `state_k = apply(state_{k-1}, sealed_k)`."""

    def __init__(self, config: RunConfig, method: Method, fragment: Fragment, flat: F32) -> None:
        self.fragment, self.round = fragment, 0
        self.anchor, self.momentum = np.empty(fragment.numel, np.float32), np.zeros(fragment.numel, np.float32)
        fragment.gather(flat, self.anchor)
        self.sealed: F32 | None = None  # (numel,) the merged delta of the newest round
        self.moved = 0.0  # |anchor_k - anchor_{k-1}|
        self._config, self._method = config, method
        self._gathers = config.reduce.codec is CodecName.SPARSE
        self._codec: Codec = make_codec(config.reduce.codec, config.reduce.block, config.reduce.scales)
        self._chunks = Chunks(fragment.numel, config.reduce.chunk)
        self._pieces = chunk_pieces(fragment, self._chunks)

    @property
    def encoded_size(self) -> int:
        """Bytes of one encoded delta."""
        return sum(self._codec.size(self._chunks.size(c)) for c in range(self._chunks.count))

    def bytes_sent(self, members: int) -> float:
        """Bytes that each of `members` sends in a round: 2 (n - 1) / n of a vector in a reduce, n - 1 vectors in a
        gathering."""
        return self.encoded_size * (members - 1) * (1.0 if self._gathers else 2.0 / max(members, 1))

    def over_the_wire(self, delta: F32) -> F32:
        """Encode a delta (numel,) and decode it as the others do, (numel,). Raises `NonFinite` if training
        diverged."""
        decoded = np.empty_like(delta)
        for c in range(self._chunks.count):
            span = self._chunks.span(c)
            decoded[span] = self._encoded(c, delta[span])
        return decoded

    def commit(self, contributions: Sequence[MemberDelta], seals: Seals | None = None) -> None:
        """Merge the contributions, seal the mean, and take the outer step: `round`, `anchor`, `momentum` and
        `moved`. `seals`: the owners, None: honest ones."""
        weights = self._method.weigh([c.tokens for c in contributions], [c.steps for c in contributions])
        factors = [c.damping for c in contributions]
        if self._config.outer.clip:
            norms, steps = [norm(c.decoded) for c in contributions], [float(c.steps) for c in contributions]
            clips = clip_factors(norms, steps, float(self._config.rounds.inner_steps))
            factors = [f * g for f, g in zip(factors, clips, strict=True)]
        parts, sealed = shares(weights, factors), np.empty_like(self.anchor)
        scratch = np.empty_like(self.anchor)

        def seal(c: int) -> F32:
            span = self._chunks.span(c)
            deltas = [contribution.decoded[span] for contribution in contributions]
            merged = np.empty(self._chunks.size(c), np.float32)
            merge_pieces(self._config.outer, self._pieces[c], deltas, parts, merged, scratch[span])
            return merged if self._gathers else self._encoded(c, merged)

        for c in range(self._chunks.count):
            sealed[self._chunks.span(c)] = seal(c)
        if seals is not None:
            seals(self._chunks, sealed, self._encoded, seal)
        self.round += 1
        self.sealed = sealed
        before = self.anchor.copy()
        rule = self._method.schedule.at(self.round, self._length(contributions))
        rule.step(self.anchor, self.momentum, sealed, scratch)
        before -= self.anchor
        self.moved = norm(before)

    def refuses(self, payload: int) -> bool:
        """Whether an owner refuses a contribution to the first chunk whose bytes all are this one."""
        size = self._chunks.size(0)
        try:
            self._codec.check(np.full(self._codec.size(size), payload, np.uint8), size)
        except Malformed:
            return True
        return False

    def _encoded(self, c: int, x: F32) -> F32:
        """What the elements of chunk `c`, (n,), are once they were encoded."""
        payload, decoded = np.empty(self._codec.size(x.size), np.uint8), np.empty_like(x)
        self._codec.encode(x, payload)
        self._codec.decode(payload, decoded)
        return decoded

    def _length(self, contributions: Sequence[MemberDelta]) -> float:
        """Of the round, in usual rounds."""
        if not self._config.outer.per_token:
            return 1.0
        steps = bounded([float(c.steps) for c in contributions], self._config.security.weight_bound)
        return sum(steps) / len(contributions) / self._config.rounds.inner_steps
