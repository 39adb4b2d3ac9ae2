"""A run's config becomes the pieces that it says, and the pieces are put together as they should be."""

import numpy as np
import pytest

from atoll.comm.config.outer import MergeName, OuterConfig
from atoll.comm.config.run import RoundsConfig, RunConfig
from atoll.node.outer.method import merge_pieces, outer_schedule
from atoll.outer_opt.arrays import norm
from atoll.outer_opt.nesterov import Nesterov
from atoll.outer_opt.schedule import for_length
from atoll.outer_opt.sgd import Sgd
from atoll.outer_opt.tensors import TensorKind

KINDS = (TensorKind.MATRIX, TensorKind.EMBEDDING, TensorKind.VECTOR)


def test_radial_merges_are_of_matrices_and_embeddings_and_vectors_get_the_plain_mean() -> None:
    parts = np.kron(np.ones((1, 3), np.float32), np.eye(4, dtype=np.float32) * np.float32(2))  # (members, 3 x 4)
    pieces = [(kind, slice(4 * i, 4 * i + 4)) for i, kind in enumerate(KINDS)]
    out, scratch = np.empty(12, np.float32), np.empty(12, np.float32)
    merge_pieces(OuterConfig(merge=MergeName.RADIAL), pieces, list(parts), [0.25] * 4, out, scratch)
    assert [norm(out[span]) for _, span in pieces] == pytest.approx([2.0, 1.0, 1.0])
    np.testing.assert_allclose(out, [1.0] * 4 + [0.5] * 8, rtol=1e-6)
    merge_pieces(OuterConfig(), pieces, list(parts), [0.25] * 4, out, scratch)
    np.testing.assert_array_equal(out, [0.5] * 12)


def test_after_a_data_parallel_start_the_ramp_begins_and_keeps_its_decay_a_token() -> None:
    outer = OuterConfig(lr=0.7, momentum=0.9, momentum_warmup=4, per_token=True)
    schedule = outer_schedule(RunConfig(outer=outer, rounds=RoundsConfig(inner_steps=10, data_parallel=5)))
    assert [schedule.at(k, 0.1) for k in range(1, 6)] == [Sgd(1.0)] * 5
    warming = [Nesterov(0.7, 0.9 * k / 4) for k in range(4)]
    assert [schedule.at(k) for k in range(6, 10)] == warming
    assert [schedule.at(k, 0.5) for k in range(6, 10)] == [for_length(usual, 0.5) for usual in warming]
    assert schedule.at(10) == schedule.at(99) == Nesterov(0.7, 0.9)
    assert schedule.at(10, 0.5) == for_length(Nesterov(0.7, 0.9), 0.5)
