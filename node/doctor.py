"""`atoll doctor`: whether this machine can take part in a run, check by check, before it joins one.

Nothing is started, changed or sent, but that the coordinator of a join URL is asked for its health, without the
token.
"""

import asyncio
import json
import os
import platform
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

import click
import grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse

from atoll.comm.addresses import is_own_network
from atoll.comm.config.load import load_dataclass
from atoll.comm.cores import core_share
from atoll.comm.descriptors import raise_limit
from atoll.comm.errors import Refused, ResourceError, Unreachable
from atoll.comm.extras import lacking
from atoll.comm.invite import Invite, split_host_port
from atoll.comm.terminal import say
from atoll.node.cli import invite_of, state_dir_option
from atoll.node.config import Device, NodeConfig, check
from atoll.node.control.tls_channel import channel, check_plain
from atoll.node.devices import gpus, has_compiler, has_gpu_driver, torch_has_gpus
from atoll.node.preflight import PROCESS_BYTES, available

MIN_DISK = 1 << 30  # bytes that a node of the smallest model takes, with its logs
MIN_DESCRIPTORS = 1024  # a few for each member of a fleet
ASKED_TIMES = 3  # the coordinator, for the shortest of the round trips
CALL_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at."""

    name: str
    ok: bool
    found: str  # in words
    remedy: str = ""  # what to do where it is not ok; or what to know
    exit_code: int = ResourceError.exit_code  # of the command, where this is the first that is not ok


@click.command()
@click.argument("url", required=False)
@click.argument("overrides", nargs=-1)
@state_dir_option
@click.option("--json", "as_json", is_flag=True)
def doctor(url: str | None, overrides: tuple[str, ...], state_dir: Path, as_json: bool) -> None:
    """Say whether this machine can take part, and if not, why.

    With the join URL of a run (@FILE reads it from a file) its coordinator is asked, too; no token is used up.
    OVERRIDES are the settings that `atoll node join` would be given.

    The exit code is 0 if all is well; else that of the first check that fails: 3 for a lack on this machine, 4 if
    the coordinator does not answer, 5 if it is another than the URL's.
    """
    if url and "=" in url and "://" not in url and not url.startswith("@"):  # no URL, and an override
        overrides, url = (url, *overrides), None
    invite = invite_of(url) if url else None
    state_dir = state_dir.expanduser().absolute()
    local = state_dir / "node.yaml"
    config = load_dataclass(NodeConfig, local if local.exists() else None, overrides)
    check(config)
    checks = list(machine_checks(config, state_dir))
    if invite is not None and invite.rendezvous:
        found = "is found through a gateway when the node joins: it was not asked"
        checks.append(
            Check(
                "coordinator",
                not lacking("a join URL that names a gateway", "hivemind"),
                found,
                lacking("a join URL that names a gateway", "hivemind"),
            )
        )
    elif invite is not None:
        checks += asyncio.run(coordinator_checks(invite))
    if as_json:
        shown = [{k: v for k, v in asdict(c).items() if k != "exit_code"} for c in checks]
        click.echo(json.dumps({"ok": all(c.ok for c in checks), "checks": shown}))
    else:
        for c in checks:
            say(f"{'ok' if c.ok else 'NO':>4}  {c.name:<12} {c.found}")
            if c.remedy:
                say(f"{'':>19}{c.remedy}")
    raise SystemExit(next((c.exit_code for c in checks if not c.ok), 0))


def machine_checks(config: NodeConfig, state_dir: Path) -> Iterator[Check]:
    """What a node with these settings needs of this machine, whatever the run."""
    yield Check("python", True, f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    yield _packages()
    yield Check("cores", True, str(core_share()))
    yield _memory()
    yield _gpu(config)
    yield _compiler(config)
    yield _disk(state_dir)
    yield _descriptors()


async def coordinator_checks(invite: Invite) -> list[Check]:
    """Whether the coordinator of a join URL answers and is the URL's, and from where it sees this machine come."""
    try:
        seconds = await _ask(invite)
    except Unreachable as error:
        remedy = "is it running, and is its port open to this machine?"
        return [Check("coordinator", False, str(error), remedy, error.exit_code)]
    except Refused as error:  # whose sentence has the remedy
        return [Check("coordinator", False, str(error), exit_code=error.exit_code)]
    how = "with the URL's certificate" if invite.pin else "not encrypted"
    found = Check("coordinator", True, f"{invite.address} answers in {1e3 * seconds:.0f} ms, {how}")
    return [found, _address(invite)]


def _packages() -> Check:
    if sentence := lacking("a node", "torch", "numba"):
        needs, _, install = sentence.partition(": ")
        return Check("packages", False, needs, install)
    return Check("packages", True, f"atoll {version('atoll')}, torch {version('torch')}")


def _memory() -> Check:
    have = available()
    found = f"{have / 1e9:.1f} GB available"
    if have < PROCESS_BYTES:
        return Check(
            "memory", False, found, f"a node takes {PROCESS_BYTES / 1e9:.1f} GB beside its model: free some"
        )
    return Check("memory", True, found)


def _gpu(config: NodeConfig) -> Check:
    if config.device is Device.CPU:
        return Check("gpu", True, "not asked for (device=cpu)")
    if found := gpus():
        names = ", ".join(f"{gpu.name} ({gpu.memory / 1e9:.0f} GB)" for gpu in found)
        return Check("gpu", True, names)
    if not torch_has_gpus() and (has_gpu_driver() or config.device is Device.CUDA):
        here = "an NVIDIA driver is here" if has_gpu_driver() else "device=cuda"
        remedy = "install a CUDA build of torch (pytorch.org says how), or give device=cpu"
        return Check("gpu", False, f"{here}, and torch is built for CPUs", remedy)
    if config.device is Device.CUDA:
        return Check(
            "gpu", False, "device=cuda, and no driver tells of a GPU", "install the driver, or give device=cpu"
        )
    return Check("gpu", True, "none: the trainer takes the CPU")


def _compiler(config: NodeConfig) -> Check:
    if has_compiler():
        return Check("compiler", True, "there is one, for compile=true")
    wanted = bool(config.compile)
    return Check("compiler", not wanted, "none, which compile=true needs", "install g++" if wanted else "")


def _disk(state_dir: Path) -> Check:
    folder = next(p for p in (state_dir, *state_dir.parents) if p.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        return Check("disk", False, f"nothing can be written to {folder}", "give another --state-dir")
    free = shutil.disk_usage(folder).free
    found = f"{free / 1e9:.1f} GB free for {state_dir}"
    if free < MIN_DISK:
        return Check("disk", False, found, "a node takes 1 GB and about 80 bytes a parameter: free some")
    return Check("disk", True, found, "a durable node takes about 80 bytes a parameter of the run's model")


def _descriptors() -> Check:
    limit = raise_limit()
    ok = limit >= MIN_DESCRIPTORS
    return Check("descriptors", ok, f"{limit:,} at most", "" if ok else f"ulimit -n {MIN_DESCRIPTORS} or more")


async def _ask(invite: Invite) -> float:
    """Seconds of the shortest of a few calls. Raises `Refused`, `Unreachable`."""
    best = float("inf")
    async with await channel(invite, []) as way:
        call = way.unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=HealthCheckRequest.SerializeToString,
            response_deserializer=HealthCheckResponse.FromString,
        )
        for _ in range(ASKED_TIMES):
            begun = time.monotonic()
            try:
                answer = await call(HealthCheckRequest(), timeout=CALL_SECONDS)
            except grpc.aio.AioRpcError as error:
                if not invite.pin:
                    await check_plain(invite)
                why = error.details() or error.code().name
                raise Unreachable(f"no coordinator answers at {invite.address} ({why})") from None
            best = min(best, time.monotonic() - begun)
            if answer.status != HealthCheckResponse.SERVING:
                raise Unreachable(
                    f"the coordinator at {invite.address} is there and does not serve yet, or no more"
                )
    return best


def _address(invite: Invite) -> Check:
    """The address of this machine that its packets to the coordinator come from."""
    host, port = split_host_port(invite.address, "the join URL's address")
    own = ""
    with suppress(OSError):
        family, kind, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as sock:
            sock.connect(place)  # sends nothing
            own = str(sock.getsockname()[0])
    if not own:
        return Check("address", True, "not known")
    if is_own_network(own):
        remedy = "peers elsewhere cannot dial it: forward a port and give --listen and --advertise, or give --leaf"
        return Check("address", True, f"{own}, of a private network", remedy)
    return Check(
        "address", True, f"{own}, a public one", "peers dial it at --listen: its firewall has to let them"
    )
