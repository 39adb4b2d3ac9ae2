"""The model of a run that transformers builds (`engine: hf`), and LoRA adapters in it.

A run's config comes from elsewhere, and a model's config.json can name code. So what names any is refused or left
out here, before a node gives it to transformers: a node builds only what transformers itself has.
"""

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from atoll.comm.config.model_source import HUB_MODEL, MAX_CONFIG_SIZE, config_text
from atoll.comm.config.rules import MAX_LAYERS, Rule, positive, representable
from atoll.comm.errors import ConfigError

MAX_CONFIG_DEPTH = 32  # objects and lists within one another
DIGEST_DIGITS = 32
CODE_KEY = "auto_map"  # names modules of a repository that its model is to be built by
# Keys that choose an implementation, which may be one to fetch; a node says sdpa.
LEFT_OUT = ("attn_implementation", "experts_implementation", "quantization_config", "transformers_version")


class BaseDtype(StrEnum):
    """The types that frozen weights are stored in; what is trained is fp32."""

    FP32 = "fp32"
    BF16 = "bf16"


@dataclass
class LoraConfig:
    """Adapters of low rank beside frozen matrices (LoRA, arXiv 2106.09685), by peft; they alone are trained."""

    rank: int = 0  # of each adapter; 0: none, every parameter is trained
    alpha: float = 16.0  # what an adapter adds is multiplied by alpha / rank
    dropout: float = 0.0  # of an adapter's input
    # modules that get one, by the last parts of their names, such as q_proj; empty: every linear layer but
    # the head
    targets: list[str] = field(default_factory=list)

    def rules(self) -> Iterator[Rule]:
        """Rules of the adapters' numbers and of the names of their modules."""
        yield self.rank >= 0, f"hf.lora.rank is {self.rank}: it must be 0 (every parameter is trained) or more"
        yield from positive("hf.lora", alpha=self.alpha)
        yield from representable("hf.lora", self)
        yield 0 <= self.dropout < 1, f"hf.lora.dropout is {self.dropout}: it must be in [0, 1)"
        for target in self.targets:
            yield (
                re.fullmatch(r"\w+(\.\w+)*", target) is not None,
                f"hf.lora.targets has {target!r}: write the last parts of a module's name, such as q_proj",
            )


@dataclass
class HfConfig:
    """The model of a run with `engine: hf`. Of the run's `model` section only `seq_len` and `vocab_size` count
    then, the latter taken from here."""

    # content of its config.json; a folder or hf://org/name, from which it is read when the run is started; empty:
    # that of `base`
    config: str = ""
    # with LoRA: the frozen weights, a folder on each node or hf://org/name, which each node fetches
    base: str = ""
    digest: str = ""  # of the tensors in `base` (`python -m atoll.node.engines.hf_weights digest BASE`)
    dtype: BaseDtype = BaseDtype.FP32  # of the frozen weights in a node's memory
    # train also an architecture of which a node cannot try whether documents that share a sample stay apart
    assume_isolation: bool = False
    lora: LoraConfig = field(default_factory=LoraConfig)

    @property
    def content(self) -> dict[str, Any]:
        """The config.json, without what names code to be built or computed by. Raises `ValueError` where it is no
        JSON object."""
        found = json.loads(self.config)
        if not isinstance(found, dict):
            raise ValueError("it is not an object")
        return _plain(found)

    @property
    def architecture(self) -> str:
        """The name of the model's class, else of its type, for people."""
        content = self.content
        named = content.get("architectures")
        found = named[0] if isinstance(named, list) and named else content.get("model_type")
        return str(found or "a model without a name")

    @property
    def vocab_size(self) -> int | None:
        """The number of the model's tokens; None where its config.json leaves that to transformers."""
        return self._number("vocab_size")

    @property
    def positions(self) -> int | None:
        """The number of positions that the model is made for; None where its config.json does not say it."""
        return self._number("max_position_embeddings")

    def _number(self, key: str) -> int | None:
        if _wrong_json(self.config):
            return None
        content = self.content
        text = content.get("text_config")
        for section in (content, text if isinstance(text, dict) else {}):
            if isinstance(found := section.get(key), int):
                return found
        return None

    def rules(self, seq_len: int, vocab_size: int) -> Iterator[Rule]:
        """Rules of the model and its adapters, as far as they can be checked without transformers, for samples of
        `seq_len` tokens below `vocab_size`."""
        yield (
            bool(self.config),
            "engine is hf and hf.config is empty: give a model's folder, hf://org/name, or the content of its "
            "config.json",
        )
        yield len(self.config) <= MAX_CONFIG_SIZE, f"hf.config has more than {MAX_CONFIG_SIZE:,} characters"
        wrong = _wrong_json(self.config)
        yield not wrong, f"hf.config is not the content of a config.json: {wrong}"
        kind = self.content.get("model_type")
        yield (
            isinstance(kind, str) and bool(kind),
            "hf.config has no model_type: it must be the config.json of a model of transformers",
        )
        yield (
            not _has_key(json.loads(self.config), CODE_KEY),
            f"hf.config is of {self.architecture}, which is built by code of its own repository ({CODE_KEY}): a "
            "node never runs that; train an architecture that transformers itself has",
        )
        quantised = json.loads(self.config).get("quantization_config")
        yield (
            not quantised,
            f"hf.config is of a quantised {self.architecture}: give the model whose weights are not quantised",
        )
        for key, value in _integers(self.content):
            yield (
                "layer" not in key or value <= MAX_LAYERS,
                f"hf.config has {key}={value}: {MAX_LAYERS} are the most",
            )
        positions, vocabulary = self.positions, self.vocab_size
        yield (
            positions is None or seq_len <= positions,
            f"model.seq_len is {seq_len}, and hf.config's {self.architecture} has {positions} positions",
        )
        yield (
            vocabulary is None or vocab_size <= vocabulary,
            f"model.vocab_size is {vocab_size}, and hf.config's {self.architecture} has {vocabulary} tokens",
        )
        yield from self.lora.rules()
        if not self.lora.rank:
            yield (
                not self.base,
                "hf.base is given and hf.lora.rank is 0: without adapters every parameter is trained, and the run "
                "begins with init_from",
            )
            return
        yield (
            bool(self.base),
            "hf.lora.rank is above 0 and hf.base is empty: name the frozen weights, a folder or hf://org/name",
        )
        yield (
            "://" not in self.base or re.fullmatch(HUB_MODEL, self.base) is not None,
            f"hf.base is {self.base!r}: write a folder, or hf://org/name or hf://org/name@revision",
        )
        yield (
            re.fullmatch(rf"[0-9a-f]{{{DIGEST_DIGITS}}}", self.digest) is not None,
            f"hf.digest is {self.digest!r}: each node compares the frozen weights with it; "
            f"`python -m atoll.node.engines.hf_weights digest {self.base}` prints it",
        )


def resolved(hf: HfConfig) -> HfConfig:
    """The section with the content of the config.json that it names. Raises `ConfigError`, `ResourceError` where
    that cannot be read."""
    where = hf.config or hf.base
    if not where or where.lstrip().startswith("{"):
        return hf
    return replace(hf, config=read_config(where))


def read_config(where: str) -> str:
    """The content of config.json in a folder, or in hf://org/name, on one line. Raises `ConfigError` where there
    is none, `ResourceError` where it cannot be read."""
    text = config_text(where, "hf.config")
    if wrong := _wrong_json(text):
        raise ConfigError(f"hf.config={where}: it is not a model's config.json: {wrong}")
    return json.dumps(json.loads(text), separators=(",", ":"))


def _wrong_json(text: str | bytes) -> str:
    """What is wrong with a config.json; empty: nothing."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        return str(error)
    if not isinstance(found, dict):
        return "it is not an object"
    level: list[Any] = [found]
    for _ in range(MAX_CONFIG_DEPTH):
        level = [inner for outer in level for inner in _within(outer) if isinstance(inner, dict | list)]
    return f"it has more than {MAX_CONFIG_DEPTH} objects or lists within one another" if level else ""


def _within(found: dict[str, Any] | list[Any]) -> Iterable[Any]:
    return found.values() if isinstance(found, dict) else found


def _plain(found: dict[str, Any]) -> dict[str, Any]:
    """A config.json, and those within it, without private keys and without `LEFT_OUT`."""
    return {
        key: _plain(value) if isinstance(value, dict) else value
        for key, value in found.items()
        if not key.startswith("_") and key not in LEFT_OUT
    }


def _integers(found: dict[str, Any]) -> Iterator[tuple[str, int]]:
    """The integers of a config.json, and of those within it, with their keys."""
    for key, value in found.items():
        if isinstance(value, dict):
            yield from _integers(value)
        elif isinstance(value, int):
            yield key, value


def _has_key(found: Any, key: str) -> bool:
    """Whether an object anywhere in this JSON has the key."""
    if isinstance(found, dict):
        return key in found or any(_has_key(value, key) for value in found.values())
    return isinstance(found, list) and any(_has_key(value, key) for value in found)
