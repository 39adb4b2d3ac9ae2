"""Start a trainer's local ranks under torch's elastic launcher.

    python -m atoll.node.trainer.launcher --spec FILE

Called by the daemon, from a thread that lives as long as the daemon (the kernel ends the launcher when that
thread ends, and the ranks when the launcher does: nothing is left behind by `kill -9`). Ranks are not
restarted here: the daemon starts a new launcher. No port is opened but on loopback: the ranks meet in a file.
"""

import argparse
import logging
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import msgspec

from atoll.comm.child_process import LAUNCHER, die_with_parent
from atoll.node.config import SPEC, Device, TrainerSpec, threads_of


def main() -> int:
    """Start the ranks that the command line's spec file describes; return the exit code when they have ended."""
    die_with_parent(signal.SIGTERM)
    parser = argparse.ArgumentParser(description="Start a trainer's local ranks.")
    parser.add_argument("--spec", required=True, help="the daemon's TrainerSpec, JSON")
    path = Path(parser.parse_args().spec).resolve()
    spec = msgspec.json.decode(path.read_bytes(), type=TrainerSpec)
    set_environment(spec, path)
    if spec.command:
        return become(spec.command)
    return launch(spec, path)


def become(command: tuple[str, ...]) -> int:
    """Go on as the volunteer's own command, which ends with the daemon as this process does."""
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"cannot start {command[0]}: {error.strerror}", file=sys.stderr)
        return 127


def set_environment(spec: TrainerSpec, path: Path) -> None:
    """Set the variables that say where the spec is, and those that torch and its backends read once, when torch is
    imported: threads, loopback interfaces, devices. To be called before that."""
    threads, _ = threads_of(spec.node)
    os.environ[SPEC] = str(path)
    os.environ[LAUNCHER] = str(os.getpid())
    os.environ["OMP_NUM_THREADS"] = str(threads)
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # who waits for another thread leaves it the core
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # it would listen on every interface
    os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = "5"  # seconds from SIGTERM to SIGKILL
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    if spec.node.device is Device.CPU:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def launch(spec: TrainerSpec, path: Path) -> int:
    """Run the ranks until they end; return the exit code."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    for part in ("agent.server.api", "multiprocessing.api"):  # ranks say themselves what happened
        logging.getLogger(f"torch.distributed.elastic.{part}").setLevel(logging.CRITICAL)
    work = path.with_suffix(".launch")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=spec.node.ranks,
        run_id="trainer",
        rdzv_backend="c10d",
        rdzv_endpoint=str(work / "rendezvous"),
        rdzv_configs={"store_type": "file"},
        local_addr="127.0.0.1",
        max_restarts=0,
        monitor_interval=0.1,
        start_method="fork",
        logs_specs=DefaultLogsSpecs(log_dir=str(work / "logs")),
    )
    entrypoint, arguments = rank_command(spec, str(work / "group"))
    try:
        elastic_launch(config, entrypoint)(*arguments)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        code = failure.exitcode
        how = f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
        print(f"launch: rank {rank} ended with {how}", file=sys.stderr)
        return code if code > 0 else 1
    except SignalException as error:
        return 128 + error.sigval
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return 0


def rank_command(spec: TrainerSpec, group: str) -> tuple[Any, tuple[str, ...]]:
    """The entrypoint of a rank and its arguments: on the CPU a function to fork, which has torch imported already;
    for CUDA, which would not survive a fork, a program."""
    if spec.node.device is Device.CPU or not cuda_available():
        from atoll.node.trainer import process

        return process.main, (group,)
    return sys.executable, ("-m", "atoll.node.trainer.process", "--group", group)


def cuda_available() -> bool:
    import torch

    return torch.cuda.is_available()


if __name__ == "__main__":
    sys.exit(main())
