"""A node's state directory, filled as its daemon fills it."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np

from atoll.comm.byte_view import U8
from atoll.comm.codecs.factory import make_codec
from atoll.comm.config.model import ModelConfig
from atoll.comm.config.run import ReduceConfig, RunConfig
from atoll.comm.digest import digest
from atoll.node.checkpoint.checkpoint_files import CheckpointLocation
from atoll.node.checkpoint.checkpointer import Checkpointer
from atoll.node.checkpoint.run_manifest import RunManifest
from atoll.node.checkpoint.snapshots import TensorShapes
from atoll.node.outer.layout import flat_order, fragments_and_chunks
from atoll.node.outer.method import outer_schedule, seal_format
from atoll.node.outer.shared_vectors import SharedVectors
from atoll.node.outer.state import OuterState
from atoll.node.participant.flat_vector import layout_of
from atoll.node.trainer.model import build

TINY = ModelConfig(vocab_size=64, dim=32, layers=2, heads=4, kv_heads=4, ffn_dim=48, seq_len=16)
RUN = RunConfig(name="tiny", model=TINY, reduce=ReduceConfig(chunk=4096))
MARK = b"r" * 16


def layout_for(model: ModelConfig) -> TensorShapes:
    return tuple((slot.name, slot.shape) for slot in layout_of(build(model)).slots)


class Node:
    """A node's state directory, filled as its daemon fills it."""

    def __init__(
        self, folder: Path, about: RunManifest | None = None, layout: TensorShapes = (), mark: bytes = MARK
    ) -> None:
        about = about or RunManifest(RUN)
        self.state_dir, self.run, self.folder = folder, about.run, folder / "outer" / mark.hex()
        layout = layout or layout_for(about.run.model)
        layout = flat_order(self.run, layout) if self.run.fragments.count > 1 else layout
        fragments, self.chunks = fragments_and_chunks(self.run, layout)
        self.codec = make_codec(self.run.reduce.codec, self.run.reduce.block, self.run.reduce.scales)
        vectors = SharedVectors.create(self.chunks.numel, folder, folder / "shm")
        self.outer = OuterState(vectors, self.chunks, seal_format(self.run, *fragments), outer_schedule(self.run))
        place = CheckpointLocation(self.folder, mark, layout, 3, manifest=about)
        self.disk = Checkpointer(self.outer, lambda _: None, place)

    async def commit(self, *rounds: int) -> None:
        for round_ in rounds:
            if not round_:
                rng = np.random.default_rng(0)
                self.outer.vectors.anchor[:] = rng.standard_normal(self.chunks.numel, dtype=np.float32)
                self.outer.initialise()
            else:
                of, payloads = (
                    self.chunks.fragment_range(self.outer.fragment_schedule.fragment(round_)),
                    self.sealed(round_),
                )
                for c, payload in zip(of, payloads, strict=True):
                    self.outer.apply(c, payload)
                self.outer.advance_unchanged(round_)
                self.disk.record_round(round_, payloads, [digest(payload) for payload in payloads])
                self.outer.finalize()
            self.disk.finalized(round_, 10 * round_)
            await self.disk.wait_idle()

    def sealed(self, round_: int) -> list[U8]:
        delta = np.random.default_rng(round_).standard_normal(self.chunks.numel, dtype=np.float32)
        of = self.chunks.fragment_range(self.outer.fragment_schedule.fragment(round_))
        payloads = [np.empty(self.codec.size(self.chunks.size(c)), np.uint8) for c in of]
        for c, payload in zip(of, payloads, strict=True):
            self.codec.encode(delta[self.chunks.span(c)], payload)
        return payloads

    def anchor(self) -> "np.ndarray[Any, np.dtype[np.float32]]":
        return np.array(self.outer.vectors.anchor)


def filled(folder: Path, rounds: int, **node: Any) -> Node:
    made = Node(folder, **node)
    asyncio.run(made.commit(*range(rounds + 1)))
    return made
