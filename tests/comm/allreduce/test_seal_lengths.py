"""What owners seal is not longer than the deltas that they merge; where it is, members say so."""

import math
from dataclasses import replace

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
    plan_for,
    reducing,
    reference,
    run,
)

from atoll.comm.allreduce.delta_encoder import encoded_norm
from atoll.comm.allreduce.seal_lengths import MAX_TIMES, SLACK, SealLengths
from atoll.comm.allreduce.sealing import EncodedSeal, SealFormat, Term, TimedSeal, WeightedMean
from atoll.comm.byte_view import U8, view
from atoll.comm.codecs.codec import Codec
from atoll.comm.codecs.factory import make_codec
from atoll.comm.config.run import CodecName
from atoll.comm.digest import digest
from atoll.comm.plan import NOBODY, Plan
from atoll.outer_opt.merge import radial
from atoll.outer_opt.robust_merge import TrimmedMean, centered


def take(lengths: SealLengths, c: int, owner: int, square: float, longest: float = 1.0) -> list[tuple[int, float]]:
    lengths.take(c, owner, square)
    return lengths.too_long(longest)


def test_the_chunks_of_one_owner_count_together_and_the_largest_is_named_once() -> None:
    lengths = SealLengths()
    assert take(lengths, 0, 1, 3.0) == []
    assert take(lengths, 1, 2, 4.0) == [], "another owner's, just as long as it may be"
    assert take(lengths, 2, 1, 1.0) == []
    assert take(lengths, 3, 1, 1.0) == [(0, math.sqrt(5.0))]
    assert take(lengths, 4, 1, 9.0) == []
    assert take(lengths, 5, 2, 2.0**200) == [(5, math.sqrt(2.0**200 + 4.0))]


def test_what_is_sealed_anew_counts_for_its_new_owner_alone() -> None:
    lengths = SealLengths()
    assert take(lengths, 0, 1, 4.0) == take(lengths, 0, 2, 4.0) == take(lengths, 1, 1, 4.0) == []
    assert take(lengths, 2, 2, 0.1) == [(0, math.sqrt(4.1))]


def test_another_attempt_hears_again_of_what_is_still_sealed() -> None:
    lengths = SealLengths()
    assert take(lengths, 0, 1, 9.0) == [(0, 3.0)]
    assert take(lengths, 1, 1, 16.0) == []
    lengths.begin_attempt()
    assert lengths.too_long(1.0) == [(1, 5.0)] and lengths.too_long(1.0) == []
    lengths.forget(0)
    lengths.forget(0)
    lengths.forget(1)
    assert lengths.too_long(1.0) == [] and take(lengths, 2, 1, 9.0) == [(2, 3.0)]


def test_where_what_was_named_turns_out_to_be_something_else_the_next_is_named() -> None:
    """An owner may give members another chunk than it sealed, only to have that one named."""
    lengths = SealLengths()
    assert take(lengths, 0, 1, 2.0**200) == [(0, 2.0**100)]
    assert take(lengths, 1, 1, 9.0) == []
    lengths.forget(0)  # it is not the ledger's
    assert lengths.too_long(1.0) == [(1, 3.0)]


def test_where_all_deltas_are_zeros_anything_is_too_long_and_where_one_is_not_known_nothing_is() -> None:
    lengths = SealLengths()
    assert take(lengths, 0, 1, 0.0, 0.0) == []
    for c in range(1, 1000):
        assert take(lengths, c, c, (1 + c / 997) * 1e-300, 0.0) == [(c, MAX_TIMES)], "no more, by rounding"
    assert take(lengths, 0, 1000, 1e300, math.inf) == []


def looking(plan: Plan, codec: Codec, inputs: list[tuple[U8, ...]]) -> Plan:
    """The plan with the norms of what its members send."""
    told = [encoded_norm(codec, CHUNKS, each) for each in inputs]
    return replace(plan, members=tuple(replace(m, norm=n) for m, n in zip(plan.members, told, strict=True)))


class Vast:
    """A seal format that makes a chunk so many times as long as it is."""

    def __init__(self, honest: EncodedSeal, chunk: int, times: float) -> None:
        self._honest, self._chunk, self._times = honest, chunk, np.float32(times)

    def __getattr__(self, name: str) -> object:
        return getattr(self._honest, name)

    def seal(self, c: int, terms: list[Term], length: float, numel: int, out: U8) -> None:
        self._honest.seal(c, terms, length, numel, out)
        if c == self._chunk:
            mean = np.empty(numel, np.float32)
            self._honest.decode(c, out, mean)
            self._honest.codec.encode(mean * self._times, out)


@pytest.mark.parametrize("times", [1.0, 20.0, 1e30])
def test_all_others_say_that_an_owner_sealed_what_is_too_long_before_they_hold_it(times: float) -> None:
    async def body() -> None:
        async with fleet(3) as planes:
            plan = looking(plan_for(planes, owners=[0, 1, 2] * 3 + [0]), CODEC, list(ENCODED[:3]))
            honest = EncodedSeal(CODEC, WeightedMean(CODEC))
            formats: list[SealFormat] = [honest, Vast(honest, 4, times), honest]  # type: ignore[list-item]
            group = [Member(p, ENCODED[i], plan, sealing=formats[i]) for i, p in enumerate(planes)]
            async with reducing(*group):
                for member in group:
                    await member.holds_all()
                assert not group[1].reports.too_long, "it is its own"
                for member in (group[0], group[2]):
                    assert [(c, since) for c, since, _, _ in member.reports.too_long] == [(4, 1)] * (times > 1)
                    assert all(SLACK < told <= times for _, _, _, told in member.reports.too_long)

    run(body())


def test_of_what_is_left_of_one_that_is_gone_it_is_said_again_before_it_is_held() -> None:
    """Whoever sealed it may have left before anybody could say so, and nobody owns it now."""

    async def body() -> None:
        async with fleet(3) as planes:
            plan = looking(plan_for(planes, owners=[0, 1, 2] * 3 + [0]), CODEC, list(ENCODED[:3]))
            formats: list[SealFormat | None] = [None, Vast(EncodedSeal(CODEC, WeightedMean(CODEC)), 4, 1e30), None]  # type: ignore[list-item]
            group = [Member(p, ENCODED[i], plan, sealing=formats[i]) for i, p in enumerate(planes)]
            async with reducing(*group):
                for member in group:
                    await member.holds_all()
                owners = tuple(NOBODY if owner == 1 else owner for owner in plan.owners)
                since = tuple(2 if owner == NOBODY else 1 for owner in owners)
                gone = tuple(replace(m, gone=i == 1) for i, m in enumerate(plan.members))
                after = replace(plan, attempt=2, members=gone, owners=owners, since=since)
                after = replace(after, kept=frozenset(range(CHUNKS.count)))
                for member in (group[0], group[2]):
                    member.reports.root, member.reports.too_long = b"", []
                    member.reduction.replan(after)
                    assert member.reports.root and member.reports.orphaned is not None
                    assert [word[:2] for word in member.reports.too_long] == [(4, 2)]

    run(body())


def test_who_gives_others_something_else_than_it_sealed_does_not_hide_behind_it_what_is_too_long() -> None:
    """Chunk 1 as it was given comes first, and is named; it turns out not to be what was sealed. Chunk 4 is."""

    async def body() -> None:
        async with fleet(3) as planes:
            plan = looking(plan_for(planes, owners=[0, 1, 2] * 3 + [0]), CODEC, list(ENCODED[:3]))
            honest = EncodedSeal(CODEC, WeightedMean(CODEC))
            vast = Vast(Vast(honest, 1, 1e10), 4, 1e30)  # type: ignore[arg-type]
            formats: list[SealFormat | None] = [None, vast, None]  # type: ignore[list-item]
            group = [Member(p, ENCODED[i], plan, sealing=formats[i]) for i, p in enumerate(planes)]
            async with reducing(*group):
                given = [await member.holds_all() for member in group][0]
                ledger = list(given)
                ledger[1] = reference(1, range(3), [1.0] * 3)
                group[1].reduction._sealed[1] = np.array(view(ledger[1]))
                group[1].reduction.prove(
                    [digest(chunk) for chunk in given]
                )  # its own word: it keeps what it gives
                for member in (group[0], group[2]):
                    assert {word[0] for word in member.reports.too_long} == {1}
                    member.reports.root = b""
                    member.reduction.prove([digest(chunk) for chunk in ledger])
                for member in (group[0], group[2]):
                    assert await member.holds_all() == ledger
                    word = member.reports.too_long[-1]
                    assert word[:3] == (4, 1, digest(ledger[4]))

    run(body())


@pytest.mark.parametrize("alike", [True, False])
def test_no_honest_merge_is_too_long_however_coarse_its_codec(alike: bool) -> None:
    vectors = [VECTORS[0]] * 4 if alike else VECTORS[:4]
    shares = [0.4, 0.3, 0.2, 0.1]
    for codec in (CODEC, make_codec(CodecName.INT4, 64), make_codec(CodecName.BF16, 64)):
        sent = [encode(x, codec) for x in vectors]
        longest = max(encoded_norm(codec, CHUNKS, each) for each in sent)
        for rule in (None, centered, TrimmedMean(0.25), radial):
            square = 0.0
            for c in range(CHUNKS.count):
                terms: list[Term] = [(i, sent[i][c], share) for i, share in enumerate(shares)]
                out = np.empty(codec.size(CHUNKS.size(c)), np.uint8)
                sealing = TimedSeal(EncodedSeal(codec, WeightedMean(codec)))
                whole = np.empty(sealing.size(CHUNKS.size(c), 4), np.uint8)
                sealing.seal(c, terms, 1.0, CHUNKS.size(c), whole)
                if rule is not None:
                    decoded = [np.empty(CHUNKS.size(c), np.float32) for _ in terms]
                    for each, (_, payload, _) in zip(decoded, terms, strict=True):
                        codec.decode(payload, each)
                    merged, scratch = np.empty_like(decoded[0]), np.empty_like(decoded[0])
                    rule(decoded, shares, merged, scratch)
                    codec.encode(merged, out)
                    whole[: out.size] = out
                square += sealing.square(whole, CHUNKS.size(c))
            assert math.sqrt(square) < SLACK * longest, (codec, rule)


def test_of_gathered_contributions_an_upper_bound_counts() -> None:
    terms: list[Term] = [(i, SPARSE[i][0], share) for i, share in enumerate([0.5, 0.3, 0.2])]
    numel = CHUNKS.size(0)
    out, merged = np.empty(GATHERED.size(numel, 3), np.uint8), np.empty(numel, np.float32)
    GATHERED.seal(0, terms, 1.0, numel, out)
    GATHERED.decode(0, out, merged)
    bound = math.sqrt(GATHERED.square(out, numel))
    longest = max(math.sqrt(SPARSE_CODEC.square(SPARSE[i][0], numel)) for i in range(3))
    assert float(np.linalg.norm(merged)) <= bound * (1 + 1e-6) and bound <= longest * (1 + 1e-9)
