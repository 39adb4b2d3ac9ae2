"""Recovery over loopback: a joiner gets the state, what differs is fetched, a donor that moves on is followed."""

from pathlib import Path

import numpy as np
import pytest
from recovery_peers import CHUNKS, NUMEL, Peer, bring, served, with_peers

from atoll.comm.chunks import Chunks
from atoll.comm.ids import Round
from atoll.node.recovery.recovery import RoundMovedOn


def test_a_joiner_gets_anchor_and_momentum_bit_for_bit(tmp_path: Path) -> None:
    @with_peers(tmp_path, "a", "b")
    async def _(a: Peer, b: Peer) -> None:
        a.initialise()
        sum_ = await a.commit(1)
        await bring(b, 1, sum_, a)
        assert b.outer.round == 1 and b.outer.finalize() == sum_
        assert b.bits() == a.bits()


def test_a_joiner_gets_fragments_of_different_turns(tmp_path: Path) -> None:
    @with_peers(tmp_path, "a", "b", chunks=Chunks(5000, 512, (1500, 600, 2900)))
    async def _(a: Peer, b: Peer) -> None:
        a.initialise()
        for k in range(1, 6):
            sum_ = await a.commit(k)
        await bring(b, 5, sum_, a)
        assert b.outer.round == 5 and b.outer.finalize() == sum_
        for k in (6, 7):
            assert await a.commit(k) == await b.commit(k)
        assert b.bits() == a.bits()


def test_chunks_from_before_the_donor_moved_on_are_brought_forward(tmp_path: Path) -> None:
    @with_peers(tmp_path, "a", "b")
    async def _(a: Peer, b: Peer) -> None:
        a.initialise()
        first = await a.commit(1)
        await bring(b, 1, first, a)
        b.outer.chunk_rounds[2] = -1  # as if this chunk had not arrived when a moved on
        with pytest.raises(RoundMovedOn):
            await bring(b, 1, await a.commit(2), a)
        sum_ = await a.commit(3)
        await bring(b, 3, sum_, a)
        assert b.outer.chunk_rounds == [3] * CHUNKS.count
        assert b.bits() == a.bits()


def test_a_flipped_bit_in_one_chunk_is_found_and_only_that_chunk_is_fetched(tmp_path: Path) -> None:
    @with_peers(tmp_path, "a", "b")
    async def _(a: Peer, b: Peer) -> None:
        sum_ = a.initialise()
        await bring(b, 0, sum_, a)
        b.outer.vectors.anchor[1500] += 1
        before = a.plane.bytes_up
        await bring(b, 0, sum_, a)
        assert b.bits() == a.bits()
        assert a.plane.bytes_up - before < 8 * 1024 + 1000


@pytest.mark.parametrize("vector", ["anchor", "momentum"])
def test_a_node_whose_state_is_not_the_runs_fetches_what_differs(tmp_path: Path, vector: str) -> None:
    @with_peers(tmp_path, "a", "b")
    async def _(a: Peer, b: Peer) -> None:
        a.initialise()
        b.initialise()
        assert await a.commit(1) == await b.commit(1)
        getattr(b.outer.vectors, vector).view(np.uint32)[1500] ^= 1 << 20
        sum_, wrong = await a.commit(2), await b.commit(2)
        assert wrong != sum_
        b.outer.distrust()
        assert b.outer.final_digests(Round(2)) is None, "nobody is served from it"
        asked = served(a)
        await bring(b, 2, sum_, a)
        assert asked == [1] and b.outer.finalize() == sum_ and b.bits() == a.bits()


def test_work_that_a_round_left_out_starts_from_the_new_anchor(tmp_path: Path) -> None:
    @with_peers(tmp_path, "a", "b")
    async def _(a: Peer, b: Peer) -> None:
        a.initialise()
        b.initialise()
        vectors = b.outer.vectors
        steps = np.random.default_rng(9).standard_normal(NUMEL, dtype=np.float32)
        vectors.local[:] = vectors.anchor + steps
        await a.commit(1)
        sum_ = await a.commit(2)
        b.outer.set_work_aside()
        b.outer.set_work_aside()  # a second try after one that failed
        await bring(b, 2, sum_, a)
        assert b.outer.finalize() == sum_
        assert np.abs(vectors.local - (vectors.anchor + steps)).max() < 1e-5
        before = vectors.local.copy()
        b.outer.finalize()
        assert np.array_equal(vectors.local, before)  # rebased once
