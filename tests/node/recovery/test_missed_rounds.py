"""Recovery over loopback by the sealed bytes of the rounds that were missed, where these are fewer."""

from pathlib import Path

import numpy as np
import pytest
from recovery_peers import CHUNKS, CODEC, NUMEL, Peer, bring, with_peers

from atoll.comm.allreduce.sealing import GatheredSeal, WeightedMean
from atoll.comm.byte_view import U8
from atoll.comm.chunks import Chunks
from atoll.comm.codecs.factory import make_codec
from atoll.comm.config.run import CodecName, RunConfig
from atoll.comm.digest import digest


def test_the_sealed_bytes_of_a_few_missed_rounds_are_there_for_the_log(tmp_path: Path) -> None:
    @with_peers(tmp_path, "a", "b", "c")
    async def _(a: Peer, b: Peer, c: Peer) -> None:
        for peer in (a, b, c):
            peer.initialise()
        await c.commit(1)
        for k in range(1, 4):
            sum_ = await a.commit(k)
        took = await bring(c, 3, sum_, a)
        assert list(took.sealed_rounds) == [2, 3]
        for k, sealed in took.sealed_rounds.items():
            for chunk, one in enumerate(sealed):
                assert one.payload == await a.sealed(k, chunk) and one.digest == digest(one.payload)
        assert not (await bring(b, 3, sum_, a)).sealed_rounds, "it missed more than memory is for"


@pytest.mark.parametrize("missed", [1, 2, 3, 7])
def test_of_fragments_that_take_turns_the_rounds_that_were_missed_are_fetched(missed: int, tmp_path: Path) -> None:
    chunks = Chunks(5000, 512, (1500, 600, 2900))

    @with_peers(tmp_path, "a", "b", chunks=chunks)
    async def _(a: Peer, b: Peer) -> None:
        sums = [a.initialise()]
        b.initialise()
        for k in range(1, 4 + missed):
            sums.append(await a.commit(k))
            if k <= 3:
                await b.commit(k)
        before = a.plane.bytes_up
        await bring(b, 3 + missed, sums[-1], a)
        assert b.outer.chunk_rounds == [3 + missed] * chunks.count and b.outer.finalize() == sums[-1]
        assert b.bits() == a.bits()
        sealed = sum(
            chunks.fragment_chunks(a.outer.fragment_schedule.fragment(k)).numel for k in range(4, 4 + missed)
        )
        assert a.plane.bytes_up - before < 1.1 * sealed + 3000


def test_the_sealed_bytes_of_missed_rounds_of_fragments_are_there_for_the_log(tmp_path: Path) -> None:
    @with_peers(tmp_path, "a", "b", chunks=Chunks(5000, 512, (1500, 600, 2900)))
    async def _(a: Peer, b: Peer) -> None:
        a.initialise()
        b.initialise()
        for k in range(1, 5):
            sum_ = await a.commit(k)
            if k <= 2:
                await b.commit(k)
        took = await bring(b, 4, sum_, a)
        assert [(k, len(sealed)) for k, sealed in took.sealed_rounds.items()] == [(3, 6), (4, 3)]
        for k, sealed in took.sealed_rounds.items():
            for chunk, one in enumerate(sealed):
                assert one.payload == await a.sealed(k, chunk) and one.digest == digest(one.payload)


def test_three_missed_rounds_are_less_than_three_point_two_bytes_a_parameter(tmp_path: Path) -> None:
    config = RunConfig().reduce
    chunks, codec = Chunks(1_200_000, config.chunk), make_codec(config.codec, config.block, config.scales)

    @with_peers(tmp_path, "a", "b", chunks=chunks, codec=codec)
    async def _(a: Peer, b: Peer) -> None:
        a.initialise()
        b.initialise()
        for k in range(1, 4):
            sum_ = await a.commit(k)
        await bring(b, 3, sum_, a)
        assert b.bits() == a.bits()
        assert b.plane.bytes_down < 3.2 * chunks.numel, "all that it received"


def test_who_gives_other_sealed_bytes_is_asked_for_few_of_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It answers at once, so that it would be asked for most of them."""
    chunks = Chunks(1024 * 100, 1024)

    @with_peers(tmp_path, "a", "liar", "joiner", chunks=chunks)
    async def _(a: Peer, liar: Peer, joiner: Peer) -> None:
        for peer in (a, liar, joiner):
            peer.initialise()
            await peer.commit(1)
        await liar.commit(2)
        sum_ = await a.commit(2)
        out = np.empty(CODEC.size(1024), np.uint8)
        CODEC.encode(np.ones(1024, np.float32), out)
        false, asked = out.tobytes(), list[int]()

        async def sealed(round: int, chunk: int) -> bytes:
            asked.append(chunk)
            return false

        liar.sealed = sealed  # type: ignore[method-assign]
        await bring(joiner, 2, sum_, liar, a)
        assert joiner.bits() == a.bits()
        assert 0 < len(asked) < 30, "those that were on their way when the first one was replayed"
        assert [r.message for r in caplog.records if "sealed bytes that liar" in r.message]


def test_missed_rounds_whose_sealed_bytes_differ_in_size_are_brought_forward(tmp_path: Path) -> None:
    few = make_codec(CodecName.SPARSE, 256)
    sealing = GatheredSeal(few, WeightedMean(few))

    def sealed(c: int, members: int) -> U8:
        rng, n = np.random.default_rng((c, members)), CHUNKS.size(c)
        payloads = [np.empty(few.size(n), np.uint8) for _ in range(members)]
        for payload in payloads:
            few.encode(rng.standard_normal(n, dtype=np.float32), payload)
        out = np.empty(sealing.size(n, members), np.uint8)
        terms = [(i, payload, 1 / members) for i, payload in enumerate(payloads)]
        sealing.seal(c, terms, 1.0, n, out)
        return out

    @with_peers(tmp_path, "a", "b")
    async def _(a: Peer, b: Peer) -> None:
        for peer in (a, b):
            peer.outer.sealing = sealing
        await bring(b, 0, a.initialise(), a)
        for round_, members in enumerate((1, 3, 2), 1):
            payloads = [sealed(c, members) for c in range(CHUNKS.count)]
            for c, payload in enumerate(payloads):
                a.outer.apply(c, payload)
            a.disk.record_round(round_, payloads, [digest(payload) for payload in payloads])
            await a.disk.wait_idle()
        before = a.plane.bytes_up
        await bring(b, 3, a.outer.finalize(), a)
        assert b.bits() == a.bits()
        assert a.plane.bytes_up - before < NUMEL, "the state is 8 bytes a parameter"


def test_a_node_too_far_behind_gets_a_snapshot(tmp_path: Path) -> None:
    @with_peers(tmp_path, "a", "b")
    async def _(a: Peer, b: Peer) -> None:
        a.initialise()
        b.initialise()
        for k in range(1, 9):
            sum_ = await a.commit(k)
        before = a.plane.bytes_up
        await bring(b, 8, sum_, a)
        assert a.plane.bytes_up - before < 8.1 * NUMEL + 2000, "eight rounds are more than a snapshot"
        assert b.bits() == a.bits()
