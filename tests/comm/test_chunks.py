import numpy as np
import pytest

from atoll.comm.chunks import Chunks


@pytest.mark.parametrize(("numel", "chunk"), [(1, 1), (10, 4), (12, 4), (3, 100), (1000, 7)])
def test_spans_tile_the_vector_in_order(numel: int, chunk: int) -> None:
    chunks = Chunks(numel, chunk)
    vector = np.arange(numel)
    parts = [vector[chunks.span(c)] for c in range(chunks.count)]
    assert np.array_equal(np.concatenate(parts), vector)
    assert [len(part) for part in parts] == [chunks.size(c) for c in range(chunks.count)]
    assert all(len(part) == chunk for part in parts[:-1])


@pytest.mark.parametrize("c", [-1, 3])
def test_a_chunk_outside_the_vector_is_refused(c: int) -> None:
    with pytest.raises(IndexError, match="of 3"):
        Chunks(10, 4).span(c)


@pytest.mark.parametrize(("numel", "chunk"), [(0, 4), (4, 0), (-1, 4)])
def test_sizes_below_one_are_refused(numel: int, chunk: int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        Chunks(numel, chunk)


@pytest.mark.parametrize("fragments", [(10,), (4, 6), (1, 8, 1), (3, 3, 3, 1)])
def test_fragments_are_cut_by_themselves_and_follow_one_another(fragments: tuple[int, ...]) -> None:
    chunks, vector = Chunks(10, 4, fragments), np.arange(10)
    assert np.array_equal(np.concatenate([vector[chunks.span(c)] for c in range(chunks.count)]), vector)
    assert [c for p in range(chunks.fragment_count) for c in chunks.fragment_range(p)] == list(range(chunks.count))
    assert chunks.largest == max(chunks.size(c) for c in range(chunks.count))
    for p, numel in enumerate(fragments):
        alone, part = chunks.fragment_chunks(p), vector[chunks.fragment_slice(p)]
        assert (alone.numel, part.size, len(chunks.fragment_range(p))) == (numel, numel, alone.count)
        for i, c in enumerate(chunks.fragment_range(p)):
            assert chunks.place(c) == (p, i)
            assert np.array_equal(vector[chunks.span(c)], part[alone.span(i)])


@pytest.mark.parametrize("fragments", [(4, 5), (10, 0), (11, -1)])
def test_fragments_that_are_not_the_vector_are_refused(fragments: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="are not 10 elements"):
        Chunks(10, 4, fragments)
