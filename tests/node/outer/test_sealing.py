"""What real nodes seal and apply is what `atoll simulate` does to the same deltas, bit for bit."""

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from atoll.comm.allreduce.sealing import UnusableContribution
from atoll.comm.chunks import Chunks
from atoll.comm.codecs.factory import make_codec
from atoll.comm.config.outer import FragmentsConfig, MergeName, OuterConfig, PatternName, WeightName
from atoll.comm.config.run import CodecName, ReduceConfig, RunConfig
from atoll.node.outer.layout import flat_order, fragments_and_chunks
from atoll.node.outer.method import chunk_pieces, outer_schedule, seal_format
from atoll.node.outer.shared_vectors import SharedVectors
from atoll.node.outer.state import OuterState
from atoll.node.simulate.exchange import MemberDelta, ReplicatedState
from atoll.node.simulate.method import build_method
from atoll.outer_opt.arrays import norm
from atoll.outer_opt.clip import clip_factors
from atoll.outer_opt.fragments import whole
from atoll.outer_opt.tensors import TensorKind, with_offsets
from atoll.outer_opt.weights import bounded, shares

SHAPES = {"blocks.0.wq": (64, 40), "embed": (96, 40), "norm": (40,), "out": (40, 64)}
TENSORS = with_offsets((f"{name}.weight", shape) for name, shape in SHAPES.items())
(MODEL,) = whole(TENSORS)
F32 = NDArray[np.float32]


def drawn(members: int) -> list[F32]:
    rng = np.random.default_rng(members)
    sizes = [10.0 ** rng.integers(-3, 3) for _ in range(members)]
    return [np.float32(s) * rng.standard_t(3, MODEL.numel).astype(np.float32) for s in sizes]


@pytest.mark.parametrize("merge", MergeName)
@pytest.mark.parametrize("codec", CodecName)
@pytest.mark.parametrize("weights", [WeightName.TOKENS, WeightName.QUALITY])
def test_nodes_do_what_the_simulator_does(merge: MergeName, codec: CodecName, weights: WeightName) -> None:
    outer = OuterConfig(merge=merge, weights=weights, clip=True, per_token=True)
    run = RunConfig(outer=outer, reduce=ReduceConfig(codec=codec, chunk=1024))
    method, chunks = build_method(run, TENSORS), Chunks(MODEL.numel, 1024)
    start = np.random.default_rng(9).standard_normal(MODEL.numel).astype(np.float32)
    simulated = ReplicatedState(run, method, MODEL, start)
    sealing, wire = seal_format(run, MODEL), make_codec(codec, run.reduce.block, run.reduce.scales)
    anchor, momentum = start.copy(), np.zeros_like(start)
    for round_ in (1, 2, 3):
        deltas, steps = drawn(round_ + 1), [40 * (i + 1) * round_ for i in range(round_ + 1)]
        decoded = [simulated.over_the_wire(delta) for delta in deltas]
        found = [MemberDelta(x, 64 * n, n) for x, n in zip(decoded, steps, strict=True)]
        simulated.commit(found)

        clips = clip_factors([norm(x) for x in decoded], steps, run.rounds.inner_steps)
        parts = shares(method.weigh([c.tokens for c in found], steps), clips)
        length = sum(bounded(steps, run.security.weight_bound)) / len(steps) / run.rounds.inner_steps
        for c in range(chunks.count):
            span, n = chunks.span(c), chunks.size(c)
            payloads = [np.empty(wire.size(n), np.uint8) for _ in deltas]
            for delta, payload in zip(deltas, payloads, strict=True):
                wire.encode(np.ascontiguousarray(delta[span]), payload)
            terms = [(i, payload, parts[i]) for i, payload in enumerate(payloads)]
            sealed = np.empty(sealing.size(n, len(terms)), np.uint8)
            delta, scratch = np.empty((2, n), np.float32)
            sealing.seal(c, terms, length, n, sealed)
            assert sealing.fits(sealed.size, n, len(terms))
            sealing.check(sealed, n)
            assert sealing.decode(c, sealed, delta) == length
            method.schedule.at(round_, length).step(anchor[span], momentum[span], delta, scratch)
        assert anchor.tobytes() == simulated.anchor.tobytes()
        assert momentum.tobytes() == simulated.momentum.tobytes()


@pytest.mark.parametrize("merge", MergeName)
@pytest.mark.parametrize("pattern", PatternName)
def test_fragments_that_take_turns_are_what_the_simulator_makes_of_each(
    merge: MergeName, pattern: PatternName, tmp_path: Path
) -> None:
    outer = OuterConfig(clip=False, merge=merge, momentum_warmup=3, per_token=True)
    reduce = ReduceConfig(codec=CodecName.INT4, chunk=1024)
    run = RunConfig(outer=outer, reduce=reduce, fragments=FragmentsConfig(3, pattern))
    method, rng = build_method(run, TENSORS), np.random.default_rng(9)
    start = rng.standard_normal(MODEL.numel).astype(np.float32)
    simulated = [ReplicatedState(run, method, fragment, start) for fragment in method.fragments]
    fragments, chunks = fragments_and_chunks(run, flat_order(run, [(t.name, t.shape) for t in TENSORS]))
    vectors, wire = (
        SharedVectors.create(MODEL.numel, tmp_path),
        make_codec(CodecName.INT4, reduce.block, reduce.scales),
    )
    for p, fragment in enumerate(method.fragments):
        fragment.gather(start, vectors.anchor[chunks.fragment_slice(p)])
    state = OuterState(vectors, chunks, seal_format(run, *fragments), outer_schedule(run))
    state.initialise()
    for round_ in range(1, 8):
        p = (round_ - 1) % chunks.fragment_count
        alone, sealing, steps = chunks.fragment_chunks(p), seal_format(run, fragments[p]), [20, 30 * round_]
        deltas = [delta[: alone.numel] for delta in drawn(2)]
        decoded = [simulated[p].over_the_wire(delta) for delta in deltas]
        simulated[p].commit([MemberDelta(x, 64 * n, n) for x, n in zip(decoded, steps, strict=True)])

        parts = shares(method.weigh([64 * n for n in steps], steps), [1.0, 1.0])
        for i, c in enumerate(chunks.fragment_range(p)):
            payloads = [np.empty(wire.size(alone.size(i)), np.uint8) for _ in deltas]
            for delta, payload in zip(deltas, payloads, strict=True):
                wire.encode(np.ascontiguousarray(delta[alone.span(i)]), payload)
            terms = [(k, payload, parts[k]) for k, payload in enumerate(payloads)]
            sealed = np.empty(sealing.size(alone.size(i), 2), np.uint8)
            sealing.seal(
                i,
                terms,
                sum(bounded(steps, run.security.weight_bound)) / 2 / run.rounds.inner_steps,
                alone.size(i),
                sealed,
            )
            state.apply(c, sealed)
        state.advance_unchanged(round_)
        state.finalize()
        assert state.round == round_
        for q, replica in enumerate(simulated):
            assert vectors.anchor[chunks.fragment_slice(q)].tobytes() == replica.anchor.tobytes()
            assert vectors.momentum[chunks.fragment_slice(q)].tobytes() == replica.momentum.tobytes()
    vectors.close()


def test_chunks_know_what_they_have_of_each_tensor() -> None:
    pieces = chunk_pieces(MODEL, Chunks(MODEL.numel, 2000))
    assert pieces[0] == [(TensorKind.MATRIX, slice(0, 2000))]
    assert pieces[1] == [(TensorKind.MATRIX, slice(0, 560)), (TensorKind.EMBEDDING, slice(560, 2000))]
    assert pieces[-1] == [(TensorKind.MATRIX, slice(0, 1000))]
    assert sum(s.stop - s.start for chunk in pieces for _, s in chunk) == MODEL.numel


@pytest.mark.parametrize("merge", MergeName)
def test_a_malformed_contribution_is_refused_by_its_place(merge: MergeName) -> None:
    run = RunConfig(outer=OuterConfig(merge=merge), reduce=ReduceConfig(chunk=1024))
    sealing = seal_format(run, MODEL)
    good = np.zeros(sealing.size(1024, 1), np.uint8)
    terms = [(3, good, 0.5), (7, good[:-1], 0.5)]
    with pytest.raises(UnusableContribution) as refused:
        sealing.seal(0, terms, 1.0, 1024, good.copy())
    assert refused.value.place == 7


@pytest.mark.parametrize("merge", [MergeName.CENTERED, MergeName.TRIMMED])
def test_robust_merges_need_no_model_and_bound_an_outlier(merge: MergeName) -> None:
    run = RunConfig(outer=OuterConfig(merge=merge), reduce=ReduceConfig(codec=CodecName.FP32, chunk=1024))
    rng = np.random.default_rng(1)
    honest = [(1 + 0.1 * rng.standard_normal(1024)).astype("<f4") for _ in range(7)]
    terms = [(i, x.view(np.uint8), 1 / 8) for i, x in enumerate([*honest, np.full(1024, -1e30, "<f4")])]
    sealed = [np.empty(4096, np.uint8) for _ in range(2)]
    seal_format(run).seal(0, terms, 1.0, 1024, sealed[0])
    seal_format(run, MODEL).seal(0, terms, 1.0, 1024, sealed[1])
    assert sealed[0].tobytes() == sealed[1].tobytes()
    np.testing.assert_allclose(sealed[0].view("<f4"), 1, atol=0.3)
