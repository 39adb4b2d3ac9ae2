"""A caller has a burst, then a rate; nobody pays for another one."""

from atoll.coordinator.service.rate_limits import RateLimit, TokenBuckets


def test_a_burst_then_so_many_a_second() -> None:
    buckets = TokenBuckets(RateLimit(2.0, 4))
    assert [buckets.take("a", 0.0) for _ in range(5)] == [True] * 4 + [False]
    assert [buckets.take("a", 1.0) for _ in range(3)] == [True, True, False]
    assert all(buckets.take("b", 1.0) for _ in range(4))
    assert [buckets.take("a", 100.0) for _ in range(5)] == [True] * 4 + [False]


def test_looking_does_not_count() -> None:
    buckets = TokenBuckets(RateLimit(1.0, 1))
    assert not buckets.empty("a", 0.0) and not buckets.empty("a", 0.0)
    assert buckets.take("a", 0.0) and buckets.empty("a", 0.5) and not buckets.empty("a", 1.0)


def test_buckets_that_are_full_again_are_not_kept() -> None:
    buckets = TokenBuckets(RateLimit(1.0, 1), max_buckets=3)
    for second, caller in enumerate("abcdefgh"):
        assert buckets.take(caller, 2.0 * second)
        assert len(buckets._left) <= 3
    crowd = TokenBuckets(RateLimit(1e-6, 2), max_buckets=3)
    for caller in "abcdefgh":
        assert crowd.take(caller, 0.0)
        assert len(crowd._left) <= 3
