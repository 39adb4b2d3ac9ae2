"""Error feedback and overlap: nothing that was trained is lost or counted twice."""

import numpy as np
import pytest
import torch
from deltas import F32, deltas

from atoll.outer_opt.arrays import Array
from atoll.outer_opt.feedback import ErrorFeedback
from atoll.outer_opt.nesterov import Nesterov
from atoll.outer_opt.overlap import Adopt, Mix, rebase, replace


def coarse(x: F32) -> F32:
    """A wire that keeps three levels: most of every delta stays behind."""
    scale = np.abs(x).max()
    levels: F32 = np.round(x / scale).astype(np.float32) * scale
    return levels


def test_nothing_is_lost_in_fifty_rounds_of_which_many_fail() -> None:
    """The sum of what was sent in rounds that used it, and the residual, is all that was trained."""
    n, rng = 2000, np.random.default_rng(1)
    feedback, rule = ErrorFeedback(1.0), Nesterov(0.7, 0.9)
    anchor, momentum, scratch = np.zeros(n, np.float32), np.zeros(n, np.float32), np.empty(n, np.float32)
    local, residual, offered = anchor.copy(), np.zeros(n, np.float32), np.empty(n, np.float32)
    trained, sent_in_all, included_rounds = np.zeros(n), np.zeros(n), 0
    for k in range(50):
        step = (rng.standard_normal(n) * 1e-2).astype(np.float32)
        before = local.copy()
        local += step
        trained += local.astype(np.float64) - before
        delta = anchor - local
        feedback.offer(residual, delta, offered)
        sent = coarse(offered)
        outcome = "included" if k == 49 else rng.choice(["included", "excluded", "aborted"], p=[0.7, 0.2, 0.1])
        if outcome == "aborted":  # nothing moves anywhere
            continue
        old = anchor.copy()
        others = (rng.standard_normal(n) * 1e-2).astype(np.float32)
        rule.step(anchor, momentum, (sent + others) / 2 if outcome == "included" else others, scratch)
        if outcome == "included":
            feedback.commit(residual, offered, sent)
            replace(local, anchor, old, scratch)
            sent_in_all += sent
            included_rounds += 1
        else:
            rebase(local, anchor, old, scratch)  # it keeps what it trained
    assert 25 < included_rounds < 45
    error = np.linalg.norm(sent_in_all + residual + trained) / np.linalg.norm(trained)
    assert error < 1e-5


def test_feedback_gives_the_same_bits_on_numpy_and_torch_arrays() -> None:
    feedback, residual, offered = ErrorFeedback(0.95), np.zeros(257, np.float32), np.empty(257, np.float32)
    there, offered_there = torch.zeros(257), torch.empty(257)
    for delta in deltas(5, 257):
        feedback.offer(residual, delta, offered)
        feedback.offer(there, torch.from_numpy(delta.copy()), offered_there)
        assert offered.tobytes() == offered_there.numpy().tobytes()
        sent = coarse(offered)
        feedback.commit(residual, offered, sent)
        feedback.commit(there, offered_there, torch.from_numpy(sent))
        assert residual.tobytes() == there.numpy().tobytes()


def test_a_decayed_residual_forgets() -> None:
    residual, out = np.ones(3, np.float32), np.empty(3, np.float32)
    ErrorFeedback(0.95).offer(residual, np.full(3, 2, np.float32), out)
    np.testing.assert_array_equal(out, np.float32(0.95) + np.float32(2))
    assert residual.tolist() == [1, 1, 1]
    ErrorFeedback(0.95).commit(residual, out, np.full(3, 2.5, np.float32))
    np.testing.assert_allclose(residual, 0.45, rtol=1e-6)


def test_the_three_ways_to_take_the_anchor() -> None:
    def taken(adopt: Adopt) -> float:
        local, anchor, sent = (np.full(1, x, np.float32) for x in (1.5, 3, 1))
        adopt(local, anchor, sent, np.empty(1, np.float32))
        return float(local[0])

    assert taken(replace) == 3.0
    assert taken(rebase) == 3.5
    assert taken(Mix(0.5)) == 2.25
    assert taken(Mix(0.0)) == 3.0


def test_mixing_in_nothing_of_the_local_parameters_is_replacing_them() -> None:
    local, anchor = deltas(2, 1000)
    scratch, other = np.empty_like(local), local.copy()
    Mix(0.0)(local, anchor, local.copy(), scratch)
    replace(other, anchor, anchor, scratch)
    assert local.tobytes() == other.tobytes()


@pytest.mark.parametrize("adopt", [replace, rebase, Mix(0.3)])
def test_numpy_and_torch_arrays_give_the_same_bits(adopt: Adopt) -> None:
    arrays = deltas(4, 301)
    tensors: list[Array] = [torch.from_numpy(a.copy()) for a in arrays]
    adopt(*arrays)
    adopt(*tensors)
    assert arrays[0].tobytes() == tensors[0].numpy().tobytes()
    feedback = ErrorFeedback(0.95)
    feedback.offer(arrays[1], arrays[2], arrays[3])
    feedback.offer(tensors[1], tensors[2], tensors[3])
    feedback.commit(arrays[1], arrays[3], arrays[0])
    feedback.commit(tensors[1], tensors[3], tensors[0])
    assert arrays[1].tobytes() == tensors[1].numpy().tobytes()
