"""The tokenizer of a data set: tokenizer.json, what lies beside it, and its token for the end of a text.

A special token that stands in a document's own text is text: `load_plain` reads it letter by letter, so that
nobody who writes a web page ends its document, or begins an assistant's turn in it.
"""

import re
from dataclasses import dataclass
from typing import Any

import msgspec

from atoll.comm.decode_errors import DECODE_ERRORS
from atoll.comm.errors import ConfigError, ResourceError
from atoll.node.data.manifest import TOKENIZER, TOKENIZER_FILES

CONFIG, TEMPLATE = "tokenizer_config.json", "chat_template.jinja"
END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "<|end▁of▁sentence|>", "</s>", "<eos>", "<|eos|>", "[EOS]")
MAX_FILE_BYTES = 256 << 20


@dataclass(frozen=True)
class TokenizerFiles:
    """The bytes of tokenizer.json and of the files beside it, by name."""

    tokenizer: bytes
    beside: dict[str, bytes]
    name: str = TOKENIZER  # of the first file, as its user gave it

    @property
    def config(self) -> dict[str, Any]:
        """The content of tokenizer_config.json; empty if there is none. Raises `ConfigError`."""
        try:
            return msgspec.json.decode(self.beside.get(CONFIG, b"{}"), type=dict[str, Any])
        except DECODE_ERRORS as error:
            raise ConfigError(f"the tokenizer's {CONFIG} is damaged: {error}") from None

    def special_token(self, name: str) -> str | None:
        """The token that tokenizer_config.json has under a name such as eos_token; None if it has none."""
        value = self.config.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        return value if isinstance(value, str) else None

    def chat_template(self) -> str:
        """The Jinja template that makes a text of a conversation. Raises `ConfigError` if there is none."""
        found: Any = (
            self.beside[TEMPLATE].decode() if TEMPLATE in self.beside else self.config.get("chat_template")
        )
        if isinstance(found, list):  # of several with names
            by_name = {entry.get("name"): entry.get("template") for entry in found if isinstance(entry, dict)}
            found = by_name.get("default")
        if not isinstance(found, str):
            raise ConfigError(
                f"--chat needs the tokenizer's chat template: a chat_template in the {CONFIG} beside "
                f"tokenizer.json, or a {TEMPLATE}; there is none"
            )
        return found


def read_tokenizer_files(place: str) -> TokenizerFiles:
    """The files of a tokenizer.json, or of a folder with one, here or at any URL that fsspec knows. Raises
    `ConfigError`."""
    from fsspec.core import url_to_fs

    try:
        fs, path = url_to_fs(place)
        if fs.isdir(path):
            path = f"{path.rstrip('/')}/{TOKENIZER}"
        if not fs.isfile(path):
            raise ConfigError(f"--tokenizer {place}: there is no {path.rpartition('/')[2]}; give a tokenizer.json")
        content = _read(fs, path)
        folder, _, name = path.rpartition("/")
        near = {other: f"{folder}/{other}" for other in TOKENIZER_FILES if name == TOKENIZER}
        return TokenizerFiles(content, {n: _read(fs, at) for n, at in near.items() if fs.isfile(at)}, name)
    except (OSError, ValueError, ImportError) as error:
        raise ConfigError(f"--tokenizer {place} cannot be read: {error}") from error


def _read(fs: Any, path: str) -> bytes:
    if (size := fs.size(path) or 0) > MAX_FILE_BYTES:
        raise ConfigError(f"{path} has {size} bytes: that is no tokenizer's file")
    data: bytes = fs.cat_file(path)
    return data


def load_tokenizer(content: bytes, name: str = TOKENIZER) -> Any:
    """The `tokenizers.Tokenizer` of the bytes of a tokenizer.json, which neither cuts nor pads. `name`: the
    file's, for the sentence. Raises `ConfigError`."""
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_str(content.decode())
    except Exception as error:  # tokenizers raises bare Exception
        raise ConfigError(f"{name} is not a tokenizer's: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def load_plain(content: bytes, end_of_text: str) -> Any:
    """A tokenizer for documents' own text: no token that stands there is special. Raises `ConfigError`."""
    tokenizer = load_tokenizer(content)
    tokenizer.add_special_tokens([end_of_text])  # which it is, though its file may not say so
    tokenizer.encode_special_tokens = True
    return tokenizer


def vocabulary_size(tokenizer: Any) -> int:
    """One more than the largest id."""
    return 1 + max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)


def end_of_text_of(tokenizer: Any, files: TokenizerFiles, given: str) -> str:
    """The token behind each document: the one that is `given`, or the one that is known by its name, or
    tokenizer_config.json's eos_token. Raises `ConfigError` if it cannot be told."""
    if given:
        if tokenizer.token_to_id(given) is None:
            raise ConfigError(f"--end-of-text {given}: the tokenizer has no such token")
        return given
    known = [token for token in END_OF_TEXT if tokenizer.token_to_id(token) is not None]
    eos = files.special_token("eos_token")
    if len(known) == 1:
        return known[0]
    if eos and tokenizer.token_to_id(eos) is not None:
        return eos
    names = f"it has {' and '.join(known)}" if known else "it has none of the usual names"
    raise ConfigError(
        f"the tokenizer's token for the end of a text cannot be told, {names}: say --end-of-text TOKEN"
    )


def special_pattern(tokenizer: Any) -> re.Pattern[str] | None:
    """A pattern of the special tokens in a text, with the blanks that they take along; None if there are none."""
    tokens = [token for token in tokenizer.get_added_tokens_decoder().values() if token.special and token.content]
    tokens.sort(key=lambda token: (-len(token.content), token.content))
    blanks = (r"\s*", "")
    parts = [
        f"{blanks[not token.lstrip]}(?:{re.escape(token.content)}){blanks[not token.rstrip]}" for token in tokens
    ]
    return re.compile("|".join(parts)) if parts else None


def token_text(tokenizer: Any, ids: list[int]) -> str:
    """The text of tokens, special ones by their names. Raises `ResourceError` for ids that the tokenizer lacks."""
    try:
        text: str = tokenizer.decode(ids, skip_special_tokens=False)
    except Exception as error:  # tokenizers raises bare Exception
        raise ResourceError(f"the tokenizer cannot decode these tokens: {error}") from error
    return text
