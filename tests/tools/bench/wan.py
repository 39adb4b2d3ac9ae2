"""A wide-area network on this machine, for tests and measurements: namespaces joined by the emulator `wan.c`.

    with Wan(4, up=100, down=100, rtt=50, loss=0.05) as wan:
        subprocess.run([*wan.prefix(1), "ping", "-c", "1", wan.host(2)])

Rates are Mbit/s on the wire, times milliseconds, loss percent of TCP segments; `wan.c` says what each does.
Needs root for the namespaces and a C compiler, which compiles the emulator once for each version of its source.
"""

import hashlib
import json
import os
import selectors
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

SOURCE = Path(__file__).with_name("wan.c")
COME_UP = 30.0  # seconds, for all namespaces
ANSWER = 10.0  # seconds


class WanError(Exception):
    """The emulator cannot be built, cannot run, or refused a command; the message says why."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """What a node's links carried since the start."""

    tx: int  # bytes on the wire that it sent and the network took
    rx: int  # bytes on the wire that it got
    lost: int  # segments that it sent, lost at random
    dropped: int  # segments, by a full queue of its links
    severed: int  # segments that it sent, lost in a cut


@dataclass(frozen=True, slots=True)
class Stat:
    cpu_s: float  # of the emulator; the kernel's work for the receivers is in it
    late_max_ms: float  # how far deliveries came after their time: what the emulation is wrong by
    late_mean_ms: float
    nodes: tuple[Traffic, ...]  # of node 1, 2, ...


class Wan:
    """Nodes 1 to n, each in a namespace of its own. Between two nodes, delays are the mean of theirs; `set` puts
    them in regions."""

    def __init__(
        self,
        n: int,
        *,
        up: float = 0,
        down: float = 0,
        rtt: float = 0,
        jitter: float = 0,
        loss: float = 0,
        queue: float = 200,
        seed: int = 1,
        name: str = "wan",
        net: str = "10.77.0",
    ) -> None:
        self.n, self._name, self._net = n, name, net
        shape = shape_words({"up": up, "down": down, "rtt": rtt, "jitter": jitter, "loss": loss, "queue": queue})
        self._words = [str(n), f"name={name}", f"net={net}", f"seed={seed}", *shape]
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        if why := unavailable():
            raise WanError(why)
        pipe = subprocess.PIPE
        command = [str(build()), *self._words]
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe)
        try:
            self._answer(COME_UP)  # "ready"
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def prefix(self, i: int) -> list[str]:
        """What to write before a command to run it on node i."""
        return ["ip", "netns", "exec", f"{self._name}{i}"]

    def host(self, i: int) -> str:
        """The address of node i."""
        return f"{self._net}.{i}"

    @property
    def launch_template(self) -> str:
        """`prefix` as one string, with `{i}` for the node."""
        return " ".join(["ip", "netns", "exec", f"{self._name}{{i}}"])

    @property
    def host_template(self) -> str:
        """`host` with `{i}` for the node."""
        return f"{self._net}.{{i}}"

    def set(self, i: int, **shape: float) -> None:
        """Change node i's up, down, rtt, jitter, loss, queue, region, far (ms that the way to another region and
        back takes longer) or between (Mbit/s of what its region sends to others). What is on its way keeps its
        times."""
        self._command(f"set {i} {' '.join(shape_words(shape))}")

    def pair(self, i: int, j: int, **shape: float) -> None:
        """Change what node i sends to node j, and nothing else: rate, loss, spoil (percent of the segments in
        which a byte is changed), cut (1: nothing gets through)."""
        self._command(f"pair {i} {j} {' '.join(f'{k}={v:g}' for k, v in shape.items())}")

    def cut(self, i: int) -> None:
        """Lose everything from and to node i, without a word."""
        self._command(f"cut {i}")

    def heal(self, i: int) -> None:
        self._command(f"heal {i}")

    def stat(self) -> Stat:
        return parse_stat(self._command("stat"))

    def _command(self, line: str) -> str:
        assert self._process is not None and self._process.stdin is not None, "use it in a `with` statement"
        try:
            self._process.stdin.write(f"{line}\n".encode())
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._ended() from None
        answer = self._answer(ANSWER)
        if answer.startswith("error"):
            raise WanError(f"the emulator refused `{line}`: {answer}")
        return answer

    def _answer(self, seconds: float) -> str:
        """The next line of the emulator."""
        assert self._process is not None and self._process.stdout is not None
        pipe = self._process.stdout.fileno()
        deadline, text = time.monotonic() + seconds, b""
        with selectors.DefaultSelector() as selector:
            selector.register(pipe, selectors.EVENT_READ)
            while not text.endswith(b"\n"):
                if not selector.select(deadline - time.monotonic()):
                    raise WanError(f"the emulator said nothing for {seconds:g} s")
                if not (more := os.read(pipe, 65536)):
                    raise self._ended()
                text += more
        return text.decode().strip()

    def _ended(self) -> WanError:
        assert self._process is not None and self._process.stderr is not None
        said = self._process.stderr.read().decode().strip()
        return WanError(said or f"the emulator ended with code {self._process.wait(ANSWER)}")

    def _end(self) -> None:
        assert self._process is not None
        process, self._process = self._process, None
        with process:  # closes its pipes: at the end of its input the emulator removes its namespaces
            assert process.stdin is not None
            process.stdin.close()
            try:
                process.wait(COME_UP)
            except subprocess.TimeoutExpired:
                process.kill()


def unavailable() -> str:
    """Why there can be no emulated network here; empty if there can."""
    if os.geteuid() != 0:
        return "an emulated network needs root, for network namespaces"
    if not Path("/dev/net/tun").exists():
        return "an emulated network needs /dev/net/tun"
    if shutil.which("ip") is None:
        return "an emulated network needs the command `ip`: install iproute2"
    if _compiler() is None:
        return "an emulated network needs a C compiler: install gcc"
    return ""


def build() -> Path:
    """The compiled emulator, from the user's cache if this source was compiled before."""
    digest = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "atoll"
    program = cache / f"wan-{digest}"
    if program.exists():
        return program
    if (compiler := _compiler()) is None:
        raise WanError("there is no C compiler for the emulator: install gcc")
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        fresh = Path(folder) / "wan"
        command = [compiler, "-O2", "-std=gnu17", "-o", str(fresh), str(SOURCE), "-lm"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        if done.returncode:
            raise WanError(f"{SOURCE.name} does not compile with {compiler}:\n{done.stderr}")
        fresh.replace(program)
    return program


def shape_words(shape: Mapping[str, float]) -> list[str]:
    """The emulator's words for a shape; it thinks in one-way delays."""
    one_way = {"rtt": "delay", "far": "far"}
    return [f"{one_way[k]}={v / 2:g}" if k in one_way else f"{k}={v:g}" for k, v in shape.items()]


def parse_stat(line: str) -> Stat:
    told = json.loads(line)
    nodes = tuple(Traffic(**counters) for counters in told.pop("nodes"))
    return Stat(nodes=nodes, **told)


def _compiler() -> str | None:
    return next((path for name in ("cc", "gcc", "clang") if (path := shutil.which(name))), None)
