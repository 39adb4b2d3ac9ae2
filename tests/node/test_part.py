import asyncio
from pathlib import Path

import numpy as np
import pytest

from atoll.comm.chunks import Chunks
from atoll.comm.codec import NonFinite, make
from atoll.comm.config import CodecName
from atoll.comm.ids import NodeId, Round, RunId
from atoll.comm.plane import DataPlane
from atoll.comm.sealing import mean_of
from atoll.node.machine import Work
from atoll.node.outer import OuterState
from atoll.node.part import Part
from atoll.node.reports import Reports
from atoll.node.vectors import Vectors
from atoll.outer_opt.nesterov import Nesterov
from atoll.outer_opt.schedule import Always

CODEC, CHUNKS = make(CodecName.INT8, 64), Chunks(5000, 1024)
LAYOUT = (("embed.weight", (20, 100)), ("norm.weight", (3000,)))


class Nothing:
    async def sealed(self, round: Round, chunk: int) -> None: ...
    def state(self, round: Round, chunk: int) -> None: ...
    def digests(self, round: Round) -> None: ...


@pytest.mark.parametrize(("element", "name"), [(0, "embed"), (1999, "embed"), (2000, "norm"), (4999, "norm")])
def test_a_delta_that_is_not_finite_names_its_parameter(element: int, name: str, tmp_path: Path) -> None:
    vectors = Vectors.create(CHUNKS.numel, tmp_path, tmp_path / "shm")
    outer = OuterState(vectors, CHUNKS, mean_of(CODEC), Always(Nesterov(0.7, 0.9)))
    vectors.anchor[:] = 0.0
    vectors.local[:] = 0.0
    vectors.local[element] = np.nan

    async def body() -> None:
        plane = DataPlane(RunId("run"), NodeId("ada"), b"", Nothing())
        tells = Reports.__new__(Reports)  # nothing is told
        part = Part(
            plane, outer, CODEC, [mean_of(CODEC)], LAYOUT, None, tells, asyncio.to_thread, asyncio.create_task
        )
        part.encode(Work(1, 0, 1))
        encoding = part._round.encoding
        assert encoding is not None
        with pytest.raises(NonFinite, match=f"training diverged: .* in {name}.weight"):
            await encoding

    asyncio.run(body())
    vectors.close()
