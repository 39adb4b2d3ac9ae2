"""The order of a data set's windows, and of a mixture's data sets."""

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.node.data.mixture import Mixture
from atoll.node.data.order import MAX_GROUP_BLOCKS, Window, WindowOrder, permuted


@pytest.mark.parametrize("count", [1, 2, 3, 10, 64, 65, 1000])
def test_a_permutation_visits_every_index_once(count: int) -> None:
    image = [permuted(index, count, "key") for index in range(count)]
    assert sorted(image) == list(range(count))
    if count >= 64:
        assert image != list(range(count))
        assert image != [permuted(index, count, "other key") for index in range(count)]


@pytest.mark.parametrize("full", [0, 1, 63, 64, 65, 200])
@pytest.mark.parametrize("last", [0, 1, 3])
def test_an_epoch_has_every_window_once_and_the_next_one_another_order(full: int, last: int) -> None:
    order = WindowOrder("7:train", full, 4, last)
    windows = {Window(block, number) for block in range(full) for number in range(4)}
    windows |= {Window(full, number) for number in range(last)}
    assert len(order) == len(windows)
    if not windows:
        return
    epochs = [[order.window(e * len(order) + i) for i in range(len(order))] for e in range(2)]
    assert all(set(epoch) == windows for epoch in epochs)
    if full > 1:
        assert epochs[0] != epochs[1] and epochs[0] != sorted(epochs[0])
        other = WindowOrder("8:train", full, 4, last)
        assert epochs[0] != [other.window(i) for i in range(len(order))]


@given(st.integers(0, 10**15), st.integers(1, 3000))
def test_a_range_of_indices_lies_in_few_blocks(first: int, count: int) -> None:
    order = WindowOrder("0:train", 100_000, 32)
    blocks = {order.window(index).block for index in range(first, first + count)}
    groups = count // (32 * (MAX_GROUP_BLOCKS - 1)) + 2  # groups of 63 or 64 blocks
    assert len(blocks) <= groups * MAX_GROUP_BLOCKS


@pytest.mark.parametrize(("full", "sizes"), [(93, [46, 47]), (64, [64]), (65, [32, 33]), (200, [50] * 4)])
def test_the_groups_of_an_epoch_are_of_equal_size(full: int, sizes: list[int]) -> None:
    order, at = WindowOrder("7:train", full, 4, 3), 0
    for size in sizes:
        last = at + 4 * size == 4 * full
        windows = [order.window(index) for index in range(at, at + 4 * size + 3 * last)]
        blocks = {window.block for window in windows}
        assert len(blocks) == size + last, "each block of a group has all of its windows in it"
        at += len(windows)
    assert at == len(order)


def test_the_order_of_a_trillion_tokens_takes_no_memory() -> None:
    order = WindowOrder("0:train", 10**12 // 32768, 32)
    assert len({order.window(index) for index in range(10**8, 10**8 + 1000)}) == 1000


@pytest.mark.parametrize("weights", [[1.0], [1.0, 1.0], [0.7, 0.3], [3.0, 0.1, 2.0, 5.5], [1e-6, 1.0]])
def test_a_mixture_gives_each_data_set_its_own_samples_one_after_the_other(weights: list[float]) -> None:
    mixture, seen = Mixture.by_weight(weights), Counter[int]()
    for index in range(5000):
        part, own = mixture.draw(index)
        assert own == seen[part]
        seen[part] += 1


@given(
    st.lists(st.sampled_from([0.1, 0.3, 1.0, 2.5, 7.0]), min_size=1, max_size=5),
    st.integers(0, 10**18),
    st.integers(1, 2000),
)
def test_a_range_of_indices_has_the_weights_to_within_a_sample_a_division(
    weights: list[float], first: int, count: int
) -> None:
    mixture = Mixture.by_weight(weights)
    seen = Counter(mixture.draw(index).part for index in range(first, first + count))
    for part, weight in enumerate(weights):
        assert abs(seen[part] - count * weight / sum(weights)) < len(weights)


def test_weights_are_the_numbers_that_are_written() -> None:
    mixture = Mixture.by_weight([0.1, 0.2, 0.7])
    seen = Counter(mixture.draw(index).part for index in range(10**9, 10**9 + 1000))
    assert [seen[part] for part in range(3)] == [100, 200, 700]


@pytest.mark.long
def test_two_hundred_rounds_of_nodes_that_come_and_go_have_every_sample_once_and_the_mixtures_weights() -> None:
    """As the coordinator deals them out: leases from one counter, what a node that went had left to the next."""
    mixture, orders = Mixture.by_weight([3, 1]), [WindowOrder("0:a", 500, 32), WindowOrder("0:b", 90, 32, 5)]
    fresh, left = 0, list[tuple[int, int]]()
    used = Counter[tuple[int, int, int, Window]]()
    drawn = Counter[int]()
    for round_ in range(200):
        for node in range(3 + round_ % 4):
            want = 48 + 16 * (node % 3)
            if left:
                first, count = left.pop()
            else:
                first, count = fresh, want
                fresh += want
            done = count // 2 if (round_ + node) % 7 == 0 else count  # the others go on with the rest
            if done < count:
                left.append((first + done, count - done))
            for index in range(first, first + done):
                part, own = mixture.draw(index)
                used[part, own // len(orders[part]), own, orders[part].window(own)] += 1
                drawn[part] += 1
    assert set(used.values()) == {1}
    assert abs(drawn[0] / drawn.total() - 0.75) < 0.01
    for part in range(2):  # the first epoch's windows: each once, but for what is still left
        first_epoch = [window for (p, epoch, _, window) in used if p == part and not epoch]
        assert len(set(first_epoch)) == len(first_epoch)
    assert drawn[1] > len(orders[1]) and all(a != b for a, b in pairwise(sorted(used)))
