"""What owners tell of the direction of the contributions that they merge."""

import math
from dataclasses import replace

import numpy as np
import pytest
from reduce_members import CHUNKS, CODEC, VECTORS, Member, encode, fleet, plan_for, reducing, run

from atoll.comm.allreduce.delta_samples import ENOUGH, MAX_STRIDE, DeltaSamples
from atoll.comm.byte_view import U8
from atoll.comm.chunks import Chunks
from atoll.comm.codecs.codec import F32, Codec
from atoll.comm.codecs.factory import make_codec
from atoll.comm.config.run import CodecName
from atoll.outer_opt.arrays import dot, norm

LAST = np.asarray(VECTORS[4] + VECTORS[0])  # what the round before sealed
LONG = 300_000  # elements: several parts of every codec but sparse


def taken(last: F32 = LAST, codec: Codec = CODEC, chunks: Chunks = CHUNKS) -> DeltaSamples:
    samples = DeltaSamples(codec, chunks)
    for c in range(chunks.count):
        samples.take(c, last[chunks.span(c)])
    return samples


def encoded(x: F32, codec: Codec) -> U8:
    out = np.empty(codec.size(x.size), np.uint8)
    codec.encode(x, out)
    return out


def test_owners_and_relays_tell_the_length_of_each_contribution_along_the_last_delta() -> None:
    told = (VECTORS[0], -VECTORS[0], VECTORS[2])

    async def body() -> None:
        async with fleet(3) as planes:
            plan = plan_for(planes)
            plan = replace(plan, members=tuple(replace(m, norm=100.0) for m in plan.members))
            samples = [taken(), taken(), None]  # the third came from elsewhere, and has none
            group = [Member(p, encode(told[i]), plan, samples=samples[i]) for i, p in enumerate(planes)]
            async with reducing(*group):
                for member in group:
                    await member.holds_all()
                for member, mine in zip(group, samples, strict=True):
                    assert member.reports.seals
                    for c, (_, seal) in member.reports.seals.items():
                        if mine is None:
                            assert seal.dots == () and seal.reference == 0
                            continue
                        last = LAST[CHUNKS.span(c)]
                        assert seal.reference == pytest.approx(norm(last), rel=1e-5)
                        for x, found in zip(told, seal.dots, strict=True):
                            exact = dot(x[CHUNKS.span(c)], last) / norm(last)
                            assert found == pytest.approx(exact, abs=0.02 * norm(x[CHUNKS.span(c)]))

    run(body())


def test_where_the_plan_looks_at_no_norms_no_directions_are_told() -> None:
    async def body() -> None:
        async with fleet(2) as planes:
            plan = plan_for(planes)
            group = [Member(p, encode(VECTORS[i]), plan, samples=taken()) for i, p in enumerate(planes)]
            async with reducing(*group):
                for member in group:
                    await member.holds_all()
                    assert {seal.dots for _, seal in member.reports.seals.values()} == {()}

    run(body())


@pytest.mark.parametrize("name", list(CodecName))
@pytest.mark.parametrize("scale", [1.0, 1e-22, 1e22])
def test_a_sample_of_a_long_chunk_tells_its_direction_whatever_its_scale(name: CodecName, scale: float) -> None:
    codec, chunks, rng = make_codec(name, 96), Chunks(LONG, LONG), np.random.default_rng(1)
    last, own = (rng.standard_normal(LONG, np.float32) for _ in range(2))
    deltas = [last, -last, own, (own + last).astype(np.float32), 0 * own]
    payloads = [encoded(np.float32(scale) * x, codec) for x in deltas]
    sample = taken(last, codec, chunks).get(0)
    assert sample is not None and sample.norm == pytest.approx(norm(last), rel=1e-5)
    norms = [math.sqrt(codec.square(p, LONG)) for p in payloads]
    found = sample.dots(codec, payloads, norms)
    for payload, n, along in zip(payloads[:4], norms, found, strict=False):
        x = np.empty(LONG, np.float32)
        codec.decode(payload, x)
        cosine = dot(x, last) / norm(x) / norm(last)
        assert along / n == pytest.approx(cosine, abs=0.05) and abs(along) <= n
    assert found[4] == 0


def test_of_a_model_of_many_chunks_some_have_a_sample_and_nobody_knows_which() -> None:
    chunks, codec = Chunks(100 * 16 * ENOUGH, 100), make_codec(CodecName.FP32, 96)
    of = np.ones(chunks.numel, np.float32), codec, chunks
    one, other = ({c for c in range(chunks.count) if samples.get(c)} for samples in (taken(*of), taken(*of)))
    assert chunks.count == MAX_STRIDE * ENOUGH and one != other
    assert all(0.4 * ENOUGH < len(found) < 2 * ENOUGH for found in (one, other))


@pytest.mark.parametrize("value", [0.0, 1e-30, 1e25])
def test_of_what_is_nothing_or_beyond_all_measure_there_is_no_sample(value: float) -> None:
    chunks = Chunks(1000, 1000)
    samples = taken(np.ones(1000, np.float32), chunks=chunks)
    assert samples.get(0) is not None
    samples.take(0, np.full(1000, value, np.float32))
    assert samples.get(0) is None
