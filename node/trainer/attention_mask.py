"""Masks of attention (causal, within one document, within a sliding window) and attention under them.

A sample may have several documents, one behind the other. Its positions count from 0 at each beginning, and no
token attends across one. Where nothing but causality bounds attention there is no mask, and the fastest kernel
takes it. On a CPU the mask is a matrix; on a GPU it is a `BlockMask` of flex attention, which never looks at
blocks of tokens that do not see each other, and takes no memory of T x T.
"""

from functools import cache
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

BLOCK = 128  # tokens of a block: flex attention's own
MIN_FLEX_DIM = 16  # elements of a head: flex attention's kernels take no smaller ones

Mask = Tensor | BlockMask


def attention_mask(
    length: int, positions: Tensor | None, window: int, head_dim: int, device: torch.device
) -> Mask | None:
    """The mask of samples of `length` tokens; None: causal and nothing else. `positions`: (B, T) int64, None: each
    sample is one document. `window`: tokens that each sees, itself among them; 0: all before it."""
    window = window if window < length else 0
    if positions is None and not window:
        return None
    documents = None if positions is None else document_numbers(positions)
    if device.type == "cuda" and head_dim >= MIN_FLEX_DIM:
        return block_mask(length, documents, window, device)
    return dense_mask(length, documents, window, device)


def begin_at_zero(positions: Tensor) -> bool:
    """Whether all positions, (B, T), are 0 ... T - 1: each sample is one document. Waits for a GPU's queue."""
    return torch.equal(positions, torch.arange(positions.shape[1], device=positions.device).expand_as(positions))


def document_numbers(positions: Tensor) -> Tensor:
    """The number of each token's document within its sample, (B, T) int32, from positions (B, T)."""
    return (positions == 0).cumsum(1, dtype=torch.int32)


def dense_mask(length: int, documents: Tensor | None, window: int, device: torch.device) -> Tensor:
    """The mask as a matrix, bool, true where a query may see a key: (B, 1, T, T), or (T, T) where `documents` is
    None."""
    at = torch.arange(length, device=device)
    back = at[:, None] - at  # tokens from key to query
    seen = back >= 0
    if window:
        seen &= back < window
    if documents is not None:
        seen = seen & (documents[:, None, :, None] == documents[:, None, None, :])
    return seen


def block_mask(length: int, documents: Tensor | None, window: int, device: torch.device) -> BlockMask:
    """The mask for flex attention, by blocks of tokens. What `create_block_mask` would find from all T x T pairs
    follows from the documents at each block's ends, since their numbers only grow."""

    def may_see(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        seen = query >= key
        if window:
            seen = seen & (query - key < window)
        return seen if documents is None else seen & (documents[b, query] == documents[b, key])

    blocks = -(-length // BLOCK)
    number = torch.arange(blocks, device=device)
    first, last = number * BLOCK, (number * BLOCK + BLOCK - 1).clamp(max=length - 1)  # tokens of each block
    q, k = number[:, None], number
    first_q, last_q = first[:, None], last[:, None]
    some, every = (
        q >= k,
        (q > k) & (last_q - first_q == BLOCK - 1),
    )  # (q, k): a pair that sees each other; all pairs
    if window:
        some, every = some & (first_q - last < window), every & (last_q - first < window)
    if documents is None:
        some, every = some[None], every[None]
    else:
        begins, ends = documents[:, first], documents[:, last]  # (B, blocks)
        some = some & (begins[:, :, None] == ends[:, None, :]) | (q == k)  # (B, q, k)
        every = every & (ends[:, :, None] == begins[:, None, :])
    partial, full = ((some & ~every)[:, None], every[:, None])  # (B, 1, q, k)
    return BlockMask.from_kv_blocks(
        *_listed(partial), *_listed(full), BLOCK_SIZE=BLOCK, mask_mod=may_see, seq_lengths=(length, length)
    )


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """The count of true ones in the last dimension, and their indices before those of the others."""
    order = torch.argsort(blocks.to(torch.int8), dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32), order.to(torch.int32).contiguous()


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Mask | None) -> Tensor:
    """Attention of queries, (B, heads, T, D), over keys and values, (B, kv_heads, T, D), as the mask lets them;
    causal without one. Returns (B, heads, T, D)."""
    if q.device.type == "mps":  # whose kernels know no groups
        k, v = ungrouped(k, q.shape[1]), ungrouped(v, q.shape[1])
    grouped = k.shape[1] < q.shape[1]
    if isinstance(mask, BlockMask):
        # In a block that is being compiled it becomes a kernel of that.
        flex = flex_attention if torch.compiler.is_compiling() else compiled_flex_attention()
        return cast(Tensor, flex(q, k, v, block_mask=mask, enable_gqa=grouped))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped)


def ungrouped(x: Tensor, heads: int) -> Tensor:
    """Keys or values, (B, kv_heads, T, D), for each of so many heads, of which a group shares one:
    (B, heads, T, D)."""
    return x.repeat_interleave(heads // x.shape[1], dim=1)


@cache
def compiled_flex_attention() -> Any:
    """Flex attention as one kernel; uncompiled it would hold all T x T scores."""
    return torch.compile(flex_attention)
