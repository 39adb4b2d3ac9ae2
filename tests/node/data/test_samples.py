"""Windows of blocks: what is learned, and where documents are."""

import numpy as np
import pytest

from atoll.node.data.manifest import Block
from atoll.node.data.samples import UNLEARNED, nothing_learned, window_count, window_of


def block_of(tokens: list[int], begins: list[int], unlearned: list[int] | None = None) -> Block:
    places = np.arange(len(tokens))
    return Block(np.array(tokens, np.uint16), np.isin(places, begins), ~np.isin(places, unlearned or []))


def test_a_window_has_the_next_tokens_of_its_documents_and_positions_that_begin_with_each() -> None:
    block = block_of([5, 6, 0, 7, 8, 9, 0, 4], begins=[3, 7])
    first, second = (window_of(block, number, 4, 8) for number in (0, 1))
    assert first.input_ids.tolist() == [5, 6, 0, 7]
    assert first.labels.tolist() == [6, 0, UNLEARNED, 8]  # the end is learned, the next document's beginning not
    assert first.position_ids.tolist() == [0, 1, 2, 0]
    assert second.input_ids.tolist() == [8, 9, 0, 4]
    assert second.labels.tolist() == [9, 0, UNLEARNED, UNLEARNED]  # behind the last one there is none
    assert second.position_ids.tolist() == [0, 1, 2, 0]
    assert all(array.dtype == np.int64 for array in first.arrays.values())


def test_padding_and_what_the_mask_leaves_out_is_not_learned() -> None:
    block = block_of([5, 6, 7, 0, 0, 0, 0, 0], begins=[0], unlearned=[1])
    assert window_of(block, 0, 8, 4).labels.tolist() == [UNLEARNED, 7, 0] + [UNLEARNED] * 5


@pytest.mark.parametrize(("tokens", "count"), [(1, 0), (2, 1), (5, 1), (6, 2), (16, 4), (13, 3), (14, 4)])
def test_a_padded_block_has_as_many_windows_as_have_something_to_learn(tokens: int, count: int) -> None:
    assert window_count(tokens, 4, 16) == count
    block = block_of(list(range(1, 17)), begins=[0])
    learned = [bool((window_of(block, n, 4, tokens).labels != UNLEARNED).any()) for n in range(4)]
    assert learned == [number < count for number in range(4)]


def test_windows_that_do_not_divide_a_block_leave_its_end() -> None:
    assert window_count(16, 5, 16) == 3


def test_of_a_damaged_sample_nothing_is_learned() -> None:
    sample = nothing_learned(7)
    assert (sample.labels == UNLEARNED).all() and sample.position_ids.tolist() == list(range(7))
