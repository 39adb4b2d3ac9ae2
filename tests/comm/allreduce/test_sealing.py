"""Sealed bytes are what the formats say, decode to the weighted mean, and others are refused."""

import struct
from dataclasses import replace

import numpy as np
import pytest
from deltas import F32, deltas

from atoll.comm.allreduce.sealing import (
    EncodedSeal,
    GatheredSeal,
    SealFormat,
    Term,
    TimedSeal,
    UnusableContribution,
    WeightedMean,
    mean_of,
)
from atoll.comm.codecs.codec import PART_ELEMENTS, Bf16, Codec, Fp32, Int4, Int8, Malformed

N, CODEC = 10, Fp32()
LARGEST = np.finfo(np.float32).max
ENCODED, GATHERED = mean_of(CODEC), GatheredSeal(CODEC, WeightedMean(CODEC))


def terms(xs: list[F32], shares: list[float]) -> list[Term]:
    """Of the members at places 5, 6, ..."""
    return [(i, x.tobytes(), share) for i, (x, share) in enumerate(zip(xs, shares, strict=True), 5)]


def sealed(sealing: SealFormat, xs: list[F32], shares: list[float], length: float = 1.0) -> bytes:
    out = np.full(sealing.size(xs[0].size, len(xs)), 0xAA, np.uint8)
    sealing.seal(0, terms(xs, shares), length, xs[0].size, out)
    return out.tobytes()


def decoded(sealing: SealFormat, payload: bytes, numel: int = N) -> tuple[float, F32]:
    out = np.full(numel, np.nan, np.float32)
    sealing.check(payload, numel)
    return sealing.decode(0, payload, out), out


def mean(xs: list[F32], shares: list[float]) -> F32:
    out = np.zeros_like(xs[0])
    for x, share in zip(xs, shares, strict=True):
        out += np.float32(share) * x
    return out


@pytest.mark.parametrize("numel", [1, N, 2 * PART_ELEMENTS + 3])
def test_a_sealed_chunk_is_the_mean_or_what_it_is_the_mean_of_and_the_rounds_length(numel: int) -> None:
    xs, shares = deltas(3, numel), [0.5, 0.25, 0.125]
    gathered = struct.pack("<I3d", 3, *shares) + b"".join(x.tobytes() for x in xs)
    for sealing, payload in ((ENCODED, mean(xs, shares).tobytes()), (GATHERED, gathered)):
        assert sealed(sealing, xs, shares, 2.5) == payload
        length, out = decoded(sealing, payload, numel)
        assert length == 1.0 and out.tobytes() == mean(xs, shares).tobytes()
        timed = TimedSeal(sealing)
        assert sealed(timed, xs, shares, 2.5) == payload + struct.pack("<d", 2.5)
        length, out = decoded(timed, sealed(timed, xs, shares, 2.5), numel)
        assert length == 2.5 and out.tobytes() == mean(xs, shares).tobytes()


def test_a_merge_of_whole_chunks_has_them_whole() -> None:
    xs, shares = deltas(2, PART_ELEMENTS + 3), [0.5, 0.5]
    seen = []

    class Whole(WeightedMean):
        def __call__(self, c: int, terms: object, out: F32) -> None:
            seen.append(out.size)
            super().__call__(c, terms, out)  # type: ignore[arg-type]

    for elementwise, sizes in ((True, [PART_ELEMENTS, 3]), (False, [PART_ELEMENTS + 3])):
        seen.clear()
        sealing = EncodedSeal(CODEC, replace(Whole(CODEC), elementwise=elementwise))
        assert sealed(sealing, xs, shares) == mean(xs, shares).tobytes() and seen == sizes


@pytest.mark.parametrize("codec", [CODEC, Bf16(), Int8(64), Int4(64)], ids=lambda c: type(c).__name__)
def test_what_is_merged_in_parts_is_the_whole_mean_encoded(codec: Codec) -> None:
    xs, shares, payloads = deltas(2, PART_ELEMENTS + 70), [0.5, 0.25], []
    for x in xs:
        codec.encode(x, payload := np.empty(codec.size(x.size), np.uint8))
        payloads.append(payload)
    out, expected = np.empty((2, codec.size(PART_ELEMENTS + 70)), np.uint8)
    mean_of(codec).seal(0, list(zip((0, 1), payloads, shares, strict=True)), 1.0, PART_ELEMENTS + 70, out)
    whole = np.empty(PART_ELEMENTS + 70, np.float32)
    codec.mean(payloads, shares, whole)
    codec.encode(whole, expected)
    assert out.tobytes() == expected.tobytes()


def test_bytes_fit_if_so_many_contributions_at_most_have_as_many() -> None:
    assert [s for s in range(200) if ENCODED.fits(s, N, 2)] == [40]
    assert [s for s in range(200) if GATHERED.fits(s, N, 2)] == [4 + 48, 4 + 2 * 48]
    assert [s for s in range(200) if TimedSeal(GATHERED).fits(s, N, 2)] == [8 + 4 + 48, 8 + 4 + 2 * 48]


@pytest.mark.parametrize("sealing", [ENCODED, GATHERED])
@pytest.mark.parametrize("sign", [1, -1])
def test_a_mean_that_rounding_puts_beyond_fp32_is_its_largest_number(sealing: SealFormat, sign: int) -> None:
    xs, shares = [np.full(N, sign * LARGEST, np.float32)] * 10, [0.1] * 10
    with np.errstate(over="ignore"):
        assert np.isinf(mean(xs, shares)).all()
    assert (decoded(sealing, sealed(sealing, xs, shares))[1] == sign * LARGEST).all()


GOOD = sealed(GATHERED, [np.ones(N, np.float32)] * 2, [0.5, 0.5])


@pytest.mark.parametrize(
    ("sealing", "payload", "sentence"),
    [
        (ENCODED, bytes(41), "41 bytes"),
        (ENCODED, np.full(N, np.nan, np.float32).tobytes(), "not finite"),
        (GATHERED, GOOD[:-1], "99 bytes, which are no contributions of 10 elements"),
        (GATHERED, bytes(3), "3 bytes, which are no contributions"),
        (GATHERED, bytes(4), "4 bytes, which are no contributions"),
        (GATHERED, b"\3" + GOOD[1:], "2 contributions and says 3"),
        (GATHERED, GOOD[:4] + struct.pack("<2d", -1e-9, 0.5) + GOOD[20:], "negative, or more than 1"),
        (GATHERED, GOOD[:4] + struct.pack("<2d", 0.5, 0.5 + 1e-8) + GOOD[20:], "negative, or more than 1"),
        (GATHERED, GOOD[:4] + struct.pack("<2d", 0.5, np.nan) + GOOD[20:], "negative, or more than 1"),
        (GATHERED, GOOD[:-4] + struct.pack("<f", np.inf), "not finite"),
        (TimedSeal(ENCODED), bytes(7), "7 bytes, too few"),
        (TimedSeal(ENCODED), bytes(39) + struct.pack("<d", 1.0), "39 bytes"),
        *(
            (
                TimedSeal(ENCODED),
                bytes(40) + struct.pack("<d", length),
                "length that is not positive, or not finite",
            )
            for length in (0.0, -1.0, 1e6, np.inf, np.nan)
        ),
    ],
)
def test_bytes_that_no_owner_seals_are_refused(sealing: SealFormat, payload: bytes, sentence: str) -> None:
    with pytest.raises(Malformed, match=sentence):
        sealing.check(payload, N)
    with pytest.raises(Malformed):
        sealing.decode(0, payload, np.empty(N, np.float32))


def test_bytes_at_the_edge_of_what_is_refused_are_taken() -> None:
    decoded(GATHERED, GOOD[:4] + struct.pack("<2d", 0.0, 1 + 1e-10) + GOOD[20:])
    for length in (1e-3, 999_999.0):
        assert decoded(TimedSeal(ENCODED), bytes(40) + struct.pack("<d", length))[0] == length
    assert decoded(TimedSeal(ENCODED), struct.pack("<d", 1.0), 0)[0] == 1.0


@pytest.mark.parametrize("sealing", [ENCODED, GATHERED, TimedSeal(ENCODED)])
def test_a_contribution_that_is_malformed_is_refused_by_its_place(sealing: SealFormat) -> None:
    xs = [np.ones(N, np.float32), np.full(N, np.inf, np.float32)]
    with pytest.raises(UnusableContribution, match="not finite") as refused:
        sealed(sealing, xs, [0.5, 0.5])
    assert refused.value.place == 6
