"""The model that a run's `model: FOLDER` or `model: hf://org/name` names: its config.json, and what it says.

Only the machine that starts the run reads it; nodes receive the fields. Torch-free, and without transformers.
"""

import re
from collections.abc import Callable
from pathlib import Path

from atoll.comm.config.hf_config import CONFIG, read_model
from atoll.comm.config.model import ModelConfig
from atoll.comm.errors import ConfigError, ResourceError
from atoll.comm.extras import demand

HUB = "hf://"
# A repository, and a revision of it: part of a path in the hub's cache, so without '..', and not from the root.
HUB_MODEL = r"hf://([\w.-]+/[\w.-]+)(?:@(\w[\w-]*(?:[./][\w-]+)*))?"
MAX_CONFIG_SIZE = 1 << 20  # bytes of a config.json


def named_model(where: str, tell: Callable[[str], None]) -> ModelConfig:
    """The model of a folder with Hugging Face's config.json, or of hf://org/name or hf://org/name@revision.
    `tell` takes a sentence of how large it is. Raises `ConfigError` where there is none or Atoll's own decoder
    does not compute it, `ResourceError` where it cannot be read."""
    model = read_model(config_text(where), f"{where}'s {CONFIG}")
    tell(
        f"model={where} has {model.n_params:,} parameters and is for up to {model.max_positions:,} tokens: "
        f"model.seq_len is {model.seq_len:,}, unless the config says another"
    )
    return model


def config_text(where: str, key: str = "model") -> bytes:
    """The contents of the config.json of a folder, or of hf://org/name. `key`: of the config, for sentences.
    Raises `ConfigError`, `ResourceError`."""
    if where.startswith(HUB):
        path = _fetched(where, key)
    else:
        path = Path(where).expanduser()
        path = path if path.name == CONFIG else path / CONFIG
        if "://" in where or not path.is_file():
            raise ConfigError(
                f"{key}={where}: there is no folder with a {CONFIG}; give a Hugging Face model's, or hf://org/name"
            )
    try:
        with path.open("rb") as file:
            text = file.read(MAX_CONFIG_SIZE + 1)
    except OSError as error:
        raise ResourceError(f"{key}={where}: cannot read {path}: {error.strerror or error}") from None
    if len(text) > MAX_CONFIG_SIZE:
        raise ConfigError(f"{key}={where}: {path} has more than {MAX_CONFIG_SIZE:,} bytes, as no {CONFIG} has")
    return text


def hub_repository(url: str, key: str = "hf.base") -> tuple[str, str | None]:
    """The repository and the revision that hf://org/name[@revision] names; None: the newest. `key`: of the config,
    for the sentence. Raises `ConfigError`."""
    found = re.fullmatch(HUB_MODEL, url)
    if found is None:
        raise ConfigError(f"{key}={url}: write hf://org/name, or hf://org/name@revision")
    return found[1], found[2]


def _fetched(url: str, key: str) -> Path:
    """A copy of the config.json of hf://org/name."""
    name, revision = hub_repository(url, key)
    demand(f"{key}={url}", "huggingface_hub")
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(name, CONFIG, revision=revision))
    except Exception as error:  # the client raises its own, and those of two HTTP libraries
        said = str(error).strip().partition("\n")[0]
        raise ResourceError(
            f"{key}={url}: cannot fetch its {CONFIG} ({type(error).__name__}: {said}); give a folder that has it"
        ) from None
