"""Blocks on disk: within the bound whatever happens, and never other bytes than those that were put there."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest

from atoll.comm.digest import digest
from atoll.node.data.cache import PAGE_BYTES, BlockCache

SIZE = 3 * PAGE_BYTES  # of a block


def block(number: int) -> bytes:
    return Random(number).randbytes(SIZE)


def key(number: int) -> bytes:
    return digest(block(number))


def on_disk(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and path.name != "size")


def filled(folder: Path, blocks: int, limit: int) -> BlockCache:
    cache = BlockCache(folder, limit * SIZE)
    for number in range(blocks):
        cache.write(key(number), block(number))
        os.utime(folder / key(number).hex()[:2] / key(number).hex(), (number, number))
    return cache


def test_what_is_put_there_is_what_is_found(tmp_path: Path) -> None:
    cache = filled(tmp_path, 3, 10)
    assert [cache.read(key(n)) for n in range(3)] == [block(n) for n in range(3)]
    assert cache.read(key(7)) is None and not cache.holds(key(7)) and cache.holds(key(1))
    again = BlockCache(tmp_path, 10 * SIZE)
    assert again.read(key(2)) == block(2)


def test_a_cache_of_20_caches_data_is_never_more_than_its_bound(tmp_path: Path) -> None:
    cache = BlockCache(tmp_path, 10 * SIZE)
    for number in range(200):
        cache.write(key(number), block(number))
        assert on_disk(tmp_path) <= 10 * SIZE
        assert cache.read(key(number)) == block(number)
    assert on_disk(tmp_path) >= 8 * SIZE


def test_what_nobody_asked_for_the_longest_goes_first(tmp_path: Path) -> None:
    cache = filled(tmp_path, 10, 10)
    for number in (0, 3, 5):
        assert cache.read(key(number)) is not None
    assert cache.holds(key(6))
    cache.write(key(10), block(10))
    assert [n for n in range(11) if cache.holds(key(n))] == [0, 2, 3, 4, 5, 6, 7, 8, 9, 10]


def test_damage_on_the_disk_is_found_and_removed(tmp_path: Path) -> None:
    cache = filled(tmp_path, 2, 10)
    path = tmp_path / key(0).hex()[:2] / key(0).hex()
    path.write_bytes(block(0)[:-1] + b"x")
    assert cache.read(key(0)) is None and not path.exists()
    cache.write(key(0), block(0))
    assert cache.read(key(0)) == block(0)


def test_nothing_is_kept_in_a_cache_of_0(tmp_path: Path) -> None:
    cache = BlockCache(tmp_path / "blocks", 0)
    with cache.claimed(key(0)):
        cache.write(key(0), block(0))
    assert cache.read(key(0)) is None and not (tmp_path / "blocks").exists()


def test_a_full_disk_is_said_and_costs_nothing_else(tmp_path: Path) -> None:
    free = 0
    cache = BlockCache(tmp_path, 10 * SIZE, room=lambda folder: free)
    cache.write(key(0), block(0))
    assert cache.read(key(0)) is None and on_disk(tmp_path) == 0
    assert "cannot keep data on the disk" in cache.trouble and str(tmp_path) not in cache.trouble
    assert "the disk has 0.0 MB left" in cache.trouble
    free = 2 * SIZE
    cache.write(key(0), block(0))
    assert cache.read(key(0)) == block(0) and cache.trouble == ""


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    cache = BlockCache(tmp_path / "file" / "blocks", 10 * SIZE)
    with cache.claimed(key(0)):
        cache.write(key(0), block(0))
    assert cache.read(key(0)) is None and "Not a directory" in cache.trouble


WRITER = """
import sys
from pathlib import Path
from random import Random
from atoll.comm.digest import digest
from atoll.node.data.cache import BlockCache

cache, first = BlockCache(Path(sys.argv[1]), int(sys.argv[2])), int(sys.argv[3])
print("begun", flush=True)
for number in range(first, first + int(sys.argv[4])):
    data = Random(number).randbytes(12288)
    cache.write(digest(data), data)
    assert not cache.trouble, cache.trouble
"""


def writers(folder: Path, limit: int, count: int) -> list[subprocess.Popen[bytes]]:
    begun = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, str(folder), str(limit), str(1000 * number), str(count)],
            stdout=subprocess.PIPE,
        )
        for number in range(3)
    ]
    for process in begun:
        assert process.stdout is not None and process.stdout.readline() == b"begun\n"
    return begun


def test_several_processes_share_a_cache_and_its_bound(tmp_path: Path) -> None:
    limit = 20 * SIZE
    processes = writers(tmp_path, limit, 150)
    while any(process.poll() is None for process in processes):
        seen = 0
        for path in tmp_path.glob("[0-9a-f][0-9a-f]/*"):
            try:
                seen += path.stat().st_size
            except FileNotFoundError:
                continue
        # A look is no moment: what went while it was counted may be counted with what came for it.
        assert seen <= 2 * limit
    assert [process.wait() for process in processes] == [0, 0, 0]
    assert 0.8 * limit <= on_disk(tmp_path) <= limit
    for path in tmp_path.glob("[0-9a-f][0-9a-f]/*"):
        assert digest(path.read_bytes()).hex() == path.name


@pytest.mark.long
@pytest.mark.parametrize("seed", range(3))
def test_writers_that_are_killed_leave_a_cache_within_its_bound(seed: int, tmp_path: Path) -> None:
    limit, chance = 20 * SIZE, Random(seed)
    for _ in range(3):
        for process in writers(tmp_path, limit, 100_000):
            for _ in range(chance.randrange(1, 2000)):
                process.poll()
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
        assert on_disk(tmp_path) <= limit
    cache = BlockCache(tmp_path, limit)
    for number in range(60):
        cache.write(key(number), block(number))
        assert cache.read(key(number)) == block(number) and on_disk(tmp_path) <= limit
    assert not list(tmp_path.rglob("*.new"))
