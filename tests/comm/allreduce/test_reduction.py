"""Whole reduces over loopback TCP, in which nothing goes wrong: everybody holds the reference, bit for bit."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from reduce_members import (
    CHUNKS,
    CODEC,
    ENCODED,
    GATHERED,
    SPARSE,
    SPARSE_CODEC,
    VECTORS,
    Member,
    encode,
    fleet,
    gathered,
    plan_for,
    reducing,
    reference,
    run,
)

from atoll.comm.allreduce.listener import SealReport
from atoll.comm.allreduce.sealing import EncodedSeal, TimedSeal, WeightedMean
from atoll.comm.codecs.codec import Codec
from atoll.comm.codecs.factory import make_codec
from atoll.comm.config.run import CodecName
from atoll.comm.digest import digest
from atoll.comm.transport import frames
from atoll.comm.transport.certificates import load_or_make
from atoll.comm.transport.tls import TlsContexts


@pytest.mark.parametrize(
    "codec", [make_codec(codec, 128) for codec in CodecName], ids=[c.value for c in CodecName]
)
@pytest.mark.parametrize("n", [1, 2, 3, 4, 5])
def test_a_reduce_equals_the_reference_bit_for_bit_on_every_member(n: int, codec: Codec) -> None:
    async def body() -> None:
        async with fleet(n, streams=2) as planes:
            plan = plan_for(planes)
            members = [Member(p, encode(VECTORS[i], codec), plan, codec) for i, p in enumerate(planes)]
            async with reducing(*members):
                expected = [reference(c, range(n), [1.0] * n, codec) for c in range(CHUNKS.count)]
                for member in members:
                    assert await member.holds_all() == expected
                for c, owner in enumerate(plan.owners):
                    seal = SealReport(c, 1, digest(expected[c]), tuple(range(n)))
                    assert members[owner].reports.seals[c] == (plan, seal)
                assert not any(member.reports.blamed for member in members)

    run(body())


def test_over_encrypted_links_it_is_the_same(tmp_path: Path) -> None:
    async def body() -> None:
        async with fleet(3, streams=2, tls=TlsContexts(load_or_make(tmp_path))) as planes:
            plan = plan_for(planes)
            members = [Member(p, ENCODED[i], plan) for i, p in enumerate(planes)]
            async with reducing(*members):
                for member in members:
                    assert await member.holds_all() == [reference(c, range(3), [1.0] * 3) for c in range(10)]
                links = [link for plane in planes for _, link in plane.peers.links()]
                assert len(links) >= 6 and all(link.encrypted for link in links)

    run(body())


@pytest.mark.parametrize("owners", [[0] * 10, [2] * 10, [0, 0, 0, 0, 0, 1, 1, 1, 1, 1], [2, 1, 0] * 3 + [2]])
def test_weights_and_owners_may_be_unequal(owners: list[int]) -> None:
    async def body() -> None:
        async with fleet(3) as planes:
            weights = [100.0, 33.3, 0.001]
            plan = plan_for(planes, weights, owners)
            members = [Member(p, ENCODED[i], plan) for i, p in enumerate(planes)]
            async with reducing(*members):
                for member in members:
                    assert await member.holds_all() == [reference(c, range(3), weights) for c in range(10)]

    run(body())


def test_a_delta_is_scaled_by_its_owner_and_divided_by_the_whole_weight() -> None:
    async def body() -> None:
        async with fleet(2) as planes:
            plan = plan_for(planes, [1.0, 3.0])
            plan = replace(plan, members=(plan.members[0], replace(plan.members[1], scale=0.25)))
            members = [Member(p, ENCODED[i], plan) for i, p in enumerate(planes)]
            async with reducing(*members):
                expected = [reference(c, range(2), [1.0, 3.0], scales=[1.0, 0.25]) for c in range(10)]
                for member in members:
                    assert await member.holds_all() == expected

    run(body())


def test_the_rounds_length_is_sealed_with_every_chunk_where_it_is_asked_for() -> None:
    async def body() -> None:
        sealing = TimedSeal(EncodedSeal(CODEC, WeightedMean(CODEC)))
        async with fleet(3) as planes:
            plan = plan_for(planes, length=0.75)
            members = [Member(p, ENCODED[i], plan, sealing=sealing) for i, p in enumerate(planes)]
            async with reducing(*members):
                length = np.float64(0.75).tobytes()
                expected = [reference(c, range(3), [1.0] * 3) + length for c in range(10)]
                for member in members:
                    assert await member.holds_all() == expected

    run(body())


def test_sparse_deltas_are_gathered_and_everybody_merges_them_alike() -> None:
    async def body() -> None:
        async with fleet(4) as planes:
            weights = [3.0, 1.0, 2.0, 0.0]
            plan = plan_for(planes, weights)
            given = [*SPARSE[:3], None]
            members = [Member(p, given[i], plan, SPARSE_CODEC, GATHERED) for i, p in enumerate(planes)]
            async with reducing(*members):
                for plane in planes:
                    plane.peers.estimator._up._before = 1000.0  # where other sealed chunks would be packed
                expected = [gathered(c, range(3), weights[:3]) for c in range(CHUNKS.count)]
                for member in members[:3]:
                    assert await member.holds_all() == expected
        for c in range(CHUNKS.count):
            merged, by_hand = np.empty((2, CHUNKS.size(c)), np.float32)
            GATHERED.decode(c, expected[c], merged)
            by_hand[:] = 0.0
            for i, weight in enumerate(weights[:3]):
                x = np.empty_like(by_hand)
                SPARSE_CODEC.decode(SPARSE[i][c], x)
                by_hand += np.float32(weight / 6.0) * x
            assert merged.tobytes() == by_hand.tobytes()

    run(body())


def test_a_member_without_weight_owns_chunks_and_is_sent_no_others() -> None:
    async def body() -> None:
        async with fleet(3) as planes:
            plan = plan_for(planes, [1.0, 2.0, 0.0], [2] * 8 + [0, 1])
            members = [Member(p, ENCODED[i] if i < 2 else None, plan) for i, p in enumerate(planes)]
            async with reducing(*members):
                for member in members[:2]:
                    assert await member.holds_all() == [reference(c, range(2), [1.0, 2.0]) for c in range(10)]
                assert not members[2].reports.root and sorted(members[2].reports.seals) == list(range(8))
                assert not members[2].reduction.holds(members[0].reports.root)
                with pytest.raises(RuntimeError, match="not every sealed chunk is here"):
                    _ = members[2].reduction.result

    run(body())


def test_the_plans_order_and_not_the_order_of_arrival_decides_the_sum() -> None:
    async def body() -> None:
        async with fleet(4) as planes:
            order = (3, 1, 0, 2)
            plan = plan_for([planes[i] for i in order])
            members = [Member(planes[i], ENCODED[i], plan) for i in (2, 0, 3, 1)]
            async with reducing(*members):
                for member in members:
                    assert await member.holds_all() == [reference(c, order, [1.0] * 4) for c in range(10)]

    run(body())


def test_one_member_needs_no_socket() -> None:
    async def body() -> None:
        async with fleet(1) as planes:
            member = Member(planes[0], ENCODED[0], plan_for(planes))
            async with reducing(member):
                assert await member.holds_all() == [reference(c, [0], [1.0]) for c in range(10)]
            assert planes[0].bytes_up == planes[0].bytes_down == 0

    run(body())


def test_each_byte_crosses_twice_less_the_own_share() -> None:
    async def body() -> None:
        async with fleet(2) as planes:
            members = [Member(p, ENCODED[i], plan_for(planes)) for i, p in enumerate(planes)]
            async with reducing(*members):
                for member in members:
                    await member.holds_all()
                payload = sum(chunk.size for chunk in ENCODED[0])
                for plane in planes:
                    assert payload <= plane.bytes_up <= payload + 20 * frames.HEADER.size + 200

    run(body())


def test_packed_frames_carry_the_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the node's link is so slow that zstandard pays, and the path so long that it is tried."""
    monkeypatch.setattr("atoll.comm.transport.peer_links.LONG_PATH_RTT", 0.0)
    compressible = [np.where(np.arange(CHUNKS.numel) % 7 < 5, 0, x).astype(np.float32) for x in VECTORS]

    async def body() -> None:
        async with fleet(3) as planes:
            plan = plan_for(planes)
            encoded = [encode(x, make_codec(CodecName.FP32, 1)) for x in compressible]
            codec = make_codec(CodecName.FP32, 1)
            for plane in planes:
                plane.peers.estimator._up._before = 1000.0
            members = [Member(p, encoded[i], plan, codec) for i, p in enumerate(planes)]
            async with reducing(*members):
                held = [await member.holds_all() for member in members]
                mean = np.zeros(CHUNKS.numel, np.float32)
                for x in compressible[:3]:
                    mean += np.float32(1 / 3) * x
                assert [b"".join(chunks) for chunks in held] == [mean.tobytes()] * 3
                whole = 3 * 4 * 4 * CHUNKS.numel * 2 / 3 / 3  # what would have gone up without
                assert all(plane.bytes_up < 0.8 * whole for plane in planes)
                for member, plane in zip(members, planes, strict=True):
                    buffers = plane.peers.buffers
                    free = len(buffers)
                    for chunk in member.reduction.result.chunks:
                        buffers.give(chunk)
                    assert len(buffers) == free + CHUNKS.count, "all of it is memory for the next round"
                    assert free <= CHUNKS.count

    run(body())
