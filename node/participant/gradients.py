"""The norm of a gradient that a node's ranks share, and its bound. It is right for every way in which ranks share
a model: each block of it counts once."""

import math

import torch

from atoll.node.participant.flat_vector import ShardedParameters


@torch.no_grad()
def squared_norm(parameters: ShardedParameters) -> float:
    """The squared l2 norm of this rank's part of the gradient; the sum over the ranks is the whole gradient's. It
    is not finite if any element is not."""
    norms = [torch.linalg.vector_norm(g, dtype=torch.float32) for g in parameters.owned_gradients()]
    return float(torch.stack(norms).cpu().double().square().sum()) if norms else 0.0  # Apple's GPU has no fp64


@torch.no_grad()
def bound_norm(parameters: ShardedParameters, norm: float, limit: float) -> None:
    """Scale the gradient, whose norm is `norm`, to one of at most `limit`."""
    if norm > limit:
        torch._foreach_mul_(parameters.gradients(), limit / norm)


def norm_of(square: float) -> float:
    """The norm, or infinity where the square says nothing."""
    return math.sqrt(square) if math.isfinite(square) else math.inf
