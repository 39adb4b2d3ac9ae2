"""The trainer's supervisor: starts the launcher, takes its connection, starts it again when it dies.

The trainer is a process of its own, so its death (CUDA error, out of memory, kill) costs the node the inner steps
that it took since its last copy of the round at hand (`atoll.node.participant.round_checkpoint`) and nothing else.
"""

import asyncio
import contextlib
import logging
import os
import shlex
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec
import psutil

from atoll.comm.child_process import GRACE_SECONDS
from atoll.comm.errors import AtollError, ResourceError
from atoll.comm.exit_codes import ExitCode
from atoll.comm.files import atomic_write, write_all
from atoll.comm.incidents import IncidentKind
from atoll.node.config import NodeConfig, TrainerSpec
from atoll.node.daemon.memory_signs import cause_of_death, oom_kills
from atoll.node.daemon.state_dir import CHANNEL, CHANNEL_PREFIX, TRAINER_SPEC
from atoll.node.daemon.trainer_log import TrainerLog
from atoll.node.trainer_channel import (
    DaemonEnd,
    Failed,
    Hello,
    LoopLeft,
    Preparing,
    Ready,
    ToDaemon,
    ToTrainer,
    Train,
)

log = logging.getLogger("atoll.node")
LAST_WORD_SECONDS = 5.0  # seconds that a rank which outlives its launcher has to say what it failed of
START_SECONDS = 300.0  # until a trainer has to say hello, at least: torch, and to find a micro-batch
# A script may have data to prepare before it takes part.
COMMAND_START_SECONDS = 3600.0
PREPARATION_SECONDS = 3600.0  # without a word, of a trainer that is there and takes no orders yet
STOP_SECONDS = 3.0  # that the built-in trainer has to end by itself


class TrainerFailed(AtollError):
    """The trainer cannot work here."""

    exit_code = ExitCode.RESOURCE


class TrainerSupervisor:
    """The keeper of a node's trainer: `run` it until cancelled. `on_message` gets what the trainer says, `on_down`
    is called when it is gone."""

    def __init__(
        self,
        spec: TrainerSpec,
        state_dir: Path,
        on_message: Callable[[ToDaemon], None],
        on_down: Callable[[], None],
        on_death: Callable[[IncidentKind, int], None] = lambda kind, code: None,
    ) -> None:
        """`on_death` is called with what a trainer died of, and its exit code, or minus the number of a signal."""
        self._spec, self._state_dir = spec, state_dir
        self._on_message, self._on_down, self._on_death = on_message, on_down, on_death
        self._kills = 0  # of processes, for want of memory, by the kernel, when the latest one was started
        self._end: DaemonEnd | None = None
        self._connected: asyncio.Queue[DaemonEnd] = asyncio.Queue()
        self._crashes = 0
        self._took_part = False  # a trainer was there
        self._left_loop = False  # the latest one's loop ended by itself
        self._departures = 0  # trainers whose loop did
        self._hung = False  # the latest one does not answer
        self._wanted_again = False  # the latest one was ended for the sake of other settings
        self._exit_code = 0  # the latest one's
        self._hurried = asyncio.Event()  # nobody waits for a script to end by itself
        self._order_round = -1  # of the latest order to train
        self._round_of_death = -1  # that was under way when a trainer died
        self._log = TrainerLog(state_dir)

    def send(self, message: ToTrainer) -> None:
        """Send a message to the living trainer; one that is down learns it from the next view."""
        if isinstance(message, Train):
            self._order_round = message.round
        if self._end is not None:
            self._end.send(message)

    def hang_up(self) -> None:
        """Give a trainer up that does not answer: it is ended, by force if it must be, and started again."""
        if self._end is not None:
            self._hung = True
            self._end.close()

    @property
    def settings(self) -> NodeConfig:
        """The settings that a trainer is started with."""
        return self._spec.node

    def start_again(self, node: NodeConfig) -> None:
        """End the trainer, by force if it must be, and start it again with these settings; that is no crash of its
        own."""
        self.change_settings(node)
        if self._end is not None:
            self._wanted_again = True
            self.hang_up()

    def change_settings(self, node: NodeConfig) -> None:
        """Let the trainer have these settings: some of them at its next round, the others when it starts again."""
        if self._spec.node != node:
            self._spec.node = node
            if self._spec.channel:
                self._write_spec()

    def _write_spec(self) -> None:
        """Write what the trainer is to know, whole or not at all. Raises `ResourceError`."""
        path = self._state_dir / TRAINER_SPEC
        try:
            with atomic_write(path, None) as out:
                write_all(out, [memoryview(msgspec.json.encode(self._spec))], 0)
        except OSError as error:
            raise ResourceError(f"cannot write {path}: {error.strerror}") from None

    def hurry(self) -> None:
        """Wait no longer for a script that is to end by itself."""
        self._hurried.set()

    async def run(self) -> None:
        """Keep a trainer alive until cancelled. Raises `TrainerFailed` when starting it again would not help, or
        did not, and `ResourceError` where the disk does not allow it."""
        with tempfile.TemporaryDirectory(prefix=CHANNEL_PREFIX) as folder:  # unix socket paths are short
            channel = str(Path(folder, CHANNEL))
            server = await asyncio.start_unix_server(self._accept, channel, limit=16 << 20)
            os.chmod(channel, 0o600)
            spec_file = self._state_dir / TRAINER_SPEC
            self._spec.channel = channel
            self._write_spec()
            with contextlib.closing(server):
                while True:
                    await self._recover_from_crash(await self._live_once(spec_file))

    async def _live_once(self, spec_file: Path) -> str:
        """Start a trainer and listen to it until it has ended; return how that was, in words."""
        self._left_loop = self._hung = self._wanted_again = False
        self._kills = oom_kills()
        command = [sys.executable, "-P", "-m", "atoll.node.trainer.launcher", "--spec", str(spec_file)]
        await self._log.try_to_bound()
        while not self._connected.empty():  # of one that connected when it was given up
            self._connected.get_nowait().close()
        if (node := self._spec.node).machines > 1:
            fewest = node.machines_min or node.machines
            number = f"{fewest} to {node.machines}" if fewest < node.machines else str(node.machines)
            log.info(
                f"the trainer waits for {number} machines, this one and others: there, "
                f"`atoll node worker {node.rendezvous}`"
            )
        log.info(f"{self._name} starts; what it prints is in {self._log.path}")
        with self._log.open() as out:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,  # a terminal's Ctrl-C is for the daemon, which has its steps handed over
            )
        connecting = asyncio.create_task(self._connected.get())
        exited = asyncio.create_task(process.wait())
        bounding = asyncio.create_task(self._log.keep_bounded())
        try:
            # One that does not come up is ended and started again; one that is busy loading is not.
            several = self._spec.node.machines > 1  # whose launchers wait for each other
            start = None if several else max(self._spec.run.members.stall, START_SECONDS)
            await asyncio.wait([connecting, exited], timeout=start, return_when=asyncio.FIRST_COMPLETED)
            if self._spec.command and not connecting.done() and not exited.done():
                log.warning(f"{self._name} has not begun to take part after {start or 0:.0f} s ({self._log.path})")
                await asyncio.wait(
                    [connecting, exited], timeout=COMMAND_START_SECONDS, return_when=asyncio.FIRST_COMPLETED
                )
            began, ended = connecting.done(), exited.done()
            if connecting.done():
                await self._listen(connecting.result())
        finally:
            connecting.cancel()
            bounding.cancel()
            patient = self._spec.command and connecting.done() and not self._hung
            await end_launcher(process, GRACE_SECONDS if patient else STOP_SECONDS, self._hurried)
            await asyncio.gather(exited, bounding, return_exceptions=True)
        await self._hear_other_ranks()
        self._exit_code = exited.result()
        return "was ended" if not began and not ended else f"ended with {exit_in_words(self._exit_code)}"

    async def _listen(self, end: DaemonEnd) -> None:
        self._end, takes_orders = end, False
        try:
            while (message := await self._next_message(end, takes_orders)) is not None:
                if isinstance(message, Failed):
                    raise self._failure(message)
                match message:
                    case Preparing():
                        self._took_part = True
                    case Hello():
                        self._took_part = takes_orders = True
                    case LoopLeft():
                        self._left_loop = True
                    # What a trainer that died had kept of its round makes no finished one.
                    case Ready(round=round_) if round_ > self._round_of_death:
                        self._crashes = 0
                self._on_message(message)
        finally:
            self._end = None
            end.close()
            self._on_down()

    async def _next_message(self, end: DaemonEnd, takes_orders: bool) -> ToDaemon | None:
        """The trainer's next message; None where it is gone, or hangs before it takes orders. From then on the
        node's machine knows what it owes."""
        try:
            async with asyncio.timeout(None if takes_orders else PREPARATION_SECONDS):
                return await end.receive()
        except TimeoutError:
            log.warning(f"{self._name} prepares and has said nothing for {PREPARATION_SECONDS:.0f} s: it is ended")
            self._hung = True
            return None

    async def _hear_other_ranks(self) -> None:
        while not self._connected.empty():
            end, message = self._connected.get_nowait(), None
            try:
                async with asyncio.timeout(LAST_WORD_SECONDS):
                    message = await end.receive()
            except TimeoutError:
                pass
            finally:
                end.close()
            if isinstance(message, Failed):
                raise self._failure(message)

    def _failure(self, failed: Failed) -> TrainerFailed:
        """The error with which the node ends for want of a trainer that works."""
        self._on_death(IncidentKind.OUT_OF_MEMORY if failed.out_of_memory else IncidentKind.TRAINER_DIED, 1)
        return TrainerFailed(failed.sentence)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connected.put_nowait(DaemonEnd(reader, writer))

    @property
    def _name(self) -> str:
        return f"the command `{shlex.join(self._spec.command)}`" if self._spec.command else "the trainer"

    async def _recover_from_crash(self, ending: str) -> None:
        last_line = self._last_line()
        if self._spec.command and not self._took_part:
            raise TrainerFailed(f"{self._name} {ending} and had never called `participate`: {last_line}")
        if self._left_loop:
            await self._recover_from_departure()
            return
        if self._wanted_again:
            return
        if not self._hung:
            words, _ = self._log.last_words()
            code = self._exit_code if words.exit_code is None else words.exit_code
            self._on_death(*cause_of_death(words.line, code, oom_kills() - self._kills))
        self._crashes, self._round_of_death = self._crashes + 1, self._order_round
        if self._crashes > self._spec.node.max_restarts:
            raise TrainerFailed(f"the trainer died {self._crashes} times without finishing a round: {last_line}")
        pause = min(0.5 * 2 ** (self._crashes - 1), 30.0)
        log.warning(f"the trainer died ({last_line}); it starts again in {pause:g} s")
        await asyncio.sleep(pause)

    def _last_line(self) -> str:
        """What the latest trainer ended of, as far as its log and its exit code say, and where the rest is."""
        words, path = self._log.last_words()
        said, code = words.line or "it said nothing", words.exit_code
        number = signal_number(self._exit_code if code is None else code)
        if self._hung:
            said = f"it hung and was ended; it last said: {words.line}" if words.line else "it hung and was ended"
        elif number is not None:
            said = f"it was killed by {number.name}" + (f"; it last said: {words.line}" if words.line else "")
        elif words.peer_gone and self._spec.node.machines > 1:
            said = f"a machine of the node is gone: {said}"
        return f"{said} (see {path})"

    async def _recover_from_departure(self) -> None:
        """The script left its loop, perhaps after rounds that it finished: so it is counted apart from crashes."""
        self._departures += 1
        said = f"{self._name} left its training loop while the run goes on"
        if self._departures > self._spec.node.max_restarts:
            often = f"{self._departures} times: let it loop over run.batches() until that ends"
            raise TrainerFailed(f"{said}, {often}")
        log.warning(f"{said}: it starts again from the anchor")
        await asyncio.sleep(0.5)


def exit_in_words(code: int) -> str:
    """A process's exit code, or the signal that ended it: -N, or 128 + N as a shell has it."""
    number = signal_number(code)
    return f"exit code {code}" if number is None else f"signal {number.name}"


def signal_number(code: int) -> signal.Signals | None:
    """The signal that ended a process of this exit code; None where it ended by itself."""
    with contextlib.suppress(ValueError):
        return signal.Signals(-code if code < 0 else code - 128)
    return None


async def end_launcher(
    process: asyncio.subprocess.Process, grace: float = STOP_SECONDS, hurried: asyncio.Event | None = None
) -> None:
    """End the launcher and its ranks. They go by themselves once the channel is closed, in `grace` seconds, or
    until `hurried` is set; else they are made to."""
    hurried = hurried or asyncio.Event()
    if not await _ends(process, min(grace, STOP_SECONDS), hurried) and grace > STOP_SECONDS:
        log.info(
            f"the script may take up to {grace - STOP_SECONDS:.0f} s for what it does after its loop; "
            "interrupt again to end it now"
        )
        await _ends(process, grace - STOP_SECONDS, hurried)
    with contextlib.suppress(psutil.Error):
        ranks = psutil.Process(process.pid).children(recursive=True)
        for rank in ranks:
            with contextlib.suppress(psutil.Error):
                rank.send_signal(signal.SIGTERM)
        await asyncio.to_thread(psutil.wait_procs, ranks, 5.0)
        for rank in ranks:
            with contextlib.suppress(psutil.Error):
                rank.kill()
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    await process.wait()


async def _ends(process: asyncio.subprocess.Process, seconds: float, hurried: asyncio.Event) -> bool:
    """Whether the process ends in so many seconds, before `hurried` is set."""
    ended, hurry = asyncio.ensure_future(process.wait()), asyncio.ensure_future(hurried.wait())
    try:
        await asyncio.wait((ended, hurry), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        return ended.done()
    finally:
        ended.cancel()
        hurry.cancel()
