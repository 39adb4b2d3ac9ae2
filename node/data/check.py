"""`atoll data check`: every byte of a data set against its manifest, and what its tokens are."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from atoll.comm.digest import digest
from atoll.node.data.manifest import TOKENIZER, Manifest
from atoll.node.data.reader import DamagedData, DataSetReader
from atoll.node.data.tokenizer_files import MAX_FILE_BYTES

READ_BYTES = 8 << 20  # that are asked for at once
MOST_FREQUENT = 5  # token ids that are told


@dataclass(frozen=True)
class DataSetReport:
    """Findings in slices of a data set that is whole."""

    digest: str  # of the manifest, hexadecimal: what a run's data.digest is
    manifest: Manifest
    tokens: dict[str, int]  # of each slice that was read, without padding
    documents: dict[str, int]  # that begin in it
    learned: int  # tokens that are to be learned
    largest_id: int
    distinct_ids: int
    frequent: tuple[tuple[int, int], ...]  # ids and how often they are there, the most frequent first


def check(url: str, slice_name: str, show: Callable[[int, int], None]) -> DataSetReport:
    """Read the data set, or one slice of it, and compare every digest. `show` is called with the blocks that were
    read, and how many there are. Raises `DamagedData` with the name of what is not as it was built."""
    reader = DataSetReader(url)
    data = reader.manifest_bytes()
    manifest = Manifest.decode(data)
    files = {TOKENIZER: manifest.tokenizer, **manifest.tokenizer_files}
    for name, expected in files.items():
        reader.checked_file(name, expected, MAX_FILE_BYTES)
    shards = manifest.slice(slice_name) if slice_name else manifest.shards
    reader.check_ranges(manifest.shards[0])
    total, done = sum(shard.blocks for shard in shards), 0
    at_once = max(1, READ_BYTES // manifest.format.size)
    counts = np.zeros(manifest.vocab_size, np.int64)
    tokens, documents, learned = dict[str, int](), dict[str, int](), 0
    for shard in shards:
        digests, left = reader.digests(shard), shard.tokens
        for first in range(0, shard.blocks, at_once):
            number = min(at_once, shard.blocks - first)
            for i, content in enumerate(reader.blocks(manifest, shard, digests, first, number), first):
                block = manifest.format.decode(content)
                ids = block.tokens[:left].astype(np.int64)
                if int(block.tokens.max()) >= manifest.vocab_size:
                    raise DamagedData(
                        f"{url}: block {i} of {shard.name} has the token {int(block.tokens.max())}, and the "
                        f"manifest's vocab_size is {manifest.vocab_size}: it was built wrong"
                    )
                counts += np.bincount(ids, minlength=manifest.vocab_size)
                documents[shard.slice] = documents.get(shard.slice, 0) + int(block.begins[:left].sum())
                learned += int(block.learned[:left].sum())
                left -= len(ids)
            done += number
            show(done, total)
        tokens[shard.slice] = tokens.get(shard.slice, 0) + shard.tokens
    if not slice_name and sum(documents.values()) != manifest.documents:
        raise DamagedData(
            f"{url} has {sum(documents.values())} documents, and its manifest says {manifest.documents}: it was "
            "built wrong"
        )
    used = np.flatnonzero(counts)
    order = used[np.argsort(-counts[used], kind="stable")][:MOST_FREQUENT]
    return DataSetReport(
        digest(data).hex(),
        manifest,
        tokens,
        documents,
        learned,
        int(used[-1]) if len(used) else -1,
        len(used),
        tuple((int(i), int(counts[i])) for i in order),
    )
