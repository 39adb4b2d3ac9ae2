"""What late work counts on a node is what it counts in a simulation."""

from pathlib import Path

import numpy as np
import pytest

from atoll.comm.allreduce.sealing import mean_of
from atoll.comm.byte_view import U8
from atoll.comm.chunks import Chunks
from atoll.comm.codecs.factory import make_codec
from atoll.comm.config.run import CodecName
from atoll.comm.fragment_schedule import FragmentSchedule
from atoll.node.outer.shared_vectors import SharedVectors
from atoll.node.outer.staleness import StalenessTracker
from atoll.node.outer.state import OuterState
from atoll.outer_opt.arrays import norm
from atoll.outer_opt.nesterov import Nesterov
from atoll.outer_opt.schedule import Constant

CHUNKS = Chunks(5000, 1024)
NEXT = 9  # round
CODEC = make_codec(CodecName.INT8, 64)


def damping(way: float, usual: float) -> float:
    return usual / (usual + way)


class Late:
    """A node's state, and how far it was moved by each round."""

    def __init__(self, folder: Path) -> None:
        vectors = SharedVectors.create(CHUNKS.numel, folder, folder / "shm")
        self.gap = StalenessTracker(FragmentSchedule())
        self.outer = OuterState(vectors, CHUNKS, mean_of(CODEC), Constant(Nesterov(0.7, 0.9)), self.gap)
        self.outer.initialise()

    def close(self) -> None:
        self.outer.vectors.close()

    def commit(self, round_: int, owed: bool) -> float:
        """Take a round that left this node's work out, or did not."""
        before = self.outer.vectors.anchor.copy()
        if owed:
            self.outer.set_work_aside()
        for c in range(CHUNKS.count):
            self.outer.apply(c, sealed(round_, c))
        self.outer.finalize()
        return norm(self.outer.vectors.anchor - before)


def sealed(round_: int, c: int) -> U8:
    payload = np.empty(CODEC.size(CHUNKS.size(c)), np.uint8)
    delta = np.random.default_rng((round_, c)).standard_normal(CHUNKS.size(c), dtype=np.float32)
    CODEC.encode(round_ * delta, payload)
    return payload


@pytest.fixture
def late(tmp_path: Path) -> "Late":
    return Late(tmp_path)


def test_the_gap_is_what_the_rounds_moved_that_left_the_work_out(late: Late) -> None:
    late.commit(1, owed=False)
    assert late.gap.damping(NEXT) == 1.0
    second, third = late.commit(2, owed=True), late.commit(3, owed=True)
    assert second != pytest.approx(third, rel=0.1)
    assert late.gap.damping(NEXT) == pytest.approx(damping(second + third, third), rel=1e-6) != 1.0
    late.commit(4, owed=False)
    assert late.gap.damping(NEXT) == 1.0
    late.close()


def test_rounds_taken_at_once_count_one_by_one_and_a_fetched_state_as_one(late: Late, tmp_path: Path) -> None:
    other = Late(tmp_path / "other")
    steps = [late.commit(k, owed=True) for k in (1, 2, 3)]
    other.outer.set_work_aside()
    for c in range(CHUNKS.count):  # chunk after chunk, as a node that was away
        for k in (1, 2, 3):
            other.outer.apply(c, sealed(k, c))
    other.outer.finalize()
    assert (
        other.gap.damping(NEXT)
        == late.gap.damping(NEXT)
        == pytest.approx(damping(sum(steps), steps[-1]), rel=1e-6)
    )
    fetched = Late(tmp_path / "fetched")
    fetched.outer.set_work_aside()
    for c in range(CHUNKS.count):
        fetched.outer.replace_chunk(c, 3, late.outer.copy_chunk(c)[1].tobytes())
    fetched.outer.finalize()
    assert fetched.gap.damping(NEXT) == 0.5
    for node in (late, other, fetched):
        node.close()


def test_a_chunk_that_is_mended_has_not_moved(late: Late) -> None:
    begun = late.outer.copy_chunk(0)[1].tobytes()
    late.commit(1, owed=False)
    second = late.commit(2, owed=True)
    late.outer.vectors.anchor[5] += 1000.0
    assert not late.outer.is_intact(0)
    assert late.outer.rebuild_chunk(0, 0, begun, [sealed(round_, 0) for round_ in (1, 2)])
    third = late.commit(3, owed=True)
    assert late.gap.damping(NEXT) == pytest.approx(damping(second + third, third), rel=1e-6)


def test_fragments_that_take_turns_have_a_gap_each() -> None:
    """Rounds 1 and 3 move the first one, 2 and 4 the second."""
    gap = StalenessTracker(FragmentSchedule(2))
    for round_, norms, owed in ((1, (3.0, 4.0), False), (2, (1.0,), True), (3, (6.0, 8.0), True)):
        for norm_ in norms:
            gap.record_move((round_ - 1) % 2, round_, norm_)
        gap.finalized(owed)
    assert gap.damping(4) == damping(1.0, 1.0) == 0.5
    assert gap.damping(5) == damping(10.0, 10.0) == 0.5
    gap.record_move(1, 4, 2.0)
    gap.finalized(owed=True)
    assert gap.damping(6) == damping(3.0, 2.0) == pytest.approx(0.4)
    gap.record_move(0, 5, 1.0)
    gap.finalized(owed=False)
    assert gap.damping(7) == 1.0
    assert gap.damping(6) == pytest.approx(0.4)


def test_work_that_begins_from_the_anchor_counts_whole(late: Late) -> None:
    late.commit(1, owed=True)
    assert late.gap.damping(NEXT) == 0.5
    late.gap.restart()
    assert late.gap.damping(NEXT) == 1.0
    late.close()
