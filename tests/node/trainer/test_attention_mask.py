"""Who attends to whom: the same on every device, and nobody across a document's beginning."""

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, create_mask, flex_attention

from atoll.node.trainer.attention_mask import (
    BLOCK,
    attend,
    attention_mask,
    begin_at_zero,
    block_mask,
    dense_mask,
    document_numbers,
)

CPU = torch.device("cpu")


def positions_of(*samples: tuple[int, ...]) -> Tensor:
    """Positions of samples whose documents have so many tokens."""
    return torch.stack([torch.cat([torch.arange(n) for n in lengths]) for lengths in samples])


MIXED = positions_of((700,), (1, 699), (128, 128, 200, 244), (300, 5, 395), (512, 188), (650, 50), (127, 2, 571))


def test_a_token_sees_itself_and_those_before_it_in_its_document_and_window() -> None:
    positions = positions_of((3, 2), (5,))
    first, second = dense_mask(5, document_numbers(positions), 2, CPU)[:, 0].int().tolist()
    assert first == [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 1, 1, 0, 0], [0, 0, 0, 1, 0], [0, 0, 0, 1, 1]]
    assert second == [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 1, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 0, 1, 1]]


def test_there_is_no_mask_where_causality_is_the_only_bound() -> None:
    assert attention_mask(16, None, 0, 32, CPU) is None
    assert attention_mask(16, None, 16, 32, CPU) is None, "no token has 16 before it"
    assert attention_mask(17, None, 16, 32, CPU) is not None
    assert begin_at_zero(positions_of((9,), (9,))) and not begin_at_zero(positions_of((9,), (4, 5)))


@pytest.mark.parametrize("window", [0, 1, 100, 128, 129, 300])
@pytest.mark.parametrize("length", [700, 640, 128, 64])
@pytest.mark.parametrize("documents", [True, False])
def test_the_blocks_of_a_gpu_are_those_that_all_pairs_of_tokens_give(
    documents: bool, length: int, window: int
) -> None:
    numbers = document_numbers(MIXED[:, :length]) if documents else None
    found = block_mask(length, numbers, window, CPU)
    batch = len(MIXED) if documents else 1
    expected = create_block_mask(found.mask_mod, batch, None, length, length, "cpu", BLOCK)
    seen = create_mask(found.mask_mod, batch, None, length, length, "cpu")
    assert torch.equal(seen, dense_mask(length, numbers, window, CPU).expand_as(seen))
    assert found.shape == expected.shape
    for name in ("kv", "full_kv", "q", "full_q"):
        counts, wanted = getattr(found, f"{name}_num_blocks"), getattr(expected, f"{name}_num_blocks")
        assert torch.equal(counts, wanted), name
        order, wanted_order = getattr(found, f"{name}_indices"), getattr(expected, f"{name}_indices")
        filled = torch.arange(order.shape[-1]) < counts[..., None]
        assert torch.equal(order * filled, wanted_order * filled), name


@pytest.mark.long
@pytest.mark.parametrize("window", [0, 150])
def test_flex_attention_gives_what_the_matrix_gives(window: int) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(len(MIXED), heads, 700, 16, generator=generator) for heads in (4, 2, 2))
    numbers = document_numbers(MIXED)
    blocks = block_mask(700, numbers, window, CPU)
    found = flex_attention(q, k, v, block_mask=blocks, enable_gqa=True)
    expected = attend(q, k, v, dense_mask(700, numbers, window, CPU))
    assert isinstance(found, Tensor) and (found - expected).abs().max() < 1e-5
