"""`atoll data show`: the text of a block, or of a sample's window, of a data set."""

from dataclasses import dataclass

import numpy as np

from atoll.comm.errors import ConfigError
from atoll.node.data.manifest import TOKENIZER, Shard
from atoll.node.data.reader import DataSetReader
from atoll.node.data.tokenizer_files import MAX_FILE_BYTES, load_tokenizer, token_text


@dataclass(frozen=True, slots=True)
class Run:
    """Tokens one after the other that are all to be learned, or all not."""

    text: str
    tokens: int
    learned: bool


@dataclass(frozen=True, slots=True)
class Passage:
    """The part of one document that lies in the tokens shown."""

    begins: bool  # here; else before
    runs: tuple[Run, ...]


def passages(url: str, index: int, slice_name: str, seq_len: int) -> list[Passage]:
    """The documents in block `index` of a slice, or with `seq_len` in its window `index` of so many tokens, in the
    order of the files. Raises `ConfigError` for an index beyond the end."""
    reader = DataSetReader(url)
    manifest = reader.manifest()
    shards = manifest.slice(slice_name)
    size = manifest.block_tokens
    if seq_len > size:
        raise ConfigError(f"a sample of {seq_len} tokens is longer than the data set's blocks of {size}")
    per_block = size // seq_len if seq_len else 1
    number, window = divmod(index, per_block)
    total = sum(shard.blocks for shard in shards)
    if number >= total:
        what = "samples" if seq_len else "blocks"
        raise ConfigError(f"there is no number {index}: slice {slice_name} has {total * per_block} {what}, from 0")
    shard, at = _shard_of(shards, number)
    tokenizer = load_tokenizer(reader.checked_file(TOKENIZER, manifest.tokenizer, MAX_FILE_BYTES))
    (content,) = reader.blocks(manifest, shard, reader.digests(shard), at, 1)
    block = manifest.format.decode(content)
    start = window * seq_len
    stop = min(start + (seq_len or size), shard.tokens - at * size)  # padding is not shown
    ids, begins, learned = (a[start:stop] for a in (block.tokens, block.begins, block.learned))
    cuts = [0, *(int(i) for i in np.flatnonzero(begins) if i), len(ids)]
    found = []
    for first, last in zip(cuts, cuts[1:], strict=False):
        if first == last:
            continue
        turns = [
            first,
            *(first + 1 + int(i) for i in np.flatnonzero(np.diff(learned[first:last].view(np.int8)))),
            last,
        ]
        runs = tuple(
            Run(token_text(tokenizer, ids[a:b].tolist()), b - a, bool(learned[a]))
            for a, b in zip(turns, turns[1:], strict=False)
        )
        found.append(Passage(bool(begins[first]), runs))
    return found


def _shard_of(shards: tuple[Shard, ...], block: int) -> tuple[Shard, int]:
    """The shard that has block number `block` of the slice, and its number there."""
    for shard in shards:
        if block < shard.blocks:
            return shard, block
        block -= shard.blocks
    raise AssertionError("a block beyond the slice's end")
