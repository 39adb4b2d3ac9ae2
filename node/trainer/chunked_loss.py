"""The loss of a language model's head that never holds the logits of all tokens.

torch.nn.functional.linear_cross_entropy (torch 2.13) does the same, and in fp32 as well; in bf16 it adds up the
loss and the weight's gradient in bf16, chunk by chunk: of 2048 tokens and 8192 classes its loss is off by 2 %, and
its gradient by three times as much as that of the plain loss. Here both are added up in fp32.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from atoll.node.data.samples import UNLEARNED

PLAIN_BYTES = 64 << 20  # of fp32 logits; more are computed in chunks of as many
MIN_ROWS = 512  # tokens of a chunk at least: fewer are too small a matrix for a GPU


def is_large(tokens: int, classes: int) -> bool:
    """Whether the logits of so many tokens take more memory than they should."""
    return tokens * classes * 4 > PLAIN_BYTES


def chunked_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor, rows: int = 0) -> Tensor:
    """The mean cross entropy, fp32, of the logits `hidden @ weight.T` for `targets`: (N, D), (V, D), (N,) int64;
    over those targets that are not `UNLEARNED`, 0 where all are. `rows`: tokens whose logits are held at a time;
    0: what takes `PLAIN_BYTES`. It can be differentiated once.
    """
    rows = rows or max(MIN_ROWS, PLAIN_BYTES // (4 * len(weight)))
    learns = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    loss: Tensor = _ChunkedCrossEntropy.apply(hidden, weight, targets, rows, learns)  # type: ignore[no-untyped-call]
    return loss


class _ChunkedCrossEntropy(Function):
    """Computes the gradients with the loss, since both need the logits: a chunk's are gone when the next one's
    come."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, rows: int, learns: bool) -> Tensor:
        losses, learned = [], targets != UNLEARNED  # (N,)
        of_hidden = torch.empty_like(hidden) if learns else None
        of_weight = torch.zeros_like(weight, dtype=torch.float32) if learns else None
        for start in range(0, len(hidden), rows):
            part = slice(start, start + rows)
            wanted, counts = targets[part, None].clamp(min=0), learned[part, None]
            logits = F.linear(hidden[part], weight).float()  # (rows, V)
            norm = torch.logsumexp(logits, dim=1, keepdim=True)
            losses.append(((norm - logits.gather(1, wanted)) * counts).sum())
            if of_hidden is None or of_weight is None:
                continue
            slope = logits.sub_(norm).exp_()  # of the sum of the losses: softmax, less 1 for the target
            slope.scatter_add_(1, wanted, torch.full_like(norm, -1.0))
            slope = slope.mul_(counts).to(hidden.dtype)
            torch.mm(slope, weight, out=of_hidden[part])
            if weight.dtype == torch.float32:
                of_weight.addmm_(slope.T, hidden[part])
            else:
                of_weight += slope.T @ hidden[part]
        ctx.gradients, ctx.count = (of_hidden, of_weight), learned.sum().clamp(min=1)
        mean: Tensor = torch.stack(losses).sum() / ctx.count
        return mean

    @staticmethod
    def backward(ctx: Any, *of_loss: Tensor) -> tuple[Tensor | None, ...]:
        (of_hidden, of_weight), ctx.gradients = ctx.gradients, (None, None)
        assert of_hidden is not None and of_weight is not None, "the loss was differentiated before"
        scale = of_loss[0] / ctx.count  # fp32: in bf16 it would be off by as much for all
        kind = of_hidden.dtype
        return of_hidden.float().mul_(scale).to(kind), of_weight.mul_(scale).to(kind), None, None, None
