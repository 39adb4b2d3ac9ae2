"""The process of one sink: `python -m atoll.coordinator.tracking.writer`. It has nothing to lose.

    journal --- records after the sink's last round --> rows --> sink
                        ^ each time the coordinator says that it committed, and now and then

wandb may hang, take gigabytes or end its process, so it does that here; the coordinator starts another one. Which
rounds are missing is looked up, not handed over: at the first start, after a restart, after an outage of days it
is the same loop. When the coordinator ends, however it does, standard input ends, and the process writes what the
journal has and closes the sink, within `CLOSE_SECONDS`. One process at a time writes to a sink; what an earlier
one left running (wandb's own process) is ended first.
"""

import fcntl
import json
import logging
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import assert_never

import msgspec
import psutil

from atoll.comm import log as logs
from atoll.comm.config.run import RunConfig, from_json
from atoll.coordinator.history.record_store import opened
from atoll.coordinator.service.journal import Journal
from atoll.coordinator.service.run_records import RecordOptions, RunRecords
from atoll.coordinator.tracking.figures import row
from atoll.coordinator.tracking.json_lines import FILE, JsonLines
from atoll.coordinator.tracking.messages import AlertRaised, Committed, Message, SinkSpec
from atoll.coordinator.tracking.sink import Sink, SinkKind
from atoll.coordinator.tracking.tensorboard import FOLDER, TensorBoard
from atoll.coordinator.tracking.wandb_news import WandbNews
from atoll.coordinator.tracking.wandb_run import WandbRun

log = logging.getLogger("atoll.coordinator")
BATCH = 100  # records that are read at once: no transaction of the journal's waits for a sink
POLL_SECONDS = 30.0  # between two looks at the journal at most
CLOSE_SECONDS = 25.0  # from the coordinator's end to this process's end at most
NICENESS = 10  # it gives way to whatever else the machine does
FAILED = 1  # exit status: the sink did not take it; a sentence says why


class Inbox:
    """What the coordinator said, as it came, and whether it is gone."""

    def __init__(self, lines: Iterable[bytes]) -> None:
        self.closing = threading.Event()  # the coordinator is gone
        self._queue = queue.SimpleQueue[Message | None]()
        threading.Thread(target=self._read, args=(lines,), name="inbox", daemon=True).start()

    def wait(self, timeout: float) -> list[Message]:
        """What came since the last call; waits for something for `timeout` seconds."""
        came = list[Message | None]()
        with suppress(queue.Empty):
            came.append(self._queue.get(timeout=timeout))
            while True:
                came.append(self._queue.get_nowait())
        return [message for message in came if message is not None]

    def _read(self, lines: Iterable[bytes]) -> None:
        decode = msgspec.json.Decoder(Message).decode
        for line in lines:
            self._queue.put(decode(line))
        self.closing.set()
        self._queue.put(None)


def main() -> None:
    """Serve the sink that the first line of standard input names."""
    for number in (signal.SIGINT, signal.SIGTERM):  # who ends the coordinator may mean all its processes
        signal.signal(number, signal.SIG_IGN)
    os.nice(NICENESS)
    lines = sys.stdin.buffer
    spec = msgspec.json.decode(lines.readline(), type=SinkSpec)
    logs.setup(spec.log)
    inbox = Inbox(lines)
    threading.Thread(target=_end_in_time, args=(inbox,), name="deadline", daemon=True).start()
    try:
        with only_writer(spec) as note_children:
            _serve(spec, inbox, note_children)
    except Exception as error:  # each sink's library has its own
        log.warning(f"{spec.kind} takes no figures, it is tried again: {type(error).__name__}: {error}")
        _end_now(FAILED)
    _end_now(0)


def _serve(spec: SinkSpec, inbox: Inbox, note_children: Callable[[], None]) -> None:
    state_dir = Path(spec.state_dir)
    journal = Journal(state_dir, lock=False)
    store = opened(spec.archive) if spec.archive else None
    records = RunRecords(journal, state_dir, spec.run, RecordOptions(store=store))
    config = from_json((journal.meta("config") or "").encode())
    sink = open_sink(spec, config)
    note_children()
    news = WandbNews(sink, journal, records, config) if isinstance(sink, WandbRun) else None
    follow(sink, records, inbox, news)
    journal.close()


def follow(sink: Sink, records: RunRecords, inbox: Inbox, news: WandbNews | None = None) -> None:
    """Hand over what the sink lacks, again and again, until the coordinator is gone; then close the sink."""
    ending = False
    while True:
        while batch := list(islice(records.iter_rounds(sink.last, BATCH), BATCH)):
            for record in batch:
                logs.about(round=record.round)
                sink.write(row(record))
                if news is not None:
                    news.take(record)
            sink.flush()
        sink.flush()
        if news is not None:
            news.tell(time.monotonic(), last=ending)
        if ending:
            return sink.close()
        for message in inbox.wait(POLL_SECONDS):
            match message:
                case Committed():
                    pass
                case AlertRaised(title, sentence, on):
                    if news is not None:
                        news.alert(title, sentence, on)
                case _:
                    assert_never(message)
        ending = inbox.closing.is_set()


def open_sink(spec: SinkSpec, config: RunConfig) -> Sink:
    """The sink, to go on with what is there. Raises what its library raises."""
    state_dir = Path(spec.state_dir)
    match spec.kind:
        case SinkKind.WANDB:
            return WandbRun(config, state_dir, spec.wandb_id, spec.wandb_mode)
        case SinkKind.TENSORBOARD:
            return TensorBoard(state_dir / FOLDER)
        case SinkKind.JSONL:
            return JsonLines(state_dir / FILE)
        case _:
            assert_never(spec.kind)


@contextmanager
def only_writer(spec: SinkSpec) -> Iterator[Callable[[], None]]:
    """While the context lasts no other process writes to the sink. What it yields notes which processes this one
    has started, so that the next writer can end them if this one is killed."""
    path = Path(spec.state_dir) / f"{spec.kind}.lock"
    with open(path, "a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # one that is closing takes a while
        _end_left_behind(path)

        def note_children() -> None:
            found = [[p.pid, p.create_time()] for p in psutil.Process().children(recursive=True)]
            file.truncate(0)
            file.write(json.dumps(found))
            file.flush()

        yield note_children


def _end_left_behind(path: Path) -> None:
    """End the processes that a writer before this one had started, and left when it was killed."""
    with suppress(ValueError):
        for pid, created in json.loads(path.read_text() or "[]"):
            with suppress(psutil.Error):
                process = psutil.Process(pid)
                if process.create_time() == created:
                    process.kill()
                    process.wait(1.0)


def _end_in_time(inbox: Inbox) -> None:
    inbox.closing.wait()
    time.sleep(CLOSE_SECONDS)
    log.warning("a sink could not be closed in time: what it lacks is written at the next start")
    _end_now(FAILED)


def _end_now(status: int = 0) -> None:
    """End this process and those that it started, without what libraries do at the end of one: that may wait."""
    logging.shutdown()
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            process.kill()
    os._exit(status)


if __name__ == "__main__":
    main()
