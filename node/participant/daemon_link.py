"""A trainer's link to its daemon, for all its ranks: rank 0 holds the channel and passes each command on; what
ends a trainer for good is told by whichever rank it happens to."""

import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import msgspec
import torch

from atoll.comm import log
from atoll.comm.child_process import LAUNCHER, die_with_parent
from atoll.comm.config.run import from_json, to_json
from atoll.comm.errors import AtollError, ConfigError, ResourceError, Unreachable
from atoll.node.config import SPEC, TrainerSpec
from atoll.node.participant.rank_group import RankGroup
from atoll.node.participant.watchdog import end_late_script
from atoll.node.trainer_channel import Failed, Preparing, ToDaemon, ToTrainer, TrainerEnd


def read_spec() -> TrainerSpec | None:
    """Read what the daemon tells the trainer that it has started, or a worker the ranks of another machine; None
    where neither has."""
    path = os.environ.get(SPEC)
    return msgspec.json.decode(Path(path).read_bytes(), type=TrainerSpec) if path else None


def agreed_spec(ranks: RankGroup) -> TrainerSpec:
    """Agree on the spec of this rank, with the run and network of rank 0's, and log as its node. Every rank must
    call it. Raises `ConfigError` where no daemon has started this."""
    spec = read_spec()
    if spec is None and ranks.rank == 0:
        raise ConfigError(
            f"this script takes part in a run: have a node start it, `atoll node join URL -- python {sys.argv[0]}`"
        )
    spec = spec or TrainerSpec()
    encoded = ranks.broadcast(to_json(spec.run))
    lan = ranks.broadcast(b"lan" if spec.lan else b"") == b"lan"  # other machines do not know the coordinator
    spec = replace(spec, run=from_json(encoded), lan=lan) if ranks.rank else spec
    log.about(run=spec.run.name, node=ranks.broadcast(spec.log.node.encode()).decode())
    return spec


class DaemonLink:
    """The daemon's commands in the same order on every rank; answers go out from rank 0."""

    def __init__(self, ranks: RankGroup, channel: str) -> None:
        """`channel`: the daemon's socket, which rank 0 connects to. Raises `Unreachable`."""
        self._ranks = ranks
        self._end = connect(channel, end_late_script) if ranks.rank == 0 else None

    @property
    def has_channel(self) -> bool:
        """Whether this is the rank that the daemon hears."""
        return self._end is not None

    def next_command(self) -> ToTrainer:
        """Wait for the daemon's next command; every rank must call it."""
        message = self._end.next_command() if self._end else None
        if self._ranks.size == 1 and message:
            return message
        encoded = self._ranks.broadcast(msgspec.json.encode(message) if message else None)
        command: ToTrainer = msgspec.json.decode(encoded, type=ToTrainer)
        return command

    def has_command(self) -> bool:
        """Whether a command of the daemon waits; only rank 0 knows, on the other ranks it is always False."""
        return self._end.has_command() if self._end else False

    def send(self, message: ToDaemon) -> None:
        """Tell the daemon; of no effect on the other ranks."""
        if self._end:
            self._end.send(message)

    @classmethod
    def opened(cls, ranks: RankGroup, channel: str) -> "DaemonLink":
        """The process's link to this socket: made at the first call, so that a trainer which has much to load says
        first of all that it is there. Raises `Unreachable`."""
        if channel not in _links:
            _links[channel] = cls(ranks, channel)
            _links[channel].send(Preparing())
        return _links[channel]

    def close(self) -> None:
        """Say no more and hear no more; of no effect on the other ranks."""
        for channel in [channel for channel, link in _links.items() if link is self]:
            del _links[channel]
        if self._end:
            self._end.close()


_links: dict[str, DaemonLink] = {}  # by socket


def connect(path: str, on_close: Callable[[], None] | None = None) -> TrainerEnd:
    """Connect to the daemon's socket; `on_close` is called in a thread when the daemon is gone. Raises
    `Unreachable`."""
    try:
        return TrainerEnd(path, on_close)
    except OSError as error:
        raise Unreachable(f"the daemon does not answer at {path}: {error.strerror}") from error


@contextmanager
def failures_reported(channel: str, link: DaemonLink | None = None) -> Iterator[None]:
    """Tell the daemon what a restart would not cure, as `Failed`, and raise it as an `AtollError`. A rank with no
    link to the daemon makes one: rank 0 may not have failed."""

    def report(sentence: str, out_of_memory: bool = False) -> None:
        failed = Failed(sentence, out_of_memory)
        if link is not None and link.has_channel:
            link.send(failed)
            return
        with suppress(AtollError):  # the daemon is gone
            connect(channel).send(failed)

    try:
        yield
    except AtollError as error:
        report(str(error))
        raise
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        sentence = (
            f"the trainer ran out of memory ({str(error).partition('. ')[0]}): set micro_batch=1 and "
            "checkpointing=full if they are set otherwise, share the model among more local ranks (ranks=), or "
            "join a run with a smaller model"
        )
        report(sentence, out_of_memory=True)
        raise ResourceError(sentence) from error


def end_with_launcher() -> None:
    """Have this rank end when what started it does: the daemon's launcher, or torchrun."""
    launcher = int(os.environ.get(LAUNCHER, "0"))
    if launcher and launcher == os.getppid():
        die_with_parent(signal.SIGKILL, launcher)
    elif "TORCHELASTIC_RUN_ID" in os.environ:
        die_with_parent(signal.SIGKILL)


def script_place(error: BaseException) -> str:
    """The line of the training script at which the error was raised, as a traceback has it; empty: it has none."""
    package = Path(__file__).resolve().parents[1]
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not Path(frame.filename).resolve().is_relative_to(package):
            return f' (File "{frame.filename}", line {frame.lineno})'
    return ""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the error says that memory has run out. Torch has a class for CUDA's memory only; for the host's and
    for Apple's GPU it raises a plain RuntimeError."""
    plain = any(words in str(error) for words in ("can't allocate memory", "MPS backend out of memory"))
    return plain or isinstance(error, (MemoryError, torch.OutOfMemoryError))
