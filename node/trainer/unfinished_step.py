"""Forgets a step that did not end, such as one that memory did not suffice for."""

import gc

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule


def forget_step(model: nn.Module, device: torch.device) -> None:
    """Forget the gradients, and what else a step has begun that did not end; give its memory back."""
    model.zero_grad(set_to_none=True)
    if isinstance(model, FSDPModule):
        # Those were of gathered parameters, whose gradients the reset leaves as they are.
        model.reset_iter_state()
        model.zero_grad(set_to_none=True)
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif device.type == "mps":
        torch.mps.empty_cache()
