"""`atoll export --out model.safetensors`: the anchor of a node's newest state as one file, to be loaded without
Atoll, and the model's config beside it: `config.json` of model.safetensors, `X.config.json` of X.safetensors.

It reads what the node has on its disk (`atoll.node.checkpoint.saved_run`), whether its daemon runs or not, and
changes nothing there.
"""

import json
from dataclasses import replace
from pathlib import Path

from atoll.comm.errors import ConfigError
from atoll.comm.files import Room, atomic_write, room, write_all
from atoll.node.checkpoint.hf_layout import config_beside
from atoll.node.checkpoint.saved_run import SavedRun
from atoll.node.export.model_files import TensorNaming, model_files
from atoll.node.export.newest_state import ExportResult, write_newest
from atoll.node.export.weights import (
    SUFFIX,
    WeightDtype,
    WeightFile,
    file_size,
    state_facts,
    write_weights,
)

WEIGHTS = "model.safetensors"  # where transformers looks for them
PUBLIC_MODE = 0o666  # within the umask: a model is made to be passed on


def export(
    state_dir: Path,
    out: Path,
    naming: TensorNaming,
    run: str = "",
    overwrite: bool = False,
    room: Room = room,
    dtype: WeightDtype = WeightDtype.FP32,
) -> ExportResult:
    """Write the model to `out`, and its config beside it. `run`: name or mark, where the node has kept several.
    Raises `ConfigError`, `ResourceError`."""
    _check_out(out, naming, overwrite)
    return write_newest(state_dir, run, out, lambda saved, round_: _write(saved, round_, out, naming, room, dtype))


def _write(
    saved: SavedRun, round_: int, out: Path, naming: TensorNaming, room: Room, dtype: WeightDtype
) -> ExportResult:
    model, n_params = model_files(saved, naming), saved.chunks.numel
    if model.adapters:  # under their own names, as another run begins with them; a folder is what peft loads
        model = replace(model, tensors=saved.layout, transformers=False)
    file, facts = WeightFile(out.name, model.tensors, 0, n_params), state_facts(saved, round_)
    out.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(out, file_size(file, dtype, facts), room, PUBLIC_MODE) as descriptor:
        facts = write_weights(saved, [file], dtype, facts, {out.name: descriptor})
        config = model.config | {"torch_dtype": dtype.torch_name} if model.transformers else model.config
        text = json.dumps(config if model.transformers else {**facts.texts(), **config}, indent=2).encode() + b"\n"
        with atomic_write(config_path(out), len(text), room, PUBLIC_MODE) as beside:
            write_all(beside, [memoryview(text)], 0)
    return ExportResult(facts.run, round_, n_params, facts.state_digest)


def config_path(out: Path) -> Path:
    """The file of the config beside a file of weights: of a name of its own, but for model.safetensors."""
    return out.with_name(config_beside(out.name))


def _check_out(out: Path, naming: TensorNaming, overwrite: bool) -> None:
    if out.is_dir():
        raise ConfigError(f"{out} is a folder: name a file, such as {out / WEIGHTS}")
    if out.suffix != SUFFIX:
        raise ConfigError(f"{out.name} will be a safetensors file: give --out {out.with_suffix(SUFFIX)}")
    if naming is TensorNaming.LLAMA and out.name != WEIGHTS:
        raise ConfigError(f"transformers looks for {WEIGHTS}, not {out.name}: give --out {out.with_name(WEIGHTS)}")
    for path in (out, config_path(out)):
        if path.exists() and not overwrite:
            raise ConfigError(f"{path} exists: give --overwrite, or --out in another folder")
