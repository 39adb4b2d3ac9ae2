import asyncio
import gc
import re
import weakref
from collections.abc import AsyncIterator, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from atoll.comm import reduce as reduce_module
from atoll.comm import wire
from atoll.comm.chunks import Chunks
from atoll.comm.codec import F32, Codec, Fp32, Int8, NonFinite
from atoll.comm.digest import digest
from atoll.comm.errors import Unreachable
from atoll.comm.ids import Epoch, Incarnation, NodeId, Round, RunId
from atoll.comm.plan import BadPlan, Plan, PlanMember
from atoll.comm.plane import DataPlane, PeerLost
from atoll.comm.reduce import EncodedVector, Seal, SealedVector, encode_delta, reduce
from atoll.comm.wire import Header, Kind, Link

CHUNKS = Chunks(10_000, 1024)  # 10 chunks, the last one shorter
CODEC = Int8(256)
VECTORS = [np.random.default_rng(i).standard_normal(CHUNKS.numel, dtype=np.float32) for i in range(5)]


class Empty:
    def sealed(self, round: Round, chunk: int) -> None: ...
    def state(self, round: Round, chunk: int) -> None: ...
    def digests(self, round: Round) -> None: ...


def encode(x: F32, codec: Codec = CODEC, chunks: Chunks = CHUNKS) -> EncodedVector:
    return encode_delta(x, np.zeros_like(x), codec, chunks)


ENCODED = [encode(x) for x in VECTORS]


def reference(members: Sequence[int], weights: Sequence[float], codec: Codec = CODEC) -> bytes:
    """The sealed bytes, as reduce.py's docstring defines them."""
    sealed = b""
    for c in range(CHUNKS.count):
        span, n = CHUNKS.span(c), CHUNKS.size(c)
        mean, x, payload = np.zeros(n, np.float32), np.empty(n, np.float32), np.empty(codec.size(n), np.uint8)
        for position, (i, weight) in enumerate(zip(members, weights, strict=True)):
            codec.encode(VECTORS[i][span], payload)
            codec.decode(payload, x)
            term = x * np.float32(weight / sum(weights))
            mean = mean + term if position else term
        codec.encode(mean, payload)
        sealed += payload.tobytes()
    return sealed


def name(i: int) -> NodeId:
    return NodeId(f"n{i}")


@asynccontextmanager
async def fleet(n: int) -> AsyncIterator[list[DataPlane]]:
    planes = [await DataPlane.start("127.0.0.1:0", RunId("run"), name(i), b"k" * 32, Empty()) for i in range(n)]
    try:
        yield planes
    finally:
        for plane in planes:
            await plane.close()
        assert asyncio.all_tasks() == {asyncio.current_task()}, "tasks are left"


def plan_for(
    planes: list[DataPlane],
    attempt: int = 0,
    members: Iterable[int] | None = None,
    weights: Sequence[float] | None = None,
    owners: tuple[int, ...] | None = None,
) -> Plan:
    chosen = list(range(len(planes)) if members is None else members)
    weights = weights or [1.0] * len(chosen)
    return Plan(
        Incarnation(1),
        Epoch(1),
        Round(1),
        attempt,
        tuple(PlanMember(name(i), planes[i].address, w) for i, w in zip(chosen, weights, strict=True)),
        owners or tuple(c % len(chosen) for c in range(CHUNKS.count)),
    )


async def part(
    planes: list[DataPlane], plan: Plan, i: int, seals: list[Seal] | None = None, deadline: float = 10.0
) -> SealedVector:
    """Member i's share of an attempt."""

    async def on_seal(seal: Seal) -> None:
        if seals is not None:
            seals.append(seal)

    return await reduce(planes[i], plan, name(i), ENCODED[i], CODEC, CHUNKS, on_seal, deadline)


def run(body: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(15):
            await body

    asyncio.run(bounded())


async def ends(*tasks: asyncio.Task[SealedVector]) -> list[BaseException | SealedVector]:
    return await asyncio.gather(*tasks, return_exceptions=True)


async def cancelled(*tasks: asyncio.Task[SealedVector]) -> None:
    for task in tasks:
        task.cancel()
    assert [type(end) for end in await ends(*tasks)] == [asyncio.CancelledError] * len(tasks)


@pytest.mark.parametrize("codec", [Int8(256), Int8(7), Fp32()])
@pytest.mark.parametrize("n", [1, 2, 3, 4, 5])
def test_a_reduce_equals_the_reference_bit_for_bit_on_every_member(n: int, codec: Codec) -> None:
    async def body() -> None:
        async with fleet(n) as planes:
            plan = plan_for(planes)
            encoded = [encode(VECTORS[i], codec) for i in range(n)]
            seals: list[Seal] = []

            async def on_seal(seal: Seal) -> None:
                seals.append(seal)

            results = await asyncio.gather(
                *(reduce(planes[i], plan, name(i), encoded[i], codec, CHUNKS, on_seal) for i in range(n))
            )
            expected = reference(range(n), [1.0] * n, codec)
            for result in results:
                assert result.buffer.tobytes() == expected
                assert result.digests == [digest(result.chunk(c)) for c in range(CHUNKS.count)]
            assert sorted(seals, key=lambda seal: seal.chunk) == [
                Seal(c, d) for c, d in enumerate(results[0].digests)
            ]

    run(body())


@pytest.mark.parametrize(
    "owners", [(0,) * 10, (2,) * 10, (0, 0, 0, 0, 0, 1, 1, 1, 1, 1), (2, 1, 0, 2, 1, 0, 2, 1, 0, 2)]
)
def test_weights_and_owners_may_be_unequal(owners: tuple[int, ...]) -> None:
    weights = [100.0, 33.3, 0.001]

    async def body() -> None:
        async with fleet(3) as planes:
            plan = plan_for(planes, weights=weights, owners=owners)
            results = await asyncio.gather(*(part(planes, plan, i) for i in range(3)))
            assert {result.buffer.tobytes() for result in results} == {reference(range(3), weights)}

    run(body())


def test_the_plans_order_and_not_the_order_of_arrival_decides_the_sum() -> None:
    async def body() -> None:
        async with fleet(4) as planes:
            plan = plan_for(planes, members=(3, 1, 0, 2))
            results = await asyncio.gather(*(part(planes, plan, i) for i in (2, 0, 3, 1)))
            assert {result.buffer.tobytes() for result in results} == {reference((3, 1, 0, 2), [1.0] * 4)}

    run(body())


def test_one_member_needs_no_socket() -> None:
    async def body() -> None:
        async with fleet(1) as planes:
            result = await part(planes, plan_for(planes), 0)
            assert result.buffer.tobytes() == reference([0], [1.0])
            assert planes[0].bytes_up == planes[0].bytes_down == 0

    run(body())


def test_each_parameter_byte_crosses_twice_less_the_own_share() -> None:
    async def body() -> None:
        async with fleet(2) as planes:
            plan = plan_for(planes)
            await asyncio.gather(*(part(planes, plan, i) for i in range(2)))
            payload = ENCODED[0].buffer.size
            for plane in planes:
                assert payload <= plane.bytes_up <= payload + 40 * 12 + 100

    run(body())


async def dies_in_mid_reduce(planes: list[DataPlane], plan: Plan, me: int) -> None:
    """Open a stream to everybody, send one contribution and half of the next, and be gone."""
    links = [await planes[me].dial(m.node, m.address) for m in plan.members if m.node != name(me)]
    for to, link in zip((m.node for m in plan.members if m.node != name(me)), links, strict=True):
        mine, second = plan.owned(plan.index(to))[:2]
        await link.send(Header(Kind.OPEN, plan.fence))
        payload = ENCODED[me].chunk(mine)
        await link.send(Header(Kind.CONTRIBUTION, plan.fence, mine, payload.size), payload)
        await link.write(Header(Kind.CONTRIBUTION, plan.fence, second, CODEC.size(CHUNKS.size(second))).pack())
        await link.write(bytes(100))
    await planes[me].close()
    for link in links:
        link.abort()


def test_a_death_in_mid_reduce_is_named_by_all_and_the_survivors_go_on_with_the_same_inputs() -> None:
    async def body() -> None:
        async with fleet(4) as planes:
            inputs = [encoded.buffer.tobytes() for encoded in ENCODED]
            plan = plan_for(planes)
            tasks = [asyncio.create_task(part(planes, plan, i)) for i in range(3)]
            await dies_in_mid_reduce(planes, plan, 3)
            for end in await ends(*tasks):
                assert isinstance(end, PeerLost) and end.node == name(3), end
            again = plan_for(planes, attempt=1, members=range(3))
            results = await asyncio.gather(*(part(planes, again, i) for i in range(3)))
            assert {result.buffer.tobytes() for result in results} == {reference(range(3), [1.0] * 3)}
            assert [encoded.buffer.tobytes() for encoded in ENCODED] == inputs

    run(body())


def test_a_member_that_cannot_be_reached_is_named() -> None:
    async def body() -> None:
        async with fleet(2) as planes:
            plan = plan_for(planes)
            await planes[1].close()
            with pytest.raises(PeerLost, match="n1: no connection to .*refused") as caught:
                await part(planes, plan, 0)
            assert caught.value.node == name(1)

    run(body())


def test_a_member_that_gives_up_because_of_a_third_is_not_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reduce_module, "GRACE", 0.2)
    monkeypatch.setattr(wire, "LINGER", 0.2)

    async def body() -> None:
        async with fleet(3) as planes:
            plan = plan_for(planes)
            # n2 opens its streams and sends nothing: n0 and n1 are in the middle of their attempt.
            links = [await planes[2].dial(name(i), planes[i].address) for i in range(2)]
            for link in links:
                await link.send(Header(Kind.OPEN, plan.fence))
            first, second = (asyncio.create_task(part(planes, plan, i)) for i in range(2))
            links[1].abort()  # n1 alone sees n2 fail
            end = (await ends(second))[0]
            assert isinstance(end, PeerLost) and end.node == name(2)
            while planes[1]._links:  # until n1 has said its last word to n0
                await asyncio.sleep(0.01)
            assert not first.done()
            links[0].abort()  # n0's own evidence
            end = (await ends(first))[0]
            assert isinstance(end, PeerLost) and end.node == name(2)

    run(body())


def test_a_cancelled_attempt_closes_its_streams_and_a_newer_one_succeeds() -> None:
    async def body() -> None:
        async with fleet(3) as planes:
            old = plan_for(planes)
            under_way = asyncio.Event()

            async def stuck(seal: Seal) -> None:
                under_way.set()
                await asyncio.Event().wait()

            tasks = [
                asyncio.create_task(reduce(planes[i], old, name(i), ENCODED[i], CODEC, CHUNKS, stuck))
                for i in range(3)
            ]
            await under_way.wait()
            await cancelled(*tasks)
            new = plan_for(planes, attempt=1)
            results = await asyncio.gather(*(part(planes, new, i) for i in range(3)))
            assert {result.buffer.tobytes() for result in results} == {reference(range(3), [1.0] * 3)}

    run(body())


def test_members_may_learn_of_the_plan_one_after_another() -> None:
    async def body() -> None:
        async with fleet(3) as planes:
            plan = plan_for(planes)
            early = [asyncio.create_task(part(planes, plan, i)) for i in range(2)]
            while planes[2].bytes_down < 2 * (8 + 7 + 32 + 40):  # both streams wait at n2
                await asyncio.sleep(0)
            waiting = planes[2].bytes_down
            await asyncio.sleep(0.02)
            assert planes[2].bytes_down == waiting, "payload was read before the attempt began"
            results = [await part(planes, plan, 2), *(await asyncio.gather(*early))]
            assert {result.buffer.tobytes() for result in results} == {reference(range(3), [1.0] * 3)}

    run(body())


def test_a_member_of_an_older_attempt_is_refused_while_the_newer_one_succeeds() -> None:
    async def body() -> None:
        async with fleet(3) as planes:
            new = plan_for(planes, attempt=1, members=(0, 1))
            results = await asyncio.gather(*(part(planes, new, i) for i in range(2)))
            assert {result.buffer.tobytes() for result in results} == {reference(range(2), [1.0] * 2)}
            with pytest.raises(PeerLost, match="refused this member's stream: attempt 0 of round 1 .* is over"):
                await part(planes, plan_for(planes, attempt=0), 2)

    run(body())


async def with_a_liar(frames: Sequence[tuple[Header, bytes]], owners: tuple[int, ...]) -> str:
    """What n0 says of n1, which sends `frames` after opening its stream."""
    async with fleet(2) as planes:
        plan = plan_for(planes, owners=owners)
        task = asyncio.create_task(part(planes, plan, 0))
        link: Link = await planes[1].dial(name(0), planes[0].address)
        await link.send(Header(Kind.OPEN, plan.fence))
        for header, payload in frames:
            await link.write(header.pack() + payload)
        end = (await ends(task))[0]
        link.abort()
        assert isinstance(end, PeerLost) and end.node == name(1), end
        return end.sentence


FENCE = Plan(Incarnation(1), Epoch(1), Round(1), 0, (), ()).fence
SIZE = CODEC.size(1024)
NAN_SCALE = np.array([np.nan, 1, 1, 1], "<f4").tobytes() + bytes(1024)
MINE, ITS = (0,) * 10, (1,) * 10  # owners


@pytest.mark.parametrize(
    ("header", "payload", "owners", "sentence"),
    [
        (
            Header(Kind.CONTRIBUTION, FENCE, 0, 0xFFFFFFFF),
            b"",
            MINE,
            "sent 4294967295 bytes of chunk 0, expected 1040",
        ),
        (Header(Kind.CONTRIBUTION, FENCE, 0, SIZE - 1), b"", MINE, "sent 1039 bytes of chunk 0, expected 1040"),
        (Header(Kind.CONTRIBUTION, FENCE, 9, SIZE), b"", MINE, "sent 1040 bytes of chunk 9, expected 800"),
        (
            Header(Kind.CONTRIBUTION, FENCE, 10, SIZE),
            b"",
            MINE,
            "CONTRIBUTION of chunk 10, which was not expected",
        ),
        (Header(Kind.CONTRIBUTION, FENCE, 0, SIZE), b"", ITS, "CONTRIBUTION of chunk 0, which was not expected"),
        (Header(Kind.RESULT, FENCE, 0, SIZE), b"", MINE, "RESULT of chunk 0, which was not expected"),
        (Header(Kind.DONE, FENCE), b"", MINE, "DONE of chunk 0, which was not expected"),
        (Header(Kind.CONTRIBUTION, FENCE._replace(attempt=1), 0, SIZE), b"", MINE, "in the stream of"),
        (
            Header(Kind.CONTRIBUTION, FENCE, 0, SIZE),
            NAN_SCALE,
            MINE,
            "contribution to chunk 0 was refused: .*scales",
        ),
        (Header(Kind.RESULT, FENCE, 0, SIZE), NAN_SCALE, ITS, "scales that are negative or not finite"),
    ],
)
def test_a_wrong_frame_loses_its_sender(
    header: Header, payload: bytes, owners: tuple[int, ...], sentence: str
) -> None:
    async def body() -> None:
        said = await with_a_liar([(header, payload)], owners)
        assert re.search(sentence, said), said

    run(body())


def test_a_chunk_sent_twice_loses_its_sender() -> None:
    async def body() -> None:
        frame = (Header(Kind.CONTRIBUTION, FENCE, 3, SIZE), ENCODED[1].chunk(3).tobytes())
        assert "CONTRIBUTION of chunk 3, which was not expected" in await with_a_liar([frame, frame], MINE)

    run(body())


def test_the_deadline_names_whom_the_attempt_was_waiting_for() -> None:
    async def body() -> None:
        async with fleet(2) as planes:
            plan = plan_for(planes)
            link = await planes[1].dial(name(0), planes[0].address)
            await link.send(Header(Kind.OPEN, plan.fence))
            with pytest.raises(PeerLost, match="n1: 5 of its contributions did not come within 0.1 s"):
                await part(planes, plan, 0, deadline=0.1)
            link.abort()

    run(body())


def test_a_member_that_opens_no_stream_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reduce_module, "ARRIVAL", 0.05)
    monkeypatch.setattr(reduce_module, "GRACE", 0.05)

    async def body() -> None:
        async with fleet(2) as planes:
            with pytest.raises(PeerLost, match="n1: it opened no stream within 0.05 s"):
                await part(planes, plan_for(planes), 0)

    run(body())


def test_a_coordinator_that_takes_no_seals_is_not_a_peers_fault() -> None:
    async def body() -> None:
        async with fleet(1) as planes:

            async def stuck(seal: Seal) -> None:
                await asyncio.Event().wait()

            with pytest.raises(Unreachable, match="10 seals were not taken by the coordinator within 0.1 s"):
                await reduce(planes[0], plan_for(planes), name(0), ENCODED[0], CODEC, CHUNKS, stuck, 0.1)

    run(body())


def test_an_error_of_the_callback_is_passed_on() -> None:
    async def body() -> None:
        async with fleet(2) as planes:

            async def broken(seal: Seal) -> None:
                raise ZeroDivisionError

            plan = plan_for(planes)
            other = asyncio.create_task(part(planes, plan, 1))
            with pytest.raises(ZeroDivisionError):
                await reduce(planes[0], plan, name(0), ENCODED[0], CODEC, CHUNKS, broken)
            other.cancel()
            await ends(other)

    run(body())


def test_a_plan_for_other_chunks_or_without_this_node_is_refused() -> None:
    async def body() -> None:
        async with fleet(2) as planes:
            with pytest.raises(BadPlan, match="owners for 3 chunks, the vector has 10"):
                await part(planes, plan_for(planes, owners=(0, 1, 0)), 0)
            with pytest.raises(BadPlan, match="n1 is not one of its members"):
                await part(planes, plan_for(planes, members=[0]), 1)

    run(body())


def test_an_attempt_leaves_no_memory_behind_that_only_the_collector_frees() -> None:
    async def body() -> None:
        async with fleet(2) as planes:
            gc.disable()
            plan = plan_for(planes)
            results = await asyncio.gather(*(part(planes, plan, i) for i in range(2)))
            sealed = [weakref.ref(result.buffer) for result in results]
            del results
            await asyncio.sleep(0)  # the loop's handle of gather's future goes
            assert [ref() for ref in sealed] == [None, None]

    try:
        run(body())
    finally:
        gc.enable()


def test_encode_delta_is_anchor_minus_local_with_its_norm_and_cannot_be_written_to() -> None:
    anchor, local = VECTORS[0], VECTORS[1]
    kept = anchor.tobytes(), local.tobytes()
    encoded = encode_delta(anchor, local, Fp32(), CHUNKS)
    assert encoded.buffer.tobytes() == (anchor - local).tobytes()
    assert encoded.norm == pytest.approx(np.linalg.norm((anchor - local).astype(np.float64)), rel=1e-12)
    assert (anchor.tobytes(), local.tobytes()) == kept
    with pytest.raises(ValueError, match="read-only"):
        encoded.chunk(0)[0] = 1


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_delta_that_is_not_finite_names_its_chunk(bad: float) -> None:
    local = np.zeros(CHUNKS.numel, np.float32)
    local[3 * 1024] = bad
    with pytest.raises(NonFinite, match="in chunk 3"):
        encode_delta(VECTORS[0], local, CODEC, CHUNKS)
