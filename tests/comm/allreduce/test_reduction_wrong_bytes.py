"""Wrong bytes in a reduce over loopback TCP: they are refused, their sender is named, and the others go on."""

import math
import tracemalloc
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
from reduce_members import (
    CHUNKS,
    CODEC,
    ENCODED,
    SIZE,
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

from atoll.comm.allreduce.delta_encoder import encoded_norm
from atoll.comm.allreduce.sealing import SealFormat, Term, TimedSeal, mean_of
from atoll.comm.byte_view import U8
from atoll.comm.codecs import zstd
from atoll.comm.codecs.codec import ByteShuffle, Malformed
from atoll.comm.codecs.factory import make_codec
from atoll.comm.config.run import CodecName
from atoll.comm.digest import digest
from atoll.comm.ids import Epoch, Incarnation, Round
from atoll.comm.plan import Plan
from atoll.comm.transport import frames
from atoll.comm.transport.connection import LinkBroken
from atoll.comm.transport.frames import FrameKind, Header


def test_owners_tell_the_norm_of_each_contribution_that_they_merged_whatever_its_sender_told_of_it() -> None:
    """All of one at a thousand times what it was told as; another one's lie is in a single chunk."""
    told = [encoded_norm(CODEC, CHUNKS, ENCODED[i]) for i in range(3)]

    async def body() -> None:
        async with fleet(3) as planes:
            plan = plan_for(planes)
            members = (replace(m, norm=norm) for m, norm in zip(plan.members, told, strict=True))
            plan = replace(plan, members=tuple(members))
            sent = [encode(VECTORS[2] * np.float32(1000)) if i == 2 else ENCODED[i] for i in range(3)]
            group = [Member(p, sent[i], plan) for i, p in enumerate(planes)]
            async with reducing(*group):
                for member in group:
                    await member.holds_all()
                seen = [0.0] * 3
                for member in group:
                    for c, (_, seal) in member.reports.seals.items():
                        assert seal.inputs == (0, 1, 2) and not member.reports.blamed
                        for i, norm in enumerate(seal.norms):
                            assert norm == math.sqrt(CODEC.square(sent[i][c], CHUNKS.size(c)))
                            seen[i] += norm**2
                assert [math.sqrt(square) for square in seen] == [
                    pytest.approx(told[0]),
                    pytest.approx(told[1]),
                    pytest.approx(1000 * told[2], rel=1e-3),
                ]

    run(body())


class OfAnotherRound:
    """A seal format that says that the round is longer than it is."""

    def __init__(self, honest: TimedSeal) -> None:
        self._honest = honest

    def __getattr__(self, name: str) -> object:
        return getattr(self._honest, name)

    def seal(self, c: int, terms: list[Term], length: float, numel: int, out: U8) -> None:
        self._honest.seal(c, terms, 1e5 * length, numel, out)


def test_what_is_sealed_as_of_a_round_of_another_length_is_refused() -> None:
    """The outer rule's momentum goes by it."""

    async def body() -> None:
        async with fleet(3) as planes:
            plan, honest = plan_for(planes, length=0.75), TimedSeal(mean_of(CODEC))
            formats: list[SealFormat] = [honest, OfAnotherRound(honest), honest]  # type: ignore[list-item]
            group = [Member(p, ENCODED[i], plan, sealing=formats[i]) for i, p in enumerate(planes)]
            async with reducing(*group):
                for member in (group[0], group[2]):
                    await member.reports.until(lambda r: bool(r.blamed))
                    assert set(member.reports.spoilers) == {name(1)} == {node for node, _ in member.reports.blamed}
                    assert not member.reports.root

    run(body())


def test_norms_are_told_only_where_the_plan_looks_at_them_and_never_larger_than_they_can_travel() -> None:
    largest = np.full_like(VECTORS[0], np.finfo(np.float32).max)
    for looks in (False, True):

        async def body(looks: bool = looks) -> None:
            async with fleet(2) as planes:
                plan = plan_for(planes)
                norm = 1.0 if looks else math.inf
                plan = replace(plan, members=tuple(replace(m, norm=norm) for m in plan.members))
                group = [Member(p, encode(largest), plan) for p in planes]
                async with reducing(*group):
                    for member in group:
                        await member.holds_all()
                    norms = [seal.norms for m in group for _, seal in m.reports.seals.values()]
                    limit = float(np.finfo(np.float32).max)
                    assert norms == ([(limit, limit)] if looks else [()]) * CHUNKS.count

        run(body())


def test_a_contributor_of_malformed_bytes_is_named_and_the_others_go_on_without_it() -> None:
    async def body() -> None:
        async with fleet(3) as planes:
            plan = plan_for(planes, owners=[0] * 10)
            poison = tuple(np.full_like(chunk, 0xFF) for chunk in ENCODED[2])
            inputs = [ENCODED[0], ENCODED[1], poison]
            members = [Member(p, inputs[i], plan) for i, p in enumerate(planes)]
            async with reducing(*members):
                await members[0].reports.until(lambda reports: bool(reports.blamed))
                node, sentence = members[0].reports.blamed[0]
                assert node == name(2) and "its contribution to chunk" in sentence and "scale" in sentence
                assert set(members[0].reports.spoilers) == {name(2)}
                second = survive(plan, 2, {})
                for member in members[:2]:
                    member.reduction.replan(second)
                for member in members[:2]:
                    assert await member.holds_all() == [reference(c, range(2), [1.0] * 2) for c in range(10)]

    run(body())


def test_whose_contribution_was_refused_is_asked_anew_at_once_and_named_when_it_is_refused_again() -> None:
    """The coordinator cannot know from one word whose fault it was, and keeps it for an attempt more."""

    async def body() -> None:
        async with fleet(3) as planes:
            plan = plan_for(planes, owners=[0] * 10)
            poison = tuple(np.full_like(chunk, 0xFF) for chunk in ENCODED[2])
            inputs = [ENCODED[0], ENCODED[1], poison]
            members = [Member(p, inputs[i], plan) for i, p in enumerate(planes)]
            async with reducing(*members):
                named = members[0].reports.blamed
                await members[0].reports.until(lambda reports: bool(reports.blamed))
                for attempt in (2, 3):
                    named.clear()
                    for member in members:
                        member.reduction.replan(replace(plan, attempt=attempt, since=(1,) * 10))
                    await members[0].reports.until(lambda reports: bool(reports.blamed))
                    node, sentence = named[0]
                    assert node == name(2) and "was refused" in sentence, "it is not waited for until it is late"
            assert not members[2].reports.blamed

    run(body())


def test_an_owner_of_malformed_bytes_is_named() -> None:
    async def body() -> None:
        async with fleet(2) as planes:
            plan = plan_for(planes, owners=[1] * 10)
            member = Member(planes[0], ENCODED[0], plan)
            async with reducing(member):
                link = await linked(planes[1], planes[0])
                size = CODEC.size(CHUNKS.size(0))
                header = Header(FrameKind.SEALED, plan.fence, 0, size, place=1)
                await frames.send(link, header, b"\xff" * size)
                await member.reports.until(lambda reports: any("refused" in s for _, s in reports.blamed))
                assert "chunk 0 as it sent it was refused" in member.reports.blamed[-1][1]
                assert member.reports.spoilers == [name(1)]
                link.close()

    run(body())


@pytest.mark.parametrize("kind", [FrameKind.CONTRIBUTION, FrameKind.SEALED])
def test_a_bomb_stays_packed_and_its_sender_is_named(kind: FrameKind, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a contribution and as a sealed chunk: a frame as short as one may be, of 64 MB."""
    bomb = zstd.pack(bytes(1 << 26))
    codec = make_codec(CodecName.FP32, 1)  # of which a chunk is longer than the bomb
    encoded = [encode(vector, codec) for vector in VECTORS[:2]]
    assert len(bomb) < encoded[0][0].size

    async def body() -> None:
        async with fleet(2) as planes:
            plan = plan_for(planes, owners=[int(kind is FrameKind.SEALED)] * 10)
            member = Member(planes[0], encoded[0], plan, codec)
            async with reducing(member):
                link = await linked(planes[1], planes[0])
                tracemalloc.start()
                header = Header(kind, plan.fence, 0, len(bomb), packed=True, place=1)
                await frames.send(link, header, bomb)
                await member.reports.until(lambda reports: bool(reports.blamed))
                assert tracemalloc.get_traced_memory()[1] < 1 << 23
                tracemalloc.stop()
                node, sentence = member.reports.blamed[0]
                assert node == name(1) and "declares 67108864 bytes" in sentence
                link.close()

    run(body())


def test_a_sealed_chunk_that_is_not_the_ledgers_comes_again_from_another_member() -> None:
    async def body() -> None:
        async with fleet(3) as planes:
            plan = plan_for(planes, owners=[2] * 10)
            members = [Member(p, ENCODED[i], plan) for i, p in enumerate(planes)]
            async with reducing(*members):
                expected = [reference(c, range(3), [1.0] * 3) for c in range(10)]
                assert [await member.holds_all() for member in members] == [expected] * 3
                victim, right = members[0], members[2].reduction.result
                ledger = right.digests
                forged = Header(FrameKind.SEALED, plan.fence, 4, SIZE, place=2)
                exchange = victim.reduction._exchange  # as if the owner had sent it other bytes
                exchange._give_up(4, [])
                victim.reduction.arrived(name(2), forged, ENCODED[5][4].copy())
                victim.reports.root = b""
                victim.reduction.prove(ledger)
                assert await victim.holds_all() == expected and victim.reports.proven
                assert victim.reports.forgers == [(name(2), 4)] and not victim.reports.blamed
                assert not members[1].reports.proven and not members[1].reports.forgers

    run(body())


def test_a_sealed_chunk_that_everybody_has_otherwise_than_the_ledger_is_lacking_everywhere() -> None:
    async def body() -> None:
        async with fleet(3) as planes:
            plan = plan_for(planes, owners=[2] * 10)
            members = [Member(p, ENCODED[i], plan) for i, p in enumerate(planes)]
            async with reducing(*members):
                for member in members:
                    await member.holds_all()
                ledger = list(members[2].reduction.result.digests)
                ledger[4] = digest(b"what nobody has")
                for member in members:
                    member.reduction.prove(ledger)
                for member in members:
                    await member.reports.until(lambda reports: reports.lacks == (4,))
                    assert not member.reports.blamed

    run(body())


FENCE = Plan(Incarnation(1), Epoch(1), Round(1), 1, (), ()).fence


@pytest.mark.parametrize(
    "header",
    [
        Header(FrameKind.CONTRIBUTION, FENCE, 0, 0xFFFFFFFF),
        Header(FrameKind.CONTRIBUTION, FENCE, 0, SIZE - 1),
        Header(FrameKind.CONTRIBUTION, FENCE, 0, SIZE + 1, packed=True),
        Header(FrameKind.CONTRIBUTION, FENCE, 9, SIZE),
        Header(FrameKind.CONTRIBUTION, FENCE, 10, SIZE),
        Header(FrameKind.SEALED, FENCE, 0xFFFFFFFF, SIZE),
        Header(FrameKind.MERGED, FENCE, 0, 1),
        Header(FrameKind.WANT, FENCE, 10),
        Header(FrameKind.LACK, FENCE, 0xFFFFFFFF),
        Header(FrameKind.RESYNC, FENCE, 0, 0xFFFFFFFF),
        Header(FrameKind.RESYNC, FENCE, 0, 5),
        Header(FrameKind.DATA, FENCE),
        Header(FrameKind.LINK, FENCE),
        Header(FrameKind.GET_STATE, FENCE),
        Header(FrameKind.REFUSED, FENCE, 0, 0xFFFFFFFF),
    ],
    ids=lambda h: f"{h.kind.name}-{h.chunk}-{h.length}",
)
def test_a_frame_that_none_should_send_ends_its_link_only(header: Header) -> None:
    async def body() -> None:
        async with fleet(3) as planes:
            stranger, planes = planes[2], planes[:2]
            members = [Member(p, ENCODED[i], plan_for(planes)) for i, p in enumerate(planes)]
            async with reducing(*members):
                link = await linked(stranger, planes[0])
                tracemalloc.start()
                await link.write(header.pack())
                with suppress(LinkBroken):
                    while True:  # its RESYNC may be on the way
                        await link.read(1, 5.0)
                assert tracemalloc.get_traced_memory()[1] < 1 << 22
                tracemalloc.stop()
                link.close()
                for member in members:
                    assert await member.holds_all() == [reference(c, range(2), [1.0] * 2) for c in range(10)]

    run(body())


def test_what_was_spoiled_on_its_way_comes_again_over_another_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atoll.comm.transport.peer_links.LONG_PATH_RTT", 0.0)
    spoiled, right = list[int](), zstd.unpack_shuffled

    def unpack(frame: memoryview, payload: U8, apart: ByteShuffle) -> None:
        if len(spoiled) < 2:
            spoiled.append(payload.size)
            raise Malformed("a bit of it changed on the way")
        right(frame, payload, apart)

    monkeypatch.setattr(zstd, "unpack_shuffled", unpack)

    async def body() -> None:
        async with fleet(2) as planes:
            plan = plan_for(planes, owners=[0] * 10)
            planes[1].peers.estimator._up._before = 1000.0
            codec = make_codec(CodecName.FP32, 1)
            encoded = [encode(np.zeros(CHUNKS.numel, np.float32), codec) for _ in planes]
            members = [Member(p, encoded[i], plan, codec) for i, p in enumerate(planes)]
            async with reducing(*members):
                assert [len(await member.holds_all()) for member in members] == [10, 10]
                assert len(spoiled) == 2 and members[0].reports.blamed

    run(body())
