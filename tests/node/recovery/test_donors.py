"""Donors of a recovery over loopback: many at once, and slow, silent, dying and lying ones."""

import asyncio
import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from recovery_peers import CHUNKS, Peer, bring, served, with_peers

from atoll.comm.byte_view import Octets
from atoll.comm.chunks import Chunks
from atoll.comm.ids import NodeId, Round
from atoll.comm.transport import frames
from atoll.comm.transport.fetch_client import DonorLost
from atoll.node.daemon import state_server
from atoll.node.daemon.outer_loop import how_far
from atoll.node.recovery import chunk_scheduler
from atoll.node.recovery import recovery as recover_
from atoll.node.recovery.chunk_assembly import ChunkAssembly
from atoll.node.recovery.chunk_scheduler import ChunkRequest, ChunkScheduler
from atoll.node.recovery.recovery import (
    MIN_STREAMS,
    Donor,
    DonorsSilent,
    RecoveryProgress,
    RoundMovedOn,
    Target,
    _RecoveryRun,
    recover,
)


def test_a_donor_whose_state_is_not_the_runs_is_passed_over(tmp_path: Path) -> None:
    @with_peers(tmp_path, "a", "liar", "b")
    async def _(a: Peer, liar: Peer, b: Peer) -> None:
        sum_ = a.initialise()
        liar.initialise()
        liar.outer.vectors.anchor[7] += 1
        liar.outer.finalize()
        await bring(b, 0, sum_, liar, a)
        assert b.bits() == a.bits()


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


@pytest.mark.long
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
