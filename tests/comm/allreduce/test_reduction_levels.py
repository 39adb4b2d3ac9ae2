"""Whole reduces in two levels over loopback TCP: regions, relays, and the deaths of these."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from reduce_members import (
    CHUNKS,
    CODEC,
    ENCODED,
    VECTORS,
    Member,
    encode,
    fleet,
    linked,
    name,
    plan_for,
    reducing,
    reference,
    run,
    survive,
)

from atoll.comm.allreduce.listener import SealReport
from atoll.comm.codecs.codec import F32, Codec
from atoll.comm.codecs.factory import make_codec
from atoll.comm.config.run import CodecName
from atoll.comm.digest import digest
from atoll.comm.plan import Plan
from atoll.comm.transport import frames
from atoll.comm.transport.data_plane import DataPlane
from atoll.comm.transport.frames import FrameKind, Header


def mean_of(terms: Sequence[tuple[bytes | F32, float]], c: int, codec: Codec = CODEC) -> bytes:
    """The encoded mean of encoded chunks or vectors' chunks with these weights, by reduction.py's docstring."""
    span, n = CHUNKS.span(c), CHUNKS.size(c)
    mean, x, payload = np.zeros(n, np.float32), np.empty(n, np.float32), np.empty(codec.size(n), np.uint8)
    for term, weight in terms:
        if isinstance(term, bytes):
            payload[:] = np.frombuffer(term, np.uint8)
        else:
            codec.encode(np.ascontiguousarray(term[span]), payload)
        codec.decode(payload, x)
        mean = mean + np.float32(weight / sum(w for _, w in terms)) * x
    codec.encode(mean, payload)
    return payload.tobytes()


def layered_reference(plan: Plan, c: int, inputs: Sequence[int], codec: Codec = CODEC) -> bytes:
    """The sealed bytes of a chunk in two levels, of these places, whose vectors have the same numbers."""
    home = plan.region(plan.owners[c])
    terms: list[tuple[int, bytes | F32, float]] = []
    for g in sorted({plan.region(i) for i in inputs}):
        mine = [(i, VECTORS[i], plan.members[i].weight) for i in inputs if plan.region(i) == g]
        if g == home:
            terms += mine
        else:
            mean = mean_of([(x, weight) for _, x, weight in mine], c, codec)
            terms.append((plan.relays[g][c], mean, sum(weight for _, _, weight in mine)))
    return mean_of([(x, weight) for _, x, weight in sorted(terms, key=lambda term: term[0])], c, codec)


def layered_plan(
    planes: Sequence[DataPlane], regions: Sequence[int], weights: Sequence[float], **rest: Any
) -> Plan:
    plan = plan_for(planes, weights, **rest)
    places: dict[int, list[int]] = {}
    for i, g in enumerate(regions):
        places.setdefault(g, []).append(i)
    relays = tuple(
        tuple(o if regions[o] == g else places[g][c % len(places[g])] for c, o in enumerate(plan.owners))
        for g in sorted(places)
    )
    return replace(plan, regions=tuple(regions), relays=relays, layered=frozenset(range(CHUNKS.count)))


@pytest.mark.parametrize(
    "codec", [make_codec(codec, 128) for codec in CodecName], ids=[c.value for c in CodecName]
)
@pytest.mark.parametrize("regions", [(0, 0, 1, 1), (0, 1, 0, 1, 2), (0, 0, 0, 0, 1), (0, 0, 0)])
def test_two_levels_equal_their_reference_bit_for_bit_on_every_member(
    regions: tuple[int, ...], codec: Codec
) -> None:
    async def body() -> None:
        async with fleet(len(regions)) as planes:
            weights = [1.0, 2.0, 3.5, 0.25, 7.0][: len(regions)]
            plan = layered_plan(planes, regions, weights)
            everybody = tuple(range(len(regions)))
            members = [Member(p, encode(VECTORS[i], codec), plan, codec) for i, p in enumerate(planes)]
            async with reducing(*members):
                expected = [layered_reference(plan, c, everybody, codec) for c in range(CHUNKS.count)]
                for member in members:
                    assert await member.holds_all() == expected
                for c, owner in enumerate(plan.owners):
                    assert members[owner].reports.seals[c] == (
                        plan,
                        SealReport(c, 1, digest(expected[c]), everybody),
                    )
                assert not any(member.reports.blamed for member in members)

    run(body())


def test_a_chunk_crosses_between_regions_once_each_way() -> None:
    async def body() -> None:
        async with fleet(6) as planes:
            plan = layered_plan(planes, (0, 0, 0, 1, 1, 1), [1.0] * 6, owners=[0] * 10)
            members = [Member(p, ENCODED[i], plan) for i, p in enumerate(planes)]
            async with reducing(*members):
                for member in members:
                    await member.holds_all()
                payload = sum(chunk.size for chunk in ENCODED[0])
                far = (link.moved for i in range(3) for n, link in planes[i].peers.links() if n > name(2))
                assert 2 * payload <= sum(far) <= 2 * payload + 9 * 40 * frames.HEADER.size

    run(body())


def test_a_relay_and_an_owner_may_bring_no_delta() -> None:
    async def body() -> None:
        async with fleet(4) as planes:
            weights = [0.0, 1.0, 0.0, 2.0]
            plan = layered_plan(planes, (0, 0, 1, 1), weights, owners=[0] * 10)
            plan = replace(plan, relays=((0,) * 10, (2,) * 10))
            members = [Member(p, ENCODED[i] if weights[i] else None, plan) for i, p in enumerate(planes)]
            async with reducing(*members):
                for member in (members[1], members[3]):
                    assert await member.holds_all() == [layered_reference(plan, c, (1, 3)) for c in range(10)]

    run(body())


@pytest.mark.parametrize("victim", [1, 3, 4])
@pytest.mark.parametrize("after", [0, 2, 5])
def test_after_the_death_of_a_member_a_relay_or_an_owner_the_survivors_hold_what_the_seals_say(
    victim: int, after: int
) -> None:
    """Of two regions; 4 is neither owner nor relay."""

    async def body() -> None:
        async with fleet(5) as planes:
            plan = layered_plan(planes, (0, 0, 1, 1, 1), [1.0, 2.0, 3.0, 4.0, 5.0], owners=[0, 1, 2, 3, 0] * 2)
            far = tuple(o if o > 1 else 2 + c % 2 for c, o in enumerate(plan.owners))
            plan = replace(plan, relays=(plan.relays[0], far))
            members = [Member(p, ENCODED[i], plan) for i, p in enumerate(planes)]
            async with reducing(*members):
                await members[0].reports.until(lambda reports: len(reports.seals) >= min(after, 4))
                await members[victim].stop()
                await planes[victim].close()
                living = [m for i, m in enumerate(members) if i != victim]
                ledger = {c: s for m in living for c, (_, s) in m.reports.seals.items()}
                second = survive(plan, victim, ledger)
                for member in living:
                    member.reports.root = b""
                    member.reduction.replan(second)
                held = [await member.holds_all() for member in living]
                seals = {
                    c: s for m in living for c, (p, s) in m.reports.seals.items() if c in ledger or p is second
                }
                for c in range(CHUNKS.count):
                    inputs = seals[c].inputs
                    assert set(inputs) >= set(range(5)) - {victim}
                    two = c in (plan if c in ledger else second).layered
                    flat = reference(c, inputs, [plan.members[i].weight for i in inputs])
                    expected = layered_reference(plan, c, inputs) if two else flat
                    assert [chunks[c] for chunks in held] == [expected] * 4
                    assert seals[c].digest == digest(expected)

    run(body())


def test_a_relay_that_claims_others_than_its_region_is_named() -> None:
    async def body() -> None:
        async with fleet(4) as planes:
            plan = layered_plan(planes, (0, 0, 1, 1), [1.0] * 4, owners=[0] * 10)
            plan = replace(plan, relays=((0,) * 10, (2,) * 10))
            member = Member(planes[0], ENCODED[0], plan)
            async with reducing(member):
                link = await linked(planes[2], planes[0])
                size = CODEC.size(CHUNKS.size(0))
                header = Header(FrameKind.PARTIAL, plan.fence, 0, size + 1, place=2)
                await frames.send(link, header, ENCODED[2][0].tobytes() + bytes([0b1110]))
                await member.reports.until(lambda reports: any("claims" in s for _, s in reports.blamed))
                node, sentence = member.reports.blamed[-1]
                assert node == name(2) and "region's mean of chunk 0 was refused" in sentence
                link.close()

    run(body())


def test_the_error_of_two_levels_is_that_of_one_quantisation_more() -> None:
    rng, n, codec = np.random.default_rng(7), 1 << 16, make_codec(CodecName.INT8, 128)
    vectors = [rng.standard_normal(n, dtype=np.float32) for _ in range(8)]
    payload = np.empty(codec.size(n), np.uint8)

    def through(x: F32) -> F32:
        y = np.empty_like(x)
        codec.encode(x, payload)
        codec.decode(payload, y)
        return y

    exact = np.mean(vectors, axis=0, dtype=np.float64)
    sent = [through(x) for x in vectors]
    flat = through(np.mean(sent, axis=0))
    two = through(np.mean([np.mean(sent[:4], axis=0), through(np.mean(sent[4:], axis=0))], axis=0))
    errors = [float(np.linalg.norm(x - exact) / np.linalg.norm(exact)) for x in (flat, two)]
    assert errors[0] < errors[1] < 1.25 * errors[0] < 0.0125
