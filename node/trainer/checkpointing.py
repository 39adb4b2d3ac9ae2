"""Activation checkpointing: what a block's backward pass needs is computed again, not kept.

Around each block's own forward, within what FSDP2 and the compiler put around a block, so that modules and
parameters keep their names. The level may change between two steps.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from atoll.node.config import Checkpointing

# Matrix products, of which every other one is kept, and attentions, which are all kept: what takes longest. The
# same choice as torchtitan's.
MATRIX_PRODUCTS = ("mm", "addmm", "bmm", "linear")
ATTENTIONS = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_attention_math",
)


def _overloads(names: Sequence[str]) -> frozenset[Any]:
    return frozenset(getattr(torch.ops.aten, name).default for name in names if hasattr(torch.ops.aten, name))


_PRODUCTS = _overloads(MATRIX_PRODUCTS)
_ATTENTIONS = _overloads(ATTENTIONS) | {torch.ops.higher_order.flex_attention}


class ActivationCheckpointing:
    """Checkpointing of some blocks, at a level that they share: none at first."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        self._forwards = [(block, block.forward) for block in blocks]
        self.level = Checkpointing.NONE

    def set(self, level: Checkpointing) -> None:
        """Take this level, one of none, selective and full, from the next forward pass on."""
        if level is self.level:
            return
        self.level = level
        for block, forward in self._forwards:
            match level:
                case Checkpointing.NONE:
                    block.forward = forward
                case Checkpointing.SELECTIVE:
                    block.forward = _selective(forward)
                case _:
                    block.forward = _full(forward)
        if any(block._compiled_call_impl is not None for block, _ in self._forwards):
            torch.compiler.reset()  # what was compiled does otherwise


def _selective(forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, context_fn=selective_contexts, **kwargs)

    return run


def _full(forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:  # the compiler takes no variable in the place of `context_fn`
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return run


def selective_contexts() -> Any:
    """The contexts of a forward pass and of its repetition, in which attentions and every other matrix product are
    kept."""
    return create_selective_checkpoint_contexts(partial(_policy, Counter()))  # type: ignore[no-untyped-call]


def _policy(products: Counter[bool], context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    if op in _PRODUCTS:
        products[context.is_recompute] += 1
        keep = products[context.is_recompute] % 2 == 1
    else:
        keep = op in _ATTENTIONS
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE
