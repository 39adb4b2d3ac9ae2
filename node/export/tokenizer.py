"""The tokenizer's files of an export, so that `AutoTokenizer.from_pretrained` loads what the run was trained with.

They come from a file or folder of the user's, or from the run's data set, whose manifest says the digest of its
tokenizer. A run on bytes has no tokenizer: a token is a byte.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atoll.comm.config.data import DataConfig
from atoll.comm.config.run import RunConfig
from atoll.comm.digest import digest
from atoll.comm.errors import ConfigError, ResourceError
from atoll.node.data.manifest import MANIFEST, MAX_MANIFEST_BYTES, TOKENIZER, Manifest
from atoll.node.data.store import StoreError, open_store

TOKENIZER_CONFIG, TEMPLATE = "tokenizer_config.json", "chat_template.jinja"
# What a folder of a tokenizer may have beside tokenizer.json.
COMPANIONS = (
    TOKENIZER_CONFIG,
    *("special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt"),
    *("tokenizer.model", TEMPLATE, "chat_template.json"),
)
MAX_TOKENIZER_BYTES = 256 << 20
# Tokens that end a turn in chat templates, beside the tokenizer's own end of a text.
END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>", "<|eot|>", "</s>")
ROLES = ("bos", "eos", "pad")  # of special tokens that a model's config names by their ids


@dataclass(frozen=True, slots=True)
class DataSource:
    """A data set that a run's config names."""

    url: str
    digest: str  # of its manifest, hexadecimal
    weight: float = 1.0
    manifest: Manifest | None = None  # None: it was not read


@dataclass(frozen=True, slots=True)
class TokenizerExport:
    """The files of a tokenizer by name, and the ids of the tokens that a model's config names."""

    files: dict[str, bytes]
    ids: dict[str, int]  # bos_token_id and so on, of those that there are
    ends: tuple[int, ...] = ()  # of a text and of a turn: what generation stops at


def data_sources(data: DataConfig) -> tuple[DataSource, ...]:
    """The data sets of a run, as its config names them; none for a run on bytes or a script's own data."""
    if data.mixture:
        return tuple(DataSource(part.url, part.digest, part.weight) for part in data.mixture)
    return (DataSource(data.url, data.digest),) if data.url else ()


def read_source(source: DataSource) -> DataSource:
    """The data set with its manifest, whose digest is compared. Raises `ConfigError`, `ResourceError`."""
    data = _fetch(source.url, MANIFEST, MAX_MANIFEST_BYTES)
    return DataSource(source.url, source.digest, source.weight, Manifest.decode(data, source.digest))


def tokenizer_of_source(source: DataSource, run: RunConfig) -> TokenizerExport:
    """The tokenizer of a data set whose manifest was read, with all files that came with it. Raises `ConfigError`,
    `ResourceError`."""
    assert source.manifest is not None, "read_source comes first"
    files = dict[str, bytes]()
    for name, expected in {TOKENIZER: source.manifest.tokenizer, **source.manifest.tokenizer_files}.items():
        files[name] = _fetch(source.url, name, MAX_TOKENIZER_BYTES)
        if (found := digest(files[name]).hex()) != expected:
            raise ResourceError(
                f"{name} of data set {source.manifest.name} has the digest {found}, its manifest says {expected}: "
                "it was replaced; give the right one with --tokenizer"
            )
    return _complete(files, run, source.manifest.end_of_text)


def tokenizer_of_path(path: Path, run: RunConfig, end_of_text: int | None = None) -> TokenizerExport:
    """The tokenizer in a tokenizer.json or in a folder with one. `end_of_text`: the data set's token behind a
    document, where it is known. Raises `ConfigError`."""
    file = path / TOKENIZER if path.is_dir() else path
    found = {TOKENIZER: _read(file)}
    if path.is_dir():
        found |= {name: _read(path / name) for name in COMPANIONS if (path / name).is_file()}
    return _complete(found, run, end_of_text, file.name)


def special_tokens(folder: Path) -> set[str]:
    """The roles, of `ROLES`, that a folder's tokenizer_config.json has a token for. Raises `ConfigError`."""
    path = folder / TOKENIZER_CONFIG
    config = json_object(_read(path), TOKENIZER_CONFIG) if path.is_file() else {}
    return {role for role in ROLES if _text_of(config.get(f"{role}_token"))}


def _complete(
    files: dict[str, bytes], run: RunConfig, end_of_text: int | None, name: str = TOKENIZER
) -> TokenizerExport:
    """Check the tokenizer against the model, and give it the config that AutoTokenizer needs if it has none.
    `name`: what its user calls the file."""
    tokens = _tokens(files[TOKENIZER], name)
    if (largest := max(tokens.values())) >= run.model.vocab_size:
        raise ConfigError(
            f"the tokenizer has {largest + 1} tokens, the model of run {run.name} only {run.model.vocab_size}: it "
            "is not the run's; give the right one with --tokenizer"
        )
    config = json_object(files[TOKENIZER_CONFIG], TOKENIZER_CONFIG) if TOKENIZER_CONFIG in files else {}
    config.pop("auto_map", None)  # code that is not among these files
    config.setdefault("tokenizer_class", "PreTrainedTokenizerFast")
    config.setdefault("model_max_length", run.model.seq_len)
    config.setdefault("clean_up_tokenization_spaces", False)
    names = {token_id: token for token, token_id in tokens.items()}
    if end_of_text is not None and end_of_text in names:
        config.setdefault("eos_token", names[end_of_text])
    ids = {f"{role}_token_id": tokens.get(_text_of(config.get(f"{role}_token"))) for role in ROLES}
    text = json.dumps(config, indent=2, ensure_ascii=False).encode() + b"\n"
    known = {k: v for k, v in ids.items() if v is not None}
    template = files.get(TEMPLATE, b"").decode(errors="replace") or json.dumps(
        config.get("chat_template", ""), ensure_ascii=False
    )
    turns = (tokens[token] for token in END_OF_TURN if token in tokens and token in template)
    found = [known.get("eos_token_id"), end_of_text, *turns]
    ends = tuple(dict.fromkeys(i for i in found if i is not None))
    return TokenizerExport(files | {TOKENIZER_CONFIG: text}, known, ends)


def _tokens(data: bytes, name: str) -> dict[str, int]:
    """The tokens of a tokenizer.json and their ids."""
    tokenizer = json_object(data, name)
    try:
        vocab = tokenizer["model"]["vocab"]
        listed = {str(entry[0]): i for i, entry in enumerate(vocab)} if isinstance(vocab, list) else dict(vocab)
        found = listed | {str(t["content"]): int(t["id"]) for t in tokenizer.get("added_tokens", ())}
        if not found or not all(isinstance(i, int) for i in found.values()):
            raise ValueError("no tokens")
    except (KeyError, TypeError, ValueError, IndexError, OverflowError) as error:
        raise ConfigError(f"{name} is not a tokenizer of the tokenizers library ({error!r})") from None
    return found


def _text_of(token: object) -> str:
    """A special token's text, which a config has by itself or as the content of an object."""
    return str(token.get("content", "")) if isinstance(token, dict) else str(token or "")


def json_object(data: bytes, name: str) -> dict[str, Any]:
    """The JSON object in a file of that name. Raises `ConfigError`."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{name} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{name} is not a JSON object")
    return found


def _read(path: Path) -> bytes:
    try:
        if path.stat().st_size > MAX_TOKENIZER_BYTES:
            raise ConfigError(f"{path} has more than {MAX_TOKENIZER_BYTES >> 20} MiB: it is no tokenizer")
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"cannot read the tokenizer {path}: {error.strerror}; give a tokenizer.json, or a folder with one"
        ) from None


def _fetch(url: str, name: str, limit: int) -> bytes:
    """A small file of a data set, as nodes read it; this machine's own files too, since its user asks for it."""
    try:
        return open_store(url, files=True).read_whole(name, limit)
    except StoreError as error:
        raise ResourceError(f"{error}: give the run's tokenizer with --tokenizer") from None
