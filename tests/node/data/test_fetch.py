"""Fetching ahead: bounded, once a machine, within a rate; checked, tried again, left out where it is damaged."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from data_sets import WebServer, document_tokens, web_server, write_data_set

from atoll.comm.digest import digest
from atoll.comm.errors import ConfigError
from atoll.node.data import fetch
from atoll.node.data.cache import BlockCache
from atoll.node.data.fetch import DAMAGE_TRIES, BlockFetcher, BlockId, FetchedSet, Throttle
from atoll.node.data.manifest import MANIFEST, Manifest
from atoll.node.data.store import open_store

DEADLINE = 30.0  # seconds


@dataclass
class Fetchers:
    """Fetchers of one data set on a web server, and what they told."""

    web: WebServer
    cache: BlockCache
    told: list[str] = field(default_factory=list)
    made: list[BlockFetcher] = field(default_factory=list)

    @property
    def manifest(self) -> Manifest:
        return Manifest.decode((self.web.folder / MANIFEST).read_bytes())

    def make(
        self, throttle: Throttle | None = None, memory: int = 1 << 20, sample_bytes: int = 32
    ) -> BlockFetcher:
        expected = digest((self.web.folder / MANIFEST).read_bytes()).hex()
        sets = [FetchedSet(self.manifest, open_store(self.web.url, files=False), expected)]
        limit = Throttle(0) if throttle is None else throttle
        fetcher = BlockFetcher(sets, self.cache, limit, 32, memory_bytes=memory, first_delay=0.02)
        fetcher.tell = self.told.append
        self.made.append(fetcher)
        return fetcher


@pytest.fixture
def fetchers(tmp_path: Path) -> Iterator[Fetchers]:
    write_data_set(tmp_path / "set", train=4000, validation=300)
    with web_server(tmp_path / "set") as web:
        found = Fetchers(web, BlockCache(tmp_path / "cache", 1 << 20))
        yield found
        for fetcher in found.made:
            fetcher.close()


def until(condition: Callable[[], bool]) -> None:
    """Wait until it holds, by which no test's outcome is decided but a failure."""
    deadline = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def blocks(fetchers: Fetchers) -> list[BlockId]:
    shards = enumerate(fetchers.manifest.shards)
    return [BlockId(0, number, k) for number, shard in shards for k in range(shard.blocks)]


def bytes_of(fetchers: Fetchers, wanted: BlockId) -> bytes:
    layout, shard = fetchers.manifest.format, fetchers.manifest.shards[wanted.shard]
    data = (fetchers.web.folder / f"{shard.name}.tokens").read_bytes()
    return data[wanted.number * layout.size :][: layout.size]


def test_blocks_are_those_of_the_data_set_and_each_is_fetched_once(fetchers: Fetchers) -> None:
    wanted, layout = blocks(fetchers), fetchers.manifest.format
    for _ in range(2):
        fetcher = fetchers.make()
        for one in wanted:
            found, right = fetcher.block(one), layout.decode(bytes_of(fetchers, one))
            assert found is not None
            assert (found.tokens == right.tokens).all() and (found.begins == right.begins).all()
    lists = 16 * len(wanted)
    assert fetchers.web.total == len(wanted) * layout.size + lists
    assert len(fetchers.web.requests) == len(set(fetchers.web.requests))


def test_lists_of_digests_take_bounded_memory_however_long_they_are(
    fetchers: Fetchers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "LISTS_BYTES", 300)  # two of 8 digests, of 16 bytes each
    fetcher = fetchers.make()
    for one in blocks(fetchers):
        assert fetcher.block(one) is not None
        assert 0 < sum(map(len, fetcher._lists.values())) <= 300
    assert len(fetchers.web.requests) == len(set(fetchers.web.requests))


def test_two_ranks_of_a_machine_fetch_each_block_once(fetchers: Fetchers) -> None:
    wanted, ranks = blocks(fetchers), [fetchers.make(), fetchers.make()]
    for rank in ranks:
        rank.expect(iter(wanted))
    threads = [threading.Thread(target=lambda r=rank: [r.block(one) for one in wanted]) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE)
    assert len(fetchers.web.requests) == len(set(fetchers.web.requests))
    assert len(fetchers.web.requests) == len(wanted) + len(fetchers.manifest.shards)


def test_what_is_expected_is_fetched_before_it_is_asked_for_and_no_more_than_the_bound(fetchers: Fetchers) -> None:
    wanted = [one for one in blocks(fetchers) for _ in range(4)]  # four samples of each block
    fetchers.cache.limit = 1  # nothing fits: what is ahead is in memory
    fetcher = fetchers.make(memory=20 * fetchers.manifest.format.size)
    taken, ahead = list[BlockId](), fetcher.samples_ahead
    assert ahead == 5 * fetchers.manifest.format.size // 32

    def walked() -> Iterator[BlockId]:
        for one in wanted:
            taken.append(one)
            yield one

    fetcher.expect(walked())
    assert ahead + 20 < len(wanted)
    until(lambda: len(taken) == ahead)
    until(lambda: not fetcher._under_way)
    requests = len(fetchers.web.requests)
    assert fetcher.block(wanted[0]) is not None and len(fetchers.web.requests) == requests
    for one in wanted[1:20]:
        fetcher.block(one)
    until(lambda: len(taken) > ahead + 10)
    assert len(taken) <= ahead + 20


def test_blocks_that_are_requested_together_are_fetched_before_they_are_asked_for(fetchers: Fetchers) -> None:
    wanted, fetcher = blocks(fetchers)[:20], fetchers.make()
    fetcher.request(wanted)
    until(lambda: all(one in fetcher._memory for one in wanted))
    fetcher.request(wanted)
    assert not fetcher._urgent and len(set(fetchers.web.requests)) == len(fetchers.web.requests)


def test_another_lease_takes_the_place_of_what_was_expected(fetchers: Fetchers) -> None:
    wanted, fetcher = blocks(fetchers), fetchers.make()
    fetcher.expect(iter(wanted[:3]))
    fetcher.expect(iter(wanted[30:33]))
    until(
        lambda: (
            {("train-00003.tokens", f"bytes={k * 136}-{k * 136 + 135}") for k in (6, 7)}
            <= set(fetchers.web.requests)
        )
    )


def test_a_damaged_block_is_asked_for_again_left_out_counted_and_named(fetchers: Fetchers) -> None:
    path, size = fetchers.web.folder / "train-00001.tokens", fetchers.manifest.format.size
    data = bytearray(path.read_bytes())
    data[2 * size + 5] ^= 1
    path.write_bytes(data)
    fetcher = fetchers.make()
    assert fetcher.block(BlockId(0, 1, 2)) is None and fetcher.block(BlockId(0, 1, 2)) is None
    assert fetcher.block(BlockId(0, 1, 3)) is not None
    assert fetchers.web.requests.count(("train-00001.tokens", f"bytes={2 * size}-{3 * size - 1}")) == 4
    (said,) = fetchers.told
    assert f"bytes {2 * size} to {3 * size} of {fetchers.web.url}/train-00001.tokens are not those" in said
    assert said.endswith("nothing of that block is learned; blocks left out since the start: 1")
    assert list(fetcher.damaged) == [BlockId(0, 1, 2)]
    assert fetcher.trouble == "blocks of the run's data that are damaged, and left out: 1"


def test_a_block_with_tokens_that_the_vocabulary_lacks_is_left_out(fetchers: Fetchers) -> None:
    largest = int(document_tokens(64, 256, 0).max())
    path = fetchers.web.folder / MANIFEST
    path.write_text(json.dumps(json.loads(path.read_text()) | {"vocab_size": largest}))
    fetcher = fetchers.make()
    assert fetcher.block(BlockId(0, 0, 0)) is None
    (said,) = fetchers.told
    assert f"has the token {largest}, and the manifest's vocab_size is {largest}: nothing of that block" in said


def test_a_shard_that_is_cut_short_loses_its_last_blocks(fetchers: Fetchers) -> None:
    path, size = fetchers.web.folder / "train-00001.tokens", fetchers.manifest.format.size
    path.write_bytes(path.read_bytes()[: 6 * size + 10])
    fetcher = fetchers.make()
    found = [fetcher.block(BlockId(0, 1, number)) is not None for number in range(8)]
    assert found == [True] * 6 + [False] * 2
    assert any("train-00001.tokens ends at byte" in said for said in fetchers.told)
    assert any("ends before bytes=" in said for said in fetchers.told)


def test_a_list_of_digests_that_is_another_one_leaves_no_block_out_and_is_asked_for_until_it_is_right(
    fetchers: Fetchers,
) -> None:
    path, found = fetchers.web.folder / "train-00001.digests", list[object]()
    right = path.read_bytes()
    path.write_bytes(bytes(len(right)))
    fetcher = fetchers.make()
    asking = threading.Thread(target=lambda: found.append(fetcher.block(BlockId(0, 1, 0))))
    asking.start()
    until(lambda: fetchers.web.requests.count(("train-00001.digests", "bytes=0-127")) > DAMAGE_TRIES)
    assert fetcher.block(BlockId(0, 0, 0)) is not None and not fetcher.damaged and not found
    assert "cannot use the run's data, and tries again" in fetcher.trouble
    (said,) = fetchers.told
    assert "train-00001.digests are not those of the data set" in said
    path.write_bytes(right)
    asking.join(DEADLINE)
    assert found and found[0] is not None and fetcher.trouble == ""


@pytest.mark.parametrize("own", [True, False])
def test_a_data_set_that_was_built_anew_under_its_url_ends_the_trainer(own: bool, fetchers: Fetchers) -> None:
    fetcher = fetchers.make()
    assert not own or fetcher.block(BlockId(0, 1, 0)) is not None  # whose list is here
    write_data_set(fetchers.web.folder, train=4000, validation=300, seed=1)
    with pytest.raises(ConfigError, match=r"the run's data set made was built anew: its manifest.json has"):
        fetcher.block(BlockId(0, 1, 2))
    assert not fetcher.damaged


def test_an_answer_that_ends_half_way_is_asked_for_again(fetchers: Fetchers) -> None:
    fetchers.web.cut_answers = 3
    fetcher = fetchers.make()
    assert all(fetcher.block(one) is not None for one in blocks(fetchers)[:4])
    assert not fetcher.damaged and fetcher.trouble == ""


@pytest.mark.long
@pytest.mark.parametrize("status", [503, 403])
def test_a_store_that_does_not_answer_is_told_and_asked_until_it_does(status: int, fetchers: Fetchers) -> None:
    fetchers.web.status = status
    fetcher, waits = fetchers.make(), list[str]()
    waiting = threading.Event()

    def wait() -> None:
        waits.append(fetcher.trouble)
        waiting.set()

    fetcher.waiting = wait
    found = list[object]()
    asking = threading.Thread(target=lambda: found.append(fetcher.block(BlockId(0, 0, 0))))
    asking.start()
    assert waiting.wait(DEADLINE)
    assert f"cannot fetch the run's data, and tries again: {fetchers.web.url}" in waits[-1]
    assert f"the server says {status}" in fetcher.trouble
    fetchers.web.status = 0
    asking.join(DEADLINE)
    assert found[0] is not None and fetcher.trouble == "" and not fetcher.damaged
    assert [said.partition(":")[0] for said in fetchers.told] == [
        "cannot fetch the run's data, and tries again",
        "fetches the run's data again from http",
    ]


@pytest.mark.parametrize("kind", ["http", "folder", "file"])
def test_the_trouble_that_others_read_has_no_folder_and_no_query_and_the_log_has(
    kind: str, fetchers: Fetchers
) -> None:
    folder, digested = fetchers.web.folder, digest((fetchers.web.folder / MANIFEST).read_bytes()).hex()
    private = "?signature=secret" if kind == "http" else str(folder)
    url = {"http": f"{fetchers.web.url}{private}", "folder": str(folder), "file": f"file://{folder}"}[kind]
    wrong, gone = folder / "train-00000.digests", folder / "train-00001.digests"
    wrong.write_bytes(bytes(len(wrong.read_bytes())))
    gone.unlink()
    sets = [FetchedSet(fetchers.manifest, open_store(url, files=True), digested)]
    fetcher = BlockFetcher(sets, fetchers.cache, Throttle(0), 32, first_delay=0.02)
    fetcher.tell = fetchers.told.append
    fetchers.made.append(fetcher)
    fetcher.request([BlockId(0, 0, 0), BlockId(0, 1, 0)])
    until(lambda: len(fetchers.told) == 2)
    assert all(private in said for said in fetchers.told)
    assert private not in fetcher.trouble and "secret" not in fetcher.trouble
    assert all(f"{name}.digests" in fetcher.trouble for name in ("train-00000", "train-00001"))


@pytest.mark.long
def test_while_the_store_is_away_nobody_waits_for_what_is_here(fetchers: Fetchers) -> None:
    wanted, fetcher = blocks(fetchers), fetchers.make()
    fetcher.expect(iter(wanted))
    until(lambda: len(fetchers.web.requests) == len(wanted) + len(fetchers.manifest.shards))
    until(lambda: not fetcher._under_way)
    fetchers.web.status = 503
    again = fetchers.make()  # started anew: only the disk has them
    for rank in (fetcher, again):
        assert all(rank.block(one) is not None for one in wanted)


def test_a_block_on_the_disk_waits_for_none_of_those_that_the_store_does_not_give(fetchers: Fetchers) -> None:
    wanted, fetcher = blocks(fetchers), fetchers.make()
    assert fetcher.block(wanted[0]) is not None
    fetchers.web.status = 503
    again = fetchers.make()
    again.expect(iter(wanted[1:]))
    until(lambda: len(again._under_way) == len(again._threads) - 1)
    found = list[object]()
    asking = threading.Thread(target=lambda: found.append(again.block(wanted[0])))
    asking.start()
    asking.join(DEADLINE)
    assert found and found[0] is not None
    fetchers.web.status = 0


def test_a_fault_in_a_thread_is_raised_where_a_block_is_asked_for(
    fetchers: Fetchers, monkeypatch: pytest.MonkeyPatch
) -> None:
    def faulty(self: object, wanted: BlockId, urgent: bool) -> None:
        raise RuntimeError("out of tune")

    monkeypatch.setattr(BlockFetcher, "_bring", faulty)
    with pytest.raises(RuntimeError, match="out of tune"):
        fetchers.make().block(BlockId(0, 0, 0))


def test_a_full_disk_is_told_and_training_goes_on(fetchers: Fetchers, tmp_path: Path) -> None:
    fetchers.cache = BlockCache(tmp_path / "full", 1 << 20, room=lambda folder: 0)
    fetcher = fetchers.make()
    assert all(fetcher.block(one) is not None for one in blocks(fetchers))
    assert "the disk has 0.0 MB left" in fetcher.trouble


def test_a_rate_is_kept_over_threads() -> None:
    now, slept = [0.0], list[float]()
    throttle = Throttle(1000.0, clock=lambda: now[0], sleep=slept.append)
    for _ in range(5):
        throttle.wait(500)
    assert slept == [0.5, 1.0, 1.5, 2.0]
    now[0] = 100.0
    throttle.wait(500)
    assert len(slept) == 4  # what was not used is not saved up, nor owed
    throttle.wait(500)
    assert slept[4:] == [0.5]


def test_fetching_takes_as_long_as_the_rate_says(fetchers: Fetchers) -> None:
    slept = list[float]()
    fetcher = fetchers.make(Throttle(1e6, clock=lambda: 0.0, sleep=slept.append))
    for one in blocks(fetchers):
        fetcher.block(one)
    assert max(slept) == pytest.approx(fetchers.web.total / 1e6, rel=0.05)
