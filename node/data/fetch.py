"""Fetches blocks of data sets ahead of the samples that need them, in threads of a trainer's process.

Whoever reads samples says which follow (`expect`) and asks for their blocks (`block`). Threads walk along what is
expected, a bounded way ahead of what was asked for, and bring what is not on this machine: each range once a
machine, within the node's `download=`, and checked against the manifest before anybody sees it.

    wanted ---> in memory                                          asked for: at once
           ---> on disk (`BlockCache`)                             asked for: read and checked
           ---> from the store, tried again for ever               asked for: waits, and that is the data wait
                other bytes than the manifest's, `DAMAGE_TRIES`    the block is left out, counted and named
                times

A block's digest comes from its shard's list of digests, which is fetched and checked in the same way. A list that
is not the manifest's is asked for again for ever, since no block of the shard could be told right from wrong. When
bytes differ, the store's manifest is read again: a data set that was built anew under its URL ends the trainer.
"""

import math
import random
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from atoll.comm.digest import DIGEST_SIZE, digest
from atoll.comm.errors import ConfigError
from atoll.node.data.cache import BlockCache
from atoll.node.data.manifest import (
    DIGESTS_SUFFIX,
    MANIFEST,
    MAX_MANIFEST_BYTES,
    TOKENS_SUFFIX,
    Block,
    Manifest,
)
from atoll.node.data.store import CutShort, Store, StoreError, StoreRefused, public

THREADS = 8  # ranges that are fetched at the same time
MEMORY_BYTES = 64 << 20  # of blocks in memory
MIN_MEMORY_BLOCKS = 4
LISTS_BYTES = 32 << 20  # of shards' lists of digests in memory, of 32 KB each by default
AHEAD_BYTES = 256 << 20  # of samples that are fetched before they are asked for
# Of the cache's bound, or of the memory: the same, where that is less. What was asked for since is as young as
# what
# is ahead, and takes as much: together they must fit, or what is ahead goes before it is asked for.
AHEAD_SHARE = 0.25
STRIDE_SHARE = 64  # of what is fetched ahead: so far the asker goes before the threads look again
DAMAGE_TRIES = 4
FIRST_DELAY, MAX_DELAY = 0.5, 30.0  # seconds between two tries, twice as long each time
TELLING_TRIES = 2  # after which it is told that a store does not answer
MANIFEST_SECONDS = 60.0  # between two looks at a store's manifest
WAIT_SECONDS = 1.0  # between two words of one who waits


class BlockId(NamedTuple):
    """A block of a data set."""

    part: int  # the number of the data set
    shard: int  # its number in the manifest
    number: int  # within the shard


class Damaged(StoreError):
    """The store has other bytes than the manifest."""


@dataclass(frozen=True)
class FetchedSet:
    """A data set, and the store that has its files."""

    manifest: Manifest
    store: Store
    digest: str  # of the manifest, hexadecimal


@dataclass
class Throttle:
    """Bounds the bytes a second that threads fetch."""

    rate: float  # bytes a second; 0: no bound
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _free: float = 0.0  # when the next byte may be asked for

    def wait(self, size: int) -> None:
        """Return when so many bytes may be asked for."""
        if not self.rate:
            return
        with self._lock:
            now = self.clock()
            begin = max(self._free, now)
            self._free = begin + size / self.rate
        if begin > now:
            self.sleep(begin - now)


def _decoded(fetched: FetchedSet, name: str, number: int, data: bytes) -> Block:
    """The block of these bytes. Raises `Damaged` where it has tokens that the vocabulary lacks: the model has no
    embeddings of them."""
    block, size = fetched.manifest.format.decode(data), fetched.manifest.vocab_size
    if (largest := int(block.tokens.max())) >= size:
        raise Damaged(
            f"block {number} of {fetched.store.url}/{name} has the token {largest}, and the manifest's vocab_size "
            f"is {size}"
        )
    return block


def _silent(sentence: str) -> None:
    pass


class BlockFetcher:
    """Blocks of several data sets. Any thread may ask; the fetcher's own threads end with the process, or at
    `close`."""

    def __init__(
        self,
        sets: Sequence[FetchedSet],
        cache: BlockCache,
        throttle: Throttle,
        sample_bytes: int,
        ranks: int = 1,
        threads: int = THREADS,
        memory_bytes: int = MEMORY_BYTES,
        first_delay: float = FIRST_DELAY,
    ) -> None:
        """`sample_bytes`: of the tokens of a sample; `ranks`: processes that take turns on the same blocks."""
        self.sets, self._cache, self._throttle = sets, cache, throttle
        self._sample_bytes, self._ranks, self._first_delay = sample_bytes, ranks, first_delay
        self._memory_bytes = max(memory_bytes, MIN_MEMORY_BLOCKS * max(s.manifest.format.size for s in sets))
        self._memory = OrderedDict[BlockId, Block]()
        self._used_memory = 0  # bytes of the blocks in it, as they are in the store
        self._stride = max(1, self.samples_ahead // STRIDE_SHARE)
        self._lists = OrderedDict[tuple[int, int], bytes]()  # of digests, by data set and shard
        self._lists_bytes = 0
        self._list_locks = dict[tuple[int, int], threading.Lock]()
        self._state = threading.RLock()
        self._work_there = threading.Condition(self._state)
        self._arrived = threading.Condition(self._state)
        self._answered = threading.Condition(self._state)
        self._over = False
        self._urgent, self._under_way, self._planned = set[BlockId](), set[BlockId](), set[BlockId]()
        self._plan: Iterator[BlockId] = iter(())
        self._walked = self._asked = 0  # samples of the plan: seen by the threads; asked for
        self._troubles = dict[int, str]()  # by data set
        self._wrong_lists = dict[tuple[int, str], str]()  # why lists of digests are not had, by data set and file
        self._manifest_looks = dict[int, float]()  # when a data set's manifest was last read again
        self.damaged = dict[BlockId, str]()  # what is left out, and why
        self.tell: Callable[[str], None] = _silent  # takes sentences for the log
        self.waiting: Callable[[], None] | None = None  # called each `WAIT_SECONDS` by who waits for a block
        self._broken: Exception | None = None  # what has ended a thread
        # The first has time for who waits, though all others wait for a store that does not answer.
        self._threads = [
            threading.Thread(target=self._work, args=(number == 0,), name="fetch", daemon=True)
            for number in range(threads + 1)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def trouble(self) -> str:
        """What keeps blocks from coming, or from being kept, in words that others may read; empty: nothing."""
        with self._state:
            count = len(self.damaged)
            left_out = f"blocks of the run's data that are damaged, and left out: {count}" if count else ""
            found = *self._troubles.values(), *islice(self._wrong_lists.values(), 1), left_out, self._cache.trouble
            return "; ".join(filter(None, found))

    @property
    def samples_ahead(self) -> int:
        """Samples that may be fetched before they are asked for."""
        in_memory = AHEAD_SHARE * self._memory_bytes
        on_disk = 0.0 if self._cache.trouble else min(AHEAD_BYTES, AHEAD_SHARE * self._cache.limit)
        size = max(in_memory, on_disk)
        return max(1, int(size) // (self._sample_bytes * self._ranks))

    def expect(self, blocks: Iterator[BlockId]) -> None:
        """Fetch from now on the blocks of the samples that follow, one for each, in their order. The iterator is
        the fetcher's from then on."""
        with self._state:
            self._plan, self._walked, self._asked = blocks, 0, 0
            self._planned.clear()
            self._work_there.notify_all()

    def request(self, blocks: Iterable[BlockId]) -> None:
        """Fetch these blocks now, several at the same time: who asks for them one by one waits less."""
        with self._state:
            self._urgent |= {wanted for wanted in blocks if not self._is_settled(wanted)}
            self._work_there.notify_all()

    def block(self, wanted: BlockId, expected: bool = True) -> Block | None:
        """A block; waits until it is there. None: it is damaged wherever it is to be had. `expected`: it is of the
        next of the samples that were expected."""
        with self._state:
            self._asked += expected
            if expected and self._asked % self._stride == 0:
                self._work_there.notify_all()
            while (found := self._memory.get(wanted)) is None and wanted not in self.damaged:
                if self._broken is not None:
                    raise self._broken
                if wanted not in self._under_way:
                    self._urgent.add(wanted)
                    self._work_there.notify()
                if not self._arrived.wait(WAIT_SECONDS) and self.waiting is not None:
                    self._state.release()
                    try:
                        self.waiting()
                    finally:
                        self._state.acquire()
            if found is not None:
                self._memory.move_to_end(wanted)
            return found

    def close(self) -> None:
        """End the threads, and wait for what they are fetching."""
        with self._state:
            self._over = True
            self._work_there.notify_all()
            self._answered.notify_all()
        for thread in self._threads:
            thread.join()

    # The threads

    def _work(self, urgent_only: bool) -> None:
        while (task := self._next(urgent_only)) is not None:
            wanted, urgent = task
            try:
                self._bring(wanted, urgent)
            except Exception as error:  # a fault of ours, raised where it is seen
                self._broken = error
            finally:
                with self._state:
                    self._under_way.discard(wanted)
                    self._arrived.notify_all()

    def _next(self, urgent_only: bool) -> tuple[BlockId, bool] | None:
        """The next block to bring, and whether somebody waits for it; None: it is over."""
        with self._state:
            while not self._over:
                if self._urgent:
                    wanted = self._urgent.pop()
                    self._under_way.add(wanted)
                    return wanted, True
                ahead = self._walked - self._asked
                if not urgent_only and ahead < self.samples_ahead and (following := next(self._plan, None)):
                    self._walked += 1
                    if following not in self._planned and not self._is_settled(following):
                        self._planned.add(following)
                        self._under_way.add(following)
                        return following, False
                    continue
                self._work_there.wait()
            return None

    def _is_settled(self, wanted: BlockId) -> bool:
        """Whether nothing is to be done for the block now."""
        return wanted in self._memory or wanted in self._under_way or wanted in self.damaged

    def _bring(self, wanted: BlockId, urgent: bool) -> None:
        """Have the block on this machine; in memory, if it was not on the disk or somebody waits for it."""
        fetched = self.sets[wanted.part]
        size = fetched.manifest.format.size
        if fetched.store.is_local and not urgent:
            return
        try:
            key = self._block_digest(wanted)
            if not urgent and self._cache.holds(key):
                return
            name = fetched.manifest.shards[wanted.shard].name + TOKENS_SUFFIX
            data = self._obtain(wanted.part, name, wanted.number * size, size, key)
            block = None if data is None else _decoded(fetched, name, wanted.number, data)
        except Damaged as error:
            self._leave_out(wanted, str(error))
            return
        if block is not None:
            self._keep(wanted, block, size)

    def _block_digest(self, wanted: BlockId) -> bytes:
        """The digest of a block, of the list of its shard. Raises `Damaged`."""
        place = wanted.part, wanted.shard
        with self._state:
            lock = self._list_locks.setdefault(place, threading.Lock())
        with lock:  # one thread fetches it
            if (found := self._lists.get(place)) is None:
                shard = self.sets[wanted.part].manifest.shards[wanted.shard]
                name, size = shard.name + DIGESTS_SUFFIX, shard.blocks * DIGEST_SIZE
                found = self._obtain(wanted.part, name, 0, size, bytes.fromhex(shard.digest), required=True)
                if found is None:
                    raise Damaged("the process ends")
                self._keep_list(place, found)
        return found[wanted.number * DIGEST_SIZE :][:DIGEST_SIZE]

    def _obtain(
        self, part: int, name: str, start: int, size: int, key: bytes, required: bool = False
    ) -> bytes | None:
        """The bytes of a range of a file, with this digest: from the disk or the store. `required`: asked for
        until they are right. None: the fetcher was closed before. Raises `Damaged`, and `ConfigError` where the
        store has another data set by now."""
        tries = damaged = 0
        while True:
            try:
                data = self._fetch_once(part, name, start, size, key)
                self._recovered(part, name)
                return data
            except (Damaged, CutShort) as error:
                damaged += 1
                self._check_manifest(part)
                if required:
                    self._wrong_list(part, name, f"cannot use the run's data, and tries again: {error}")
                elif damaged >= DAMAGE_TRIES:
                    raise Damaged(str(error)) from None
            except StoreError as error:
                tries += 1
                if tries >= TELLING_TRIES or isinstance(error, StoreRefused):
                    self._troubled(part, f"cannot fetch the run's data, and tries again: {error}")
            if not self._pause(tries + damaged):
                return None

    def _fetch_once(self, part: int, name: str, start: int, size: int, key: bytes) -> bytes:
        """The bytes, of the disk, or fetched while no other process of this machine does so. Raises
        `StoreError`."""
        if self.sets[part].store.is_local:
            return self._fetch(part, name, start, size, key)
        with self._cache.claimed(key):
            if (data := self._cache.read(key)) is None:
                data = self._fetch(part, name, start, size, key)
                self._cache.write(key, data)
            return data

    def _fetch(self, part: int, name: str, start: int, size: int, key: bytes) -> bytes:
        store = self.sets[part].store
        if not store.is_local:
            self._throttle.wait(size)
        data = store.read(name, start, size)
        if digest(data) != key:
            raise Damaged(f"bytes {start} to {start + size} of {store.url}/{name} are not those of the data set")
        return data

    def _check_manifest(self, part: int) -> None:
        """Raise `ConfigError` where the store has another manifest than the run; a page of a server that is out of
        order is none."""
        with self._state:
            now, fetched = time.monotonic(), self.sets[part]
            if now < self._manifest_looks.get(part, -math.inf) + MANIFEST_SECONDS:
                return
            self._manifest_looks[part] = now
        try:
            data = fetched.store.read_whole(MANIFEST, MAX_MANIFEST_BYTES)
            found = digest(data).hex()
            Manifest.decode(data)
        except (StoreError, ConfigError):
            return
        if found != fetched.digest:
            raise ConfigError(
                f"the run's data set {fetched.manifest.name} was built anew: its {MANIFEST} has "
                f"the digest {found}, and the run's is {fetched.digest}; put the run's own back, or give its "
                "folder on this machine, data=FOLDER"
            )

    def _pause(self, tries: int) -> bool:
        """Wait between two tries, longer each time, not at the same time as others; False: the fetcher is
        closed."""
        delay = min(MAX_DELAY, self._first_delay * 2.0 ** min(tries - 1, 16)) * random.uniform(0.5, 1.0)
        with self._state:
            if not self._over:
                self._answered.wait(delay)  # or until another was answered
            return not self._over

    def _keep(self, wanted: BlockId, block: Block, size: int) -> None:
        with self._state:
            if wanted not in self._memory:
                self._used_memory += size
            self._memory[wanted] = block
            self._memory.move_to_end(wanted)
            while self._used_memory > self._memory_bytes:
                gone, _ = self._memory.popitem(last=False)
                self._used_memory -= self.sets[gone.part].manifest.format.size
            self._arrived.notify_all()

    def _keep_list(self, place: tuple[int, int], digests: bytes) -> None:
        """Keep a shard's list of digests, in the place of those that came first where they are too many."""
        with self._state:
            self._lists[place] = digests
            self._lists_bytes += len(digests)
            while self._lists_bytes > LISTS_BYTES and len(self._lists) > 1:
                _, gone = self._lists.popitem(last=False)
                self._lists_bytes -= len(gone)

    def _leave_out(self, wanted: BlockId, reason: str) -> None:
        with self._state:
            if self._over:
                return
            self.damaged[wanted] = reason
            count = len(self.damaged)
        self.tell(f"{reason}: nothing of that block is learned; blocks left out since the start: {count}")

    def _troubled(self, part: int, sentence: str) -> None:
        with self._state:
            known = self._troubles.get(part)
            self._troubles[part] = public(sentence, self.sets[part].store)
        if known is None:
            self.tell(sentence)

    def _wrong_list(self, part: int, name: str, sentence: str) -> None:
        with self._state:
            known = self._wrong_lists.get((part, name))
            self._wrong_lists[part, name] = public(sentence, self.sets[part].store)
        if known is None:
            self.tell(sentence)

    def _recovered(self, part: int, name: str) -> None:
        with self._state:
            gone = self._wrong_lists.pop((part, name), None)
            gone = self._troubles.pop(part, None) or gone
            if gone is not None:
                self._answered.notify_all()
        if gone is not None:
            self.tell(f"fetches the run's data again from {self.sets[part].store.url}")
