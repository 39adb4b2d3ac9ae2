import asyncio
import threading
from collections.abc import Coroutine
from typing import Any

import numpy as np
import pytest

from atoll.comm.byte_view import U8
from atoll.comm.codecs import zstd
from atoll.comm.codecs.codec import ByteShuffle
from atoll.comm.transport import adaptive_zstd as module
from atoll.comm.transport.adaptive_zstd import (
    CHUNKS_BETWEEN_TRIES,
    KNOWN_COSTS,
    MAX_SHARED_FRAMES,
    MIN_PACKED_BYTES,
    AdaptiveZstd,
)
from atoll.comm.transport.frames import FrameKind

ZEROS: U8 = np.zeros(1 << 16, np.uint8)
NOISE: U8 = np.random.default_rng(0).integers(0, 256, 1 << 16, np.uint8)
ONES: U8 = np.ones(1 << 16, np.uint8)
HALF: U8 = np.concatenate([ZEROS, NOISE])  # gets half as large
SLOW, FAST = 1e5, 1e12  # bytes a second


@pytest.fixture(autouse=True)
def costs() -> list[float]:
    """Of the next chunks, where it is another; seconds a byte."""
    return []


@pytest.fixture(autouse=True)
def packed(monkeypatch: pytest.MonkeyPatch, costs: list[float]) -> list[int]:
    """What was packed, each byte in 2 ns of a processor."""
    sizes: list[int] = []

    def timed(payload: U8, apart: ByteShuffle) -> tuple[bytes, float]:
        sizes.append(payload.size)
        return zstd.pack_shuffled(payload, apart), (costs.pop() if costs else 2e-9) * payload.size

    monkeypatch.setattr(module, "_timed", timed)
    return sizes


def run(body: Coroutine[Any, Any, None]) -> None:
    asyncio.run(body)


def of(rate: float) -> AdaptiveZstd:
    squeeze = AdaptiveZstd()
    squeeze.rate = rate
    return squeeze


def test_on_a_slow_link_payloads_are_packed_and_unpack_to_themselves() -> None:
    async def body() -> None:
        frame = await of(SLOW).pack(FrameKind.CONTRIBUTION, 0, 1, ZEROS)
        assert frame is not None and zstd.unpack(frame, ZEROS.size) == ZEROS.tobytes()

    run(body())


def test_what_would_not_get_smaller_goes_as_it_is() -> None:
    async def body() -> None:
        assert await of(SLOW).pack(FrameKind.CONTRIBUTION, 0, 1, NOISE) is None

    run(body())


def test_small_payloads_and_links_of_unknown_rate_are_left_alone(packed: list[int]) -> None:
    async def body() -> None:
        assert await of(SLOW).pack(FrameKind.CONTRIBUTION, 0, 1, ZEROS[: MIN_PACKED_BYTES - 1]) is None
        for c in range(2 * CHUNKS_BETWEEN_TRIES):
            assert await of(0.0).pack(FrameKind.CONTRIBUTION, c, 1, ZEROS) is None
        assert not packed

    run(body())


def test_on_a_fast_link_only_every_so_many_chunks_are_tried(packed: list[int]) -> None:
    async def body() -> None:
        squeeze = of(FAST)
        for c in range(10 * CHUNKS_BETWEEN_TRIES):
            await squeeze.pack(FrameKind.CONTRIBUTION, c, 1, NOISE)
        assert 8 <= len(packed) <= 10 and not squeeze.pays

    run(body())


def test_it_is_given_up_when_it_saves_nothing_and_taken_up_when_it_does(packed: list[int]) -> None:
    async def body() -> None:
        squeeze = of(1e7)
        assert squeeze.pays
        for c in range(100):
            await squeeze.pack(FrameKind.CONTRIBUTION, c, 1, NOISE)
        assert not squeeze.pays and len(packed) < 50
        for c in range(20 * CHUNKS_BETWEEN_TRIES):
            await squeeze.pack(FrameKind.CONTRIBUTION, c, 1, ZEROS)
        assert squeeze.pays

    run(body())


def test_a_result_for_several_peers_is_packed_once_and_forgotten_with_its_round(packed: list[int]) -> None:
    async def body() -> None:
        squeeze = of(SLOW)
        frames = [await squeeze.pack(FrameKind.SEALED, 0, 1, ZEROS) for _ in range(3)]
        assert len(packed) == 1 and frames[0] == frames[1] == frames[2]
        await squeeze.pack(FrameKind.SEALED, 0, 2, ZEROS)  # of another attempt
        squeeze.forget()
        await squeeze.pack(FrameKind.SEALED, 0, 1, ZEROS)
        assert len(packed) == 3

    run(body())


def test_a_chunk_is_never_sent_for_one_that_took_its_place_or_is_of_a_later_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun, may_end = threading.Event(), threading.Event()

    def slowly(payload: U8, apart: ByteShuffle) -> tuple[bytes, float]:
        begun.set()
        assert may_end.wait(60)
        return zstd.pack_shuffled(payload, apart), 1e-9

    monkeypatch.setattr(module, "_timed", slowly)

    async def body() -> None:
        squeeze = of(SLOW)
        late = asyncio.create_task(squeeze.pack(FrameKind.SEALED, 0, 1, ZEROS))
        await asyncio.to_thread(begun.wait, 20)
        squeeze.forget()
        may_end.set()
        await late
        for other in (HALF, ONES):  # of the round that has begun, and what takes its place
            frame = await squeeze.pack(FrameKind.SEALED, 0, 1, other)
            assert frame is not None and zstd.unpack(frame, other.size) == other.tobytes()

    run(body())


def test_few_packed_chunks_are_kept() -> None:
    async def body() -> None:
        squeeze = of(SLOW)
        for c in range(3 * MAX_SHARED_FRAMES):
            await squeeze.pack(FrameKind.SEALED, c, 1, ZEROS)
        assert len(squeeze._shared) == MAX_SHARED_FRAMES

    run(body())


def test_a_run_may_do_without(packed: list[int]) -> None:
    async def body() -> None:
        squeeze = of(SLOW)
        squeeze.enabled = False
        assert await squeeze.pack(FrameKind.CONTRIBUTION, 0, 1, ZEROS) is None
        assert not packed

    run(body())


def test_chunks_that_cost_much_because_memory_was_new_do_not_end_it(packed: list[int], costs: list[float]) -> None:
    async def body() -> None:
        squeeze = of(1e7)
        costs.extend([50e-9] * (KNOWN_COSTS - 2))
        for c in range(50):
            await squeeze.pack(FrameKind.CONTRIBUTION, c, 1, HALF)
        assert squeeze.pays and len(packed) == 50

    run(body())


def test_it_is_given_up_where_it_costs_more_than_it_saves_and_taken_up_again(
    packed: list[int], costs: list[float]
) -> None:
    async def body() -> None:
        squeeze = of(1e7)
        costs.extend([500e-9] * KNOWN_COSTS)
        for c in range(KNOWN_COSTS + CHUNKS_BETWEEN_TRIES):
            await squeeze.pack(FrameKind.CONTRIBUTION, c, 1, HALF)
        assert not squeeze.pays and len(packed) == KNOWN_COSTS
        await squeeze.pack(FrameKind.CONTRIBUTION, 0, 1, HALF)
        assert squeeze.pays

    run(body())
