"""A run's configuration as the operator writes it: YAML files and dotlist overrides, read through OmegaConf.

Only what was written on this machine is read here. Over the wire the configuration is plain JSON
(`atoll.comm.config.run.from_json`): text that came from elsewhere is never given to OmegaConf, whose `${...}`
would be resolved.
"""

import re
from dataclasses import asdict, fields, is_dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import msgspec

from atoll.comm.config.engine import Engine
from atoll.comm.config.hf import resolved
from atoll.comm.config.model import ModelConfig
from atoll.comm.config.run import RunConfig, check
from atoll.comm.errors import ConfigError

T = TypeVar("T")


def load_run(path: Path, overrides: tuple[str, ...] = (), method: Path | None = None) -> RunConfig:
    """Read a run's YAML file, a method's over it, and dotlist overrides (`key.sub=value`) over both. A `model`
    that names a folder or hf://org/name is replaced by what its config.json says, over which single keys of the
    model may go; the config.json that a run of transformers' names, by its content. Raises `ConfigError` with a
    sentence, and `ResourceError` where the model cannot be read."""
    config = load_dataclass(RunConfig, path, overrides, over=method)
    if config.engine is Engine.HF:
        config.hf = resolved(config.hf)
        config.model.vocab_size = config.hf.vocab_size or config.model.vocab_size
    check(config)
    return config


def load_dataclass(schema: type[T], path: Path | None, overrides: tuple[str, ...], over: Path | None = None) -> T:
    """Merge `schema`'s defaults, a YAML file, one `over` it, and a dotlist; unknown keys and wrong types are
    `ConfigError`s."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    source = "the overrides"
    try:
        merged = OmegaConf.structured(schema)
        for file in (path, over):
            if file is not None:
                path, source = file, str(file)
                merged = OmegaConf.merge(merged, _with_words(schema, OmegaConf.load(file), source))
        source = "the overrides"
        for part in _whole_sections_first(overrides):
            merged = OmegaConf.merge(merged, _with_words(schema, _dotlist(schema, part), source))
        loaded = OmegaConf.to_object(merged)
    except TypeError:
        raise ConfigError(f"{source} does not hold keys and values: write a YAML mapping") from None
    except OmegaConfBaseException as error:
        key = getattr(error, "full_key", None) or "?"
        reason = str(error.msg or error).splitlines()[0] if hasattr(error, "msg") else str(error).splitlines()[0]
        # OmegaConf lists the members' names; what is written are their values.
        reason = re.sub(r"expected one of \[.*\]", lambda found: found[0].lower(), reason)
        raise ConfigError(f"config key {key!r} in {source}: {reason}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the config file {path}: {error}") from None
    except YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None
    assert isinstance(loaded, schema)
    return loaded


def _whole_sections_first(overrides: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The overrides in two parts: a section's keys go over what `section=` says, wherever that stands."""
    whole = tuple(override for override in overrides if "." not in override.partition("=")[0])
    return whole, tuple(override for override in overrides if override not in whole)


def _dotlist(schema: type[Any], overrides: tuple[str, ...]) -> Any:
    """The overrides as one OmegaConf mapping; the one that cannot be read is named. A text of `schema` that YAML
    takes for a number, as a digest of digits alone, stays what was written."""
    from omegaconf import OmegaConf
    from yaml import YAMLError

    merged = OmegaConf.create()
    for override in overrides:
        if "=" not in override:
            raise ConfigError(f"override {override!r} has no '=': write key=value, for example outer.lr=0.5")
        try:
            merged.merge_with_dotlist([override])
            key, _, text = override.partition("=")
            if _kind_of(schema, key) is str and isinstance(OmegaConf.select(merged, key), int | float):
                OmegaConf.update(merged, key, text.strip())
        except YAMLError as error:
            reason = getattr(error, "problem", None) or error
            raise ConfigError(f"override {override!r} is not valid YAML behind the '=': {reason}") from None
    return merged


def _kind_of(schema: type[Any], key: str) -> Any:
    """The type of what `schema` has under a dotted key; None: it has no such key."""
    kind: Any = schema
    for name in key.split("."):
        kind = get_type_hints(kind).get(name) if is_dataclass(kind) else None
    return kind


def _with_words(schema: type[Any], found: Any, source: str, above: str = "") -> Any:
    """`found` with words where the schema has words: YAML takes a bare on or off for true or false. A model that
    is named is replaced by its fields; any other value in the place of a section is refused."""
    from omegaconf import DictConfig, OmegaConf

    for key, kind in get_type_hints(schema).items() if isinstance(found, DictConfig) else ():
        if key not in found or OmegaConf.is_interpolation(found, key) or not isinstance(kind, type):
            continue
        value = found.get(key)
        if is_dataclass(kind):
            if kind is ModelConfig and isinstance(value, str):
                from atoll.comm.config.model_source import named_model

                found[key] = asdict(named_model(value))
                continue
            if not isinstance(value, DictConfig):
                example = f"{above}{key}.{fields(kind)[0].name}=..."
                raise ConfigError(
                    f"config key '{above}{key}' in {source} is a section: set one of its keys, as in {example}"
                )
            _with_words(kind, value, source, f"{above}{key}.")
        elif isinstance(value, bool) and issubclass(kind, StrEnum):
            found[key] = "on" if value else "off"
    return found


def to_yaml(config: Any) -> str:
    """The resolved configuration as YAML, for people to read and for `load_run`."""
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml(OmegaConf.create(msgspec.to_builtins(config)))  # enums by their values
