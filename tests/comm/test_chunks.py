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
