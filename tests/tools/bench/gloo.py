"""The baseline: torch.distributed's all_reduce of fp32 over gloo, in as many processes as there are peers.

Run as a program it is one rank: it prints the seconds of each iteration as a JSON list.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from time import monotonic, perf_counter

START_UP = 60.0  # seconds, for all ranks to have imported torch and met


class GlooFailed(Exception):
    """A rank failed or was late; the message says which."""


def measure(
    peers: int,
    numel: int,
    iters: int,
    warmup: int = 1,
    prefixes: Sequence[Sequence[str]] = (),
    patience: float = 60,
) -> list[float]:
    """Seconds of each iteration after the warm-up, of the slowest rank.

    `prefixes` starts each rank in its place of an emulated network; without it all are on loopback. `patience` is
    for all iterations together.
    """
    interface = "w0" if prefixes else "lo"
    environment = os.environ | {"GLOO_SOCKET_IFNAME": interface, "OMP_NUM_THREADS": "1"}
    deadline = monotonic() + START_UP + patience
    with tempfile.TemporaryDirectory(prefix="gloo-") as folder, ExitStack() as stack:
        ranks = []
        for rank in range(peers):
            prefix = prefixes[rank] if prefixes else ()
            numbers = map(str, (rank, peers, numel, iters, warmup))
            command = [*prefix, sys.executable, "-P", __file__, f"{folder}/meeting", *numbers]
            process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
            )
            stack.callback(process.communicate)
            stack.callback(process.kill)
            ranks.append(process)
        told = []
        for rank, process in enumerate(ranks):
            try:
                out, err = process.communicate(timeout=max(deadline - monotonic(), 0))
            except subprocess.TimeoutExpired:
                raise GlooFailed(f"gloo's rank {rank} was not done after {START_UP + patience:g} s") from None
            if process.returncode:
                raise GlooFailed(f"gloo's rank {rank} ended with code {process.returncode}: {err[-300:].strip()}")
            told.append(json.loads(out))
    return [max(of_all) for of_all in zip(*told, strict=True)]


def _rank(meeting: str, rank: int, world: int, numel: int, iters: int, warmup: int) -> None:
    from datetime import timedelta

    import torch
    from torch import distributed

    torch.set_num_threads(1)
    # A file is the meeting point: no port is guessed.
    distributed.init_process_group(
        "gloo", f"file://{meeting}", rank=rank, world_size=world, timeout=timedelta(seconds=600)
    )
    try:
        x = torch.normal(0, 1e-3, (numel,), generator=torch.Generator().manual_seed(rank))
        seconds = []
        for _ in range(warmup + iters):
            distributed.barrier()
            begun = perf_counter()
            distributed.all_reduce(x)
            seconds.append(perf_counter() - begun)
            x /= world  # it stays in its range
        print(json.dumps(seconds[warmup:]))
    finally:
        distributed.destroy_process_group()


if __name__ == "__main__":
    _rank(sys.argv[1], *map(int, sys.argv[2:]))
