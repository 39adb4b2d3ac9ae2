"""The coordinator's side of its sinks: a process for each, kept alive, told of commits, and ended with the run.

Nothing here waits for a sink: what is told goes into a pipe, and what does not fit is left out. A process that
missed a commit looks again by itself.
"""

import asyncio
import logging
import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Protocol

import msgspec

from atoll.comm import log as logs
from atoll.comm.config.run import RunConfig, WandbMode
from atoll.coordinator.service.journal import Journal
from atoll.coordinator.state_machine.events import Effect, Publish
from atoll.coordinator.tracking.messages import AlertRaised, Committed, Message, SinkSpec
from atoll.coordinator.tracking.sink import SinkKind
from atoll.coordinator.tracking.wandb_settings import new_run_id, wandb_mode

log = logging.getLogger("atoll.coordinator")
MODULE = "atoll.coordinator.tracking.writer"
WANDB_ID = "wandb"  # the journal's key of the id of the run's wandb run
MIN_PAUSE, MAX_PAUSE = 2.0, 300.0  # seconds between the end of a process and the next one
STEADY_SECONDS = 600.0  # after which an end is not one of a series
MAX_UNREAD = 1 << 16  # bytes that a process may leave unread
CLOSE_SECONDS = 30.0  # that a process has to end; it ends itself a little earlier


class Alert(Protocol):
    """Something that people should know at once, or that is over."""

    @property
    def title(self) -> str:
        """What it is, in a few words."""
        ...

    @property
    def sentence(self) -> str:
        """The same with all that is known."""
        ...

    @property
    def on(self) -> bool:
        """Whether it begins; False: it is over."""
        ...


class Tracker:
    """The sinks of one coordinator: an asynchronous context, in which they are alive."""

    def __init__(self, config: RunConfig, journal: Journal, state_dir: Path, archive: str = "") -> None:
        """`archive`: where old commit records are copied to. Raises `ConfigError` and `JournalFull`."""

        def spec(kind: SinkKind, wandb_id: str = "", mode: WandbMode = WandbMode.DISABLED) -> SinkSpec:
            how = logs.beside(kind)
            return SinkSpec(kind, str(state_dir.absolute()), config.name, archive, how, wandb_id, mode)

        self._sinks = list[_SinkProcess]()
        if (mode := wandb_mode(config)) is not WandbMode.DISABLED:
            self._sinks.append(_SinkProcess(spec(SinkKind.WANDB, _wandb_id(journal), mode)))
        if config.figures.tensorboard:
            self._sinks.append(_SinkProcess(spec(SinkKind.TENSORBOARD)))
        if config.figures.jsonl:
            self._sinks.append(_SinkProcess(spec(SinkKind.JSONL)))
        self._tasks = list[asyncio.Task[None]]()

    async def __aenter__(self) -> "Tracker":
        self._tasks = [asyncio.create_task(sink.run()) for sink in self._sinks]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*(sink.close() for sink in self._sinks))
        for ended in await asyncio.gather(*self._tasks, return_exceptions=True):
            if isinstance(ended, Exception):
                raise ended

    def tell(self, effect: Effect) -> None:
        """Take in an effect of the run that is durable; never waits."""
        if isinstance(effect, Publish):
            self._say(Committed())

    def alert(self, alert: Alert) -> None:
        """Have whoever watches the run told of an alert; never waits."""
        self._say(AlertRaised(alert.title, alert.sentence, alert.on))

    @property
    def process_ids(self) -> tuple[int, ...]:
        """Of the sinks' processes."""
        return tuple(sink.process.pid for sink in self._sinks if sink.process is not None)

    def _say(self, message: Message) -> None:
        line = msgspec.json.encode(message) + b"\n"
        for sink in self._sinks:
            sink.say(line)


class _SinkProcess:
    """The process of one sink."""

    def __init__(self, spec: SinkSpec) -> None:
        self._spec = spec
        self.process: asyncio.subprocess.Process | None = None

    async def run(self) -> None:
        """Keep the process alive until cancelled; then it is left as it is, for `close`."""
        pause = MIN_PAUSE
        while True:
            began = time.monotonic()
            self.process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", MODULE),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is the coordinator's
            )
            self.say(msgspec.json.encode(self._spec) + b"\n")
            code = await self.process.wait()
            if time.monotonic() - began > STEADY_SECONDS:
                pause = MIN_PAUSE
            log.debug(f"the process for {self._spec.kind} ended ({code}), another one starts in {pause:g} s")
            await asyncio.sleep(pause)
            pause = min(2 * pause, MAX_PAUSE)

    def say(self, line: bytes) -> None:
        """Write a line to the process, unless it is gone or reads nothing."""
        wire = self.process.stdin if self.process is not None else None
        if wire is not None and not wire.is_closing() and wire.transport.get_write_buffer_size() < MAX_UNREAD:
            wire.write(line)

    async def close(self) -> None:
        """Have the process finish what it has to write, and end; wait for that, but not for ever."""
        if self.process is None or self.process.returncode is not None:
            return
        if self.process.stdin is not None:
            self.process.stdin.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_SECONDS):
                await self.process.wait()
        if self.process.returncode is None:
            self.process.kill()
            await self.process.wait()


def _wandb_id(journal: Journal) -> str:
    """The id of the run's wandb run: WANDB_RUN_ID, or the one that the journal has; kept there."""
    kept = journal.meta(WANDB_ID)
    run_id = os.environ.get("WANDB_RUN_ID") or kept or new_run_id()
    if run_id != kept:
        journal.set_meta(WANDB_ID, run_id)
    return run_id
