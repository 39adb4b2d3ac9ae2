"""What a run needs of this machine, and what a node of it will read, write and talk to. Nothing is started."""

import shutil
from collections.abc import Iterator
from pathlib import Path

from atoll.comm.config.data import DataKind
from atoll.comm.config.engine import Engine
from atoll.comm.config.run import RunConfig
from atoll.comm.errors import AtollError
from atoll.comm.invite import Invite
from atoll.node.checkpoint.disk_budget import disk_need
from atoll.node.checks.check import Check, failed
from atoll.node.config import Device, NodeConfig
from atoll.node.data.source import check_source
from atoll.node.devices import gpus, resolve
from atoll.node.engine_check import check_engine
from atoll.node.outer.method import outer_schedule
from atoll.node.preflight import (
    BYTES_FLAT,
    BYTES_TRAINED,
    MOMENT_BYTES,
    available,
    beginning_out_of_reach,
    check_device,
    check_memory,
    check_network,
    check_ranks,
    memory_need,
)

GIGABYTE = 1e9


def run_checks(run: RunConfig, config: NodeConfig, state_dir: Path) -> Iterator[Check]:
    """What a node with the built-in trainer is refused for when it joins this run, check by check."""
    yield _settings(run, config)
    yield _data(run, config)
    yield from size_checks(run, config, state_dir)


def size_checks(run: RunConfig, config: NodeConfig, state_dir: Path) -> Iterator[Check]:
    """What a run takes of this machine's memory and disk."""
    yield _model(run, config)
    yield _disk(run, config, state_dir)


def doings(run: RunConfig, config: NodeConfig, state_dir: Path, invite: Invite) -> Iterator[Check]:
    """What the node's program will read, write and talk to."""
    yield Check("reads", True, "; ".join(_reads(run, config)))
    yield Check("writes", True, "; ".join(_writes(run, config, state_dir)))
    yield Check("talks to", True, "; ".join(_talks_to(run, invite)))


def knows_size(run: RunConfig, config: NodeConfig) -> bool:
    """Whether the run's config says how large the model is that is trained here."""
    return run.decoder and not config.model and run.data.kind is not DataKind.SCRIPT


def state_bytes(run: RunConfig, config: NodeConfig) -> float:
    """Bytes of disk that the run's state may take here; 0: none, or as much as a model that only its trainer
    knows."""
    if not config.durable or not knows_size(run, config):
        return 0.0
    need = disk_need(run.model.n_params, run.inner.optimizer)
    return min(need, config.disk * GIGABYTE) if config.disk else need


def _settings(run: RunConfig, config: NodeConfig) -> Check:
    try:
        check_network(config)
        outer_schedule(run)
        check_engine(run, config)
        check_device(config)
        if config.machines == 1 and config.ranks:
            check_ranks(run.inner.batch_size, config.ranks)
    except AtollError as error:
        return failed("settings", error)
    engine = "the built-in trainer" if run.engine is Engine.BUILTIN else f"engine {run.engine}"
    return Check("settings", True, f"{engine}, this machine's settings suit it")


def _model(run: RunConfig, config: NodeConfig) -> Check:
    if not knows_size(run, config):
        return Check("model", True, "how large it is only its trainer knows, which looks before it begins")
    found = () if config.device is Device.CPU else gpus()
    settled, _ = resolve(config, run.inner.batch_size, found)
    try:
        check_memory(run, settled, found)
    except AtollError as error:
        return failed("model", error)
    need = memory_need(run, settled)
    words = f"{run.model.n_params:,} parameters take {need / 1e9:.1f} of {available() / 1e9:.1f} GB of memory"
    if settled.device is Device.CUDA:
        moments = MOMENT_BYTES[run.inner.optimizer]
        each = run.model.n_params * (BYTES_TRAINED + moments) / settled.ranks
        words += f", and {each / 1e9:.1f} GB and a batch of each of {settled.ranks} GPUs"
    return Check("model", True, words)


def _data(run: RunConfig, config: NodeConfig) -> Check:
    try:
        check_source(run, config)
    except AtollError as error:
        return failed("data", error)
    return Check("data", True, next(iter(_reads(run, config))), beginning_out_of_reach(run, config))


def _disk(run: RunConfig, config: NodeConfig, state_dir: Path) -> Check:
    if not config.durable:
        return Check("state", True, "durable=false: nothing of the run's state is kept")
    need = state_bytes(run, config)
    free = shutil.disk_usage(next(p for p in (state_dir, *state_dir.parents) if p.exists())).free
    words = f"the run's state takes up to {need / 1e9:.1f} of {free / 1e9:.1f} GB of disk"
    if need > free:
        return Check(
            "state", False, words, "free some, or give --state-dir on another disk, disk=GB or durable=false"
        )
    if run.data.kind is DataKind.DATASET and need + config.cache * GIGABYTE > free:
        return Check("state", True, words, f"and its data up to cache={config.cache:g} GB: give a smaller cache=")
    return Check("state", True, words)


def _reads(run: RunConfig, config: NodeConfig) -> Iterator[str]:
    match run.data.kind:
        case DataKind.STDLIB:
            yield "the source of Python's own library, which is the run's text"
        case DataKind.BYTES:
            yield f"text files in {config.data}"
        case DataKind.DATASET if config.data:
            yield f"the run's data set in {config.data}"
        case DataKind.DATASET:
            yield f"the run's data from {', '.join(part.url for part in run.data.sets)}"
        case DataKind.SCRIPT:
            yield "what your own script reads"
        case _:
            yield f"what the plugin {run.data.plugin} reads"
    if config.files and run.init_from and "://" not in run.init_from:
        yield f"{run.init_from} (files=true)"
    yield "nothing else of this machine's files"


def _writes(run: RunConfig, config: NodeConfig, state_dir: Path) -> Iterator[str]:
    parts = ["logs"]
    if config.durable:
        need = state_bytes(run, config)
        parts.append(f"the run's state (up to {need / 1e9:.1f} GB)" if need else "the run's state")
    if run.data.kind is DataKind.DATASET and config.cache:
        parts.append(f"fetched data (up to {config.cache:g} GB)")
    yield f"{state_dir}: {', '.join(parts)}"
    shared = f" ({BYTES_FLAT * run.model.n_params / 1e9:.1f} GB)" if knows_size(run, config) else ""
    yield f"shared memory while it runs{shared}"


def _talks_to(run: RunConfig, invite: Invite) -> Iterator[str]:
    yield f"the coordinator at {invite.address}"
    yield "the run's members, which see this machine's address"
    urls = [part.url for part in run.data.sets] if run.data.kind is DataKind.DATASET else []
    urls += [run.checkpoint.remote, run.init_from, run.hf.base]
    if stores := [url for url in urls if "://" in url]:
        yield ", ".join(dict.fromkeys(stores))
