"""Ranks of one process group, for tests of what several compute together: processes that begin clean.

A fork of the process that runs the tests would have the locks that its threads held at that moment (those of gRPC,
of executors), and might wait for them for ever. So a server is forked that has imported what ranks need, and has
no threads; what a rank is to do it finds in the test's file.
"""

import multiprocessing
import runpy
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

from atoll.node.participant import rank_group

PRELOAD = ["torch.distributed.fsdp", "torch.distributed.pipelining", "atoll.node.trainer.process"]


def on_ranks(size: int, folder: Path, story: Callable[..., None], *choices: Callable[..., Any]) -> None:
    """Call `story`, of a test's file, on each of `size` ranks of a gloo group that meets in `folder`, with it and
    the `choices`, functions of the same file. Raises what a rank raises, with its traceback."""
    (folder / "group").unlink(missing_ok=True)
    multiprocessing.set_forkserver_preload(PRELOAD)
    names = [function.__name__ for function in (story, *choices)]
    arguments = (size, folder, story.__code__.co_filename, names)
    start_processes(_on_a_rank, arguments, nprocs=size, start_method="forkserver")  # type: ignore[no-untyped-call]


def _on_a_rank(rank: int, size: int, folder: Path, file: str, names: list[str]) -> None:
    torch.set_num_threads(1)
    found = runpy.run_path(file, run_name="rank")
    story, *choices = (found[name] for name in names)
    group, rank_group.COLLECTIVE_TIMEOUT = f"file://{folder}/group", timedelta(minutes=1)
    dist.init_process_group(
        "gloo", init_method=group, rank=rank, world_size=size, timeout=rank_group.COLLECTIVE_TIMEOUT
    )
    try:
        story(folder, *choices)
    finally:
        dist.destroy_process_group()
