"""Writes the tokens of a data set into shards, slice by slice, in steps that a build which was killed can go back
to.

A `SliceWriter` appends whole blocks to SLICE-NUMBER.tokens and their digests to SLICE-NUMBER.digests. What it has
besides (the block that is not full) and how far the files are is its `SliceState`: with that, and files that are
at least as long, another process writes the same bytes on.
"""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from atoll.comm.digest import DIGEST_SIZE, digest
from atoll.comm.errors import ConfigError
from atoll.comm.files import sync
from atoll.node.data.manifest import DIGESTS_SUFFIX, TOKENS_SUFFIX, BlockFormat, Shard

SUFFIXES = (TOKENS_SUFFIX, DIGESTS_SUFFIX)


class SliceState(msgspec.Struct, frozen=True):
    """Progress of a slice: shard `number` has so many whole blocks, and a block is begun."""

    slice: str
    number: int = 0
    blocks: int = 0
    tokens: bytes = b""  # of the begun block, of the set's dtype
    begins: bytes = b""  # bool, of each of these
    learned: bytes = b""  # likewise; empty without a mask


class SliceWriter:
    """Writes the shards of one slice into a folder."""

    def __init__(
        self, folder: Path, layout: BlockFormat, shard_blocks: int, end_of_text: int, state: SliceState
    ) -> None:
        """Goes on from `state`. Raises `ConfigError` if the files in the folder are shorter than it says."""
        self._folder, self._layout, self._shard_blocks, self._end = folder, layout, shard_blocks, end_of_text
        self._slice, self._number, self._blocks = state.slice, state.number, state.blocks
        self._tokens = np.empty(layout.tokens, np.int64)
        self._begins, self._learned = np.empty((2, layout.tokens), np.bool_)
        self._fill = len(state.tokens) // layout.dtype.itemsize
        self._tokens[: self._fill] = np.frombuffer(state.tokens, layout.dtype)
        self._begins[: self._fill] = np.frombuffer(state.begins, np.bool_)
        if layout.masked:
            self._learned[: self._fill] = np.frombuffer(state.learned, np.bool_)
        self._files = [self._path(suffix).open("ab") for suffix in SUFFIXES] if state.blocks else []
        for file, size in zip(self._files, (layout.size, DIGEST_SIZE), strict=False):
            if file.tell() < size * state.blocks:
                raise ConfigError(
                    f"{file.name} is shorter than the build left it, and cannot go on: begin anew with --overwrite"
                )
            file.truncate(size * state.blocks)
        self._digests = self._path(DIGESTS_SUFFIX).read_bytes() if state.blocks else b""

    def add(
        self, tokens: NDArray[np.unsignedinteger], begins: NDArray[np.bool_], learned: NDArray[np.bool_]
    ) -> Iterator[Shard]:
        """Append tokens, (n,) each; `learned` is not looked at without a mask. Yields the shards that this fills,
        whose files are on the disk."""
        at = 0
        while at < len(tokens):
            part = slice(at, at + self._layout.tokens - self._fill)
            count = len(tokens[part])
            into = slice(self._fill, self._fill + count)
            self._tokens[into], self._begins[into] = tokens[part], begins[part]
            if self._layout.masked:
                self._learned[into] = learned[part]
            self._fill += count
            at += count
            if self._fill == self._layout.tokens:
                yield from self._block(self._fill)

    def finish(self) -> Iterator[Shard]:
        """The last shard, its last block padded; nothing if there is no token in it."""
        if count := self._fill:
            self._tokens[count:] = self._end
            self._begins[count:] = self._learned[count:] = False
            yield from self._block(count)
        if self._blocks:
            yield self._close(self._blocks * self._layout.tokens - (self._layout.tokens - count if count else 0))

    def save(self) -> SliceState:
        """The state to go on from; the files are on the disk so far."""
        for file in self._files:
            file.flush()
            sync(Path(file.name))
        return SliceState(
            self._slice,
            self._number,
            self._blocks,
            self._tokens[: self._fill].astype(self._layout.dtype).tobytes(),
            self._begins[: self._fill].tobytes(),
            self._learned[: self._fill].tobytes() if self._layout.masked else b"",
        )

    def close(self) -> None:
        """Close the files, wherever they are."""
        for file in self._files:
            file.close()
        self._files = []

    def _block(self, count: int) -> Iterator[Shard]:
        """Write the block, of which `count` tokens are the slice's."""
        if not self._files:
            self._files = [self._path(suffix).open("wb") for suffix in SUFFIXES]
        data = self._layout.encode(self._tokens, self._begins, self._learned)
        found = digest(data)
        for file, content in zip(self._files, (data, found), strict=True):
            file.write(content)
        self._digests += found
        self._blocks += 1
        self._fill = 0
        if self._blocks == self._shard_blocks and count == self._layout.tokens:
            yield self._close(self._blocks * self._layout.tokens)

    def _close(self, tokens: int) -> Shard:
        self.save()
        self.close()
        shard = Shard(self._name, self._slice, self._blocks, tokens, digest(self._digests).hex())
        self._number, self._blocks, self._digests = self._number + 1, 0, b""
        return shard

    @property
    def _name(self) -> str:
        return f"{self._slice}-{self._number:05d}"

    def _path(self, suffix: str) -> Path:
        return self._folder / f"{self._name}{suffix}"
