"""What peers are given of the state is of one moment, whatever the worker does meanwhile."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from atoll.comm.chunks import Chunks
from atoll.comm.codec import make
from atoll.comm.config import CodecName
from atoll.comm.digest import digest
from atoll.comm.ids import Round
from atoll.comm.sealing import mean_of
from atoll.node.outer import OuterState
from atoll.node.vectors import Vectors
from atoll.outer_opt.nesterov import Nesterov
from atoll.outer_opt.overlap import rebase
from atoll.outer_opt.schedule import Always

CODEC, CHUNKS = make(CodecName.FP32, 256), Chunks(1000, 600)


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
    vectors = Vectors.create(CHUNKS.numel, tmp_path, tmp_path / "shm")
    anchor = vectors.anchor.view(Copied)
    outer = OuterState(replace(vectors, anchor=anchor), CHUNKS, mean_of(CODEC), Always(Nesterov(0.7, 0.9)))
    anchor.told = lambda: None
    outer.initialised()
    digests = outer.digests(Round(0))
    before = outer.state(Round(0), 0)
    assert digests is not None and before is not None and digest(before) == digests[0]

    def commit() -> None:
        anchor.told = lambda: None
        for c in range(CHUNKS.count):
            outer.apply(c, np.ones(CHUNKS.size(c), np.float32).tobytes())
        outer.settle()

    anchor.told = commit
    assert outer.state(Round(0), 0) is None, "the anchor of one round and the momentum of another"
    assert outer.state(Round(1), 0) is not None
    vectors.close()


def test_work_that_is_set_aside_is_rebased(tmp_path: Path) -> None:
    vectors, rng = Vectors.create(CHUNKS.numel, tmp_path, tmp_path / "shm"), np.random.default_rng(0)
    outer = OuterState(vectors, CHUNKS, mean_of(CODEC), Always(Nesterov(0.7, 0.9)))
    vectors.anchor[:] = rng.standard_normal(CHUNKS.numel, np.float32)
    outer.initialised()
    vectors.local[:] = rng.standard_normal(CHUNKS.numel, np.float32)
    old, expected = vectors.anchor.copy(), vectors.local.copy()
    outer.set_aside()
    for c in range(CHUNKS.count):
        outer.apply(c, rng.standard_normal(CHUNKS.size(c), np.float32).tobytes())
    outer.settle()
    assert vectors.anchor.tobytes() != old.tobytes()
    rebase(expected, vectors.anchor, old, np.empty_like(old))
    assert vectors.local.tobytes() == expected.tobytes()
    vectors.close()
