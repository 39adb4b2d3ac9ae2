"""Batches that are prepared while the loop computes: the same samples in the same order, whatever the thread
does."""

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from data_sets import WebServer, web_server, write_data_set

from atoll.comm.config.data import DataConfig, DataKind
from atoll.comm.config.model import ModelConfig
from atoll.comm.config.run import RunConfig
from atoll.comm.errors import ResourceError
from atoll.node.config import NodeConfig
from atoll.node.data import fetch
from atoll.node.data.dataset import DataSetSource
from atoll.node.data.samples import Sample, one_document
from atoll.node.data.source import open_source
from atoll.node.participant.batches import RunTokens, Share, collated
from atoll.node.participant.prefetch import BATCHES_AHEAD, BatchPrefetcher
from atoll.node.participant.rank_group import RankGroup

CPU, ALONE = torch.device("cpu"), RankGroup(0, 1)
SIZE = 4  # samples of a batch
DEADLINE = 30.0  # seconds


def until(condition: Callable[[], bool]) -> None:
    """Wait until it holds, by which no test's outcome is decided but a failure."""
    deadline = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@dataclass
class Numbers:
    """A source whose sample i is made of i; it may wait before a sample, or fail at one."""

    made: list[int] = field(default_factory=list)
    threads: set[int] = field(default_factory=set)
    gate: Callable[[int], object] = lambda index: None
    missing: int = -1

    def train(self, index: int) -> Sample:
        self.gate(index)
        self.threads.add(threading.get_ident())
        self.made.append(index)
        if index == self.missing:
            raise ResourceError(f"sample {index} cannot be read")
        return one_document(np.arange(index, index + 4))

    def validation(self, index: int) -> Sample:
        raise AssertionError

    def expect(self, indices: Iterator[int]) -> None:
        pass


@pytest.fixture
def made() -> Iterator[Callable[..., BatchPrefetcher]]:
    """Makes prefetchers, which are closed at the end."""
    prefetchers = list[BatchPrefetcher]()

    def make(source: Any, **more: Any) -> BatchPrefetcher:
        prefetchers.append(BatchPrefetcher(RunTokens(source), ALONE, more.pop("share", Share(0, 1)), CPU, **more))
        return prefetchers[-1]

    yield make
    for prefetcher in prefetchers:
        prefetcher.close()


def lease(first: int, count: int) -> Callable[[], Iterator[list[int]]]:
    """So many batches of `SIZE` samples, from sample `first` on."""
    return lambda: (list(range(at, at + SIZE)) for at in range(first, first + SIZE * count, SIZE))


def assert_is_of(batch: Any, indices: list[int]) -> None:
    right = collated([RunTokens(Numbers())[index] for index in indices])
    assert batch.keys() == right.keys() and all(torch.equal(batch[name], right[name]) for name in right)


def test_a_batch_is_that_of_the_samples_asked_for_whatever_was_expected(
    made: Callable[..., BatchPrefetcher],
) -> None:
    source, rng = Numbers(), np.random.default_rng(0)
    prefetcher = made(source)
    for _ in range(60):
        first, count = (int(number) for number in rng.integers(0, 20, 2))
        prefetcher.expect(lease(first, count))
        for indices in [*lease(first, count)()][: int(rng.integers(0, 20))]:
            assert_is_of(prefetcher.take(indices), indices)
        if rng.random() < 0.5:  # not what was expected, and what follows on it neither
            for other in lease(int(rng.integers(0, 50)), 2)():
                assert_is_of(prefetcher.take(other), other)


def test_each_rank_prepares_its_share(made: Callable[..., BatchPrefetcher]) -> None:
    source = Numbers()
    prefetcher = made(source, share=Share(1, 2))
    prefetcher.expect(lease(0, 2))
    assert_is_of(prefetcher.take([2, 3]), [2, 3])
    assert_is_of(prefetcher.take([6, 7]), [6, 7])
    assert source.made == [2, 3, 6, 7]


def test_a_slow_source_is_hidden_behind_compute_and_no_more_is_made_than_the_bound(
    made: Callable[..., BatchPrefetcher],
) -> None:
    """Each sample waits for the loop to compute; a loop that prepares its own batches would wait for ever."""
    computed, waits = threading.Semaphore(0), list[str]()
    source = Numbers(gate=lambda index: computed.acquire(timeout=DEADLINE))
    prefetcher = made(source, waiting=waits.append)
    prefetcher.expect(lease(0, 10))
    for number, indices in enumerate(lease(0, 10)()):
        computed.release(SIZE)  # the step before
        until(lambda: not prefetcher.is_behind)
        assert source.made == list(range(SIZE * (number + 1)))
        assert_is_of(prefetcher.take(indices), indices)
    assert not waits and threading.get_ident() not in source.threads
    computed.release(SIZE * 20)
    prefetcher.expect(lease(100, 20))
    until(lambda: len(prefetcher._ready) == BATCHES_AHEAD)
    assert source.made[SIZE * 10 :] == list(range(100, 100 + SIZE * BATCHES_AHEAD))


def test_what_was_expected_before_is_given_up_in_the_midst_of_a_batch(
    made: Callable[..., BatchPrefetcher],
) -> None:
    reached, onward = threading.Event(), threading.Event()

    def gate(index: int) -> None:
        if index == 5:
            reached.set()
            assert onward.wait(DEADLINE)

    source = Numbers(gate=gate)
    prefetcher = made(source)
    prefetcher.expect(lease(0, 10))
    assert reached.wait(DEADLINE)
    prefetcher.expect(lease(40, 3))
    onward.set()
    for indices in lease(40, 3)():
        assert_is_of(prefetcher.take(indices), indices)
    assert source.made == [0, 1, 2, 3, 4, 5, *range(40, 52)]


def test_an_error_is_raised_in_the_loop_when_it_comes_to_that_batch(made: Callable[..., BatchPrefetcher]) -> None:
    source = Numbers(missing=9)
    prefetcher = made(source)
    prefetcher.expect(lease(0, 5))
    until(lambda: 9 in source.made)
    first, second, third, *_ = lease(0, 5)()
    assert_is_of(prefetcher.take(first), first)
    assert_is_of(prefetcher.take(second), second)
    for _ in range(2):
        with pytest.raises(ResourceError, match="sample 9 cannot be read"):
            prefetcher.take(third)
    prefetcher.expect(lease(40, 1))
    assert_is_of(prefetcher.take([40, 41, 42, 43]), [40, 41, 42, 43])


def test_a_collation_of_the_scripts_own_is_called_in_the_loop_alone(made: Callable[..., BatchPrefetcher]) -> None:
    source = Numbers()
    prefetcher = made(source, collate=lambda samples: [int(sample["input_ids"][0]) for sample in samples])
    prefetcher.expect(lease(0, 2))
    assert [prefetcher.take(indices) for indices in lease(0, 2)()] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert source.threads == {threading.get_ident()}


def test_a_closed_one_has_no_thread_and_makes_batches_in_the_loop(made: Callable[..., BatchPrefetcher]) -> None:
    source = Numbers()
    prefetcher = made(source)
    prefetcher.expect(lease(0, 2))
    prefetcher.close()
    assert prefetcher._thread is not None and not prefetcher._thread.is_alive()
    prefetcher.expect(lease(0, 2))
    for indices in lease(0, 2)():
        assert_is_of(prefetcher.take(indices), indices)
    assert threading.get_ident() in source.threads


@pytest.fixture
def away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[WebServer, DataSetSource]]:
    """Samples of a web server that answers nothing any more."""
    monkeypatch.setattr(fetch, "WAIT_SECONDS", 0.05)
    found = write_data_set(tmp_path / "set", train=4000, validation=300)
    with web_server(tmp_path / "set") as web:
        data = DataConfig(DataKind.DATASET, url=web.url, digest=found)
        run = RunConfig(model=ModelConfig(seq_len=16, vocab_size=256), data=data)
        source = open_source(run, NodeConfig(), tmp_path / "cache")
        assert isinstance(source, DataSetSource)
        web.status = 503
        yield web, source
        source.fetcher.close()


def test_who_waits_for_a_store_says_so_and_goes_on_when_it_is_back(
    away: tuple[WebServer, DataSetSource], made: Callable[..., BatchPrefetcher], monkeypatch: pytest.MonkeyPatch
) -> None:
    web, source = away
    threads = set[int]()
    monkeypatch.setattr("atoll.node.participant.prefetch.WAIT_SECONDS", 0.05)

    def wait(trouble: str) -> None:
        threads.add(threading.get_ident())
        web.status = 0 if "503" in trouble else web.status

    prefetcher = made(source, waiting=wait)
    prefetcher.expect(lease(0, 3))
    taken = [prefetcher.take(indices)["input_ids"] for indices in lease(0, 3)()]
    assert threads == {threading.get_ident()}
    assert (torch.cat(taken).numpy() == np.stack([source.train(index).input_ids for index in range(12)])).all()


def test_a_thread_that_waits_for_a_store_ends_all_the_same(
    away: tuple[WebServer, DataSetSource], made: Callable[..., BatchPrefetcher]
) -> None:
    _, source = away
    prefetcher = made(source)
    prefetcher.expect(lease(0, 3))
    until(lambda: bool(source.fetcher.trouble))
    prefetcher.close()
    assert prefetcher._thread is not None and not prefetcher._thread.is_alive()
