"""What a node takes of its machine's memory, and what follows where that is more than its owner allows."""

import asyncio
import mmap
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import psutil
import pytest

from atoll.comm.config.run import RunConfig
from atoll.comm.errors import ResourceError
from atoll.node import memory
from atoll.node.config import Device, NodeConfig
from atoll.node.daemon import memory_limit as module
from atoll.node.daemon.memory_limit import MemoryLimit
from atoll.node.memory import free_for_node, node_bytes
from atoll.node.preflight import memory_need

MEGABYTE = 1 << 20
SETTINGS = NodeConfig(device=Device.CPU, ranks=1, memory=2.0)


class Supervisor:
    """The settings that a trainer is started with, and those that it was to start again with."""

    def __init__(self, settings: NodeConfig = SETTINGS) -> None:
        self.settings, self.again = settings, list[int]()

    def start_again(self, settings: NodeConfig) -> None:
        self.settings = settings
        self.again.append(settings.micro_batch)


def limit(supervisor: Supervisor) -> MemoryLimit:
    return MemoryLimit(RunConfig(), cast(Any, supervisor))


def test_memory_is_what_processes_have_for_themselves_and_files_in_shared_memory(tmp_path: Path) -> None:
    me = psutil.Process()
    before = node_bytes(me)
    mine = np.ones(64 * MEGABYTE, np.uint8)
    assert 50 * MEGABYTE < node_bytes(me) - before < 80 * MEGABYTE
    file = tmp_path / "file"
    file.write_bytes(mine.tobytes())
    del mine
    with open(file, "rb") as opened, mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        assert sum(mapped[::4096]) > 0
        assert abs(node_bytes(me) - before) < 20 * MEGABYTE, "what the system can take back does not count"
    assert node_bytes(me, [tmp_path]) - node_bytes(me) >= 60 * MEGABYTE
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as child:
        gone = psutil.Process(child.pid)
        assert node_bytes(gone) > 0
    assert node_bytes(gone) == 0


def test_a_rank_may_take_what_the_machine_has_and_the_owner_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available", lambda: 5 * 10**9)
    monkeypatch.setattr(memory, "node_bytes", lambda root: 3 * 10**9)
    assert free_for_node(NodeConfig()) == 5 * 10**9
    assert free_for_node(NodeConfig(memory=7)) == 4 * 10**9
    assert free_for_node(NodeConfig(memory=20)) == 5 * 10**9
    assert free_for_node(NodeConfig(memory=2)) == 0


def test_a_limit_within_which_the_model_does_not_fit_is_refused_with_what_it_needs() -> None:
    supervisor = Supervisor()
    need = memory_need(RunConfig(), SETTINGS)
    for allowed in (0.0, need / 1e9 + 0.01):
        limit(supervisor).demand_fit(replace(SETTINGS, memory=allowed))
    with pytest.raises(ResourceError, match=rf"memory=0\.1 GB.*needs about {need / 1e9:.1f} GB"):
        limit(supervisor).demand_fit(replace(SETTINGS, memory=0.1))


def test_a_trainer_is_made_smaller_once_it_has_handed_over() -> None:
    supervisor, steps = Supervisor(), [True, True, False]
    limited = limit(supervisor)
    limited.micro_batch = 7

    async def story() -> None:
        await limited.shrink(lambda: steps.pop(0))

    asyncio.run(asyncio.wait_for(story(), 60))
    assert supervisor.again == [3] and not steps


@pytest.mark.parametrize(("micro_batch", "device"), [(1, Device.CPU), (0, Device.CPU), (8, Device.CUDA)])
def test_where_nothing_can_be_made_smaller_the_node_says_so(
    micro_batch: int, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "HAND_OVER_SECONDS", 0.01)
    supervisor = Supervisor(replace(SETTINGS, device=device))
    limited = limit(supervisor)
    limited.micro_batch = micro_batch
    with pytest.raises(ResourceError, match=r"GB of memory, and memory=2 allows less: allow more"):
        asyncio.run(limited.shrink(lambda: True))  # one that hangs is waited for no longer
    assert not supervisor.again


def test_the_vectors_count_where_they_are_in_memory(tmp_path: Path) -> None:
    (tmp_path / "anchor.f32").write_bytes(bytes(range(256)) * (16 << 12))
    limited = limit(Supervisor())
    before = limited.bytes()
    for in_memory, more in ((False, 0), (True, 16)):
        limited.vectors = cast(Any, SimpleNamespace(folder=tmp_path, in_memory=in_memory))
        assert abs(limited.bytes() - before - more * MEGABYTE) < 4 * MEGABYTE
