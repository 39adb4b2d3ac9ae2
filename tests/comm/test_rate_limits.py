"""A caller has a burst, then a rate; nobody pays for another one."""

from atoll.comm.rate_limits import RateLimit, TokenBuckets


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


def test_what_has_happened_is_counted_and_waited_for() -> None:
    buckets = TokenBuckets(RateLimit(10.0, 20))
    assert buckets.spend("a", 0.0, 20) == 0.0
    assert buckets.spend("a", 0.0, 30) == 3.0
    assert not buckets.take("a", 2.9) and buckets.spend("a", 3.0, 0) == 0.0
    buckets.refund("a", 3.0, 100)
    assert buckets.take("a", 3.0, cost=20) and not buckets.take("a", 3.0)


def test_a_caller_that_is_known_costs_no_others_their_buckets() -> None:
    buckets = TokenBuckets(RateLimit(1e-6, 2), max_buckets=2)
    for caller in ("a", "b", "a", "b"):
        assert buckets.take(caller, 0.0)
    assert not buckets.take("a", 0.0) and not buckets.take("b", 0.0)
