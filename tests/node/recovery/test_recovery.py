"""Recovery over real sockets on loopback: from a snapshot, from sealed bytes, from a donor that moves on."""

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from atoll.comm.allreduce.sealing import GatheredSeal, WeightedMean, mean_of
from atoll.comm.byte_view import U8, Octets
from atoll.comm.chunks import Chunks
from atoll.comm.codecs.codec import Codec
from atoll.comm.codecs.factory import make_codec
from atoll.comm.config.run import CodecName, RunConfig
from atoll.comm.digest import digest
from atoll.comm.ids import NodeId, Round, RunId
from atoll.comm.transport import frames
from atoll.comm.transport.data_plane import DataPlane
from atoll.comm.transport.fetch_client import DonorLost
from atoll.node.checkpoint.checkpoint_files import CheckpointLocation
from atoll.node.checkpoint.checkpointer import Checkpointer
from atoll.node.daemon import state_server
from atoll.node.daemon.outer_loop import how_far
from atoll.node.daemon.state_server import StateServer
from atoll.node.outer.shared_vectors import SharedVectors, clear_stale
from atoll.node.outer.state import OuterState
from atoll.node.recovery import chunk_scheduler
from atoll.node.recovery import recovery as recover_
from atoll.node.recovery.chunk_assembly import ChunkAssembly
from atoll.node.recovery.chunk_scheduler import ChunkRequest, ChunkScheduler
from atoll.node.recovery.recovery import (
    MIN_STREAMS,
    Donor,
    DonorsSilent,
    RecoveryProgress,
    RecoveryStats,
    RoundMovedOn,
    Target,
    _RecoveryRun,
    recover,
)
from atoll.outer_opt.nesterov import Nesterov
from atoll.outer_opt.schedule import Constant

NUMEL, CHUNKS = 5000, Chunks(5000, 1024)
CODEC = make_codec(CodecName.INT8, 256)
KEY = b"k" * 32


class Peer(StateServer):
    """A node's outer state, disk and data plane, whose shelf it is."""

    def __init__(self, folder: Path, name: str, chunks: Chunks = CHUNKS, codec: Codec = CODEC) -> None:
        super().__init__()
        self.name, self.chunks, self.codec = NodeId(name), chunks, codec
        vectors = SharedVectors.create(chunks.numel, folder, folder / "shm", name)
        self.outer = OuterState(vectors, chunks, mean_of(codec), Constant(Nesterov(0.7, 0.9)))
        place = CheckpointLocation(folder / "disk", bytes(16), (("all", (chunks.numel,)),), 4)
        self.disk = Checkpointer(self.outer, lambda buffer: None, place)
        self.fill(self.outer, self.disk)

    async def up(self, rate: float = 0) -> None:
        """`rate`: bytes a second that it sends at most."""
        self.plane = await DataPlane.start("127.0.0.1:0", RunId("r"), self.name, KEY, self, (rate, 0))

    async def down(self) -> None:
        await self.plane.close()
        await self.disk.close()
        self.outer.vectors.close()

    @property
    def donor(self) -> Donor:
        return Donor(self.name, self.plane.address, name=f"{self.name}'s name")

    def initialise(self) -> bytes:
        self.outer.vectors.anchor[:] = np.random.default_rng(0).standard_normal(
            self.chunks.numel, dtype=np.float32
        )
        self.outer.initialise()
        return self.outer.finalize()

    async def commit(self, round_: int) -> bytes:
        """Apply the sealed bytes of a round: the same for everybody that commits it."""
        delta = np.random.default_rng(round_).standard_normal(self.chunks.numel, dtype=np.float32)
        payloads = []
        for c in self.chunks.fragment_range(self.outer.fragment_schedule.fragment(round_)):
            out = np.empty(self.codec.size(self.chunks.size(c)), np.uint8)
            self.codec.encode(delta[self.chunks.span(c)], out)
            payloads.append(out)
            self.outer.apply(c, payloads[-1])
        self.outer.advance_unchanged(round_)
        self.disk.record_round(round_, payloads, [digest(payload) for payload in payloads])
        await self.disk.wait_idle()
        root = self.outer.finalize()
        self.settled()
        return root

    def bits(self) -> bytes:
        return self.outer.vectors.anchor.tobytes() + self.outer.vectors.momentum.tobytes()


def with_peers(
    folder: Path, *names: str, chunks: Chunks = CHUNKS, codec: Codec = CODEC
) -> Callable[[Callable[..., Awaitable[None]]], None]:
    """Run a test with that many peers up."""

    def run(test: Callable[..., Awaitable[None]]) -> None:
        async def main() -> None:
            peers = [Peer(folder / name, name, chunks, codec) for name in names]
            for peer in peers:
                await peer.up()
            try:
                await test(*peers)
            finally:
                for peer in peers:
                    await peer.down()

        asyncio.run(main())

    return run


async def bring(
    joiner: Peer,
    round_: int,
    digest: bytes,
    *donors: Peer,
    on_progress: Callable[[RecoveryProgress], None] = lambda _: None,
) -> RecoveryStats:
    target = Target(Round(round_), digest, tuple(d.donor for d in donors))
    with ThreadPoolExecutor(1) as worker:
        return await recover(joiner.outer, target, joiner.plane, worker, on_progress)


def test_a_joiner_gets_anchor_and_momentum_bit_for_bit(tmp_path: Path) -> None:
    @with_peers(tmp_path, "a", "b")
    async def _(a: Peer, b: Peer) -> None:
        a.initialise()
        sum_ = await a.commit(1)
        await bring(b, 1, sum_, a)
        assert b.outer.round == 1 and b.outer.finalize() == sum_
        assert b.bits() == a.bits()


def test_a_node_that_missed_rounds_gets_their_sealed_bytes_only(tmp_path: Path) -> None:
    @with_peers(tmp_path, "a", "b")
    async def _(a: Peer, b: Peer) -> None:
        a.initialise()
        b.initialise()
        for k in range(1, 4):
            sum_ = await a.commit(k)
        before = a.plane.bytes_up
        await bring(b, 3, sum_, a)
        assert b.bits() == a.bits()
        assert a.plane.bytes_up - before < 3 * 1.1 * NUMEL + 2000  # a snapshot is 8 bytes a parameter


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


def test_a_joiner_gets_fragments_of_different_turns(tmp_path: Path) -> None:
    @with_peers(tmp_path, "a", "b", chunks=Chunks(5000, 512, (1500, 600, 2900)))
    async def _(a: Peer, b: Peer) -> None:
        a.initialise()
        for k in range(1, 6):
            sum_ = await a.commit(k)
        await bring(b, 5, sum_, a)
        assert b.outer.round == 5 and b.outer.finalize() == sum_
        for k in (6, 7):
            assert await a.commit(k) == await b.commit(k)
        assert b.bits() == a.bits()


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


def test_chunks_from_before_the_donor_moved_on_are_brought_forward(tmp_path: Path) -> None:
    @with_peers(tmp_path, "a", "b")
    async def _(a: Peer, b: Peer) -> None:
        a.initialise()
        first = await a.commit(1)
        await bring(b, 1, first, a)
        b.outer.chunk_rounds[2] = -1  # as if this chunk had not arrived when a moved on
        with pytest.raises(RoundMovedOn):
            await bring(b, 1, await a.commit(2), a)
        sum_ = await a.commit(3)
        await bring(b, 3, sum_, a)
        assert b.outer.chunk_rounds == [3] * CHUNKS.count
        assert b.bits() == a.bits()


def test_a_donor_whose_state_is_not_the_runs_is_passed_over(tmp_path: Path) -> None:
    @with_peers(tmp_path, "a", "liar", "b")
    async def _(a: Peer, liar: Peer, b: Peer) -> None:
        sum_ = a.initialise()
        liar.initialise()
        liar.outer.vectors.anchor[7] += 1
        liar.outer.finalize()
        await bring(b, 0, sum_, liar, a)
        assert b.bits() == a.bits()


def test_a_flipped_bit_in_one_chunk_is_found_and_only_that_chunk_is_fetched(tmp_path: Path) -> None:
    @with_peers(tmp_path, "a", "b")
    async def _(a: Peer, b: Peer) -> None:
        sum_ = a.initialise()
        await bring(b, 0, sum_, a)
        b.outer.vectors.anchor[1500] += 1
        before = a.plane.bytes_up
        await bring(b, 0, sum_, a)
        assert b.bits() == a.bits()
        assert a.plane.bytes_up - before < 8 * 1024 + 1000


@pytest.mark.parametrize("vector", ["anchor", "momentum"])
def test_a_node_whose_state_is_not_the_runs_fetches_what_differs(tmp_path: Path, vector: str) -> None:
    @with_peers(tmp_path, "a", "b")
    async def _(a: Peer, b: Peer) -> None:
        a.initialise()
        b.initialise()
        assert await a.commit(1) == await b.commit(1)
        getattr(b.outer.vectors, vector).view(np.uint32)[1500] ^= 1 << 20
        sum_, wrong = await a.commit(2), await b.commit(2)
        assert wrong != sum_
        b.outer.distrust()
        assert b.outer.final_digests(Round(2)) is None, "nobody is served from it"
        asked = served(a)
        await bring(b, 2, sum_, a)
        assert asked == [1] and b.outer.finalize() == sum_ and b.bits() == a.bits()


def test_a_donor_that_has_not_applied_the_round_yet_answers_when_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one may when the round was committed a moment ago; the next one may be committed before the next try."""
    monkeypatch.setattr(state_server, "APPLY_SECONDS", 3600.0)  # seconds

    @with_peers(tmp_path, "a", "b", "joiner")
    async def _(a: Peer, b: Peer, joiner: Peer) -> None:
        for donor in (a, b):
            donor.initialise()
        sum_ = await a.commit(1)
        asked, digests = asyncio.Event(), b.digests

        async def told(round: Round) -> Sequence[bytes] | None:
            asked.set()
            return await digests(round)

        b.digests = told  # type: ignore[method-assign]
        async with asyncio.TaskGroup() as group:
            group.create_task(bring(joiner, 1, sum_, b))
            await asked.wait()
            await b.commit(1)
        assert joiner.bits() == b.bits()


def test_who_is_asked_for_other_rounds_than_the_next_says_at_once_that_it_lacks_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_server, "APPLY_SECONDS", 3600.0)  # seconds

    @with_peers(tmp_path, "a", "joiner")
    async def _(a: Peer, joiner: Peer) -> None:
        a.initialise()
        await a.commit(1)
        for k in (0, 3):
            with pytest.raises(RoundMovedOn):
                await bring(joiner, k, bytes(16), a)


def test_that_no_donor_answers_is_told_with_the_reasons_and_not_as_if_the_round_had_passed(tmp_path: Path) -> None:
    @with_peers(tmp_path, "a", "joiner")
    async def _(a: Peer, joiner: Peer) -> None:
        donors = Donor(NodeId("b"), "127.0.0.1:1"), Donor(NodeId("c"), "no address")
        with ThreadPoolExecutor(1) as worker:
            for round_ in (1, 2):
                target = Target(Round(round_), b"d" * 16, donors)
                with pytest.raises(DonorsSilent, match="b: no connection to 127.0.0.1:1: .*refused") as failed:
                    await recover(joiner.outer, target, joiner.plane, worker, lambda _: None)
                assert "c: " in str(failed.value) and "round" not in str(failed.value)
        a.initialise()
        await a.commit(1)
        with pytest.raises(RoundMovedOn) as moved:
            await bring(joiner, 3, bytes(16), a)
        assert not isinstance(moved.value, DonorsSilent)


def test_no_donor_is_told_at_once(tmp_path: Path) -> None:
    @with_peers(tmp_path, "b")
    async def _(b: Peer) -> None:
        with pytest.raises(RoundMovedOn, match="no member"):
            await bring(b, 1, b"x" * 16)


def test_work_that_a_round_left_out_starts_from_the_new_anchor(tmp_path: Path) -> None:
    @with_peers(tmp_path, "a", "b")
    async def _(a: Peer, b: Peer) -> None:
        a.initialise()
        b.initialise()
        vectors = b.outer.vectors
        steps = np.random.default_rng(9).standard_normal(NUMEL, dtype=np.float32)
        vectors.local[:] = vectors.anchor + steps
        await a.commit(1)
        sum_ = await a.commit(2)
        b.outer.set_work_aside()
        b.outer.set_work_aside()  # a second try after one that failed
        await bring(b, 2, sum_, a)
        assert b.outer.finalize() == sum_
        assert np.abs(vectors.local - (vectors.anchor + steps)).max() < 1e-5
        before = vectors.local.copy()
        b.outer.finalize()
        assert np.array_equal(vectors.local, before)  # rebased once


# Donors that are not what they should be


def served(peer: Peer) -> list[int]:
    """The chunks of its state that are asked of a donor, from now on."""
    asked: list[int] = []
    state = peer.state

    async def told(round: Round, chunk: int) -> Octets | None:
        asked.append(chunk)
        return await state(round, chunk)

    peer.state = told  # type: ignore[method-assign]
    return asked


def test_all_donors_give_at_the_same_time(tmp_path: Path) -> None:
    @with_peers(tmp_path, "a", "b", "c", "joiner")
    async def _(a: Peer, b: Peer, c: Peer, joiner: Peer) -> None:
        sum_ = [donor.initialise() for donor in (a, b, c)][0]
        asked = [served(donor) for donor in (a, b, c)]
        await bring(joiner, 0, sum_, a, b, c)
        assert joiner.bits() == a.bits()
        assert all(asked) and set(sum(asked, [])) == set(range(CHUNKS.count))


def test_who_gives_how_much_and_how_much_is_left_is_told(tmp_path: Path) -> None:
    @with_peers(tmp_path, "a", "b", "joiner")
    async def _(a: Peer, b: Peer, joiner: Peer) -> None:
        sum_, told = a.initialise(), list[tuple[str, dict[str, Any]]]()
        b.initialise()

        def tell(standing: RecoveryProgress) -> None:
            told.append((str(standing), how_far(standing) or {}))

        await bring(joiner, 0, sum_, a, b, on_progress=tell)
        count = CHUNKS.count
        assert [said["chunks"] for _, said in told] == list(range(1, count + 1))
        assert all(said["of"] == count and said["bytes_per_s"] > 0 for _, said in told)
        assert told[-1][1]["seconds_left"] == 0 < told[0][1]["seconds_left"]
        text, said = told[-1]
        assert said["from"] == ["a's name", "b's name"]
        assert text.startswith(f"{count} of {count} chunks, ") and text.endswith(
            ", 0 s left, from a's name, b's name"
        )

    assert how_far(None) is None


def test_a_donor_that_lies_about_one_chunk_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    @with_peers(tmp_path, "a", "liar", "joiner")
    async def _(a: Peer, liar: Peer, joiner: Peer) -> None:
        sum_ = a.initialise()
        liar.initialise()
        liar.outer.vectors.anchor[:] += 1  # behind the back of its digests
        await bring(joiner, 0, sum_, liar, a)
        assert joiner.bits() == a.bits()
        assert [r.message for r in caplog.records if "without liar" in r.message and "digest" in r.message]


def test_what_a_slow_donor_has_taken_is_fetched_from_another(tmp_path: Path) -> None:
    @with_peers(tmp_path, "a", "slow", "joiner")
    async def _(a: Peer, slow: Peer, joiner: Peer) -> None:
        sum_ = a.initialise()
        slow.initialise()
        await slow.plane.close()
        await slow.up(rate=1000)  # 8 s for a chunk
        asked, given = served(slow), served(a)
        await bring(joiner, 0, sum_, a, slow)
        assert joiner.bits() == a.bits()
        assert asked and set(asked) <= set(given)
        assert len(given) == CHUNKS.count, "from the other one, each once"


def test_a_donor_that_dies_half_way_costs_a_chunk_for_each_stream(tmp_path: Path) -> None:
    @with_peers(tmp_path, "dying", "a", "joiner")
    async def _(dying: Peer, a: Peer, joiner: Peer) -> None:
        sum_ = dying.initialise()
        a.initialise()
        asked, given = served(dying), served(a)
        state, dead = dying.state, []

        async def die(round: Round, chunk: int) -> Octets | None:
            if len(asked) == 1:
                dead.append(asyncio.create_task(dying.plane.close()))
            return await state(round, chunk)

        dying.state = die  # type: ignore[method-assign]
        await bring(joiner, 0, sum_, dying, a)
        assert dead and joiner.bits() == a.bits()
        assert len(asked) + len(given) <= CHUNKS.count + MIN_STREAMS


def test_a_donor_that_is_silent_at_first_delays_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "HANDSHAKE_TIMEOUT", 120.0)

    @with_peers(tmp_path, "a", "joiner")
    async def _(a: Peer, joiner: Peer) -> None:
        sum_ = a.initialise()
        with socket.create_server(("127.0.0.1", 0)) as stopped:  # as the kernel answers for a stopped process
            silent = Donor(NodeId("silent"), f"127.0.0.1:{stopped.getsockname()[1]}")
            target = Target(Round(0), sum_, (silent, a.donor))
            async with asyncio.timeout(frames.HANDSHAKE_TIMEOUT / 2):
                with ThreadPoolExecutor(1) as worker:
                    await recover(joiner.outer, target, joiner.plane, worker, lambda _: None)
        assert joiner.bits() == a.bits()


def test_a_donor_does_not_warn_of_answers_that_nobody_waits_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    @with_peers(tmp_path, "a", "joiner")
    async def _(a: Peer, joiner: Peer) -> None:
        a.initialise()
        link = await joiner.plane.dial(a.name, a.plane.address)
        await frames.send(link, frames.unfenced(frames.FrameKind.GET_STATE, Round(0), 0))
        while a.plane.bytes_up < CHUNKS.size(0):
            await asyncio.sleep(0)
        link.close()  # without a look at the answer
        while a.plane._accepted:
            await asyncio.sleep(0)  # until the donor has noticed

    assert not [r.message for r in caplog.records if r.levelname == "WARNING"]


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


def test_who_gives_late_parts_of_what_another_gives_alone_is_not_taken_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is known then who gave what: the one who lies is left out, not the one who is slow."""
    monkeypatch.setattr(recover_, "PART_BYTES", 1024)

    @with_peers(tmp_path, "a", "joiner")
    async def _(a: Peer, joiner: Peer) -> None:
        a.initialise()
        wanted, alone, may_end = list(a.outer.final_digests(Round(0)) or ()), asyncio.Event(), asyncio.Event()
        right = a.outer.final_chunk(Round(0), 0) or b""

        class Giver:
            def __init__(self, name: str, data: bytes) -> None:
                self.node, self.data = NodeId(name), data

            async def fetch_state(self, round: Round, c: int, following: Any, take: Any, deadline: float) -> None:
                while (part := following()) is not None:
                    if self.node == "slow" and not may_end.is_set() and recovery._assemblies[0].single_donor:
                        alone.set()
                        await may_end.wait()
                    take(part[0], self.data[slice(*part)])

        slow, liar = Giver("slow", right), Giver("liar", bytes(len(right)))
        with ThreadPoolExecutor(1) as worker:
            recovery = _RecoveryRun(joiner.plane, joiner.outer, Round(0), wanted, [], {}, worker, lambda _: None)
            recovery._requests = ChunkScheduler([0])
            recovery._assemblies[0] = ChunkAssembly(
                len(right), 1024, bytearray(1024)
            )  # damaged, so that it is fetched alone
            fetching = asyncio.create_task(recovery._fetch_whole(cast(Any, slow), ChunkRequest(slow.node, 0, 0.0)))
            await alone.wait()
            with pytest.raises(DonorLost, match="liar"):
                await recovery._fetch_whole(cast(Any, liar), ChunkRequest(liar.node, 0, 0.0, late=True))
            may_end.set()
            assert (work := await fetching) is not None
            work()
        assert joiner.outer.copy_chunk(0)[1].tobytes() == right


# Which chunk next


def whole(_: int) -> int:
    """Parts of a chunk that nobody was asked for: none."""
    return 0


def test_a_stream_takes_what_nobody_has_and_then_what_is_late() -> None:
    requests, a, b = ChunkScheduler(range(3)), NodeId("a"), NodeId("b")
    first = requests.assign(a, 0.0, whole)
    late = requests.assign(b, 0.0, whole)
    assert first is not None and first.chunk == 0 and late is not None and late.chunk == 1
    assert requests.complete(first, 3.0) == []  # a takes three seconds for a chunk
    third = requests.assign(a, 3.0, whole)
    assert third is not None and third.chunk == 2
    requests.record_progress(1, 2.0)
    assert requests.complete(third, 4.0) == []
    assert requests.assign(a, 4.0, whole) is None, "b may be done before a would be"
    assert requests.assign(a, 3.9, whole) is None, "a busy machine may be silent for two seconds"
    stolen = requests.assign(a, 4.1, whole)
    assert stolen is not None and stolen.chunk == 1 and stolen.late
    assert requests.complete(stolen, 5.0) == [late] and requests.complete(late, 5.0) is None
    assert requests.remaining == 0


def test_a_stream_without_work_helps_with_the_chunk_of_which_the_most_parts_were_asked_of_nobody() -> None:
    requests, a, b = ChunkScheduler(range(4)), NodeId("a"), NodeId("b")
    open_ = {0: 0, 1: 3, 2: 5, 3: 9}
    first = requests.assign(a, 0.0, open_.__getitem__)
    others = [requests.assign(b, 0.0, open_.__getitem__) for _ in range(2)]
    assert first is not None and requests.assign(NodeId("c"), 0.0, open_.__getitem__) is not None
    assert requests.assign(b, 0.1, open_.__getitem__) is None, "how fast b is is not known yet"
    assert requests.complete(first, 0.2) == []
    helping = requests.assign(a, 0.2, open_.__getitem__)
    assert helping is not None and helping.chunk == 3 and not helping.late
    again = requests.assign(a, 0.2, open_.__getitem__)
    assert again is not None and again.chunk == 2, "a has a stream at 3"
    assert others[1] is not None and requests.complete(again, 0.3) == [others[1]]


def test_an_errand_that_came_to_nothing_is_another_donors() -> None:
    requests, a, b = ChunkScheduler(range(1)), NodeId("a"), NodeId("b")
    request = requests.assign(a, 0.0, whole)
    assert request is not None and requests.assign(b, 0.0, whole) is None
    requests.abandon(request)
    again = requests.assign(b, 0.0, whole)
    assert again is not None and again.chunk == 0


# The parts of a chunk


def test_two_streams_meet_in_the_middle_and_nothing_comes_twice() -> None:
    parts, chunk = ChunkAssembly(10, 2), bytes(range(10))
    first, second = parts.join(), parts.join()
    asked = [
        parts.next(first, False),
        parts.next(second, False),
        parts.next(first, False),
        parts.next(second, False),
    ]
    assert asked == [(0, 2), (8, 10), (2, 4), (6, 8)] and parts.unrequested == 1
    parts.add(second, 8, chunk[8:10])
    assert parts.front == 0
    parts.add(first, 0, chunk[:2])
    assert parts.front == 2 and parts.next(first, False) == (4, 6)
    assert parts.next(first, False) is None and parts.next(second, False) is None
    parts.add(second, 6, chunk[6:8])
    parts.add(first, 2, chunk[2:4])
    assert parts.front == 4 and not parts.complete
    parts.add(first, 4, chunk[4:6])
    assert parts.front == 10 and parts.complete and parts.data == chunk


def test_what_one_was_asked_for_that_is_gone_others_are() -> None:
    parts = ChunkAssembly(10, 2, resumed=bytearray(b"ab"))
    first, second = parts.join(), parts.join()
    assert [parts.next(first, False) for _ in range(3)] == [(2, 4), (4, 6), (6, 8)]
    assert parts.next(second, False) == (8, 10)
    assert parts.next(second, True) == (2, 4), "it is late"
    parts.add(first, 2, b"cd")
    parts.leave(first)
    assert parts.unrequested == 2 and [parts.next(second, False) for _ in range(3)] == [(4, 6), (6, 8), None]


def test_nobody_helps_where_it_must_be_known_who_gave_what() -> None:
    parts = ChunkAssembly(10, 2, single_donor=True)
    assert parts.unrequested == 0 and parts.next(parts.join(), False) == (0, 2)


def test_donors_share_the_last_chunks_and_no_byte_comes_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunk_scheduler, "LATE_AFTER", 60.0)  # so busy may the machine be
    chunks = Chunks(3 << 18, 1 << 18)  # 2 MiB each, in parts of a quarter

    @with_peers(tmp_path, "a", "b", chunks=chunks)
    async def _(a: Peer, b: Peer) -> None:
        for donor in (a, b):
            donor.outer.vectors.momentum[:] = 0.1
            donor.outer.vectors.anchor[:] = np.random.default_rng(0).standard_normal(chunks.numel, np.float32)
            donor.outer.initialise(with_momentum=True)
            sum_ = donor.outer.finalize()
        joiner = Peer(tmp_path / "joiner", "joiner", chunks)
        await joiner.up()
        standing = await bring(joiner, 0, sum_, a, b)
        assert joiner.outer.finalize() == sum_ and joiner.bits() == a.bits()
        assert sum(standing.bytes_from.values()) == 8 * chunks.numel
        await joiner.down()
