"""The samples of a run whose data are data sets: opened by URL or in a folder, mixed, in the run's order.

`open_data_sets` is the trainer's; it reads the manifests and nothing else. `check_data_sets` is the daemon's quick
look, which asks no server. Both compare digests: all nodes have the same samples, or a node says why it has not.
"""

import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from atoll.comm.config.data import DataSetConfig
from atoll.comm.config.run import RunConfig
from atoll.comm.digest import digest
from atoll.comm.errors import ConfigError, ResourceError
from atoll.node.config import NodeConfig
from atoll.node.data.cache import BlockCache
from atoll.node.data.fetch import FIRST_DELAY, BlockFetcher, BlockId, FetchedSet, Throttle
from atoll.node.data.manifest import MANIFEST, MAX_MANIFEST_BYTES, Manifest
from atoll.node.data.mixture import Mixture
from atoll.node.data.order import Window, WindowOrder
from atoll.node.data.samples import Sample, nothing_learned, window_count, window_of
from atoll.node.data.store import FolderStore, Store, StoreError, StoreRefused, check_store, open_store, public

GIGABYTE = 10**9
MEGABIT_BYTES = 125_000.0
MAX_OPENING_DELAY = 5.0  # seconds between two tries to get a manifest: each says that this process lives


@dataclass(frozen=True)
class Slice:
    """A slice of a data set: its shards, end to end."""

    part: int  # the number of the data set
    manifest: Manifest
    shards: tuple[int, ...]  # by their number in the manifest
    ends: tuple[int, ...]  # for each of them, the blocks until its end
    order: WindowOrder

    @classmethod
    def of(cls, part: int, manifest: Manifest, name: str, seq_len: int, seed: int) -> "Slice":
        """The slice `name`. Raises `ConfigError` where there is none, or where its shards are not full."""
        found = manifest.slice(name)
        size = manifest.block_tokens
        if any(shard.tokens < shard.blocks * size for shard in found[:-1]):
            raise ConfigError(
                f"data set {manifest.name} has a shard within slice {name} that is not full: build it anew with "
                "`atoll data build`"
            )
        ends = tuple(accumulate(shard.blocks for shard in found))
        whole, last = (
            size // seq_len,
            window_count(found[-1].tokens - (found[-1].blocks - 1) * size, seq_len, size),
        )
        full_blocks, rest = (ends[-1], 0) if last == whole else (ends[-1] - 1, last)
        order = WindowOrder(f"{seed}:{name}", full_blocks, whole, rest)
        if not len(order):
            raise ConfigError(f"slice {name} of data set {manifest.name} has not one sample of {seq_len} tokens")
        numbers = tuple(number for number, shard in enumerate(manifest.shards) if shard.slice == name)
        return cls(part, manifest, numbers, ends, order)

    def block_of(self, window: Window) -> BlockId:
        """The block that a window is in."""
        place = bisect_right(self.ends, window.block)
        before = self.ends[place - 1] if place else 0
        return BlockId(self.part, self.shards[place], window.block - before)

    def tokens_in(self, block: BlockId) -> int:
        """Tokens of a block, without its padding."""
        shard = self.manifest.shards[block.shard]
        return min(self.manifest.block_tokens, shard.tokens - block.number * self.manifest.block_tokens)


class DataSetSource:
    """The `Source` of a run of kind dataset."""

    def __init__(
        self,
        train: Sequence[Slice],
        validation: Sequence[Slice],
        mixture: Mixture,
        seq_len: int,
        fetcher: BlockFetcher,
        notice: str = "",
    ) -> None:
        """`notice`: what the node's owner should know of the data, for the log; empty: nothing."""
        self.notice = notice
        self._train, self._validation, self._mixture = train, validation, mixture
        self._seq_len, self.fetcher = seq_len, fetcher

    def train(self, index: int) -> Sample:
        """Training sample `index`; waits until it is here. Of a damaged one nothing is learned."""
        part, window = self._place(index)
        return self._sample(part, window, expected=True)

    def validation(self, index: int) -> Sample:
        """Validation sample `index`, likewise."""
        part, window = self._validation_place(index)
        return self._sample(part, window, expected=False)

    def request_validation(self, indices: Iterable[int]) -> None:
        """Begin to fetch what these validation samples need, all at once."""
        self.fetcher.request(part.block_of(window) for part, window in map(self._validation_place, indices))

    def expect(self, indices: Iterator[int]) -> None:
        """Begin to fetch what these training samples need, in the place of what was expected before."""
        self.fetcher.expect(part.block_of(window) for part, window in map(self._place, indices))

    def _place(self, index: int) -> tuple[Slice, Window]:
        number, own = self._mixture.draw(index)
        part = self._train[number]
        return part, part.order.window(own)

    def _validation_place(self, index: int) -> tuple[Slice, Window]:
        number, own = self._mixture.draw(index)
        part = self._validation[number]
        return part, part.order.window(own % len(part.order))

    def _sample(self, part: Slice, window: Window, expected: bool) -> Sample:
        wanted = part.block_of(window)
        block = self.fetcher.block(wanted, expected)
        if block is None:
            return nothing_learned(self._seq_len)
        return window_of(block, window.number, self._seq_len, part.tokens_in(wanted))


def check_data_sets(run: RunConfig, node: NodeConfig) -> None:
    """Raise the `AtollError` that `open_data_sets` would, as far as it shows without asking a server."""
    own = _own_folders(run, node)
    for part in run.data.sets:
        if part.digest not in own:
            node.demand_store("data set", part.url)
            check_store(part.url, node.files)


def open_data_sets(
    run: RunConfig,
    node: NodeConfig,
    cache: Path,
    ranks: int = 1,
    tell: Callable[[str], None] = print,
    lan: bool = True,
) -> DataSetSource:
    """The run's samples. `cache`: a folder for what is fetched; `ranks`: processes of this machine that fetch at
    the same time; `tell` takes a sentence each time that a store does not answer, which is asked for ever;
    `lan`: a server may be in this machine's own network. Raises
    an `AtollError` that says what is wrong with the data sets, this node's folder or its rights."""
    blocks = BlockCache(cache / "blocks", int(node.cache * GIGABYTE))
    sets = [
        FetchedSet(_manifest(part, store, blocks, tell), store, part.digest)
        for part, store in zip(run.data.sets, _stores(run, node, lan), strict=True)
    ]
    for part in sets:
        check_fits(part.manifest, part.store.url, run)
    check_one_tokenizer([part.manifest for part in sets])
    seq_len, seed = run.model.seq_len, run.seed
    train, validation = (
        [Slice.of(number, part.manifest, name, seq_len, seed) for number, part in enumerate(sets)]
        for name in (run.data.slice, run.data.validation)
    )
    throttle = Throttle(node.download * MEGABIT_BYTES / ranks)
    sample_bytes = seq_len * max(part.manifest.format.dtype.itemsize for part in sets)
    mixture = Mixture.by_weight([part.weight for part in run.data.sets])
    fetcher = BlockFetcher(sets, blocks, throttle, sample_bytes, ranks)
    notice = "; ".join(filter(None, (_left_over(part.manifest, seq_len) for part in sets)))
    return DataSetSource(train, validation, mixture, seq_len, fetcher, notice)


def _left_over(manifest: Manifest, seq_len: int) -> str:
    """What of the data set's blocks is in no sample, in a sentence; empty: nothing."""
    size = manifest.block_tokens
    if not (rest := size % seq_len):
        return ""
    return (
        f"samples of {seq_len} tokens do not divide the data set {manifest.name}'s blocks of {size}: the last "
        f"{rest} tokens of each block, {100 * rest / size:.1f} % of the data, are in no sample"
    )


def _stores(run: RunConfig, node: NodeConfig, lan: bool) -> list[Store]:
    """Where this node has each data set from: its own folder, if it is there, or the run's URL."""
    own, found = _own_folders(run, node), list[Store]()
    for part in run.data.sets:
        if part.digest in own:
            found.append(FolderStore(str(own[part.digest]), own[part.digest]))
        else:
            node.demand_store("data set", part.url)
            found.append(open_store(part.url, node.files, lan))
    return found


def _own_folders(run: RunConfig, node: NodeConfig) -> dict[str, Path]:
    """The data sets in the node's own folder, or in folders in it, by their digests. Raises `ConfigError` where
    none is there, or none of the run's."""
    if not node.data:
        return {}
    folder, found = Path(node.data).expanduser(), dict[str, Path]()
    for path in (folder / MANIFEST, *sorted(folder.glob(f"*/{MANIFEST}"))):
        try:
            if path.is_file():
                found[digest(path.read_bytes()).hex()] = path.parent
        except OSError as error:
            raise ResourceError(f"data={folder}: cannot read {path}: {error.strerror}") from None
    wanted = [part.digest for part in run.data.sets]
    if not found:
        raise ConfigError(f"data={node.data}: there is no {MANIFEST} in it; give the folder of the run's data set")
    if not found.keys() & set(wanted):
        raise ConfigError(
            f"data={node.data} holds the data set with the digest {', '.join(found)}, and the run's is "
            f"{', '.join(wanted)}: give the folder of the run's own, or none, to have it fetched"
        )
    return found


def _manifest(part: DataSetConfig, store: Store, cache: BlockCache, tell: Callable[[str], None]) -> Manifest:
    """The data set's manifest, which is fetched once. Raises `ConfigError` for another one, `ResourceError` where
    the store refuses it."""
    key, delay = bytes.fromhex(part.digest), FIRST_DELAY
    if (kept := cache.read(key)) is not None:
        return Manifest.decode(kept, part.digest)
    while True:
        try:
            data = store.read_whole(MANIFEST, MAX_MANIFEST_BYTES)
            break
        except StoreRefused as error:
            raise ResourceError(
                f"this node does not get the run's data set: {error}; see that it may read it (for s3:// and "
                "hf:// its keys are in the environment), or give a folder that has it, data=FOLDER"
            ) from None
        except StoreError as error:
            tell(public(f"cannot fetch the run's data set, and tries again: {error}", store))
        time.sleep(delay)
        delay = min(2 * delay, MAX_OPENING_DELAY)
    manifest = Manifest.decode(data, part.digest)
    if not store.is_local:
        cache.write(key, data)
    return manifest


def check_one_tokenizer(manifests: Sequence[Manifest]) -> None:
    """Raise `ConfigError` where the same token means something else in two data sets of a mixture."""
    first = manifests[0]
    for other in manifests[1:]:
        for key, one, two in (
            ("tokenizers", first.tokenizer, other.tokenizer),
            ("tokens for the end of a text", first.end_of_text, other.end_of_text),
        ):
            if one != two:
                raise ConfigError(
                    f"the data sets {first.name} and {other.name} cannot be mixed: their {key} differ ({one} and "
                    f"{two}); build both with the same tokenizer and the same --end-of-text"
                )


def check_fits(manifest: Manifest, url: str, run: RunConfig) -> None:
    """Raise `ConfigError` where the run's model cannot be trained on the data set."""
    if manifest.vocab_size > run.model.vocab_size:
        raise ConfigError(
            f"the data set {manifest.name} at {url} has tokens up to {manifest.vocab_size - 1}, and "
            f"model.vocab_size is {run.model.vocab_size}: the run needs model.vocab_size={manifest.vocab_size} or "
            "more, or a data set of another tokenizer"
        )
    if run.model.seq_len > manifest.block_tokens:
        raise ConfigError(
            f"the data set {manifest.name} at {url} has blocks of {manifest.block_tokens} tokens, and "
            f"model.seq_len is {run.model.seq_len}: build it with larger ones (`atoll data build "
            "--block-tokens`), or train on shorter samples"
        )
