"""A run of real processes in network namespaces, in which something can be made to go wrong, and the verdicts on
its rounds.

Three nodes, each in a namespace of its own, a coordinator in a fourth, and a web server there with the run's data;
an emulated wide-area network between them (`bench.wan`). Everything runs on this machine, and needs root.
"""

import ctypes
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import psutil
from bench.wan import Wan
from data_sets import WebServer, web_server, write_data_set
from e2e.harness import ATOLL, ROOT, Run, until

from atoll.coordinator.causes.explanation import Verdict
from atoll.coordinator.causes.slowness import MIN_ROUNDS
from atoll.coordinator.monitor.blame import RoundVerdict
from atoll.coordinator.service.journal import MAX_NOTES, Journal
from atoll.coordinator.state_machine.events import CommitRecord

T = TypeVar("T")
NAMES = ("ada", "bo", "cy")
COORDINATOR = 4  # its node of the network
MBIT, RTT = 100, 20  # of every link, Mbit/s and ms
MODEL = (
    *("model.dim=128", "model.layers=4", "model.heads=2", "model.kv_heads=1", "model.ffn_dim=512"),
    *("model.seq_len=16", "reduce.chunk=65520", "inner.optimizer=adamw", "inner.batch_size=1"),
)
RUN = (
    *("rounds.inner_steps=40", "rounds.total=0", "rounds.grace=0.5", "members.start=3", "members.minimum=1"),
    *("members.lease=8", "wandb.mode=disabled", "data.eval_every=1000", *MODEL),
)
PACED = "trainer.step=stall:0.06"  # seconds
CACHE_BYTES = 200_000  # of the data set's blocks, on a node's disk
DISK = "64m"  # of the node whose disk can be filled
USUAL_ROUNDS = 3  # without a verdict, in a row, before something is made to go wrong
CLOCK = """
import os, time
now = time.time
time.time = lambda: now() + (3600 if os.path.exists({flag!r}) else 0)
from atoll.comm.cli import main
main()
"""


class Namespace:
    """Calls in a network namespace, from this process."""

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(1, f"in {name}", initializer=lambda: _enter(name))

    def call(self, function: Callable[[], T]) -> T:
        return self._thread.submit(function).result()

    def close(self) -> None:
        self._thread.shutdown()


def _enter(name: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{name}") as space:
        if libc.setns(space.fileno(), 0):
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {name}")


class Fleet(Run):
    """The run. `opened` starts it."""

    def __init__(self, folder: Path, wan: Wan, inside: Namespace, store: WebServer) -> None:
        super().__init__(folder, wan.host(COORDINATOR))
        self.wan, self.store, self._inside = wan, store, inside
        self.url = ""
        self.clock_flag = folder / "an-hour-ahead"
        self.disk = folder / "disk"  # of the last node, which has nothing else on it

    @classmethod
    @contextmanager
    def opened(cls, folder: Path, name: str = "blame", net: str = "10.78.0") -> Iterator["Fleet"]:
        """Everything up, and a few rounds committed; all of it is gone in the end."""
        with ExitStack() as stack:
            wan = stack.enter_context(Wan(COORDINATOR, up=MBIT, down=MBIT, rtt=RTT, name=name, net=net))
            inside = Namespace(f"{name}{COORDINATOR}")
            stack.callback(inside.close)
            (folder / "web").mkdir(parents=True)
            digest = write_data_set(folder / "web", 2_000_000, 4_000, block_tokens=64, shard_blocks=2048)
            served = web_server(folder / "web", wan.host(COORDINATOR))
            store = inside.call(lambda: stack.enter_context(served))
            fleet = cls(folder, wan, inside, store)
            stack.enter_context(fleet._small_disk())
            stack.callback(fleet.stop)
            data = ("data.kind=dataset", f"data.url={store.url}", f"data.digest={digest}")
            fleet.start(*RUN, *data)
            fleet.url = fleet.invite(10)
            for node in NAMES:
                fleet.add(node)
            until("the first rounds", lambda: fleet.committed() >= 4, 180)
            yield fleet

    def restart(self, faults: str = "") -> None:
        prefix = self.wan.prefix(COORDINATOR)
        self.coordinator = self.spawn(
            "c.log", [*prefix, *ATOLL, "coordinator", "start", *self._start, *self._ports]
        )

    def start(self, *overrides: str, faults: str = "", config: str = "") -> None:
        self._start = (str(ROOT / "configs/demo.yaml"), *overrides, "--state-dir", str(self.folder / "c"))
        self.restart()
        self.page = until("the coordinator's page", self._url)
        join = next(w for w in self.log("c").split() if w.startswith(f"{self.host}:")).strip(",")
        self._ports = ("--listen", join, "--http", self.page.removeprefix("http://"))

    def add(self, name: str) -> None:
        """Start a node; the first keeps nothing on its disk, the second's clock can be set, the third's disk be
        filled."""
        number = NAMES.index(name) + 1
        settings = [f"cache={CACHE_BYTES / 1e9:.9f}", "device=cpu"]
        if name == NAMES[0]:
            settings.append("durable=false")
        program = CLOCK.format(flag=str(self.clock_flag)) if name == NAMES[1] else ""
        python = [sys.executable, "-P", "-c", program] if program else ATOLL
        state = (
            "--state-dir",
            str(self.state_dir(name)),
            "--listen",
            f"{self.wan.host(number)}:0",
            "--name",
            name,
        )
        command = [*self.wan.prefix(number), *python, "node", "join", self.url, *state, "threads=1", *settings]
        self.nodes[name] = self.spawn(f"{name}.log", command, PACED)

    def state_dir(self, name: str) -> Path:
        return (self.disk if name == NAMES[2] else self.folder) / name

    def limit(self, name: str, setting: str) -> None:
        """Have the node's owner set a limit, or take it back, while it runs."""
        where = ("--state-dir", str(self.state_dir(name)))
        subprocess.run([*ATOLL, "node", "limits", setting, *where], check=True, capture_output=True)

    def get(self, path: str) -> Any:
        return self._inside.call(lambda: super(Fleet, self).get(path))

    @contextmanager
    def _small_disk(self) -> Iterator[None]:
        self.disk.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK}", "blame", str(self.disk)], check=True)
        try:
            yield
        finally:
            subprocess.run(["umount", "-l", str(self.disk)], check=True)

    # What is known of its rounds

    def noted(self) -> list[RoundVerdict]:
        """The verdicts that were noted, with their times by the coordinator's clock."""
        with closing(Journal(self.folder / "c", lock=False)) as journal:
            notes = journal.notes(MAX_NOTES)
        return [RoundVerdict(at, n.round, n.verdict) for at, n in notes if n.verdict is not None]

    def records(self, since: int = 0) -> list[CommitRecord]:
        with closing(Journal(self.folder / "c", lock=False)) as journal:
            return journal.rounds(since)

    def node_id(self, name: str) -> str:
        """The node's id."""
        records = self.records()[-50:]
        return next(str(n) for record in reversed(records) for n, who in record.names.items() if who == name)

    def settle(self, seconds: float = 90.0) -> bool:
        """Wait until all nodes contribute to rounds that need no verdict; False: it did not come to that in
        time."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            latest = self.records()[-USUAL_ROUNDS:]
            whole = [r for r in latest if r.verdict is None and len(r.contributors) == len(NAMES) and not r.void]
            whole = [r for r in whole if r.round > MIN_ROUNDS]  # no round before that is slow
            newer = {v.round for v in self.noted() if latest and v.round > latest[-1].round}
            if len(whole) == USUAL_ROUNDS and not newer:
                return True
            time.sleep(0.3)
        return False

    # Its processes

    def ranks(self, name: str) -> list[psutil.Process]:
        """The trainer's processes of a node, its launcher aside."""
        daemon = psutil.Process(self.nodes[name].pid)
        launchers = [p for p in daemon.children() if "atoll.node.trainer.launcher" in " ".join(p.cmdline())]
        return [rank for launcher in launchers for rank in launcher.children(recursive=True)]

    def stop(self) -> None:
        for rank in [rank for name in self.nodes for rank in self._alive(name)]:
            with suppress(psutil.Error):
                rank.resume()
        super().stop()

    def _alive(self, name: str) -> list[psutil.Process]:
        with suppress(psutil.Error):
            return self.ranks(name)
        return []


@contextmanager
def duty(processes: list[psutil.Process], stopped: float, running: float) -> Iterator[None]:
    """Let processes run for a part of the time only: so many seconds each, in turns."""
    over = threading.Event()

    def turns() -> None:
        while not over.is_set():
            for process in processes:
                with suppress(psutil.Error):
                    process.suspend()
            over.wait(stopped)
            for process in processes:
                with suppress(psutil.Error):
                    process.resume()
            over.wait(running)

    thread = threading.Thread(target=turns, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        for process in processes:
            with suppress(psutil.Error):
                process.resume()


@contextmanager
def memory_limit(processes: list[psutil.Process], size: int) -> Iterator[None]:
    """Give processes no more memory than so many bytes beyond what they have: the kernel ends who needs more. By a
    control group, of either version."""
    old = Path("/sys/fs/cgroup/memory")
    parent = old if old.exists() else Path("/sys/fs/cgroup")
    limit = "memory.limit_in_bytes" if old.exists() else "memory.max"
    group = parent / f"atoll-blame-{os.getpid()}"
    group.mkdir()
    try:
        (group / limit).write_text(str(size))
        for process in processes:
            (group / "cgroup.procs").write_text(str(process.pid))
        yield
    finally:
        until("the control group to be empty", lambda: not (group / "cgroup.procs").read_text(), 60)
        group.rmdir()


def unavailable() -> str:
    """Why there can be no such run here; empty if there can."""
    from bench import wan

    if why := wan.unavailable():
        return why
    if shutil.which("mount") is None:
        return "a small disk needs the command `mount`"
    return ""


def shown(verdict: Verdict | None) -> str:
    """A verdict in a few words."""
    if verdict is None:
        return "none"
    who = f"{verdict.kind}: {verdict.name}" + (f" to {verdict.peer_name}" if verdict.peer else "")
    return who.rstrip(": ")
