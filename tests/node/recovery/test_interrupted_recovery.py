"""A joiner that is killed in the middle of its recovery fetches the rest only."""

import asyncio
import os
from pathlib import Path

import numpy as np
import pytest
from recovery_peers import Peer, bring, served, with_peers

from atoll.comm.chunks import Chunks
from atoll.comm.ids import Round
from atoll.node.outer.vector_folders import clear_stale
from atoll.node.recovery.recovery import RecoveryProgress


def test_a_joiner_that_is_killed_half_way_fetches_the_rest(tmp_path: Path) -> None:
    chunks = Chunks(256 * 1024, 1024)

    @with_peers(tmp_path, "a", chunks=chunks)
    async def _(a: Peer) -> None:
        a.initialise()
        sum_ = await a.commit(1)
        joiner = Peer(tmp_path / "joiner", "joiner", chunks)
        await joiner.up()
        asked, half = served(a), asyncio.Event()

        def look(standing: RecoveryProgress) -> None:
            if standing.present >= chunks.count // 2:
                half.set()

        task = asyncio.create_task(bring(joiner, 1, sum_, a, on_progress=look))
        await half.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await joiner.plane.close()
        os.close(joiner.outer.vectors.lock)  # as the system does for a killed process
        here = [c for c in range(chunks.count) if joiner.outer.chunk_rounds[c] == 1]
        clear_stale(tmp_path / "joiner", tmp_path / "joiner" / "shm")
        again = Peer(tmp_path / "joiner", "joiner", chunks)
        await again.up()
        assert again.disk.restore() < 0
        again.outer.resume()
        assert again.outer.chunk_rounds == [1 if c in here else -1 for c in range(chunks.count)]
        await bring(again, 1, sum_, a)
        assert chunks.count // 2 <= len(here) < chunks.count <= len(asked) <= 1.02 * chunks.count
        assert again.outer.finalize() == sum_ and again.bits() == a.bits()
        await again.down()


@pytest.mark.parametrize("damaged", [False, True])
def test_of_a_chunk_that_was_coming_when_the_joiner_was_killed_the_rest_is_fetched(
    tmp_path: Path, damaged: bool
) -> None:
    chunks = Chunks(1 << 20, 1 << 18)  # 2 MiB each, in parts of a quarter

    @with_peers(tmp_path, "a", chunks=chunks)
    async def _(a: Peer) -> None:
        a.outer.vectors.momentum[:] = 0.1
        a.outer.vectors.anchor[:] = np.random.default_rng(0).standard_normal(chunks.numel, dtype=np.float32)
        a.outer.initialise(with_momentum=True)
        sum_ = a.outer.finalize()
        joiner = Peer(tmp_path / "joiner", "joiner", chunks)
        await joiner.up()
        append, came = joiner.outer.partial_chunks.append, asyncio.Event()

        def appending(c: int, digest: bytes, at: int, part: bytes) -> None:
            append(c, digest, at, part)
            if c == 1 and at:
                came.set()

        joiner.outer.partial_chunks.append = appending  # type: ignore[method-assign]
        task = asyncio.create_task(bring(joiner, 0, sum_, a))
        await came.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await joiner.plane.close()
        os.close(joiner.outer.vectors.lock)  # as the system does for a killed process
        lacking = [c for c in range(chunks.count) if joiner.outer.chunk_rounds[c] < 0]
        sums = a.outer.final_digests(Round(0)) or ()
        here = sum(len(joiner.outer.partial_chunks.read(c, sums[c])) for c in lacking)
        if damaged:
            joiner.outer.vectors.anchor[chunks.span(1)] += 1
        again = Peer(tmp_path / "joiner", "joiner", chunks)
        await again.up()
        again.outer.resume()
        assert [c for c in range(chunks.count) if again.outer.chunk_rounds[c] < 0] == lacking and 1 in lacking
        before = a.plane.bytes_up
        await bring(again, 0, sum_, a)
        assert again.outer.finalize() == sum_ and again.bits() == a.bits()
        fetched = a.plane.bytes_up - before
        assert here >= 1 << 19
        if not damaged:
            assert fetched < len(lacking) * (1 << 21) - here + 10_000
        await again.down()
