"""A launched trainer, with the test in the daemon's place."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import psutil
from numpy.typing import NDArray

from atoll.comm.config.model import ModelConfig
from atoll.comm.config.run import InnerConfig, RunConfig
from atoll.node import trainer_channel
from atoll.node.config import Device, NodeConfig, TrainerSpec
from atoll.node.trainer_channel import DaemonEnd

T = TypeVar("T")
# Seconds for anything a trainer does here: where the machine is busy torch alone may take a minute to load.
DEADLINE = 240.0
FAR = 1_000_000  # steps that no test waits for


@dataclass
class Node:
    """A launched trainer, its channel and its vectors."""

    process: asyncio.subprocess.Process
    end: DaemonEnd
    folder: Path
    connections: asyncio.Queue[DaemonEnd]  # later ones: of other ranks, which say `Failed`
    progress: list[trainer_channel.Progress] = field(default_factory=list)
    told: list[str] = field(default_factory=list)
    preparing: list[str] = field(default_factory=list)
    micro_batch = 0

    async def attach(self) -> trainer_channel.Hello:
        hello = await self.answer(trainer_channel.Hello)
        self.anchor, self.local = (self.vector(name, hello.numel) for name in ("anchor", "local"))
        self.end.send(trainer_channel.Attach(f"{self.folder}/anchor", f"{self.folder}/local", hello.numel))
        return hello

    def vector(self, name: str, numel: int) -> NDArray[np.float32]:
        return np.memmap(self.folder / name, np.float32, "w+", shape=(numel,))

    async def ask(self, command: trainer_channel.ToTrainer, kind: type[T]) -> T:
        self.end.send(command)
        return await self.answer(kind)

    async def answer(self, kind: type[T]) -> T:
        """The next message that is not said on the way; it must be of this kind."""
        while True:
            message = await asyncio.wait_for(self.end.receive(), DEADLINE)
            if isinstance(message, kind):
                return message
            match message:
                case trainer_channel.Progress():
                    self.progress.append(message)
                case trainer_channel.LogLine(sentence):
                    self.told.append(sentence)
                case trainer_channel.Preparing(sentence):
                    self.preparing.append(sentence)
                case trainer_channel.MicroBatch(size):
                    self.micro_batch = size
                case _:
                    assert isinstance(message, trainer_channel.Reached), message

    async def failure(self) -> str:
        """The sentence with which any rank says that a restart would not help, before the trainer ends."""
        while True:
            message = await asyncio.wait_for(self.end.receive(), DEADLINE)
            if isinstance(message, trainer_channel.Failed):
                break
            if message is None:
                self.end = await asyncio.wait_for(self.connections.get(), DEADLINE)
        assert await asyncio.wait_for(self.process.wait(), DEADLINE) != 0
        return message.sentence

    async def working(self) -> None:
        """Return when the trainer has reported progress."""
        self.progress.append(await self.answer(trainer_channel.Progress))

    async def stop(self) -> None:
        """Have it end in order, with all that it has yet to write."""
        self.end.send(trainer_channel.Stop())
        while (message := await asyncio.wait_for(self.end.receive(), DEADLINE)) is not None:
            assert isinstance(message, trainer_channel.LogLine), message
            self.told.append(message.sentence)
        assert await asyncio.wait_for(self.process.wait(), DEADLINE) == 0

    def family(self) -> list[int]:
        """Process ids of the launched process and all it started."""
        root = psutil.Process(self.process.pid)
        return [root.pid, *(child.pid for child in root.children(recursive=True))]


def small(**changes: Any) -> RunConfig:
    """A run whose steps take a millisecond; grouped-query attention and an untied head."""
    model = ModelConfig(dim=32, layers=2, heads=2, kv_heads=1, ffn_dim=48, seq_len=32, tied_head=False)
    inner = InnerConfig(batch_size=4, warmup_tokens=512)
    return RunConfig(**{"seed": 5, "model": model, "inner": inner, **changes})


@asynccontextmanager
async def launched(
    folder: Path,
    run: RunConfig,
    ranks: int = 1,
    *,
    through: tuple[str, ...] = (),
    moments: str = "",
    command: tuple[str, ...] = (),
    **node: Any,
) -> AsyncIterator[Node]:
    """A trainer of `ranks` ranks that has connected, or a script's `command` in its place; `through` is a command
    that starts the launcher."""
    folder.mkdir(exist_ok=True)
    connections: asyncio.Queue[DaemonEnd] = asyncio.Queue()
    path, spec = str(folder / "socket"), folder / "spec.json"
    settings = NodeConfig(device=Device.CPU, ranks=ranks, threads=1, **node)
    cache = str(folder / "cache")
    spec.write_bytes(msgspec.json.encode(TrainerSpec(run, settings, path, cache, moments, command, lan=True)))

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.put_nowait(DaemonEnd(reader, writer))

    with closing(await asyncio.start_unix_server(accept, path)):
        launcher = (sys.executable, "-m", "atoll.node.trainer.launcher", "--spec", str(spec))
        process = await asyncio.create_subprocess_exec(*through, *launcher)
        try:
            end = await first_of(connections, process)
            yield Node(process, end, folder, connections)
            end.close()
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()


async def first_of(connections: asyncio.Queue[DaemonEnd], process: asyncio.subprocess.Process) -> DaemonEnd:
    """The first rank that connects; fails at once where the launcher ends before any did."""
    connected, ended = asyncio.create_task(connections.get()), asyncio.create_task(process.wait())
    await asyncio.wait((connected, ended), timeout=DEADLINE, return_when=asyncio.FIRST_COMPLETED)
    ended.cancel()
    await asyncio.wait((connected,), timeout=5)  # who connected and ended at once
    if not connected.done():
        connected.cancel()
        raise AssertionError(f"no rank connected; the launcher's exit code: {process.returncode}")
    return await connected


def order(round: int, steps: int, tokens: int = 0, fleet: int = 1, first: int = 0) -> trainer_channel.Train:
    """Exactly `steps` inner steps on the samples from `first` on."""
    return trainer_channel.Train(round, steps, 1, steps, tokens, fleet, ((first, 4 * steps),))
