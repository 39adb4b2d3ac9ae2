"""A coordinator and its nodes as real processes, each with its log in a folder of its own."""

import json
import os
import random
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil

from atoll.comm.log_lines import sentence_of

ROOT = Path(__file__).resolve().parents[2]
ATOLL = [sys.executable, "-P", "-m", "atoll.comm.cli"]
AN_HOUR_AHEAD = (
    "import time; t = time.time; time.time = lambda: t() + 3600; from atoll.comm.cli import main; main()"
)
TINY = (
    *("rounds.inner_steps=6", "rounds.total=0", "members.start=2", "members.minimum=1", "wandb.mode=disabled"),
    "inner.optimizer=adamw",  # of a model this small a step is mostly Muon's
    *(
        "model.dim=32",
        "model.layers=2",
        "model.heads=2",
        "model.kv_heads=1",
        "model.ffn_dim=64",
        "model.seq_len=32",
    ),
    "reduce.chunk=4096",
)


PACED = "trainer.step=stall:0.02"  # seconds: who starts has a processor for it while others train


def until(what: str, look: Callable[[], Any], seconds: float = 90.0) -> Any:
    """What `look` finds, once it finds something."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := look():
            return found
        time.sleep(0.1)  # the page takes so many connections a second
    raise AssertionError(f"waited {seconds:g} s for {what}")


def end(processes: list[psutil.Process]) -> None:
    """SIGKILL them."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):  # a helper of a node may have ended by itself, just now
            process.kill()


class Run:
    def __init__(self, folder: Path, host: str = "127.0.0.1") -> None:
        self.folder, self.host = folder, host
        self.processes: list[subprocess.Popen[str]] = []
        self.nodes: dict[str, subprocess.Popen[str]] = {}
        self.coordinator: subprocess.Popen[str]
        self.page = ""
        self._start: tuple[str, ...] = ()
        self._ports: tuple[str, ...] = ("--listen", f"{host}:0", "--http", "127.0.0.1:0")

    def spawn(self, log: str, command: list[str], faults: str = "") -> subprocess.Popen[str]:
        environment = os.environ | ({"ATOLL_FAULTS": faults} if faults else {})
        with open(self.folder / log, "a") as out:
            process = subprocess.Popen(command, stdout=out, stderr=out, text=True, env=environment)
        self.processes.append(process)
        return process

    def start(self, *overrides: str, faults: str = "", config: str = "") -> None:
        """Start the coordinator; its ports are free ones. `config`: of another run than a tiny one."""
        run = (config,) if config else (str(ROOT / "configs/demo.yaml"), *TINY)
        self._start = (*run, *overrides, "--state-dir", str(self.folder / "c"))
        self.restart(faults)
        self.page = until("the coordinator's page", self._url)
        join = next(w for w in self.said("c").split() if w.startswith(f"{self.host}:")).strip(",")
        self._ports = ("--listen", join, "--http", self.page.removeprefix("http://"))

    def restart(self, faults: str = "") -> None:
        """Start it again with the same command."""
        command = [*ATOLL, "coordinator", "start", *self._start, *self._ports]
        self.coordinator = self.spawn("c.log", command, faults)

    def _url(self) -> str:
        assert self.coordinator.poll() is None, self.log("c")
        return next((w for w in self.said("c").split() if w.startswith("http://")), "")

    def invite(self, uses: int, *options: str) -> str:
        command = [*ATOLL, "invite", "--state-dir", str(self.folder / "c"), "--uses", str(uses), *options]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    def join(
        self,
        url: str,
        name: str,
        *settings: str,
        faults: str = PACED,
        through: tuple[str, ...] = (),
        program: str = "",
        host: str = "127.0.0.1",
        script: tuple[str, ...] = (),
    ) -> subprocess.Popen[str]:
        """Start a node daemon; `through` is a command that starts it, `program` Python to run instead; `script`:
        the command that trains."""
        where = ("--state-dir", str(self.folder / name), "--listen", f"{host}:0", "--name", name)
        atoll = [sys.executable, "-P", "-c", program] if program else ATOLL
        one = [] if "reducer" in settings else ["threads=1"]
        command = [*through, *atoll, "node", "join", url, *where, *one, *settings]
        command += ["--", *script] if script else []
        self.nodes[name] = self.spawn(f"{name}.log", command, faults)
        return self.nodes[name]

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(self.page + path, timeout=5) as answer:
            return json.load(answer)

    def run(self) -> dict[str, Any]:
        """`/api/run`, or nothing while the coordinator is away."""
        try:
            found: dict[str, Any] = self.get("/api/run")
        except (urllib.error.URLError, OSError, ValueError):
            return {}
        return found

    def committed(self) -> int:
        return int(self.run().get("committed", 0))

    def rounds(self, since: int = 0) -> list[dict[str, Any]]:
        """All commit records after `since`, page by page."""
        found = list[dict[str, Any]]()
        while page := self.get(f"/api/rounds?since={found[-1]['round'] if found else since}"):
            found += page
        return found

    def recorded(self, rounds: int) -> list[dict[str, Any]]:
        """All commit records, once there are so many: that of a round comes a moment after its commit."""

        def found() -> list[dict[str, Any]]:
            records = self.rounds()
            return records if len(records) >= rounds else []

        return list(until(f"the records of {rounds} rounds", found))

    def offences(self, name: str) -> list[str]:
        """What was held against a node, from the first decision to the last."""
        command = [*ATOLL, "blame", name, "--state-dir", str(self.folder / "c"), "--json"]
        lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
        found = [json.loads(line) for line in lines if line.startswith("{")]
        return [decision["evidence"]["offence"] for decision in found if "evidence" in decision]

    def commit_after(self, committed: int) -> float:
        """Wait until a round after `committed` is committed; return when, in monotonic seconds."""
        until(f"a commit after round {committed}", lambda: self.committed() > committed)
        return time.monotonic()

    def contributors(self, since: int = 0) -> int:
        """Of the latest commit after round `since` that is on record; 0: there is none."""
        records = self.rounds(max(self.committed() - 2, since)) if self.run() else []
        return len(records[-1]["contributors"]) if records else 0

    def member(self, name: str) -> dict[str, Any]:
        return next((m for m in self.run().get("members", []) if m["name"] == name), {})

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def said(self, name: str) -> str:
        """The sentences of the log, whatever its lines are like."""
        return "\n".join(map(sentence_of, self.log(name).splitlines()))

    def family(self, name: str) -> list[psutil.Process]:
        """The node's daemon, launcher and ranks."""
        daemon = psutil.Process(self.nodes[name].pid)
        return [daemon, *daemon.children(recursive=True)]

    def kill(self, *names: str) -> None:
        """SIGKILL whole nodes at once."""
        end([p for name in names for p in self.family(name)])

    def cut_power(self) -> None:
        """SIGKILL everything at once."""
        everything = [p for name in self.nodes for p in self.family(name)]
        self.coordinator.kill()
        end(everything)
        for daemon in (self.coordinator, *self.nodes.values()):
            daemon.wait()

    def whole(self, rounds: int) -> None:
        """Every round up to `rounds` was committed once, by nodes that agree."""
        records = self.recorded(rounds)
        assert [r["round"] for r in records][:rounds] == list(range(1, rounds + 1))
        tokens = 0
        for record in records:
            assert record["digests_equal"] or record["void"], record
            tokens += sum(record["contributors"].values())
            assert record["tokens"] == tokens, record

    def stop(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.terminate()
        try:
            for process in self.processes:
                process.wait(30)
        finally:  # what does not end is a fault, but no reason to disturb the tests that follow
            for process in self.processes:
                process.kill()


def no_sample_twice(records: Iterable[dict[str, Any]]) -> None:
    """Each sample was in one round at most, and as many were as the tokens say. What was in a round whose state is
    lost stays consumed."""
    taken, sizes = list[tuple[int, int]](), set[float]()
    for record in records:
        for node, ranges in record["samples"].items():
            taken += [(first, first + count) for first, count in ranges]
            sizes.add(record["contributors"][node] / sum(count for _, count in ranges))
    assert taken and len(sizes) == 1, sizes
    taken.sort()
    twice = [(a, b) for a, b in pairwise(taken) if a[1] > b[0]]
    assert not twice, "samples that counted in two rounds"


def flip(run: Run, node: str, vector: str, bit: int, seed: int) -> None:
    """One bit of one element of a vector that a node's processes share; the element is drawn."""
    maps = psutil.Process(run.nodes[node].pid).memory_maps(grouped=True)
    path = next(Path(m.path) for m in maps if m.path.endswith(f"{vector}.f32"))
    element = random.Random(seed).randrange(path.stat().st_size // 4)
    with open(path, "r+b") as file:
        file.seek(4 * element + bit // 8)
        [was] = file.read(1)
        file.seek(4 * element + bit // 8)
        file.write(bytes([was ^ 1 << bit % 8]))
