"""What peers are given of the state is of one moment, whatever the worker does meanwhile."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atoll.comm.allreduce.delta_samples import DeltaSamples
from atoll.comm.allreduce.sealing import mean_of
from atoll.comm.chunks import Chunks
from atoll.comm.codecs.factory import make_codec
from atoll.comm.config.run import CodecName
from atoll.comm.digest import digest
from atoll.comm.ids import Round
from atoll.node.outer.shared_vectors import SharedVectors
from atoll.node.outer.state import OuterState
from atoll.outer_opt.arrays import norm
from atoll.outer_opt.nesterov import Nesterov
from atoll.outer_opt.overlap import LEFT_OUT_MIX, Adopt, rebase
from atoll.outer_opt.schedule import Constant

CODEC, CHUNKS = make_codec(CodecName.FP32, 256), Chunks(1000, 600)


class Copied(np.ndarray[Any, np.dtype[np.float32]]):
    """Tells when it is copied, which takes a while."""

    told: Any = None

    def tobytes(self, order: Any = "C") -> bytes:
        data = super().tobytes(order)
        self.told()
        return data

    def __array_finalize__(self, whole: Any) -> None:
        self.told = getattr(whole, "told", None)


def test_a_chunk_that_changes_while_it_is_copied_for_a_peer_is_not_given(tmp_path: Path) -> None:
    vectors = SharedVectors.create(CHUNKS.numel, tmp_path, tmp_path / "shm")
    anchor = vectors.anchor.view(Copied)
    outer = OuterState(replace(vectors, anchor=anchor), CHUNKS, mean_of(CODEC), Constant(Nesterov(0.7, 0.9)))
    anchor.told = lambda: None
    outer.initialise()
    digests = outer.final_digests(Round(0))
    before = outer.final_chunk(Round(0), 0)
    assert digests is not None and before is not None and digest(before) == digests[0]

    def commit() -> None:
        anchor.told = lambda: None
        for c in range(CHUNKS.count):
            outer.apply(c, np.ones(CHUNKS.size(c), np.float32).tobytes())
        outer.finalize()

    anchor.told = commit
    assert outer.final_chunk(Round(0), 0) is None, "the anchor of one round and the momentum of another"
    assert outer.final_chunk(Round(1), 0) is not None
    vectors.close()


class Killed(BaseException):
    """In the place of a signal."""


class Deadly(np.ndarray[Any, np.dtype[np.float32]]):
    """Whoever writes to it is killed."""

    def __setitem__(self, key: Any, value: Any) -> None:
        raise Killed


def test_who_is_killed_while_it_takes_a_chunk_that_came_in_parts_has_it_still(tmp_path: Path) -> None:
    vectors = SharedVectors.create(CHUNKS.numel, tmp_path, tmp_path / "shm")
    deadly = replace(vectors, anchor=vectors.anchor.view(Deadly))
    first, dying, next_ = (
        OuterState(v, CHUNKS, mean_of(CODEC), Constant(Nesterov(0.7, 0.9))) for v in (vectors, deadly, vectors)
    )
    data = np.random.default_rng(0).standard_normal(2 * CHUNKS.size(0), np.float32).tobytes()
    first.partial_chunks.append(0, digest(data), 0, data)
    with pytest.raises(Killed):
        dying.replace_chunk(0, 1, data)
    next_.resume()
    assert next_.chunk_rounds[0] == -1 and next_.partial_chunks.read(0, digest(data)) == data
    next_.replace_chunk(0, 1, data)
    assert next_.chunk_rounds[0] == 1 and not next_.partial_chunks.read(0, digest(data))
    vectors.close()


@pytest.mark.parametrize("take", [rebase, LEFT_OUT_MIX], ids=["rebase", "halfway"])
def test_work_that_is_set_aside_takes_the_anchor_as_the_method_says(take: Adopt, tmp_path: Path) -> None:
    vectors, rng = SharedVectors.create(CHUNKS.numel, tmp_path, tmp_path / "shm"), np.random.default_rng(0)
    outer = OuterState(vectors, CHUNKS, mean_of(CODEC), Constant(Nesterov(0.7, 0.9)), adopt_left_out=take)
    vectors.anchor[:] = rng.standard_normal(CHUNKS.numel, np.float32)
    outer.initialise()
    vectors.local[:] = rng.standard_normal(CHUNKS.numel, np.float32)
    old, expected = vectors.anchor.copy(), vectors.local.copy()
    outer.set_work_aside()
    for c in range(CHUNKS.count):
        outer.apply(c, rng.standard_normal(CHUNKS.size(c), np.float32).tobytes())
    outer.finalize()
    assert vectors.anchor.tobytes() != old.tobytes()
    take(expected, vectors.anchor, old, np.empty_like(old))
    assert vectors.local.tobytes() == expected.tobytes()
    outer.finalize()
    assert vectors.local.tobytes() == expected.tobytes(), "once"
    vectors.close()


def test_work_in_fragments_whose_anchor_did_not_move_is_left_alone(tmp_path: Path) -> None:
    chunks, rng = Chunks(3000, 512, (1000, 2000)), np.random.default_rng(0)
    vectors = SharedVectors.create(chunks.numel, tmp_path, tmp_path / "shm")
    outer = OuterState(vectors, chunks, mean_of(CODEC), Constant(Nesterov(0.7, 0.9)), adopt_left_out=LEFT_OUT_MIX)
    outer.initialise()
    vectors.local[:] = rng.standard_normal(chunks.numel, np.float32)
    before = vectors.local.copy()
    outer.set_work_aside()
    fragment = outer.fragment_schedule.fragment(2)
    for c in chunks.fragment_range(fragment):
        outer.apply(c, rng.standard_normal(chunks.size(c), np.float32).tobytes())
    outer.advance_unchanged(2)
    outer.finalize()
    moved = chunks.fragment_slice(fragment)
    assert np.array_equal(vectors.local[moved], 0.5 * before[moved] + 0.5 * vectors.anchor[moved])
    assert np.array_equal(np.delete(vectors.local, moved), np.delete(before, moved))
    vectors.close()


def test_chunks_that_came_from_elsewhere_have_no_sample_of_what_a_round_sealed(tmp_path: Path) -> None:
    vectors = SharedVectors.create(CHUNKS.numel, tmp_path, tmp_path / "shm")
    outer = OuterState(vectors, CHUNKS, mean_of(CODEC), Constant(Nesterov(0.7, 0.9)))
    outer.initialise()
    outer.samples = samples = DeltaSamples(CODEC, CHUNKS)
    deltas = [np.full(CHUNKS.size(c), 2.0 + c, np.float32) for c in range(2)]
    for c in range(2):
        outer.apply(c, deltas[c].tobytes())
    found = [samples.get(c) for c in range(2)]
    assert [s and s.norm for s in found] == [pytest.approx(norm(delta)) for delta in deltas]
    outer.replace_chunk(0, 1, np.zeros(2 * CHUNKS.size(0), np.float32).tobytes())
    assert samples.get(0) is None and samples.get(1) is found[1]
    outer.apply(0, deltas[0].tobytes())
    assert samples.get(0) is not None
    outer.clear()
    assert samples.get(0) is None and samples.get(1) is None
    vectors.close()
