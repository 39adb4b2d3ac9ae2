"""A delta, encoded chunk by chunk."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from encoders import at_once

from atoll.comm.allreduce import delta_encoder
from atoll.comm.allreduce.delta_encoder import DeltaEncoder, EncodedVector, encoded_norm
from atoll.comm.buffers import BufferPool
from atoll.comm.chunks import Chunks
from atoll.comm.codecs.codec import F32, Codec, NonFinite
from atoll.comm.codecs.factory import make_codec
from atoll.comm.config.run import CodecName
from atoll.comm.digest import digest

CHUNKS = Chunks(20_000, 1024)  # 20 chunks, the last one shorter
INT8, FP32 = make_codec(CodecName.INT8, 128), make_codec(CodecName.FP32, 1)
ANCHOR, LOCAL = (np.random.default_rng(i).standard_normal(CHUNKS.numel, dtype=np.float32) for i in range(2))


def encode(local: F32 = LOCAL, codec: Codec = INT8) -> EncodedVector:
    encoder = DeltaEncoder(ANCHOR, local, codec, CHUNKS)
    asyncio.run(encoder.run(asyncio.to_thread))
    return encoder.encoded


def test_it_is_anchor_minus_local_and_cannot_be_written_to() -> None:
    kept = ANCHOR.tobytes(), LOCAL.tobytes()
    encoded = encode(codec=FP32)
    assert encoded.ready == CHUNKS.count
    assert b"".join(chunk.tobytes() for chunk in encoded.whole) == (ANCHOR - LOCAL).tobytes()
    assert (ANCHOR.tobytes(), LOCAL.tobytes()) == kept
    with pytest.raises(ValueError, match="read-only"):
        encoded.whole[0][0] = 1


def test_a_chunk_can_be_had_before_the_last_one_is_encoded() -> None:
    async def body() -> None:
        encoder = DeltaEncoder(ANCHOR, LOCAL, FP32, CHUNKS)
        gate = asyncio.Semaphore(1)

        async def one_by_one(work: Callable[[], None]) -> None:
            await gate.acquire()
            work()

        running = asyncio.create_task(encoder.run(one_by_one))
        last = asyncio.create_task(encoder.encoded.chunk(CHUNKS.count - 1))
        first = await encoder.encoded.chunk(0)
        assert first is not None and first.tobytes() == (ANCHOR - LOCAL)[CHUNKS.span(0)].tobytes()
        assert encoder.encoded.ready < CHUNKS.count and not last.done()
        for _ in range(CHUNKS.count):
            gate.release()
        await running
        end, span = await last, CHUNKS.span(CHUNKS.count - 1)
        assert end is not None and end.tobytes() == (ANCHOR - LOCAL)[span].tobytes()

    asyncio.run(body())


def test_how_many_threads_encode_makes_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for n in (1, 3):
        with ThreadPoolExecutor(n) as pool:
            monkeypatch.setattr(delta_encoder, "threads", lambda n=n: n)
            monkeypatch.setattr(delta_encoder, "workers", lambda pool=pool: pool)
            found.append([chunk.tobytes() for chunk in encode().whole])
    assert found[0] == found[1]


def test_its_norm_is_that_of_what_it_decodes_to_however_many_threads_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    encoded, found = encode(), []
    for n in (1, 3):
        with ThreadPoolExecutor(n) as pool:
            monkeypatch.setattr(delta_encoder, "workers", lambda pool=pool: pool)
            found.append(encoded_norm(INT8, CHUNKS, encoded.whole))
    decoded = np.empty(CHUNKS.numel, np.float32)
    for c, payload in enumerate(encoded.whole):
        INT8.decode(payload, decoded[CHUNKS.span(c)])
    assert found[0] == found[1] == pytest.approx(float(np.linalg.norm(decoded.astype(np.float64))))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("element", [0, 3 * 1024 + 5, 19_999])
def test_a_delta_that_is_not_finite_names_its_element(bad: float, element: int) -> None:
    local = np.zeros(CHUNKS.numel, np.float32)
    local[element] = bad
    with pytest.raises(NonFinite) as caught:
        encode(local)
    assert caught.value.element == element


def test_vectors_of_another_length_are_refused() -> None:
    with pytest.raises(ValueError, match="for 20000 elements"):
        DeltaEncoder(ANCHOR[1:], LOCAL, INT8, CHUNKS)


def test_a_chunk_that_is_let_go_of_is_made_again_with_the_same_bytes_unless_nobody_wants_it() -> None:
    async def body() -> None:
        buffers = BufferPool()
        encoder = DeltaEncoder(ANCHOR, LOCAL, INT8, CHUNKS, buffers)
        await encoder.run(asyncio.to_thread)
        encoded, before = encoder.encoded, [payload.tobytes() for payload in encoder.encoded.whole]
        for c in (0, 7, CHUNKS.count - 1):
            assert (payload := encoded.release(c)) is not None and payload.tobytes() == before[c]
            assert encoded.release(c) is None
            buffers.give(payload)
        assert len(buffers) == 3
        with pytest.raises(RuntimeError, match="not every"):
            _ = encoded.whole
        assert [c for c, payload in enumerate(encoded.chunks) if payload is None] == [0, 7, CHUNKS.count - 1]
        for c in (0, 7):
            assert (payload := await encoded.chunk(c)) is not None and payload.tobytes() == before[c]
        assert len(buffers) == 1
        encoded.end()
        assert await encoded.chunk(CHUNKS.count - 1) is None

    asyncio.run(body())


def test_a_chunk_that_is_kept_or_not_there_yet_is_not_let_go_of() -> None:
    encoder = DeltaEncoder(ANCHOR, LOCAL, INT8, CHUNKS, permanent=True)
    asyncio.run(encoder.run(asyncio.to_thread))
    assert encoder.encoded.release(0) is None and len(encoder.encoded.whole) == CHUNKS.count
    assert DeltaEncoder(ANCHOR, LOCAL, INT8, CHUNKS).encoded.release(0) is None


def test_digests_are_of_the_encoded_chunks_where_they_are_asked_for() -> None:
    for digested in (False, True):
        encoded = at_once(DeltaEncoder(ANCHOR, LOCAL, INT8, CHUNKS, digested=digested))
        for c, payload in enumerate(encoded.whole):
            assert encoded.digest_of(c) == (digest(payload) if digested else None)
