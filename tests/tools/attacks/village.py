"""A run of real processes on this machine: honest nodes whose calls are timed, one more that can be made to do
harm, and what all of it takes.

Rounds are paced, so that they last some seconds and the processors idle for most of them: what an attack takes of
them would not show otherwise, for all of it is on one machine.
"""

import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import astuple, replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from attacks.clocked import CALLS, hello_file
from attacks.liar import Target
from attacks.strangers import Aim
from e2e.harness import ROOT, Run, until

from atoll.comm.invite import parse, split_host_port

HONEST = ("ada", "bo", "cy", "di")
VICTIM = HONEST[0]  # whose data port is attacked; it joined first
STEPS = 36  # of a round
RUN = (
    *(f"rounds.inner_steps={STEPS}", "rounds.total=0", "members.minimum=2"),
    *("members.lease=10", "members.reconnect=2"),
    *("wandb.mode=disabled", "data.eval_every=100000", "data.passage_tokens=0", "inner.optimizer=adamw"),
    *("model.dim=64", "model.layers=2", "model.heads=2", "model.kv_heads=1", "model.ffn_dim=128"),
    *("model.seq_len=32", "reduce.chunk=8192", "inner.lr=1e-3", "inner.min_lr=1e-3"),
)
ROUND, LONG_ROUND = 2.9, 360.0  # seconds that the steps of a round are to take
LIARS_USES = 20  # nodes that its invite is for
MEMORY_SECONDS = 2.0  # from one look at it to the next
PROGRAM = "import sys; sys.path[:0] = {path!r}; from attacks.{module} import main; main(*{arguments!r})"
EXCHANGE = 0.4  # seconds that the rest of a round takes, about
PATIENCE = 180.0  # seconds for a round, besides those of its steps
Record = dict[str, Any]


def program(module: str, *arguments: str | float) -> str:
    """Python that is a node's daemon."""
    path = [str(ROOT / "tests"), str(ROOT / "tests/tools")]
    return PROGRAM.format(path=path, module=module, arguments=arguments)


class Watch(threading.Thread):
    """Looks now and then at the memory of processes, and at what other ones take of the processors."""

    def __init__(self, run: "Village") -> None:
        super().__init__(daemon=True)
        self._run, self._over = run, threading.Event()
        self._used: dict[tuple[int, float], float] = {}  # by process: seconds
        self.memory: list[tuple[float, dict[str, int]]] = []  # (seconds since 1970, bytes by process)
        self.others: list[tuple[float, float]] = []  # (seconds since 1970, processor seconds of others)

    def run(self) -> None:
        while not self._over.wait(MEMORY_SECONDS):
            now = time.time()
            with suppress(psutil.Error):  # a process that has ended
                self.memory.append((now, {name: _bytes(which) for name, which in self._run.watched().items()}))
            self.others.append((now, self._busy() - self._ours()))

    def stop(self) -> None:
        """End it, if it was begun."""
        self._over.set()
        if self.is_alive():
            self.join()

    def _busy(self) -> float:
        times = psutil.cpu_times()
        return float(sum(times[:3]) + sum(getattr(times, name, 0.0) for name in ("irq", "softirq")))

    def _ours(self) -> float:
        this = psutil.Process()
        for process in (this, *this.children(recursive=True)):
            with suppress(psutil.Error):
                self._used[process.pid, process.create_time()] = sum(process.cpu_times()[:2])
        return sum(self._used.values())


def _bytes(processes: Sequence[psutil.Process]) -> int:
    """Bytes of memory that these processes have for themselves."""
    return sum(process.memory_full_info().uss for process in processes)


class Village(Run):
    """The run; `opened` starts it."""

    def __init__(self, folder: Path, honest: Sequence[str], seconds: float) -> None:
        super().__init__(folder)
        self.honest = tuple(honest)
        self.seconds = seconds
        self.paced = f"trainer.step=stall:{seconds / STEPS:.3f}"
        self.patience = PATIENCE + seconds
        self.watch = Watch(self)
        self._attackers = 0

    @classmethod
    @contextmanager
    def opened(cls, folder: Path, honest: Sequence[str] = HONEST, seconds: float = ROUND) -> Iterator["Village"]:
        """Everything up, and the first rounds committed; all of it ends with the context. `seconds`: of a round's
        steps."""
        with cls.empty(folder, honest, seconds) as village:
            url = village.invite(len(honest))
            for name in honest:
                village.add_honest(url, name)
                until(f"{name} to join", partial(village.member, name))
            warm = 3 if seconds == ROUND else 1  # rounds
            until("the first rounds", lambda: village.committed() >= warm, warm * village.patience)
            village.watch.start()
            yield village

    @classmethod
    @contextmanager
    def empty(cls, folder: Path, honest: Sequence[str] = HONEST, seconds: float = ROUND) -> Iterator["Village"]:
        """The coordinator alone; all that is added to it ends with the context, too."""
        village = cls(folder, honest, seconds)
        try:
            village.start(f"members.start={len(honest)}", *RUN)
            yield village
        finally:
            village.watch.stop()
            village.stop()

    def start(self, *overrides: str, faults: str = "", config: str = "") -> None:
        super().start(*overrides, faults=faults, config=config or str(ROOT / "configs/demo.yaml"))

    def watched(self) -> dict[str, list[psutil.Process]]:
        """The processes of the coordinator and of the honest nodes."""
        coordinator = psutil.Process(self.coordinator.pid)
        found = {"coordinator": [coordinator, *coordinator.children()]}
        for name in self.honest:
            daemon, *trainer = self.family(name)
            found |= {f"{name} daemon": [daemon], f"{name} trainer": trainer}
        return found

    def add_honest(self, url: str, name: str) -> None:
        """Start an honest node."""
        clocked = program("clocked", str(self.folder / f"{name}.calls"), str(self.folder))
        self.join(url, name, faults=self.paced, program=clocked)

    # Who does harm

    def aim(self) -> Aim:
        """Where a stranger goes."""
        invite, target = parse(self.invite(1)), self.target("")
        return Aim(
            split_host_port(invite.address, ""),
            split_host_port(self.page.removeprefix("http://"), ""),
            split_host_port(target.address, ""),
            invite.run,
            invite.token,
            hello_file(self.folder, target.node).read_bytes(),
        )

    def target(self, name: str) -> Target:
        """What is told to a member that is to do harm."""
        flag, tally = self.folder / f"{name}.flag", self.folder / f"{name}.tally"
        target = Target(str(flag), str(tally), self.page.removeprefix("http://"), seconds=self.seconds + EXCHANGE)
        if VICTIM not in self.nodes:
            return target
        words = self.said(VICTIM).split("peers reach this node at ")[1]
        return replace(target, address=words.split()[0], node=self.member(VICTIM)["node_id"])

    def new_name(self) -> str:
        """A name for who does harm."""
        self._attackers += 1
        return f"eve{self._attackers}"

    def add_liar(self, name: str, word: str) -> None:
        """Start a member that can do this harm, and wait until it takes part in rounds."""
        self._join_liar(name, word)
        part = partial(self._takes_part, name)
        until(f"{name} to take part", part, 3 * self.patience)

    def add_first(self, name: str, word: str) -> None:
        """Start a member that does this harm from the first moment on, and wait until the run goes by what it has
        told, or it is out."""
        Path(self.target(name).flag).touch()
        process = self._join_liar(name, word)

        def decided() -> bool:
            return process.poll() is not None or self.member(name).get("state", "joining") != "joining"

        until(f"{name} to be first", decided, self.patience)

    def _takes_part(self, name: str) -> bool:
        return name in self.contributors_of(max(self.committed(), 1))

    def _join_liar(self, name: str, word: str) -> subprocess.Popen[str]:
        url = self.invite(LIARS_USES)  # that of one who is banned is good for nobody else
        liar = program("liar", word, *astuple(self.target(name)))
        return self.join(url, name, faults=self.paced, program=liar)

    def part(self, name: str) -> None:
        """End a node, whatever it is doing."""
        if self.nodes[name].poll() is None:
            self.kill(name)
        self.nodes.pop(name).wait()

    # What is on record

    def records(self, first: int, last: int) -> list[Record]:
        """The records of these rounds; the last may be complete a moment after its commit."""

        def found() -> list[Record]:
            with suppress(OSError, ValueError):  # the page may be under attack
                records = [r for r in self.rounds(first - 1) if r["round"] <= last]
                return records if len(records) > last - first else []
            return []

        return list(until(f"the record of round {last}", found, self.patience))

    def contributors_of(self, round_: int) -> set[str]:
        """The names of those whose work is in a round."""
        return {r["names"][node] for r in self.records(round_, round_) for node in r["contributors"]}

    def committed_after(self, committed: int) -> int:
        """Wait for a commit after this one; returns the newest."""
        until(f"a commit after round {committed}", lambda: self.committed() > committed, self.patience)
        return self.committed()

    def calls(self, start: float, end: float) -> dict[str, list[float]]:
        """Seconds that calls of honest members took which began in this time (seconds since 1970), by what they
        were."""
        found: dict[str, list[float]] = {what: [] for what in CALLS}
        for name in self.honest:
            for line in (self.folder / f"{name}.calls").read_text().splitlines(keepends=True):
                began, took, what = line.split(" ") if line.endswith("\n") else ("0", "0", "")
                if start <= float(began) < end:
                    found[what.strip()].append(float(took))
        return found
