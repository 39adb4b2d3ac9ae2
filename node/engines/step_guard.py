"""Keeps an optimizer that an engine steps by itself from taking a step whose gradient is not finite: an infinity
or NaN would stay in its moments for the rest of the run."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from atoll.node.participant.flat_vector import local_tensor
from atoll.node.participant.rank_group import RankGroup


class StepGuard:
    """Hooks of one optimizer's `step`. Every rank steps at the same time."""

    def __init__(self, optimizer: Optimizer, ranks: RankGroup, before: Callable[[], None]) -> None:
        """`before` is called before each step, whether it is left out or not."""
        self.left_out = False  # the last step, on all ranks
        self._ranks, self._before = ranks, before
        self._gradients: list[tuple[Tensor, Tensor]] = []  # of parameters, while a step is left out
        optimizer.register_step_pre_hook(self._begin)
        optimizer.register_step_post_hook(self._end)

    def _begin(self, optimizer: Optimizer, *_: Any) -> None:
        """Where any rank's gradient is not finite, take all from their parameters: a step is of those that have
        one."""
        self._before()
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        (wrong,) = self._ranks.total(float(not are_finite([p.grad for p in parameters])))
        self.left_out = wrong > 0
        if self.left_out:
            self._gradients = [(p, p.grad) for p in parameters]
            for parameter in parameters:
                parameter.grad = None

    def _end(self, *_: Any) -> None:
        """Put them back, into the same memory: the engine may have captured it."""
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        self._gradients = []


@torch.no_grad()
def are_finite(tensors: list[Tensor]) -> bool:
    """Whether all elements of this rank's blocks are finite, and their norms in fp32."""
    norms = [norm.float() for norm in torch._foreach_norm([local_tensor(t) for t in tensors if t.numel()])]
    return not norms or bool(torch.stack(norms).sum().isfinite())
