"""Plain TCP between all nodes of an emulated network: what the emulator itself carries, and what it costs."""

import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from bench.wan import Stat, Wan

NODE = Path(__file__).with_name("tcp_node.py")
RAMP = 2.0  # seconds until TCP has found the links' rate


@dataclass(frozen=True, slots=True)
class Flow:
    goodput: list[float]  # Mbit/s of payload that each node got
    wire: list[float]  # Mbit/s on the wire that each node got
    cpu: float  # of the emulator, share of a core
    late_mean_ms: float
    before: Stat
    after: Stat


def measure(wan: Wan, senders: Sequence[int], streams: int, seconds: float) -> Flow:
    """The senders send to all nodes through so many streams each; the rates after a ramp."""
    everybody = range(1, wan.n + 1)
    with ExitStack() as stack:
        nodes = []
        for i in everybody:
            targets = [wan.host(j) for j in everybody if j != i] if i in senders else []
            command = [sys.executable, "-P", str(NODE), wan.host(i), str(streams), *targets]
            pipe = subprocess.PIPE
            node = subprocess.Popen([*wan.prefix(i), *command], stdin=pipe, stdout=pipe, text=True)
            stack.callback(node.wait, 10)
            stack.callback(node.kill)
            nodes.append(node)
        for node in nodes:
            _ask(node)  # all listen
        for node in nodes:
            _ask(node)  # and now they send
        time.sleep(RAMP)
        begun, first, before = time.monotonic(), [_ask(node) for node in nodes], wan.stat()
        time.sleep(seconds)
        took, last, after = time.monotonic() - begun, [_ask(node) for node in nodes], wan.stat()
    rx = [b.rx - a.rx for a, b in zip(before.nodes, after.nodes, strict=True)]
    return Flow(
        goodput=[(b - a) * 8e-6 / took for a, b in zip(first, last, strict=True)],
        wire=[bytes_ * 8e-6 / took for bytes_ in rx],
        cpu=(after.cpu_s - before.cpu_s) / took,
        late_mean_ms=after.late_mean_ms,
        before=before,
        after=after,
    )


def _ask(node: subprocess.Popen[str]) -> int:
    assert node.stdin is not None and node.stdout is not None
    node.stdin.write("\n")
    node.stdin.flush()
    return int(node.stdout.readline())
