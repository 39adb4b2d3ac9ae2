"""What a node has on its disk brings its state back, bit for bit; what waits for the disk, what is given back."""

from pathlib import Path

import numpy as np
from checkpointed_node import CHUNKS, Node, run, sealed

from atoll.comm.ids import Round


def test_a_state_comes_back_from_snapshot_and_log_bit_for_bit(tmp_path: Path) -> None:
    async def body() -> None:
        node = Node(tmp_path)
        await node.initialise()
        await node.commit(*range(1, 6))
        again = Node(tmp_path)
        assert again.disk.durable_round == 5 and again.disk.restore() == 5
        assert again.state() == node.state() and again.outer.finalize() == node.outer.finalize()
        assert [s.first for s in again.snapshots] == [3, 0], "one every three rounds, the last two survive"
        assert again.snapshots[0].tokens == 30

    run(body())


def test_buffers_are_given_back_when_the_file_is_there_and_peers_are_served_from_it(tmp_path: Path) -> None:
    async def body() -> None:
        node = Node(tmp_path)
        await node.initialise()
        node.apply(1)
        payloads = sealed(1)[0]
        assert not node.free_buffers
        assert bytes(await node.disk.sealed(Round(1), 2) or b"") == payloads[2].tobytes()
        await node.disk.wait_idle()
        assert len(node.free_buffers) == CHUNKS.count and not node.queued
        assert bytes(await node.disk.sealed(Round(1), 2) or b"") == payloads[2].tobytes()
        assert await node.disk.sealed(Round(2), 2) is None
        assert await node.disk.sealed(Round(1), CHUNKS.count) is None

    run(body())


def test_a_node_that_does_not_keep_copies_takes_no_snapshot(tmp_path: Path) -> None:
    async def body() -> None:
        node = Node(tmp_path)
        node.disk.take_snapshots(False)
        await node.initialise()
        await node.commit(1, 2)
        await node.disk.wait_durable(2)
        assert not node.snapshots
        assert await node.disk.sealed(Round(1), 0) is not None

    run(body())


def test_a_contribution_waits_for_the_disk_to_have_the_last_round(tmp_path: Path) -> None:
    async def body() -> None:
        node = Node(tmp_path, every=100)
        node.begin()
        await node.disk.wait_durable(0)
        assert node.disk.durable_round == 0
        node.apply(1)
        await node.disk.wait_durable(1)
        assert node.disk.durable_round == 1

    run(body())


def test_a_contribution_waits_for_the_disk_to_have_a_state_that_was_fetched(tmp_path: Path) -> None:
    async def body() -> None:
        (tmp_path / "other").mkdir()
        node, other = Node(tmp_path, every=100), Node(tmp_path / "other", every=100)
        await node.initialise()
        await other.initialise()
        await other.commit(1, 2)
        for c in range(CHUNKS.count):
            node.outer.replace_chunk(c, 2, other.outer.copy_chunk(c)[1].tobytes())
        node.outer.finalize()
        node.disk.finalized(2, 20)
        await node.disk.wait_durable(2)
        assert node.disk.durable_round == 2
        again = Node(tmp_path)
        assert again.disk.restore() == 2 and again.state() == other.state()
        await other.disk.wait_idle()

    run(body())


def test_rounds_whose_sealed_bytes_were_fetched_need_no_snapshot(tmp_path: Path) -> None:
    async def body() -> None:
        node = Node(tmp_path, every=100)
        await node.initialise()
        payloads, digests = sealed(1)
        fetched = [np.frombuffer(payload.tobytes(), np.uint8) for payload in payloads]
        for c, payload in enumerate(payloads):
            node.outer.apply(c, payload)
        node.disk.record_round(1, fetched, digests)
        node.outer.finalize()
        node.disk.finalized(1, 10)
        await node.disk.wait_durable(1)
        assert node.disk.durable_round == 1 and [s.first for s in node.snapshots] == [0]
        assert not node.free_buffers, "what is nobody's buffer is not used for another chunk"

    run(body())


def test_after_void_rounds_the_same_state_has_another_number(tmp_path: Path) -> None:
    async def body() -> None:
        node = Node(tmp_path)
        await node.initialise()
        await node.commit(1)
        node.outer.renumber(4)
        node.disk.drop_rounds_after(1)
        node.outer.finalize()
        node.disk.finalized(4, 10, sole_copy=True)
        await node.disk.wait_durable(4)
        await node.commit(5)
        again = Node(tmp_path)
        assert again.disk.restore() == 5 and again.state() == node.state()

    run(body())


def test_a_snapshot_loads_with_safetensors_alone(tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    async def body() -> None:
        node = Node(tmp_path)
        await node.initialise()
        await node.commit(1, 2, 3)
        loaded = load_file(node.snapshots[0].path)
        vectors = node.outer.vectors
        assert np.array_equal(loaded["anchor.a"], vectors.anchor[:3000].reshape(50, 60))
        assert np.array_equal(loaded["momentum.b"], vectors.momentum[3000:])
        assert loaded.keys() == {"anchor.a", "anchor.b", "momentum.a", "momentum.b"}

    run(body())


def test_who_is_killed_while_it_fetches_a_newer_state_keeps_what_has_come_or_goes_back(tmp_path: Path) -> None:
    async def body() -> None:
        donor, node = Node(tmp_path / "donor"), Node(tmp_path / "node")
        await donor.initialise()
        await donor.commit(*range(1, 6))
        await node.initialise()
        await node.commit(1, 2)
        old = node.state()
        for c in range(2):
            node.outer.replace_chunk(c, 5, donor.outer.copy_chunk(c)[1].tobytes())
        again = Node(tmp_path / "node", node.outer.vectors)
        assert again.disk.restore(keep_newer=True) == -1
        assert again.outer.chunk_rounds[:2] == [5, 5] and set(again.outer.chunk_rounds[2:]) == {2}
        for c in range(2, CHUNKS.count):
            again.outer.replace_chunk(c, 5, donor.outer.copy_chunk(c)[1].tobytes())
        assert again.outer.round == 5 and again.state() == donor.state()
        third = Node(tmp_path / "node", node.outer.vectors)
        assert third.disk.restore(keep_newer=True) == 5 and third.state() == donor.state()
        assert third.disk.restore() == 2 and third.state() == old, "nobody has the newer one any more"

    run(body())


def test_the_state_before_a_round_comes_back_from_the_older_snapshot(tmp_path: Path) -> None:
    async def body() -> None:
        (tmp_path / "other").mkdir()
        node, other = Node(tmp_path), Node(tmp_path / "other")
        await node.initialise()
        await other.initialise()
        await other.commit(1, 2)
        await node.commit(*range(1, 6))
        newest = node.state()
        assert node.disk.restore_before(0) == -1 and node.state() == newest, (
            "nothing is older, nothing was touched"
        )
        assert [s.first for s in node.snapshots] == [3, 0]
        assert node.disk.restore_before(3) == 2 and node.outer.finalize() == other.outer.finalize()
        await other.commit(3, 4)
        assert node.disk.restore_before(5) == 4 and node.outer.finalize() == other.outer.finalize()
        assert node.state() == other.state()

    run(body())
