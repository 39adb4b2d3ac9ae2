"""Start a trainer's local ranks under torch's elastic launcher, or the volunteer's own command in their place.

    python -m atoll.node.trainer.launcher --spec FILE

Called by the daemon, from a thread that lives as long as the daemon (the kernel ends the launcher when that
thread ends, and the ranks when the launcher does: nothing is left behind by `kill -9`). Ranks are not
restarted here: the daemon starts a new launcher. No port is opened but on loopback: the ranks meet in a file.
Those of several machines (`atoll.node.daemon.worker` starts the other launchers) meet at an address that the
volunteer gives.
"""

import argparse
import logging
import os
import platform
import shutil
import signal
import socket
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import psutil
from msgspec.structs import replace

from atoll.comm import log as logs
from atoll.comm.child_process import LAUNCHER, die_with_parent
from atoll.comm.config.engine import Engine
from atoll.comm.invite import split_host_port
from atoll.node.config import SPEC, Device, NodeConfig, TrainerSpec, threads_of
from atoll.node.devices import resolve
from atoll.node.trainer.command import run_command

# Seconds: until all machines must be there, how long those that are there wait for more than are needed, and
# between two signs of life of one that waits. So many in a row may be missed: who is taken for gone while its
# processor is busy, just as the last one comes, waits for the next meeting, and the others for it in this one.
RENDEZVOUS = {
    "join_timeout": 7 * 86400,
    "last_call_timeout": 10,
    "keep_alive_interval": 2,
    "keep_alive_max_attempt": 15,
}
log = logging.getLogger("atoll.trainer")
STORE_SECONDS = 60.0  # until the store must answer
MACHINES_KEY, ENGINE_KEY = "atoll machines", "atoll engine"


def main() -> int:
    """Start the ranks that the command line's spec file describes; return the exit code when they have ended."""
    die_with_parent(signal.SIGTERM)
    parser = argparse.ArgumentParser(description="Start a trainer's local ranks.")
    parser.add_argument("--spec", required=True, help="the daemon's TrainerSpec, JSON")
    path = Path(parser.parse_args().spec).resolve()
    spec = msgspec.json.decode(path.read_bytes(), type=TrainerSpec)
    logs.setup(replace(spec.log, process="launcher"))
    if not spec.command:
        spec.node, _ = resolve(spec.node, spec.run.inner.batch_size)
    set_environment(spec, path)
    if spec.command:
        return run_command(spec.command, spec.channel)
    return launch(spec, path)


def set_environment(spec: TrainerSpec, path: Path) -> None:
    """Set the variables that say where the spec is, and those that torch and its backends read once, when torch is
    imported: threads, loopback interfaces, devices. To be called before that."""
    threads, _ = threads_of(spec.node)
    os.environ[SPEC] = str(path)
    os.environ[LAUNCHER] = str(os.getpid())
    if not spec.command or spec.node.threads:  # a script knows better how many processes share the cores
        os.environ["OMP_NUM_THREADS"] = str(threads)
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # who waits for another thread leaves it the core
    os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = "5"  # seconds from SIGTERM to SIGKILL
    interface = interface_of("127.0.0.1") or "lo"  # on a Mac lo0
    if spec.node.rendezvous:
        interface = interface_of(address_towards(spec.node.rendezvous))
    else:
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # it would listen on every interface
    os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
    # Collectives that time out: what each rank was doing is in these files of the node's folder, its number at the
    # end; `python -m torch.distributed.flight_recorder.fr_trace` reads them.
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")  # collectives that are remembered
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", str(path.with_name("flight-record-")))
    if spec.node.device is Device.CPU:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if spec.node.device in (Device.AUTO, Device.MPS) and not spec.command:
        os.environ.setdefault("PYTORCH_ENABLE_MPS_FALLBACK", "1")  # what Apple's GPU cannot do the processor does
    if spec.command:
        os.environ.setdefault("PYTHONUNBUFFERED", "1")  # what it prints is in the trainer's log at once


def launch(spec: TrainerSpec, path: Path) -> int:
    """Run this machine's ranks until they end; return the exit code."""
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous.api import RendezvousError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    for part in ("agent.server.api", "multiprocessing.api"):  # ranks say themselves what happened
        logging.getLogger(f"torch.distributed.elastic.{part}").setLevel(logging.CRITICAL)
    work = path.with_suffix(".launch")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    try:
        store = open_store(spec.node, spec.run.engine) if spec.node.rendezvous and spec.channel else None
        place = meeting(spec, work)
    except (OSError, DistError) as error:
        log.error(f"cannot meet other machines at {spec.node.rendezvous}: {error}")
        return 1
    config = LaunchConfig(
        nproc_per_node=spec.node.ranks,
        run_id="trainer",
        rdzv_backend="c10d",
        max_restarts=0,
        monitor_interval=0.1,
        start_method="fork",
        logs_specs=DefaultLogsSpecs(log_dir=str(work / "logs")),
        **place,
    )
    entrypoint, arguments = rank_command(spec, str(work / "group"))
    try:
        elastic_launch(config, entrypoint)(*arguments)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        code = failure.exitcode
        how = f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
        log.error(f"rank {rank} ended with {how}")
        return code if code > 0 else 1
    except (RendezvousError, DistError) as error:
        log.error(f"the machines did not meet at {spec.node.rendezvous}: {error}")
        return 1
    except SignalException as error:
        return 128 + error.sigval
    finally:
        del store  # not before: the ranks meet in it
        shutil.rmtree(work, ignore_errors=True)
    return 0


def meeting(spec: TrainerSpec, work: Path) -> dict[str, Any]:
    """The place where the launchers meet, in torch's words: those of several machines at a port of the one with
    the daemon; a launcher on its own in a file, and no port is opened. Raises `OSError`."""
    node = spec.node
    if not node.rendezvous:
        file = {"rdzv_endpoint": str(work / "rendezvous"), "rdzv_configs": {"store_type": "file"}}
        return {"min_nodes": 1, "max_nodes": 1, "local_addr": "127.0.0.1", **file}
    fewest, most = machines(node.rendezvous)
    return {
        "min_nodes": fewest,
        "max_nodes": most,
        "rdzv_endpoint": node.rendezvous,
        "rdzv_configs": {"is_host": False, **RENDEZVOUS},
        "local_addr": address_towards(node.rendezvous),
    }


def open_store(node: NodeConfig, engine: Engine) -> Any:
    """Open the store in which the launchers meet, at the volunteer's address and no other, for as long as somebody
    has what is returned. It says how many machines there are to be, and the run's engine. Raises `OSError`."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    host, port = split_host_port(node.rendezvous, "rendezvous")
    listener = socket.create_server((host, port), backlog=128)
    store = TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    store.set(MACHINES_KEY, f"{node.machines_min or node.machines} {node.machines}")
    store.set(ENGINE_KEY, engine)
    return store


def machines(rendezvous: str) -> tuple[int, int]:
    """The fewest and the most machines that the one at HOST:PORT waits for."""
    fewest, most = map(int, store_at(rendezvous).get(MACHINES_KEY).split())
    return fewest, most


def engine_of(spec: TrainerSpec) -> Engine:
    """The run's engine; a worker, which does not know the run, hears it from the machine with the daemon."""
    worker = spec.node.rendezvous and not spec.channel
    return Engine(store_at(spec.node.rendezvous).get(ENGINE_KEY).decode()) if worker else spec.run.engine


def store_at(rendezvous: str) -> Any:
    """The store at HOST:PORT, which another process has opened."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    host, port = split_host_port(rendezvous, "rendezvous")
    return TCPStore(host, port, is_master=False, timeout=timedelta(seconds=STORE_SECONDS))


def address_towards(endpoint: str) -> str:
    """The address of this machine on the network through which it reaches HOST:PORT."""
    host, port = split_host_port(endpoint, "rendezvous")
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:  # nothing is sent
        probe.connect(address)
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str:
    """The network interface that has the address."""
    return next(
        (name for name, found in psutil.net_if_addrs().items() if any(a.address == address for a in found)), ""
    )


def rank_command(spec: TrainerSpec, group: str) -> tuple[Any, tuple[str, ...]]:
    """The entrypoint of a rank and its arguments: on the CPU a function to fork, which has torch imported already;
    for GPUs and on macOS, whose libraries would not survive a fork, a program."""
    engine = engine_of(spec)
    if engine is not Engine.BUILTIN:
        return sys.executable, ("-m", f"atoll.node.engines.{engine}", "--group", group)
    if spec.node.device is Device.CPU and platform.system() != "Darwin":
        from atoll.node.trainer import process

        return process.main, (group,)
    return sys.executable, ("-m", "atoll.node.trainer.process", "--group", group)


if __name__ == "__main__":
    sys.exit(main())
