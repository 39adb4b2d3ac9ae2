"""The order in which a run goes through a data set: a pure function of seed, epoch and index.

Each epoch visits every window of every block once. Blocks come in an order of the epoch's own, and in groups of
about equal size: the windows of a group's blocks are permuted among one another before the next group begins. A
range of indices, as a lease is one, therefore lies in few blocks, and each of them is fetched once for all its
windows. Nothing is stored but numbers: the order of a trillion tokens takes no more memory than that of a
thousand.
"""

import hashlib
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

MAX_GROUP_BLOCKS = 64
FEISTEL_ROUNDS = 4


class Window(NamedTuple):
    """A window of a slice's tokens."""

    block: int  # of the slice
    number: int  # within the block


@dataclass(frozen=True)
class WindowOrder:
    """The order of the windows of a slice."""

    key: str  # of the permutations: the run's seed, and the slice
    full_blocks: int  # with `block_windows` windows each
    block_windows: int
    last_windows: int = 0  # of one block more, the slice's last; 0: there is none

    def __len__(self) -> int:
        """Windows of an epoch."""
        return self.full_blocks * self.block_windows + self.last_windows

    def window(self, index: int) -> Window:
        """The window of sample `index`, which counts on from epoch to epoch. Precondition: there is a window."""
        epoch, position = divmod(index, len(self))
        key = f"{self.key}:{epoch}"
        groups = -(-self.full_blocks // MAX_GROUP_BLOCKS) or 1  # of as many blocks each, or one more
        place = position // self.block_windows
        group = min(((place + 1) * groups - 1) // max(1, self.full_blocks), groups - 1)
        first, behind = (number * self.full_blocks // groups for number in (group, group + 1))
        count = (behind - first) * self.block_windows + (self.last_windows if group + 1 == groups else 0)
        inside = permuted(position - first * self.block_windows, count, f"{key}:{group}")
        place, number = divmod(inside, self.block_windows)
        place += first
        if place >= self.full_blocks:  # the last one, with fewer windows, is in the last group of each epoch
            return Window(self.full_blocks, number)
        return Window(permuted(place, self.full_blocks, key), number)


def permuted(index: int, count: int, key: str) -> int:
    """The image of `index` under a bijection of range(count) that depends on `key`.

    A Feistel network over the next even number of bits, applied until it lands below `count` (cycle walking,
    Black & Rogaway 2002): a random-looking order without an array of `count` elements.
    """
    if count == 1:
        return 0
    half = (max(2, (count - 1).bit_length()) + 1) // 2
    mask = (1 << half) - 1
    keys = _round_keys(key)
    while True:
        left, right = index >> half, index & mask
        for round_key in keys:
            left, right = right, left ^ (_mix(right ^ round_key) & mask)
        index = left << half | right
        if index < count:
            return index


@lru_cache(64)
def _round_keys(key: str) -> list[int]:
    size = 8 * FEISTEL_ROUNDS
    keys: list[int] = np.frombuffer(hashlib.blake2b(key.encode(), digest_size=size).digest(), np.uint64).tolist()
    return keys


def _mix(value: int) -> int:
    """splitmix64's finaliser: every bit of the value moves every bit of the result."""
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
    value = (value ^ value >> 27) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
    return value ^ value >> 31
