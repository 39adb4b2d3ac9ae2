"""What a data set is: a manifest, and shards of tokens beside it.

    manifest.json            this module's `Manifest`, as JSON; its digest is the data set's
    tokenizer.json           what made the tokens, for whoever exports a model or adds text
    tokenizer_config.json    and others of `TOKENIZER_FILES`, if the tokenizer came with them
    SLICE-00000.tokens       blocks of one size, one after the other (`BlockFormat`)
    SLICE-00000.digests      16 bytes for each block of the shard of that name

A block is what is fetched, checked and kept as a whole. It holds `block_tokens` tokens, of which no sample needs
more than one block's; all blocks of a data set have the same size, so that block `i` of a shard lies at a place
that is known without an index. A node that knows the manifest's digest can check every byte that it trains on: the
manifest has the digest of each shard's list of digests, and the list that of each block.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from atoll.comm.byte_view import Octets
from atoll.comm.decode_errors import DECODE_ERRORS
from atoll.comm.digest import DIGEST_SIZE, digest
from atoll.comm.errors import ConfigError

MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.json"
# What lies beside a tokenizer.json, and an exported model needs: chat template, special tokens, how to generate.
TOKENIZER_FILES = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.jinja",
)
TOKENS_SUFFIX, DIGESTS_SUFFIX = ".tokens", ".digests"
TRAIN, VALIDATION = "train", "validation"  # the slices that a run looks for, unless it names others
VERSION = 1
MAX_MANIFEST_BYTES = 32 << 20
MAX_BLOCK_TOKENS = 1 << 22
MAX_SHARD_BLOCKS = 1 << 20  # so that a shard's list of digests has no more than 16 MiB
DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}


class Shard(msgspec.Struct, frozen=True):
    """A file of blocks."""

    name: str  # of the file, without its suffix
    slice: str  # the part of the data set that it belongs to, such as train or validation
    blocks: int
    tokens: int  # without the padding behind the last one
    digest: str  # hexadecimal, of the list of its blocks' digests


class Skipped(msgspec.Struct, frozen=True):
    """Records of the sources that could not be read, and are not in the data set."""

    count: int = 0
    examples: tuple[str, ...] = ()  # of the first ones: place and reason


class Manifest(msgspec.Struct, frozen=True):
    """A data set. `Manifest.decode` has checked whatever is in it."""

    version: int
    name: str
    dtype: str  # of a token: uint16 or uint32, little-endian
    block_tokens: int
    vocab_size: int  # every token is below
    end_of_text: int  # the token behind every document, and in the padding of a slice's last block
    tokenizer: str  # digest of tokenizer.json, hexadecimal
    masked: bool  # whether blocks say of each token if it is to be learned
    documents: int
    shards: tuple[Shard, ...]
    skipped: Skipped = Skipped()
    sources: tuple[str, ...] = ()  # what it was built from, for people
    packages: dict[str, str] = {}  # name and version of what tokenised it, for people
    tokenizer_files: dict[str, str] = {}  # those of `TOKENIZER_FILES` that are there: digest, hexadecimal

    @property
    def format(self) -> "BlockFormat":
        """The layout of every block."""
        return BlockFormat(DTYPES[self.dtype], self.block_tokens, self.masked)

    def slice(self, name: str) -> tuple[Shard, ...]:
        """The shards of a slice, in order. Raises `ConfigError` where the data set has none of that name."""
        found = tuple(shard for shard in self.shards if shard.slice == name)
        if not found:
            known = ", ".join(sorted({shard.slice for shard in self.shards})) or "none"
            remedy = "; build it with a smaller --validation-every" if name == VALIDATION else ""
            raise ConfigError(f"data set {self.name} has no slice {name!r}: it has {known}{remedy}")
        return found

    def tokens(self, name: str) -> int:
        """Tokens of a slice."""
        return sum(shard.tokens for shard in self.slice(name))

    def encode(self) -> bytes:
        """The bytes of manifest.json: the same for the same data set."""
        return msgspec.json.format(msgspec.json.encode(self, order="deterministic"), indent=1) + b"\n"

    @classmethod
    def decode(cls, data: bytes, expected: str = "") -> "Manifest":
        """Read manifest.json. `expected`: the digest that it must have, hexadecimal; empty: whatever it is. Raises
        `ConfigError` for another digest, and for what no builder writes."""
        if expected and (found := digest(data).hex()) != expected:
            raise ConfigError(
                f"the data set's {MANIFEST} has the digest {found}, and the run's is {expected}: it is another "
                "data set, or was built anew since; give the run's own"
            )
        try:
            manifest = msgspec.json.decode(data, type=cls)
        except DECODE_ERRORS as error:
            raise ConfigError(f"{MANIFEST} is not a data set's: {error}") from None
        for holds, sentence in _rules(manifest):
            if not holds:
                raise ConfigError(f"{MANIFEST} is not a data set's: {sentence}")
        return manifest


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """The bytes of a block: its tokens; then one bit for each that begins a document; then, where the data set has
    a mask, one for each that is to be learned. Bits are numpy's packbits, the lowest first."""

    dtype: np.dtype[Any]
    tokens: int  # a multiple of 8
    masked: bool

    @property
    def size(self) -> int:
        """Bytes of a block."""
        return self.tokens * self.dtype.itemsize + (2 if self.masked else 1) * (self.tokens // 8)

    def encode(self, tokens: NDArray[np.int64], begins: NDArray[np.bool_], learned: NDArray[np.bool_]) -> bytes:
        """The bytes of a block: `tokens` of them each. Without a mask `learned` is not looked at."""
        bits = [begins, learned] if self.masked else [begins]
        return b"".join(
            [tokens.astype(self.dtype).tobytes(), *(np.packbits(b, bitorder="little").tobytes() for b in bits)]
        )

    def decode(self, data: Octets) -> "Block":
        """The block of these bytes, which are `size`. Where there is no mask, everything is to be learned."""
        assert len(data) == self.size, "a block is checked before it is read"
        bits = np.frombuffer(data, np.uint8, offset=self.tokens * self.dtype.itemsize)
        flags = np.unpackbits(bits, bitorder="little").view(np.bool_)
        learned = flags[self.tokens :] if self.masked else np.ones(self.tokens, np.bool_)
        return Block(np.frombuffer(data, self.dtype, self.tokens), flags[: self.tokens], learned)


@dataclass(frozen=True, slots=True)
class Block:
    """The content of a block: three arrays of one length."""

    tokens: NDArray[np.unsignedinteger]
    begins: NDArray[np.bool_]  # the token is the first of a document
    learned: NDArray[np.bool_]  # the token is to be predicted


def _rules(manifest: Manifest) -> Iterator[tuple[bool, str]]:
    yield manifest.version == VERSION, f"version is {manifest.version}, and this Atoll reads {VERSION}"
    yield manifest.dtype in DTYPES, f"dtype is {manifest.dtype!r}: it must be one of {', '.join(DTYPES)}"
    yield (
        8 <= manifest.block_tokens <= MAX_BLOCK_TOKENS and manifest.block_tokens % 8 == 0,
        f"block_tokens is {manifest.block_tokens}: it must be a multiple of 8 up to {MAX_BLOCK_TOKENS}",
    )
    yield 1 <= manifest.vocab_size <= 1 << 32, f"vocab_size is {manifest.vocab_size}"
    yield 0 <= manifest.end_of_text < manifest.vocab_size, f"end_of_text is {manifest.end_of_text}"
    yield _is_digest(manifest.tokenizer), f"tokenizer is {manifest.tokenizer!r}: it must be a digest"
    names = {shard.name for shard in manifest.shards}
    yield len(names) == len(manifest.shards), "two shards have the same name"
    for name, found in manifest.tokenizer_files.items():
        yield name in TOKENIZER_FILES and _is_digest(found), f"a tokenizer's file is named {name!r}"
    for shard in manifest.shards:
        full = shard.blocks * manifest.block_tokens
        plain = re.fullmatch(r"[a-z0-9][a-z0-9_-]{0,99}", shard.name) is not None
        yield plain and PurePosixPath(shard.name).name == shard.name, f"a shard is named {shard.name!r}"
        yield (
            1 <= shard.blocks <= MAX_SHARD_BLOCKS,
            f"shard {shard.name} has {shard.blocks} blocks: it must be 1 to {MAX_SHARD_BLOCKS}",
        )
        yield (
            full - manifest.block_tokens < shard.tokens <= full,
            f"shard {shard.name} has {shard.tokens} tokens in {shard.blocks} blocks of {manifest.block_tokens}",
        )
        yield _is_digest(shard.digest), f"shard {shard.name} has the digest {shard.digest!r}"


def _is_digest(text: str) -> bool:
    return re.fullmatch(f"[0-9a-f]{{{2 * DIGEST_SIZE}}}", text) is not None
