"""A run's configuration as the operator writes it: YAML files and dotlist overrides, read through OmegaConf.

Only what was written on this machine is read here. Over the wire the configuration is plain JSON
(`atoll.comm.config.run.from_json`): text that came from elsewhere is never given to OmegaConf, whose `${...}`
would be resolved.
"""

import logging
import re
from collections.abc import Callable
from dataclasses import asdict, fields, is_dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import msgspec

from atoll.comm.config.engine import Engine
from atoll.comm.config.hf import resolved
from atoll.comm.config.run import RunConfig, check
from atoll.comm.errors import ConfigError

T = TypeVar("T")
log = logging.getLogger(__name__)
# What a value of each kind is, for who wrote another one.
KINDS: dict[Any, str] = {
    **{bool: "true or false", int: "a whole number", float: "a number"},
    **{bool | None: "true, false or null", int | None: "a whole number or null", float | None: "a number or null"},
}


def load_run(
    path: Path,
    overrides: tuple[str, ...] = (),
    method: Path | None = None,
    tell: Callable[[str], None] = log.info,
) -> RunConfig:
    """Read a run's YAML file, a method's over it, and dotlist overrides (`key.sub=value`) over both. A `model`
    that names a folder or hf://org/name is replaced by what its config.json says, over which single keys of the
    model may go, and an earlier file's model.seq_len; with `engine: hf` it is the run's hf.config. The config.json
    that a run of transformers' names is replaced by its content. `tell` takes sentences about what was read.
    Raises `ConfigError` with a sentence, and `ResourceError` where the model cannot be read."""
    config = load_dataclass(RunConfig, path, overrides, over=method, tell=tell)
    if config.engine is Engine.HF:
        place = config.hf.config
        if place and not place.lstrip().startswith("{") and not config.hf.lora.rank:
            _tell_beginning(f"hf.config={place}", place, bool(config.init_from), tell)
        config.hf = resolved(config.hf)
        config.model.vocab_size = config.hf.vocab_size or config.model.vocab_size
    check(config)
    return config


def load_dataclass(
    schema: type[T],
    path: Path | None,
    overrides: tuple[str, ...],
    over: Path | None = None,
    tell: Callable[[str], None] = log.info,
) -> T:
    """Merge `schema`'s defaults, a YAML file, one `over` it, and a dotlist; unknown keys and wrong types are
    `ConfigError`s."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException, ValidationError
    from yaml import YAMLError

    source = "the overrides"
    try:
        parts = list[tuple[Any, str]]()
        for file in (path, over):
            if file is not None:
                path, source = file, str(file)
                parts.append((OmegaConf.load(file), source))
        source = "the overrides"
        parts += [(_dotlist(schema, part), source) for part in _whole_sections_first(overrides)]
        if schema is RunConfig:
            _name_models(parts, tell)
        merged = OmegaConf.structured(schema)
        for part, source in parts:
            merged = OmegaConf.merge(merged, _with_words(schema, part, source))
        loaded = OmegaConf.to_object(merged)
    except TypeError:
        raise ConfigError(f"{source} does not hold keys and values: write a YAML mapping") from None
    except OmegaConfBaseException as error:
        key = getattr(error, "full_key", None) or "?"
        if isinstance(error, ValidationError) and (kind := KINDS.get(_kind_of(schema, key))):
            where = "" if source == "the overrides" else f" in {source}"
            value = "null" if error.value is None else repr(str(error.value))
            raise ConfigError(f"{key}{where} is {value}: it must be {kind}") from None
        reason = str(error.msg or error).splitlines()[0] if hasattr(error, "msg") else str(error).splitlines()[0]
        # OmegaConf lists the members' names; what is written are their values.
        reason = re.sub(r"expected one of \[.*\]", lambda found: found[0].lower(), reason)
        reason = re.sub(r"^Key '.*' not in '\w+'", "there is no such key", reason)
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


def _tell_beginning(given: str, place: str, begun: bool, tell: Callable[[str], None]) -> None:
    if not begun:
        tell(f"{given} is the model without its weights: init_from={place} begins with them")


def _name_models(parts: list[tuple[Any, str]], tell: Callable[[str], None]) -> None:
    """Replace, in each part of a run's config, a model that is named by its fields; where the run's engine is hf,
    make it the hf.config that it is. A seq_len that an earlier part gives stays: the config.json has none, but
    what the model is for at most."""
    from omegaconf import DictConfig, OmegaConf

    from atoll.comm.config.model_source import named_model

    sections = [(part, source) for part, source in parts if isinstance(part, DictConfig)]
    engine = [part["engine"] for part, _ in sections if "engine" in part]
    seq_len, given_by = None, ""
    for part, source in sections:
        model = part.get("model") if not OmegaConf.is_interpolation(part, "model") else None
        if isinstance(model, DictConfig) and "seq_len" in model:
            seq_len, given_by = model["seq_len"], source
        if not isinstance(model, str):
            continue
        if engine[-1:] == [str(Engine.HF)]:
            if any(OmegaConf.select(other, "hf.config") for other, _ in sections):
                raise ConfigError(
                    f"model={model} and hf.config are given, and both name the model of a run with engine=hf: "
                    "give one of them"
                )
            del part["model"]
            OmegaConf.update(part, "hf.config", model)
            continue
        part["model"] = asdict(named_model(model, tell))
        _tell_beginning(f"model={model}", model, any(other.get("init_from") for other, _ in sections), tell)
        if seq_len is not None:
            part["model"]["seq_len"] = seq_len
            tell(f"model.seq_len stays {seq_len}, as {given_by} says")


def _with_words(schema: type[Any], found: Any, source: str, above: str = "") -> Any:
    """`found` with words where the schema has words: YAML takes a bare on or off for true or false. A value in the
    place of a section is refused."""
    from omegaconf import DictConfig, OmegaConf

    for key, kind in get_type_hints(schema).items() if isinstance(found, DictConfig) else ():
        if key not in found or OmegaConf.is_interpolation(found, key) or not isinstance(kind, type):
            continue
        value = found.get(key)
        if is_dataclass(kind):
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
