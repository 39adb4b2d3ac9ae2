"""Forgets a step that did not end, such as one that memory did not suffice for."""

import gc

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from atoll.node.participant.idle_memory import release_cached


def can_forget(model: nn.Module) -> bool:
    """Whether this torch can have the model forget a step that broke off, and take others. FSDP2 gives up what it
    keeps of such a step by a call that torch has from 2.13 on; before, a model that it shards is made anew."""
    return not isinstance(model, FSDPModule) or hasattr(model, "reset_iter_state")


def forget_step(model: nn.Module, device: torch.device) -> None:
    """Forget the gradients, and what else a step has begun that did not end, where `can_forget`; give its memory
    back."""
    model.zero_grad(set_to_none=True)
    if isinstance(model, FSDPModule) and can_forget(model):
        # Those were of gathered parameters, whose gradients the reset leaves as they are.
        model.reset_iter_state()
        model.zero_grad(set_to_none=True)
    gc.collect()
    release_cached(device)
