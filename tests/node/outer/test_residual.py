"""What the wire leaves out is sent later, once: with the encoder, the codec and the outer state of a node."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from atoll.comm.allreduce.delta_encoder import DeltaEncoder, EncodedVector
from atoll.comm.allreduce.sealing import mean_of
from atoll.comm.bitmap import bitmap
from atoll.comm.chunks import Chunks
from atoll.comm.codecs.factory import make_codec
from atoll.comm.config.run import CodecName
from atoll.node.outer.residual import FILE_NAME, Residual
from atoll.node.outer.shared_vectors import SharedVectors
from atoll.node.outer.state import OuterState
from atoll.outer_opt.feedback import ErrorFeedback
from atoll.outer_opt.nesterov import Nesterov
from atoll.outer_opt.schedule import Constant

F32 = NDArray[np.float32]
CHUNKS, INT4 = Chunks(3000, 512), make_codec(CodecName.INT4, 64)
RUN = b"r" * 16


class Node:
    """The vectors of a node, and what they go through in a round."""

    def __init__(self, folder: Path, decay: float = 1.0) -> None:
        self.vectors = SharedVectors.create(CHUNKS.numel, folder)
        self.outer = OuterState(self.vectors, CHUNKS, mean_of(INT4), Constant(Nesterov(0.7, 0.9)))
        self.outer.initialise()
        self.residual = Residual(ErrorFeedback(decay), self.vectors, CHUNKS, INT4, (folder, RUN))

    def encode(self) -> EncodedVector:
        offer = self.residual.offer
        encoder = DeltaEncoder(self.vectors.anchor, self.vectors.local, INT4, CHUNKS, offer=offer, permanent=True)
        asyncio.run(encoder.run(asyncio.to_thread))
        return encoder.encoded

    def close(self) -> None:
        self.residual.close()
        self.vectors.close()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    node = Node(tmp_path)
    yield node
    node.close()


def decoded(encoded: EncodedVector) -> F32:
    out = np.empty(CHUNKS.numel, np.float32)
    for c in range(CHUNKS.count):
        INT4.decode(encoded.whole[c], out[CHUNKS.span(c)])
    return out


def sealed(mean: F32) -> list[NDArray[np.uint8]]:
    found = []
    for c in range(CHUNKS.count):
        payload = np.empty(INT4.size(CHUNKS.size(c)), np.uint8)
        INT4.encode(mean[CHUNKS.span(c)], payload)
        found.append(payload)
    return found


def test_in_fifty_rounds_of_which_many_fail_nothing_is_lost_nor_sent_twice(node: Node) -> None:
    """The sum of what was sent in rounds that used it, and the residual, is all that was trained. Rounds abort
    and are tried again, leave the node out, and have only some of its chunks."""
    rng = np.random.default_rng(3)
    trained, sent_in_all, fates = np.zeros(CHUNKS.numel), np.zeros(CHUNKS.numel), set()
    vectors, outer, residual = node.vectors, node.outer, node.residual
    for k in range(1, 51):
        before = vectors.local.astype(np.float64)
        vectors.local[:] += (rng.standard_normal(CHUNKS.numel) * 1e-2).astype(np.float32)
        trained += vectors.local - before
        fate = "whole" if k == 50 else rng.choice(["whole", "part", "left out", "aborted"], p=[0.5, 0.2, 0.2, 0.1])
        fates.add(str(fate))
        encoded = node.encode()
        if fate == "aborted":  # no attempt ends in a commit; the node trains on
            encoded = node.encode()
            continue
        lacks = {"whole": [], "part": [1, 4], "left out": list(range(CHUNKS.count))}[fate]
        mean = (rng.standard_normal(CHUNKS.numel) * 1e-2).astype(np.float32)
        mine = decoded(encoded)
        for c in set(range(CHUNKS.count)) - set(lacks):
            span = CHUNKS.span(c)
            mean[span] = (mean[span] + mine[span]) / 2
            sent_in_all[span] += mine[span]
        if fate == "left out":
            outer.set_work_aside()
        else:
            residual.commit(k, encoded.whole, bitmap(lacks, CHUNKS.count))
            residual.commit(k, encoded.whole, b"")  # once a round
        for c, payload in enumerate(sealed(mean)):
            outer.apply(c, payload)
        outer.finalize()
        if fate != "left out":
            vectors.local[:] = vectors.anchor
    assert len(fates) == 4
    error = np.linalg.norm(sent_in_all + residual.vector + trained) / np.linalg.norm(trained)
    assert error < 1e-5


def test_of_fragments_that_take_turns_the_residual_moves_where_the_round_was(tmp_path: Path) -> None:
    rng, chunks = np.random.default_rng(5), Chunks(3000, 512, (1000, 2000))
    vectors = SharedVectors.create(chunks.numel, tmp_path)
    residual = Residual(ErrorFeedback(1.0), vectors, chunks, INT4)
    vectors.local[:] = rng.standard_normal(chunks.numel)
    within, alone = chunks.fragment_slice(1), chunks.fragment_chunks(1)
    encoder = DeltaEncoder(vectors.anchor[within], vectors.local[within], INT4, alone)
    asyncio.run(encoder.run(asyncio.to_thread))
    residual.commit(2, encoder.encoded.whole, bitmap([3], alone.count))
    assert not residual.vector[:1000].any()
    missed = alone.span(3)  # the round has nothing of it: all is left
    assert np.array_equal(residual.vector[within][missed], -vectors.local[within][missed])
    rest = np.delete(residual.vector[within], np.r_[missed])
    assert 0 < np.abs(rest).max() < 0.5 * np.abs(vectors.local).max()
    residual.close()
    vectors.close()


def test_it_comes_back_from_the_disk_unless_a_later_round_has_used_it(node: Node, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    node.vectors.local[:] = rng.standard_normal(CHUNKS.numel)
    node.residual.commit(3, node.encode().whole, b"")
    node.residual.save()
    node.residual.close()
    assert np.abs(node.residual.vector).max() > 0

    def back(run: bytes = RUN) -> Residual:
        residual = Residual(ErrorFeedback(1.0), node.vectors, CHUNKS, INT4, (tmp_path, run))
        residual.restore()
        return residual

    same, others, used = back(), back(b"s" * 16), back()
    same.reset_to(3)
    assert same.vector.tobytes() == node.residual.vector.tobytes()
    assert not others.vector.any()
    used.reset_to(4)
    assert not used.vector.any() and used.round == 4
    damaged = bytearray((tmp_path / FILE_NAME).read_bytes())
    damaged[-1] ^= 1
    (tmp_path / FILE_NAME).write_bytes(damaged)
    assert not back().vector.any()
    (tmp_path / FILE_NAME).write_bytes(b"short")
    assert not back().vector.any()
