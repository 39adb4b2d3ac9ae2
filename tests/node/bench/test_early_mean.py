import asyncio
import threading

import numpy as np
import pytest

from atoll.comm.byte_view import U8, Octets
from atoll.comm.chunks import Chunks
from atoll.comm.codecs.codec import F32, Fp32
from atoll.node.bench import early_mean

CODEC, CHUNKS = Fp32(), Chunks(1000, 300)


def sealed(seed: int) -> tuple[list[U8], bytes]:
    """The chunks of a mean, and its bytes."""
    mean = np.random.default_rng(seed).standard_normal(1000).astype(np.float32)
    return [mean[CHUNKS.span(c)].view(np.uint8) for c in range(CHUNKS.count)], mean.tobytes()


@pytest.mark.parametrize("leisure", [0.0, 60.0])
@pytest.mark.parametrize("early_ones", [0, 1, 3, 4])
def test_a_mean_is_that_of_the_rounds_last_chunks_whichever_came_before(
    monkeypatch: pytest.MonkeyPatch, leisure: float, early_ones: int
) -> None:
    monkeypatch.setattr(early_mean, "EARLY_AFTER", leisure)

    async def story() -> None:
        mean = early_mean.EarlyMean(1000)
        for round_ in (1, 2):
            mean.begin(CODEC, CHUNKS)
            replaced, (right, exact) = sealed(10 * round_)[0], sealed(round_)
            for c in range(early_ones):
                mean.put(c, replaced[c])
                await asyncio.sleep(0)
                mean.put(c, right[c] if c % 2 else replaced[c])
            await mean.complete(right)
            assert mean.decoded.tobytes() == exact
            mean.put(0, replaced[0])
            await asyncio.sleep(0)
            assert mean.decoded.tobytes() == exact, "the round is over"

    asyncio.run(asyncio.wait_for(story(), 60))


class Slow(Fp32):
    def __init__(self) -> None:
        self.begun, self.may_end = threading.Event(), threading.Event()

    def decode(self, payload: Octets, out: F32, far: bool = False) -> None:
        self.begun.set()
        assert self.may_end.wait(60)
        super().decode(payload, out, far)


def test_a_round_may_be_complete_while_its_last_chunk_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early_mean, "EARLY_AFTER", 0.0)

    async def story() -> None:
        mean, codec, (right, exact) = early_mean.EarlyMean(1000), Slow(), sealed(1)
        mean.begin(codec, CHUNKS)
        mean.put(0, right[0])
        await asyncio.to_thread(codec.begun.wait)
        complete = asyncio.create_task(mean.complete(right))
        await asyncio.sleep(0)
        codec.may_end.set()
        await complete
        assert mean.decoded.tobytes() == exact

    asyncio.run(asyncio.wait_for(story(), 60))
