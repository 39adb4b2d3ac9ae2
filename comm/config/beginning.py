"""The state that a run begins with, in words, and what the machine that starts the run can see of it: nodes read
`init_from` and `hf.base` later, each on its own machine. Torch-free."""

import json
from collections.abc import Callable
from pathlib import Path

from atoll.comm.config.data import DataKind
from atoll.comm.config.engine import Engine
from atoll.comm.config.hf_config import CONFIG, read_model
from atoll.comm.config.model import differences
from atoll.comm.config.run import RunConfig
from atoll.comm.errors import ConfigError

PEFT_CONFIG = "adapter_config.json"


def beginning(run: RunConfig) -> str:
    """What the run's parameters are before the first round, as the end of a sentence that begins with the run."""
    if run.init_from:
        return f"begins with init_from={run.init_from}"
    if run.engine is Engine.HF and run.hf.lora.rank:
        return f"begins with new adapters, which change nothing yet, in the weights of hf.base={run.hf.base}"
    if run.data.kind is DataKind.SCRIPT:
        return "begins with what the first node's script begins with"
    return "begins with random weights"


def check_beginning(run: RunConfig, warn: Callable[[str], None]) -> None:
    """Look at `init_from` and `hf.base` where they are folders of this machine. `warn` takes a sentence about what
    is not here, and may be on the nodes. Raises `ConfigError` where a config.json there is of another model than
    the run's."""
    for key, place in (("init_from", run.init_from), ("hf.base", run.hf.base)):
        if not place or "://" in place:
            continue
        path = Path(place).expanduser()
        if not path.exists():
            who = "the first node to join reads it" if key == "init_from" else "each node reads it"
            warn(
                f"{key}={place} is neither a file nor a folder of this machine: {who} on its own, with files=true"
            )
        elif not path.is_absolute() and not place.startswith("~"):
            warn(f"{key}={place} is relative to the folder in which a node was started: give the whole path")
        if key == "init_from" and path.is_dir() and run.decoder and not (path / PEFT_CONFIG).is_file():
            _compare(run, path)


def _compare(run: RunConfig, folder: Path) -> None:
    config = folder / CONFIG
    try:
        found = json.loads(config.read_bytes())
    except (OSError, ValueError, RecursionError):
        return  # a checkpoint has none; what is damaged is the node's to say
    if not isinstance(found, dict) or "model_type" not in found:
        return
    theirs = read_model(json.dumps(found), str(config))
    for name in differences(theirs, run.model):
        raise ConfigError(
            f"{config} says {name}={getattr(theirs, name)}, and the run's model.{name} is "
            f"{getattr(run.model, name)}: give model={folder}, which reads all of them there"
        )
