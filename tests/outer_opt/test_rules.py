"""The rules against torch.optim.SGD, their coefficients over rounds, and how much a late delta counts."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from deltas import deltas

from atoll.outer_opt.arrays import norm
from atoll.outer_opt.damping import AnchorGap
from atoll.outer_opt.nesterov import Nesterov
from atoll.outer_opt.schedule import Constant, DataParallelStart, Ramp, Schedule, for_length
from atoll.outer_opt.sgd import Sgd

RULES = [(0.7, 0.9), (0.8, 0.9), (0.9, 0.7), (0.7, 0.5), (1.0, 0.0)]

AGAINST_TORCH = """
import sys
import numpy as np, torch
from atoll.outer_opt.nesterov import Nesterov

assert torch.backends.cpu.get_cpu_capability() == "DEFAULT"
rng = np.random.default_rng(0)
for lr, momentum in RULES:
    rule = Nesterov(lr, momentum)
    anchor = rng.standard_normal(1003).astype(np.float32)
    buffer, scratch = np.zeros_like(anchor), np.empty_like(anchor)
    parameter = torch.nn.Parameter(torch.from_numpy(anchor.copy()))
    sgd = torch.optim.SGD([parameter], lr=lr, momentum=momentum, nesterov=momentum > 0)
    for _ in range(20):
        delta = rng.standard_normal(1003).astype(np.float32)
        parameter.grad = torch.from_numpy(delta.copy())
        sgd.step()
        rule.step(anchor, buffer, delta, scratch)
        if anchor.tobytes() != parameter.detach().numpy().tobytes():
            sys.exit(f"{lr}, {momentum}: {np.count_nonzero(anchor != parameter.detach().numpy())} differ")
"""


def test_nesterov_is_torch_sgd_bit_for_bit_where_torch_fuses_nothing() -> None:
    # Torch's kernels for AVX2 and later fuse each product with its sum, which rounds once less; its plain ones do
    # not. Which are used is settled when torch is imported.
    environment = os.environ | {"ATEN_CPU_CAPABILITY": "default"}
    code = AGAINST_TORCH.replace("RULES", repr(RULES))
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("lr", "momentum"), RULES)
def test_nesterov_is_torch_sgd_but_for_the_rounding_of_fused_products(lr: float, momentum: float) -> None:
    rule = Nesterov(lr, momentum)
    anchor = np.linspace(-1, 1, 1000, dtype=np.float32)
    buffer, scratch = np.zeros_like(anchor), np.empty_like(anchor)
    parameter = torch.nn.Parameter(torch.from_numpy(anchor.copy()))
    sgd = torch.optim.SGD([parameter], lr=lr, momentum=momentum, nesterov=momentum > 0)
    for delta in deltas(20, 1000):
        parameter.grad = torch.from_numpy(delta.copy())
        sgd.step()
        rule.step(anchor, buffer, delta, scratch)
    np.testing.assert_allclose(anchor, parameter.detach().numpy(), rtol=0, atol=3e-7)


def test_sgd_is_nesterov_without_momentum() -> None:
    a, b = np.ones(1000, np.float32), np.ones(1000, np.float32)
    m, scratch = np.zeros(1000, np.float32), np.empty(1000, np.float32)
    for delta in deltas(5, 1000):
        Sgd(0.4).step(a, m, delta, scratch)
        assert not m.any()
        Nesterov(0.4, 0.0).step(b, np.zeros_like(m), delta, scratch)
    assert a.tobytes() == b.tobytes()


@pytest.mark.parametrize(
    "schedule", [Constant(Nesterov(0.7, 0.9)), Constant(Sgd(0.4)), Ramp(Nesterov(0.7, 0.9), 5, 10, 20, 0.5)]
)
def test_numpy_and_torch_arrays_give_the_same_bits(schedule: Schedule) -> None:
    a, m = np.ones(257, np.float32), np.zeros(257, np.float32)
    ta, tm = torch.from_numpy(a.copy()), torch.from_numpy(m.copy())
    for k, delta in enumerate(deltas(20, 257)):
        schedule.at(k + 1, 1.2).step(a, m, delta, np.empty_like(a))
        schedule.at(k + 1, 1.2).step(ta, tm, torch.from_numpy(delta.copy()), torch.empty_like(ta))
    assert a.tobytes() == ta.numpy().tobytes()
    assert m.tobytes() == tm.numpy().tobytes()


def test_steps_chunk_by_chunk_are_the_step_of_the_whole() -> None:
    rule = Nesterov(0.7, 0.9)
    whole, part = np.ones(1000, np.float32), np.ones(1000, np.float32)
    mw, mp, scratch = np.zeros(1000, np.float32), np.zeros(1000, np.float32), np.empty(1000, np.float32)
    for delta in deltas(5, 1000):
        rule.step(whole, mw, delta, scratch)
        for span in (slice(0, 300), slice(300, 1000)):
            rule.step(part[span], mp[span], delta[span], scratch[span])
    assert whole.tobytes() == part.tobytes()


def test_the_momentum_rises_stays_and_falls() -> None:
    ramp = Ramp(Nesterov(0.7, 0.9), warmup=10, begin=50, end=60, final=0.5)
    momenta = [ramp.at(k).momentum for k in range(1, 81)]
    assert momenta[0] == 0.0
    assert momenta[5] == pytest.approx(0.45)
    assert momenta[9] == pytest.approx(0.81)  # round 10 is the warm-up's last
    assert set(momenta[10:50]) == {0.9}
    assert momenta[54] == pytest.approx(0.7)
    assert momenta[59:] == pytest.approx([0.5] * 21)
    assert all(ramp.at(k).lr == 0.7 for k in range(1, 81))
    assert Ramp(Nesterov(0.7, 0.9)).at(1) == Nesterov(0.7, 0.9)


def test_a_round_of_another_length_has_its_own_coefficients_at_any_time_of_the_ramp() -> None:
    ramp = Ramp(Nesterov(0.7, 0.9), warmup=10, begin=50, end=60, final=0.5)
    for k in (1, 6, 30, 55, 70):
        assert ramp.at(k, 2.0) == for_length(ramp.at(k), 2.0)
    assert ramp.at(30, 2.0).momentum == pytest.approx(0.81)


def test_the_first_rounds_have_another_rule_and_the_others_count_anew() -> None:
    then = Ramp(Nesterov(0.7, 0.9), warmup=4)
    begun = DataParallelStart(Sgd(1.0), 3, then)
    assert [begun.at(k) for k in (1, 2, 3)] == [Sgd(1.0)] * 3
    assert begun.at(3, 0.5) == Sgd(1.0)
    assert [begun.at(k) for k in range(4, 12)] == [then.at(k) for k in range(1, 9)]
    assert begun.at(4) == Nesterov(0.7, 0.0)
    assert [begun.at(k, 1.5) for k in range(4, 12)] == [then.at(k, 1.5) for k in range(1, 9)]
    assert begun.at(9, 1.5) == for_length(Nesterov(0.7, 0.9), 1.5) != begun.at(9)


@pytest.mark.parametrize("length", [0.25, 0.5, 2.0, 3.0])
def test_a_longer_round_keeps_the_decay_a_token_and_the_gain(length: float) -> None:
    rule = for_length(Nesterov(0.7, 0.9), length)
    assert rule.momentum == pytest.approx(0.9**length, rel=1e-15)
    assert rule.lr / (1 - rule.momentum) == pytest.approx(7.0, rel=1e-12)
    # Under a steady drift, rounds of another length end where those of the usual one do.
    usual, other = np.zeros(1), np.zeros(1)
    mu, mo = np.zeros(1), np.zeros(1)
    for _ in range(1200):
        Nesterov(0.7, 0.9).step(usual, mu, np.ones(1), np.empty(1))
    for _ in range(int(1200 / length)):
        rule.step(other, mo, np.full(1, length), np.empty(1))
    assert other[0] == pytest.approx(usual[0], rel=0.02)


def test_a_late_delta_counts_less_the_further_the_anchor_went() -> None:
    gap = AnchorGap()
    assert gap.damping == 1.0  # nothing is known of usual steps yet
    gap.advance(5.0, owed=False)
    assert gap.damping == 1.0
    gap.advance(5.0, owed=True)
    assert gap.damping == 1 / 2
    gap.advance(5.0, owed=True)
    assert gap.damping == 1 / 3
    gap.advance(30.0, owed=True)
    assert gap.damping == 30 / (30 + 40)
    gap.reset()
    assert gap.damping == 1.0
    gap.advance(10.0, owed=True)
    gap.advance(2.0, owed=False)
    assert gap == AnchorGap(0.0, 2.0)


def test_a_gap_is_that_of_anchors_of_which_the_newest_step_is_the_usual_one() -> None:
    rng, rule, gap = np.random.default_rng(0), Nesterov(0.7, 0.9), AnchorGap()
    anchor, momentum, scratch = np.zeros(300, np.float32), np.zeros(300, np.float32), np.empty(300, np.float32)
    anchors = [anchor.copy()]
    for k in range(5):
        rule.step(anchor, momentum, rng.standard_normal(300, np.float32), scratch)
        anchors.append(anchor.copy())
        gap.advance(norm(anchors[-1] - anchors[-2]), owed=k >= 2)
    steps = [norm(now - then) for then, now in zip(anchors, anchors[1:], strict=False)]
    assert gap.damping == pytest.approx(1 / (1 + sum(steps[2:]) / steps[-1]), rel=1e-12)
