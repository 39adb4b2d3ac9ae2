"""Data leases: no sample twice, nothing lost but what a commit consumed. transcripts/leases shows the cases one by
one; here drawn operations are compared with sets and lists of single samples."""

import random

import pytest

from atoll.comm.ids import NodeId
from atoll.coordinator.state_machine import leases as data
from atoll.coordinator.state_machine.leases import Lease, Leases


def samples(lease: Lease) -> list[int]:
    return [sample for first, count in lease for sample in range(first, first + count)]


class Naive:
    """The same, one sample at a time."""

    def __init__(self) -> None:
        self.next, self.free, self.consumed = 0, set[int](), list[int]()
        self.held: dict[NodeId, list[int]] = {}

    def grant(self, node: NodeId, count: int) -> None:
        held = self.held.setdefault(node, [])
        while len(held) < count:
            held.append(min(self.free, default=self.next))
            self.next += not self.free
            self.free.discard(held[-1])

    def consume(self, node: NodeId, used: int) -> None:
        held = self.held.get(node, [])
        self.consumed += held[:used]
        self.held[node] = held[used:]

    def release(self, node: NodeId) -> None:
        self.free.update(self.held.pop(node, []))


def test_the_beginning_of_a_lease_is_its_first_samples() -> None:
    lease = ((3, 2), (9, 4))
    for count in range(8):
        assert samples(data.first_samples(lease, count)) == samples(lease)[:count]


@pytest.mark.parametrize("seed", range(20))
def test_leases_are_what_they_would_be_sample_by_sample(seed: int) -> None:
    rng, leases, naive = random.Random(seed), Leases(), Naive()
    nodes = [NodeId(f"n{i}") for i in range(6)]
    for _ in range(200):
        node, draw = rng.choice(nodes), rng.random()
        lease = leases.by_node.get(node, ())
        if draw < 0.5:
            count = rng.randint(0, 40)
            leases = data.grant(leases, node, count)
            naive.grant(node, count)
        elif draw < 0.85:
            used = rng.randint(0, data.size(lease))
            leases = data.consume(leases, node, used)
            naive.consume(node, used)
        else:
            leases = data.release(leases, node)
            naive.release(node)

        held = {n: samples(lease) for n, lease in leases.by_node.items()}
        assert held == {n: lease for n, lease in naive.held.items() if lease}
        assert (set(samples(leases.free)), leases.next) == (naive.free, naive.next)
        everywhere = [*naive.consumed, *samples(leases.free), *(s for lease in held.values() for s in lease)]
        assert sorted(everywhere) == list(range(leases.next)), "a sample is in two places, or in none"
        for ranges in (leases.free, *leases.by_node.values()):
            assert all(count > 0 for _, count in ranges)
            assert all(a + n != b for (a, n), (b, _) in zip(ranges, ranges[1:], strict=False)), "not joined"
        assert all(data.front(lease) == held[n][0] for n, lease in leases.by_node.items())


@pytest.mark.parametrize("seed", range(5))
def test_a_front_stays_until_a_commit_consumes_it(seed: int) -> None:
    """So work that was left out, and its samples, can still be named in a later round."""
    rng, leases = random.Random(seed), Leases()
    me, others = NodeId("n0"), [NodeId(f"n{i}") for i in range(1, 5)]
    leases = data.grant(leases, me, 10)
    before = samples(leases.by_node[me])
    for _ in range(100):
        other = rng.choice(others)
        leases = data.grant(leases, rng.choice([me, other]), rng.randint(1, 60))
        leases = data.release(leases, other) if rng.random() < 0.3 else leases
        now = samples(leases.by_node[me])
        assert now[: len(before)] == before
        before = now


@pytest.mark.parametrize("used", [11, -1])
def test_what_was_not_leased_cannot_be_consumed(used: int) -> None:
    node = NodeId("n1")
    with pytest.raises(ValueError, match=rf"used {used} sample\(s\) of a lease of 10"):
        data.consume(data.grant(Leases(), node, 10), node, used)
