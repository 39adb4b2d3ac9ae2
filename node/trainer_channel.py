"""The local message channel between a daemon and its trainer: JSON lines over a unix socket.

The daemon listens, local rank 0 of the trainer connects. Another rank connects only to say `Failed`, once: rank 0,
whose collectives break when it ends, cannot say it in its place. Bulk never travels here: parameters are in the
memory-mapped flat vectors. A closed channel means the other side is gone: a trainer exits, a daemon
restarts the trainer.

    trainer                          daemon
    Preparing... Hello(layout)  ->
                         <-------    Attach(vectors)
                         <-------    Initialise | Train | Evaluate | Finish | Hold | Stop
    Initialised | Progress... Reached... Ready | BadArithmetic | Waits
    | Evaluated | Rests | MicroBatch | LoopLeft | LogLine | Failed   ------->

A trainer says `Preparing` when it connects, and whenever it has come further with what it must do before it can
take orders; `Hello` is said when it waits for the first of them.

`Reached`, `Ready`, `BadArithmetic`, `Waits` and `Evaluated` are events of the node's machine
(`atoll.node.state_machine`) as they are.

With overlap a trainer goes ahead after `Ready`, says `Waits` when it may not go further, and then, or before, is
told to `Train` on. It may be told to `Evaluate` in between.
"""

import asyncio
import queue
import socket
import threading
from collections.abc import Callable
from contextlib import suppress

import msgspec

LIMIT = 16 << 20  # bytes of one message; a layout of a large model is the longest
FIRST_STEP_SECONDS = 600.0  # that the first thing a trainer is told to do may take beyond others: it compiles


class Attach(msgspec.Struct, tag=True, frozen=True):
    """Map the files of the flat vectors, `numel` fp32 each."""

    anchor: str  # written by the daemon (and by Initialise), read by the trainer
    local: str  # written by the trainer before Ready: its parameters after the inner steps
    numel: int
    copies: str = ""  # folder in memory for copies of the round at hand, which the daemon removes; empty: none


class Initialise(msgspec.Struct, tag=True, frozen=True):
    """Write freshly initialised parameters into the anchor, and answer `Initialised`."""

    seed: int


class Train(msgspec.Struct, tag=True, frozen=True):
    """Load the anchor, take inner steps until told to finish or at the ceiling, write the local vector, answer
    `Ready`; say `Reached` on the way."""

    round: int
    steps: int  # after which to say `Reached`
    floor: int  # steps taken even when told to finish, unless the node is to rest
    ceiling: int  # steps taken at most; fewer if the lease does not hold so many
    tokens: int  # tokens committed by the run before this round: the clock of the LR schedule
    fleet: int  # active members, so that the clock can be interpolated within the round
    lease: tuple[tuple[int, int], ...]  # (first, count) ranges of samples to train on
    resume: bool = False  # start from the local vector, which has work that was carried over
    continues: bool = (
        False  # the lease's first steps are taken since Ready: put them on top of where it would start
    )
    rebased: bool = False  # going on where fragments take turns: what was handed over of the others was rebased
    state: str = ""  # digest of the state that the anchor is of, in hexadecimal digits; empty: not told
    # That round's work held NaN or infinity: neither moments since then nor copies may be used; 0: there is none.
    doubted_round: int = 0
    duty: float = 1.0  # share of the time in which it computes: it rests between inner steps


class Evaluate(msgspec.Struct, tag=True, frozen=True):
    """Load the anchor, answer `Evaluated` with the mean validation loss."""

    round: int


class Finish(msgspec.Struct, tag=True, frozen=True):
    """Stop after the inner step at hand, or at the floor, and answer `Ready` with what there is."""

    round: int
    rest: bool = False  # whatever the floor, and take no steps ahead from there


class Hold(msgspec.Struct, tag=True, frozen=True):
    """Go no further ahead of that round's `Ready` than the inner step at hand, and answer `Waits`, until told to
    `Train` on."""

    round: int


class Stop(msgspec.Struct, tag=True, frozen=True):
    """Exit in order."""


class Preparing(msgspec.Struct, tag=True, frozen=True):
    """The trainer is there, and not done yet with what comes before `Hello`: data, model, micro-batch."""

    sentence: str = ""  # how far it is; empty: it does not say


class Hello(msgspec.Struct, tag=True, frozen=True):
    """The trainer's model. The flat vector is its parameters sorted by name, row-major, fp32."""

    pid: int
    ranks: int
    numel: int
    layout: tuple[tuple[str, tuple[int, ...]], ...]  # (name, shape)
    evaluates: bool = True  # it can measure a validation loss


class Initialised(msgspec.Struct, tag=True, frozen=True):
    """The anchor is written."""


class Progress(msgspec.Struct, tag=True, frozen=True):
    """Inner steps were taken; said four times a second at most. Figures that are 0 are not known."""

    round: int
    step: int  # inner steps taken in this round
    loss: float  # of the last step
    tokens_per_s: float = 0.0  # while it takes steps; all ranks
    mfu: float = 0.0  # model FLOPs utilisation: share of the cards' peak
    data_wait: float = 0.0  # share of the steps' time in which the loop waited for its data
    gradient_norm: float = 0.0  # l2, of the last step's gradient before it was bounded
    learning_rate: float = 0.0  # of the last step
    device_bytes: int = 0  # memory on the ranks' devices together, the most there was at a time
    host_bytes: int = 0  # resident memory of the ranks' processes together
    trouble: str = ""  # what keeps data from coming, for people


class Reached(msgspec.Struct, tag=True, frozen=True):
    """The round's inner steps are taken; more follow."""

    round: int


class Ready(msgspec.Struct, tag=True, frozen=True):
    """The local vector is written."""

    round: int
    steps: int
    loss: float  # mean over the round's steps that were not left out
    samples: int  # used, from the front of the order's lease
    norm: float = 0.0  # l2, of the anchor minus the local vector
    ahead: bool = False  # the trainer goes on, on the samples behind these
    skipped: int = 0  # of the samples, those whose steps were left out: their gradients were not finite


class BadArithmetic(msgspec.Struct, tag=True, frozen=True):
    """The work since the order, or since `Ready`, is of no use (`atoll.node.participant.health`): it is
    dropped, and the trainer waits for an order, which it begins from the anchor."""

    round: int  # of its order
    sentence: str  # what was wrong


class Waits(msgspec.Struct, tag=True, frozen=True):
    """The trainer is as far ahead of that round's Ready as it may be, and does nothing until it is told to."""

    round: int


MAX_PASSAGE = 2000  # characters, that a coordinator takes


class Passage(msgspec.Struct, frozen=True):
    """Text of validation data, and how the model goes on with it."""

    prompt: str
    text: str

    def bounded(self) -> "Passage":
        """The passage as it can be told, whoever wrote it: so many characters, none of which UTF-8 lacks."""
        prompt, text = (
            words[:MAX_PASSAGE].encode(errors="replace").decode() for words in (self.prompt, self.text)
        )
        return Passage(prompt, text)


class Evaluated(msgspec.Struct, tag=True, frozen=True):
    """The mean validation loss of the state of `round`, and what the model writes, if it was asked to."""

    round: int
    loss: float  # nats a token
    passage: Passage | None = None


class Rests(msgspec.Struct, tag=True, frozen=True):
    """The share of the time in which the trainer may compute asks for so long a rest now: longer than one between
    two steps may be."""

    seconds: float


class MicroBatch(msgspec.Struct, tag=True, frozen=True):
    """Each rank computes so many sequences at once, from now on."""

    size: int


class LoopLeft(msgspec.Struct, tag=True, frozen=True):
    """The training loop has ended by itself, while the run goes on."""


class LogLine(msgspec.Struct, tag=True, frozen=True):
    """A sentence for the daemon's log."""

    sentence: str


class Failed(msgspec.Struct, tag=True, frozen=True):
    """The trainer cannot work on this machine; restarting would not help."""

    sentence: str
    out_of_memory: bool = False


ToTrainer = Attach | Initialise | Train | Evaluate | Finish | Hold | Stop
ToDaemon = (
    Preparing
    | Hello
    | Initialised
    | Progress
    | Reached
    | Ready
    | BadArithmetic
    | Waits
    | Evaluated
    | Rests
    | MicroBatch
    | LoopLeft
    | LogLine
    | Failed
)

_decode_to_trainer: msgspec.json.Decoder[ToTrainer] = msgspec.json.Decoder(ToTrainer)
_decode_to_daemon: msgspec.json.Decoder[ToDaemon] = msgspec.json.Decoder(ToDaemon)


def from_daemon(line: bytes) -> ToTrainer:
    """The message in a line that the daemon wrote. Raises `ValueError`."""
    try:
        return _decode_to_trainer.decode(line)
    except RecursionError as error:
        raise ValueError(str(error)) from None


def from_trainer(line: bytes) -> ToDaemon:
    """The message in a line that the trainer wrote. Raises `ValueError`."""
    try:
        return _decode_to_daemon.decode(line)
    except RecursionError as error:
        raise ValueError(str(error)) from None


class TrainerEnd:
    """Rank 0's blocking end: a thread receives, so that the daemon is heard while a step runs."""

    def __init__(self, path: str, on_close: Callable[[], None] | None = None) -> None:
        """Connect to the daemon's socket. `on_close` is called in a thread when the daemon is gone. Raises
        `OSError`."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.connect(path)
        self._on_close = on_close
        self._sending = threading.Lock()
        self._commands: queue.SimpleQueue[ToTrainer] = queue.SimpleQueue()
        threading.Thread(target=self._receive, name="channel", daemon=True).start()

    def _receive(self) -> None:
        try:
            with self._socket.makefile("rb") as lines:
                while (line := lines.readline(LIMIT)).endswith(b"\n"):
                    self._commands.put(from_daemon(line))
        except (OSError, ValueError):  # the channel broke
            pass
        self._commands.put(Stop())
        if self._on_close is not None:
            self._on_close()

    def next_command(self) -> ToTrainer:
        """Wait for the daemon's next command; `Stop` when it is gone."""
        return self._commands.get()

    def has_command(self) -> bool:
        """Whether `next_command` would return at once."""
        return not self._commands.empty()

    def send(self, message: ToDaemon) -> None:
        """Tell the daemon; if it is gone, the receiving thread has noticed."""
        with suppress(OSError), self._sending:  # threads that fetch data have sentences, too
            self._socket.sendall(msgspec.json.encode(message) + b"\n")

    def close(self) -> None:
        """Hang up: the daemon ends what is left of the trainer."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)


class DaemonEnd:
    """The daemon's end of one accepted connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    def send(self, message: ToTrainer) -> None:
        self._writer.write(msgspec.json.encode(message) + b"\n")

    async def receive(self) -> ToDaemon | None:
        """The trainer's next message; None when the trainer is gone."""
        try:
            line = await self._reader.readline()
            return from_trainer(line) if line.endswith(b"\n") else None
        except (ConnectionError, ValueError):  # gone, or talking nonsense
            return None

    def close(self) -> None:
        self._writer.close()
