"""Data leases: no sample twice, nothing lost but what a commit consumed."""

import random

import pytest

from atoll.comm.ids import NodeId
from atoll.coordinator.leases import Leases, consume, grant, release

A, B = NodeId("n1"), NodeId("n2")


def test_leases_do_not_overlap_and_only_a_commit_consumes_them() -> None:
    leases = grant(grant(Leases(), A, 100), B, 100)
    assert leases.held == {A: (0, 100), B: (100, 100)}
    leases = release(consume(leases, A, 60), B)
    assert leases.free == ((60, 140),) and not leases.held
    assert grant(leases, B, 100).held[B] == (60, 100)


def test_a_node_that_holds_a_lease_keeps_it() -> None:
    leases = grant(Leases(), A, 10)
    assert grant(leases, A, 10) == leases


def test_more_than_was_leased_cannot_be_consumed() -> None:
    with pytest.raises(ValueError, match="11 samples of a lease of 10"):
        consume(grant(Leases(), A, 10), A, 11)


@pytest.mark.parametrize("seed", range(20))
def test_every_sample_is_consumed_once_or_free_or_held(seed: int) -> None:
    rng, leases, consumed = random.Random(seed), Leases(), set[int]()
    nodes = [NodeId(f"n{i}") for i in range(5)]
    for _ in range(300):
        node = rng.choice(nodes)
        if node not in leases.held:
            leases = grant(leases, node, rng.randint(1, 30))
            continue
        first, count = leases.held[node]
        used = rng.randint(0, count) if rng.random() < 0.7 else 0
        leases = consume(leases, node, used)
        fresh = set(range(first, first + used))
        assert not fresh & consumed
        consumed |= fresh
    rest = [set(range(f, f + c)) for f, c in (*leases.free, *leases.held.values())]
    assert sum(map(len, rest)) + len(consumed) == leases.next
    assert consumed.union(*rest) == set(range(leases.next))
