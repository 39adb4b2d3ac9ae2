"""The codec threads follow the node's share of the cores, unless their number is fixed."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from atoll.comm import workers as codec
from atoll.comm.cores import CoreShare

NOW = 1e6  # seconds


@pytest.fixture(autouse=True)
def shares(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """A clock that stands still, on a machine with 16 cores and one node."""
    codec.fix_threads(0)
    nodes(monkeypatch, 1, NOW)
    yield monkeypatch
    codec.fix_threads(0)


def nodes(shares: pytest.MonkeyPatch, count: int, now: float) -> None:
    shares.setattr(codec, "core_share", lambda: CoreShare(16, count))
    shares.setattr("atoll.comm.workers.time", SimpleNamespace(monotonic=lambda: now))


def size() -> int:
    pool = codec.workers()
    assert isinstance(pool, ThreadPoolExecutor)
    return pool._max_workers


def test_they_become_fewer_when_nodes_come_and_more_when_these_go(shares: pytest.MonkeyPatch) -> None:
    alone = codec.workers()
    assert size() == 8
    nodes(shares, 4, NOW + codec.RECOUNT_INTERVAL)
    assert size() == 2
    assert alone.submit(int).result() == 0  # what was asked of the earlier ones is done all the same
    nodes(shares, 1, NOW + 2 * codec.RECOUNT_INTERVAL)
    assert codec.workers() is alone


def test_the_nodes_are_counted_once_in_a_while(shares: pytest.MonkeyPatch) -> None:
    answers = iter([CoreShare(16, 1)])  # there is no second one
    shares.setattr(codec, "core_share", lambda: next(answers))
    assert {codec.workers() for _ in range(100)} == {codec.workers()}


def test_a_fixed_number_stays_whoever_comes(shares: pytest.MonkeyPatch) -> None:
    codec.fix_threads(3)
    nodes(shares, 16, NOW + codec.RECOUNT_INTERVAL)
    assert (size(), codec.threads()) == (3, 3)


@pytest.mark.parametrize(("cores", "threads"), [(1, 1), (2, 1), (3, 1), (4, 2), (16, 8), (64, 8)])
def test_half_of_the_cores_encode(cores: int, threads: int) -> None:
    assert codec.threads_of(cores) == threads
