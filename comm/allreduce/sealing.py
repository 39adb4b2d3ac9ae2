"""The sealing of a chunk by its owner: from the contributions to sealed bytes, which give everybody the same
delta.

    contributions --seal--> bytes --decode--> merged delta, and the round's length

    EncodedSeal     the merged delta, encoded once
    GatheredSeal    the contributions as they came: everybody merges them by itself
    TimedSeal       another sealing's bytes, and behind them the round's length, fp64, little-endian

How contributions are merged is a `ChunkMerge`: here the weighted mean. Only operations that IEEE arithmetic rounds
once are used, so all owners would make the same bytes of the same contributions, and all members the same delta.

Gathered bytes, of k contributions in plan order, all numbers little-endian:

    4 bytes         k
    8k bytes        the share of each, fp64
    k size(numel)   what each contributor encoded, `size` being the codec's
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Protocol

import numpy as np

from atoll.comm.buffers import thread_scratch
from atoll.comm.byte_view import U8, view
from atoll.comm.codecs.codec import F32, Codec, Malformed, NonFinite, Octets

Term = tuple[int, Octets, float]  # place in the plan, contribution, share: its weight over all, times its scale
LENGTH_BYTES = SHARE_BYTES = 8  # bytes
COUNT_BYTES = 4  # bytes
MAX_ROUND_LENGTH = 1e6  # usual rounds that one round may count as


class UnusableContribution(Exception):
    """A contribution that cannot be used."""

    def __init__(self, place: int, sentence: str) -> None:
        super().__init__(sentence)
        self.place, self.sentence = place, sentence


class ChunkMerge(Protocol):
    """A rule by which the contributions to a chunk are averaged."""

    @property
    def elementwise(self) -> bool:
        """Whether parts of a chunk may be merged one after another, as the codec has them."""

    def __call__(self, c: int, terms: Sequence[Term], out: F32) -> None:
        """Write what the contributions to chunk `c` come to into `out` (n,) fp32. Raises
        `UnusableContribution`."""


class SealFormat(Protocol):
    """A format of a chunk's sealed bytes: makes, checks and reads them."""

    def size(self, numel: int, terms: int) -> int:
        """Bytes of `numel` sealed elements of `terms` contributions."""

    def fits(self, size: int, numel: int, most: int) -> bool:
        """Whether `numel` sealed elements of `most` contributions at most can have `size` bytes."""

    def seal(self, c: int, terms: Sequence[Term], length: float, numel: int, out: U8) -> None:
        """Seal chunk `c`, of `numel` elements, into `out` (size,) uint8. `length`: the round's, in usual rounds.
        Raises `UnusableContribution`."""

    def check(self, payload: Octets, numel: int, length: float | None = None) -> None:
        """Raise `Malformed` unless it decodes to `numel` finite elements, and is of a round of this length, where
        it says so (None: of any)."""

    def square(self, payload: Octets, numel: int) -> float:
        """What the squared l2 norm of its `numel` elements is, or an upper bound of it. Raises `Malformed`."""

    def decode(self, c: int, payload: Octets, out: F32) -> float:
        """Check the bytes of chunk `c`, write the merged delta into `out` (n,) fp32, and return the round's
        length, in usual rounds. Raises `Malformed`."""


@dataclass(frozen=True)
class WeightedMean:
    """sum_i share_i x_i, the product and the sum each rounded once, in plan order."""

    codec: Codec
    elementwise: bool = True

    def __call__(self, c: int, terms: Sequence[Term], out: F32) -> None:
        try:
            self.codec.mean([payload for _, payload, _ in terms], [share for _, _, share in terms], out)
        except Malformed:
            for place, payload, _ in terms:
                _refuse_malformed(self.codec, place, payload, out.size)
            raise


@dataclass(frozen=True)
class EncodedSeal:
    """The merged delta, encoded once."""

    codec: Codec
    merge: ChunkMerge

    def size(self, numel: int, terms: int) -> int:
        return self.codec.size(numel)

    def fits(self, size: int, numel: int, most: int) -> bool:
        return size == self.codec.size(numel)

    def seal(self, c: int, terms: Sequence[Term], length: float, numel: int, out: U8) -> None:
        """Merge the contributions to chunk `c`, part by part where the merge is elementwise, and encode the mean
        into `out`; `length` is left out. Raises `UnusableContribution`."""
        if not self.merge.elementwise:
            self._seal(c, terms, thread_scratch(numel), out)
            return
        whole = [(place, view(payload), share) for place, payload, share in terms]
        for elements, octets in self.codec.parts(numel):
            part: list[Term] = [(place, payload[octets], share) for place, payload, share in whole]
            self._seal(c, part, thread_scratch(elements.stop - elements.start), out[octets])

    def _seal(self, c: int, terms: Sequence[Term], merged: F32, out: U8) -> None:
        self.merge(c, terms, merged)
        try:
            self.codec.encode(merged, out)
        except NonFinite:  # contributions at the end of fp32's range, and shares that were rounded up
            largest = np.finfo(np.float32).max
            self.codec.encode(np.clip(merged, -largest, largest, out=merged), out)

    def check(self, payload: Octets, numel: int, length: float | None = None) -> None:
        self.codec.check(payload, numel)

    def square(self, payload: Octets, numel: int) -> float:
        return self.codec.square(payload, numel)

    def decode(self, c: int, payload: Octets, out: F32) -> float:
        self.codec.decode(payload, out)
        return 1.0


@dataclass(frozen=True)
class GatheredSeal:
    """The contributions themselves, for codecs whose mean they could not encode: the mean of sparse deltas is not
    sparse. An all-gather by way of the chunk's owner, who says once and for all what is in it."""

    codec: Codec
    merge: ChunkMerge

    def size(self, numel: int, terms: int) -> int:
        return COUNT_BYTES + terms * (SHARE_BYTES + self.codec.size(numel))

    def fits(self, size: int, numel: int, most: int) -> bool:
        terms, rest = divmod(size - COUNT_BYTES, SHARE_BYTES + self.codec.size(numel))
        return rest == 0 and 0 < terms <= most

    def seal(self, c: int, terms: Sequence[Term], length: float, numel: int, out: U8) -> None:
        """Check the contributions, and write their number, their shares and them into `out`, as the module's
        docstring has it; `length` is left out. Raises `UnusableContribution`."""
        first = COUNT_BYTES + SHARE_BYTES * len(terms)
        out[:COUNT_BYTES].view("<u4")[0] = len(terms)
        out[COUNT_BYTES:first].view("<f8")[:] = [share for _, _, share in terms]
        places = out[first:].reshape(len(terms), -1)
        for (place, payload, _), copy in zip(terms, places, strict=True):
            _refuse_malformed(self.codec, place, payload, numel)
            copy[:] = np.frombuffer(payload, np.uint8)

    def check(self, payload: Octets, numel: int, length: float | None = None) -> None:
        for _, contribution, _ in self._terms(payload, numel):
            self.codec.check(contribution, numel)

    def square(self, payload: Octets, numel: int) -> float:
        """By the triangle inequality: merging would take as long as it does at the commit."""
        terms = self._terms(payload, numel)
        return sum(share * sqrt(self.codec.square(each, numel)) for _, each, share in terms) ** 2

    def decode(self, c: int, payload: Octets, out: F32) -> float:
        """Merge the contributions into `out` (n,) fp32, kept within its finite range; returns 1, the length of a
        usual round. Raises `Malformed`."""
        try:
            self.merge(c, self._terms(payload, out.size), out)
        except UnusableContribution as refused:
            raise Malformed(f"its contribution {refused.place} is malformed: {refused.sentence}") from None
        largest = np.finfo(np.float32).max
        np.clip(out, -largest, largest, out=out)  # shares add up to 1, but for their rounding
        return 1.0

    def _terms(self, payload: Octets, numel: int) -> list[Term]:
        octets: U8 = np.frombuffer(payload, np.uint8)
        if not self.fits(octets.size, numel, octets.size):
            raise Malformed(f"it has {octets.size} bytes, which are no contributions of {numel} elements")
        count = (octets.size - COUNT_BYTES) // (SHARE_BYTES + self.codec.size(numel))
        first = COUNT_BYTES + SHARE_BYTES * count
        told, found = int(octets[:COUNT_BYTES].view("<u4")[0]), octets[COUNT_BYTES:first].view("<f8").tolist()
        if told != count:
            raise Malformed(f"it has {count} contributions and says {told}")
        if not (min(found) >= 0 and sum(found) < 1 + 1e-9):  # nor are they NaN
            raise Malformed("it holds shares that are negative, or more than 1 together")
        return [(i, contribution, found[i]) for i, contribution in enumerate(octets[first:].reshape(count, -1))]


@dataclass(frozen=True)
class TimedSeal:
    """The bytes of another seal, then the round's length in usual rounds, fp64: for an outer rule whose decay is
    kept per token."""

    sealing: SealFormat

    def size(self, numel: int, terms: int) -> int:
        return self.sealing.size(numel, terms) + LENGTH_BYTES

    def fits(self, size: int, numel: int, most: int) -> bool:
        return self.sealing.fits(size - LENGTH_BYTES, numel, most)

    def seal(self, c: int, terms: Sequence[Term], length: float, numel: int, out: U8) -> None:
        self.sealing.seal(c, terms, length, numel, out[:-LENGTH_BYTES])
        out[-LENGTH_BYTES:].view("<f8")[0] = length

    def check(self, payload: Octets, numel: int, length: float | None = None) -> None:
        rest, told = _split(payload)
        if length is not None and length != told:
            raise Malformed(f"it is of a round of length {told:g}, and this one's is {length:g}")
        self.sealing.check(rest, numel)

    def square(self, payload: Octets, numel: int) -> float:
        return self.sealing.square(_split(payload)[0], numel)

    def decode(self, c: int, payload: Octets, out: F32) -> float:
        rest, length = _split(payload)
        self.sealing.decode(c, rest, out)
        return length


def mean_of(codec: Codec) -> EncodedSeal:
    """The seal of the plain weighted mean, encoded once with `codec`."""
    return EncodedSeal(codec, WeightedMean(codec))


def _refuse_malformed(codec: Codec, place: int, payload: Octets, numel: int) -> None:
    try:
        codec.check(payload, numel)
    except Malformed as error:
        raise UnusableContribution(place, str(error)) from None


def _split(payload: Octets) -> tuple[U8, float]:
    octets: U8 = np.frombuffer(payload, np.uint8)
    if octets.size < LENGTH_BYTES:
        raise Malformed(f"it has {octets.size} bytes, too few for a round's length")
    length = float(octets[-LENGTH_BYTES:].view("<f8")[0])
    if not 0 < length < MAX_ROUND_LENGTH:
        raise Malformed("it holds a round's length that is not positive, or not finite")
    return octets[:-LENGTH_BYTES], length
