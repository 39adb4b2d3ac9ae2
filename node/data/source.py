"""The door to a run's data, whatever its kind: the daemon's quick look, and the source that a trainer reads."""

from collections.abc import Callable
from pathlib import Path

from atoll.comm.config.data import DataKind
from atoll.comm.config.run import RunConfig
from atoll.comm.errors import ConfigError
from atoll.node.config import NodeConfig
from atoll.node.data.dataset import check_data_sets, open_data_sets
from atoll.node.data.plugin import check_plugin, open_plugin
from atoll.node.data.samples import Source
from atoll.node.data.text import open_files


def check_source(run: RunConfig, node: NodeConfig) -> None:
    """Raise the `AtollError` that `open_source` would, as far as it shows without reading the data or asking a
    server."""
    match run.data.kind:
        case DataKind.SCRIPT:
            raise _no_source()
        case DataKind.DATASET:
            check_data_sets(run, node)
        case DataKind.PLUGIN:
            check_plugin(run)
        case _:
            open_files(run, node)


def open_source(
    run: RunConfig,
    node: NodeConfig,
    cache: Path,
    ranks: int = 1,
    tell: Callable[[str], None] = print,
    lan: bool = True,
) -> Source:
    """The run's data on this node. `cache`: a folder for what is fetched; `ranks`: processes of this machine that
    open it; `tell` takes a sentence each time that a store does not answer; `lan`: data may be at a
    server in this machine's own network. Raises an `AtollError` that says what
    is missing and what to do."""
    match run.data.kind:
        case DataKind.SCRIPT:
            raise _no_source()
        case DataKind.DATASET:
            return open_data_sets(run, node, cache, ranks, tell, lan)
        case DataKind.PLUGIN:
            return open_plugin(run, node)
        case _:
            return open_files(run, node)


def _no_source() -> ConfigError:
    return ConfigError(
        "the run's samples are those of each node's own script, data.kind=script: join it with one, "
        "`atoll node join URL -- python train.py`, which takes its batches from a dataset of its own, "
        "run.batches(dataset)"
    )
