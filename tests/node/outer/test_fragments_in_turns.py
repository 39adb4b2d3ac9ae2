"""What a node keeps of fragments that take turns: on its disk, in a checkpoint, and what begins with it."""

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from states import MARK, RUN, Node, filled, layout_for

from atoll.comm.config.outer import FragmentsConfig, PatternName
from atoll.node.checkpoint import saved_run
from atoll.node.checkpoint.initial_state import InitialStateLoader
from atoll.node.checkpoint.remote_store import CheckpointFacts, RemoteStore, StatePiece, folder_of, state_digest
from atoll.node.checkpoint.run_manifest import RunManifest
from atoll.node.checkpoint.snapshots import TensorShapes
from atoll.node.outer.repair import ChunkCondition, repair_chunk

STRIDED = replace(RUN, fragments=FragmentsConfig(3, PatternName.STRIDED))
BALANCED = replace(RUN, fragments=FragmentsConfig(3))


def bits(node: Node) -> bytes:
    vectors = node.outer.vectors
    return vectors.anchor.tobytes() + vectors.momentum.tobytes()


@pytest.mark.parametrize("rounds", [1, 4, 5, 8])
def test_the_disk_brings_all_fragments_back(rounds: int, tmp_path: Path) -> None:
    node = filled(tmp_path, rounds, about=RunManifest(STRIDED))

    async def again() -> None:
        back = Node(tmp_path, RunManifest(STRIDED))
        assert (back.disk.durable_round, back.disk.restore()) == (rounds, rounds)
        assert bits(back) == bits(node)
        await back.commit(rounds + 1)
        await node.commit(rounds + 1)
        assert bits(back) == bits(node)

    asyncio.run(again())


def test_a_chunk_that_changed_in_memory_is_mended_with_the_rounds_of_its_fragment(tmp_path: Path) -> None:
    node = filled(tmp_path, 8, about=RunManifest(STRIDED))
    right = bits(node)
    for c in range(node.chunks.count):
        assert repair_chunk(node.outer, node.disk, c) is ChunkCondition.INTACT
        node.outer.vectors.momentum[node.chunks.span(c)] *= np.float32(1.5)
        assert repair_chunk(node.outer, node.disk, c) is ChunkCondition.REPAIRED
    assert bits(node) == right and node.outer.round == 8


def test_a_checkpoint_begins_runs_in_the_same_and_in_other_fragments(tmp_path: Path) -> None:
    node = filled(tmp_path / "node", 5, about=RunManifest(BALANCED))
    kept = saved_run.open_run(node.folder)
    assert kept is not None and kept.chunks == node.chunks
    assert kept.chunks.fragment_count == 3
    store = RemoteStore(folder_of(f"file://{tmp_path}/remote", "tiny", MARK.hex()))
    facts = CheckpointFacts("tiny", kept.run_id, 5, 0, 5, kept.chunks, kept.layout)
    manifest = store.write(
        facts, (StatePiece(*found[1:]) for found in saved_run.replay_state(kept, 5)), lambda _: None
    )
    assert manifest.state_digest == node.outer.finalize().hex()
    assert manifest.state_digest == state_digest(
        node.outer.vectors.anchor, node.outer.vectors.momentum, node.chunks
    )
    mine, named = kept.layout, layout_for(RUN.model)
    assert [name for name, _ in mine] != [name for name, _ in named]
    whole = next(iter(sorted(node.folder.glob("snapshot-*"))))  # of one round, with nothing of the log
    for url in (f"file://{tmp_path}/remote/{store.url.rpartition('/')[2]}", str(whole)):
        found = {}
        for layout in (mine, named):
            anchor, momentum = np.zeros((2, node.chunks.numel), np.float32)
            InitialStateLoader(layout, BALANCED.model, anchor, momentum).load(url, True)
            found[layout[0]] = by_name(layout, anchor), by_name(layout, momentum)
        one, other = found.values()
        for here, there in zip(one, other, strict=True):
            assert here.keys() == there.keys() and all(here[name] == there[name] for name in here)
        assert any(any(part) for part in one[1].values()) or url == str(whole)


def by_name(layout: TensorShapes, vector: "np.ndarray[tuple[int], np.dtype[np.float32]]") -> dict[str, bytes]:
    found, start = {}, 0
    for name, shape in layout:
        stop = start + int(np.prod(shape))
        found[name] = vector[start:stop].tobytes()
        start = stop
    return found
