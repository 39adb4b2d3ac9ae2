"""Liars in simulated runs: what they send and seal, and what a run does about it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from atoll.comm.chunks import Chunks
from atoll.comm.config.data import DataConfig
from atoll.comm.config.model import ModelConfig
from atoll.comm.config.outer import OuterConfig
from atoll.comm.config.run import CodecName, InnerConfig, OptimizerName, ReduceConfig, RoundsConfig, RunConfig
from atoll.comm.errors import ConfigError
from atoll.comm.evidence import Consequence, Offence
from atoll.node.config import NodeConfig
from atoll.node.data.samples import Source
from atoll.node.data.source import open_source
from atoll.node.simulate.cli import simulate
from atoll.node.simulate.conditions import Conditions
from atoll.node.simulate.defence import Defence, Seals, undefended
from atoll.node.simulate.exchange import MemberDelta, ReplicatedState
from atoll.node.simulate.fleet import SimulatedFleet
from atoll.node.simulate.liars import Liar, Lie, LieKind, parsed
from atoll.node.simulate.method import build_method
from atoll.node.simulate.simulation import fleet_of
from atoll.outer_opt.arrays import norm
from atoll.outer_opt.fragments import whole
from atoll.outer_opt.tensors import with_offsets

NODE, LIAR = NodeConfig(), 7
RUN = RunConfig(
    seed=3,
    model=ModelConfig(dim=16, layers=1, heads=2, kv_heads=1, ffn_dim=16, seq_len=16),
    data=DataConfig(val_batches=1, eval_every=1000),
    inner=InnerConfig(optimizer=OptimizerName.ADAMW, batch_size=1, warmup_tokens=1),
    rounds=RoundsConfig(inner_steps=1),
    outer=OuterConfig(clip=True),
    reduce=ReduceConfig(block=64, chunk=512),
)
(MODEL,) = whole(with_offsets([("blocks.0.wq.weight", (64, 40))]))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    return open_source(RUN, NODE, tmp_path_factory.mktemp("cache"))


def fleet(source: Source, rounds: int, lie: str = "", run: RunConfig = RUN, **conditions: Any) -> SimulatedFleet:
    """After its run, of 8 nodes whose last one lies."""
    given = Conditions(8, rounds, liars=bool(lie), lie=lie, **conditions)
    given.check()
    found = fleet_of(run, NODE, given, source, lambda record: None)
    found.simulate()
    return found


@pytest.mark.parametrize("text", ["flip:10", "noise:10000", "zeros", "replay", "copy", "nan", "weight:8"])
def test_a_lie_is_named_as_it_is_shown(text: str) -> None:
    assert str(parsed(text)) == text
    assert parsed("noise:1e4") == Lie(LieKind.NOISE, 1e4)
    assert parsed("seal") == Lie(LieKind.SEAL, 0.125)


@pytest.mark.parametrize("text", ["lie", "flip:", "flip:x", "flip:-1", "flip:nan", "zeros:1", "seal:2", ""])
def test_what_is_no_lie_is_a_sentence(text: str) -> None:
    with pytest.raises(ConfigError, match="--liar is"):
        parsed(text)


def test_there_are_fewer_liars_than_nodes_and_they_have_a_lie() -> None:
    with pytest.raises(ConfigError, match="--liars is 8"):
        Conditions(8, 1, liars=8, lie="zeros").check()
    with pytest.raises(ConfigError, match="say with --liar"):
        Conditions(8, 1, liars=1).check()
    with pytest.raises(ConfigError, match="say with --liars how many"):
        Conditions(8, 1, lie="zeros").check()


def test_deltas_of_liars() -> None:
    first, second, others = (np.random.default_rng(i).standard_normal(500).astype(np.float32) for i in range(3))

    def sent(lie: str) -> np.ndarray[Any, np.dtype[np.float32]]:
        liar = Liar(parsed(lie), (1, 2))
        liar.delta(0, first, [others])
        return liar.delta(0, second, [others])

    np.testing.assert_array_equal(sent("flip:10"), -10 * second)
    assert norm(sent("noise:100")) == pytest.approx(100 * norm(second), rel=1e-5)
    assert not sent("zeros").any() and np.isnan(sent("nan")).all()
    for lie, delta in {"replay": first, "copy": others, "weight:8": second, "seal:0.5": second}.items():
        np.testing.assert_array_equal(sent(lie), delta)
    assert Liar(parsed("weight:8"), (1,)).claim == 8 and Liar(parsed("flip"), (1,)).claim == 1


def test_the_wire_of_every_dense_codec_refuses_bytes_that_are_no_numbers() -> None:
    for codec in set(CodecName) - {CodecName.SPARSE}:
        run = replace(RUN, reduce=ReduceConfig(codec=codec, block=64, chunk=512))
        state = ReplicatedState(run, build_method(run, MODEL.tensors), MODEL, np.zeros(MODEL.numel, np.float32))
        assert state.refuses(0xFF) and not state.refuses(0), codec


def test_bytes_that_are_no_numbers_count_for_nothing(source: Source) -> None:
    found = fleet(source, 4, "nan")
    assert found.refused == 4 and not found.defence.decisions
    assert [record.members for record in found.records[1:]] == [7] * 4


# Owners


def sealed(defence: Defence, size: float, seed: int = 0) -> tuple[list[int], list[int]]:
    """The chunks that are other than they should be after one round's sealing, and who was charged."""
    chunks, true = Chunks(64 * 8, 8), np.arange(64 * 8, dtype=np.float32)
    liars, result = {LIAR: Liar(Lie(LieKind.SEAL, size), (seed,))}, true.copy()
    seals = Seals(defence, liars, 1, range(8))
    seals(chunks, result, lambda c, x: x, lambda c: true[chunks.span(c)])
    wrong = [c for c in range(chunks.count) if result[chunks.span(c)].tobytes() != true[chunks.span(c)].tobytes()]
    return wrong, [decision.node for decision in defence.decisions]


def test_who_seals_what_is_not_so_does_it_in_chunks_that_it_owns() -> None:
    off = Defence.of(RUN, on=False)
    assert sealed(off, 0.125) == (list(range(56, 64)), [])
    assert sealed(off, 0.05) == ([56, 57, 58], [])


def test_a_lying_owner_that_is_drawn_is_banned_and_all_of_its_chunks_are_made_anew() -> None:
    defence = Defence.of(RUN, on=True)
    defence.audits = 64.0
    assert sealed(defence, 0.125) == ([], [LIAR])
    assert defence.is_out(LIAR, 1) and defence.is_out(LIAR, 10_000)
    assert not any(defence.is_out(node, 1) for node in range(7))


def test_with_two_members_nothing_is_audited() -> None:
    defence, true = Defence.of(RUN, on=True), np.ones(64, np.float32)
    defence.audits, result = 8.0, true.copy()
    seals = Seals(defence, {1: Liar(Lie(LieKind.SEAL, 0.5), (0,))}, 1, range(2))
    chunks = Chunks(64, 8)
    seals(chunks, result, lambda c, x: x, lambda c: true[chunks.span(c)])
    assert not defence.decisions


def test_a_lying_owner_of_eight_is_caught_within_20_rounds_in_95_of_100_runs() -> None:
    caught = 0
    for seed in range(100):
        defence = Defence.of(replace(RUN, seed=seed), on=True)
        for _ in range(20):
            sealed(defence, 0.125, seed)
        assert {decision.node for decision in defence.decisions} <= {LIAR}
        caught += defence.is_out(LIAR, 20)
    assert caught >= 95


# Contributions


def test_a_weight_counts_one_and_a_half_times_the_median_at_most() -> None:
    fp32 = replace(
        RUN, reduce=ReduceConfig(codec=CodecName.FP32, chunk=512), outer=OuterConfig(lr=1, momentum=0, clip=False)
    )
    zero, one = np.zeros(MODEL.numel, np.float32), np.ones(MODEL.numel, np.float32)
    contributions = [*(MemberDelta(zero, 100, 1) for _ in range(7)), MemberDelta(one, 800, 8)]
    for on, share in ((False, 8 / 15), (True, 1.5 / 8.5)):
        run = fp32 if on else undefended(fp32)
        state = ReplicatedState(run, build_method(run, MODEL.tensors), MODEL, zero)
        state.commit(contributions)
        np.testing.assert_allclose(state.anchor, -share * one, rtol=1e-6)


def test_a_flipped_delta_is_clipped_and_its_sender_is_struck_and_then_left_out(source: Source) -> None:
    found = fleet(source, 14, "flip:10")
    assert {d.offence for d in found.defence.decisions} == {Offence.OUTLIER}
    others = {d.consequence for d in found.defence.decisions if d.node != LIAR}
    assert others <= {Consequence.STRUCK}  # one batch of 16 bytes may be unlike all others
    follows = [d.consequence for d in found.defence.decisions if d.node == LIAR]
    assert follows[0] == Consequence.STRUCK and follows[-1] == Consequence.NO_CONTRIBUTOR
    members = [record.members for record in found.records[1:]]
    assert members[:6] == [8] * 6 and members[6:].count(7) > 5


@pytest.mark.long
@pytest.mark.parametrize("lie", ["noise:1e30", "zeros", "replay"])
def test_what_is_unlike_all_others_round_after_round_is_left_out_and_the_anchor_stays_finite(
    lie: str, source: Source
) -> None:
    found, honest = fleet(source, 14, lie), fleet(source, 14)
    out = {d.node for d in found.defence.decisions if d.consequence is not Consequence.STRUCK}
    assert out == {LIAR}
    assert norm(found.anchor()) == pytest.approx(norm(honest.anchor()), rel=0.1)


def test_a_copied_delta_counts_twice_and_no_more() -> None:
    """Nobody can tell who had it first; whom it was copied from loses nothing by it."""
    fp32 = replace(RUN, reduce=ReduceConfig(codec=CodecName.FP32, chunk=512), outer=OuterConfig(lr=1, momentum=0))
    zero, one = np.zeros(MODEL.numel, np.float32), np.ones(MODEL.numel, np.float32)
    state = ReplicatedState(fp32, build_method(fp32, MODEL.tensors), MODEL, zero)
    state.commit([MemberDelta(delta, 100, 1) for delta in (one, one.copy(), *[-one] * 6)])
    np.testing.assert_allclose(state.anchor, 4 / 8 * one, rtol=1e-6)


def test_without_a_defence_nothing_is_held_against_anybody(source: Source) -> None:
    found = fleet(source, 8, "flip:10", defence=False)
    assert not found.defence.decisions and [record.members for record in found.records[1:8]] == [8] * 7


def test_an_owner_that_forges_is_gone_when_it_is_caught(source: Source) -> None:
    found = fleet(source, 25, "seal:0.125")
    ((decision),) = found.defence.decisions
    assert (decision.node, decision.consequence) == (LIAR, Consequence.BANNED)
    assert not found.nodes[LIAR].alive
    members = [record.members for record in found.records[1:]]
    assert members == [8] * decision.round + [7] * (25 - decision.round)


def test_honest_nodes_are_left_alone_and_the_defence_changes_nothing_but_clipping(source: Source) -> None:
    run = replace(RUN, outer=OuterConfig(clip=False))
    on, off = fleet(source, 12, run=run), fleet(source, 12, run=run, defence=False)
    assert {decision.consequence for decision in on.defence.decisions} <= {Consequence.STRUCK}
    assert on.anchor().tobytes() == off.anchor().tobytes()


@pytest.mark.long
def test_slow_nodes_late_work_and_joiners_are_not_taken_for_liars(source: Source) -> None:
    run = replace(RUN, rounds=RoundsConfig(inner_steps=4), inner=replace(RUN.inner, batch_size=2))
    found = fleet(source, 40, run=run, speeds=(1.0, 1.0, 0.5, 1.0, 0.3, 1.0, 0.8, 1.0), drop=0.2, churn=4)
    assert {decision.consequence for decision in found.defence.decisions} <= {Consequence.STRUCK}


def test_the_same_seed_gives_the_same_lies(source: Source) -> None:
    first, second = fleet(source, 8, "noise:1e4"), fleet(source, 8, "noise:1e4")
    assert first.anchor().tobytes() == second.anchor().tobytes()
    assert first.defence.decisions == second.defence.decisions


def test_the_command_tells_what_was_held_against_whom(tmp_path: Path) -> None:
    tiny = [
        *("model.dim=16", "model.layers=1", "model.heads=2", "model.kv_heads=1", "model.ffn_dim=16"),
        *("model.seq_len=16", "data.val_batches=1", "inner.batch_size=1", "rounds.inner_steps=1"),
    ]
    words = ["demo", *tiny, "--nodes", "8", "--steps", "9", "--no-baseline", "--out", str(tmp_path)]
    done = CliRunner().invoke(simulate, [*words, "--liars", "1", "--liar", "zeros"], catch_exceptions=False)
    assert "node 7: its delta is 0 times as long as the median: struck" in done.output
    assert "node 7: its delta is 0 times as long as the median: no contributor" in done.output
