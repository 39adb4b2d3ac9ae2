"""The outer step against torch.optim.SGD, and the same bits from numpy and torch."""

import numpy as np
import pytest
import torch

from atoll.outer_opt.nesterov import Nesterov


def deltas(rounds: int, n: int) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.standard_normal(n).astype(np.float32) * np.float32(1e-2) for _ in range(rounds)]


@pytest.mark.parametrize(("lr", "momentum"), [(0.7, 0.9), (1.0, 0.0), (0.9, 0.7)])
def test_it_is_torch_sgd_with_nesterov_momentum(lr: float, momentum: float) -> None:
    rule = Nesterov(lr, momentum)
    anchor = np.linspace(-1, 1, 1000, dtype=np.float32)
    buffer, scratch = np.zeros_like(anchor), np.empty_like(anchor)
    parameter = torch.nn.Parameter(torch.from_numpy(anchor.copy()))
    sgd = torch.optim.SGD([parameter], lr=lr, momentum=momentum, nesterov=momentum > 0)
    for delta in deltas(20, 1000):
        parameter.grad = torch.from_numpy(delta.copy())
        sgd.step()
        rule.step(anchor, buffer, delta, scratch)
    # torch may fuse a multiply and an add, which rounds once less
    np.testing.assert_allclose(anchor, parameter.detach().numpy(), rtol=0, atol=3e-7)


def test_numpy_and_torch_arrays_give_the_same_bits() -> None:
    rule = Nesterov(0.7, 0.9)
    a, m = np.ones(257, np.float32), np.zeros(257, np.float32)
    ta, tm = torch.from_numpy(a.copy()), torch.from_numpy(m.copy())
    for delta in deltas(20, 257):
        rule.step(a, m, delta, np.empty_like(a))
        rule.step(ta, tm, torch.from_numpy(delta.copy()), torch.empty_like(ta))
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
