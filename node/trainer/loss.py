"""The loss of next-token prediction and its gradient, in pieces that fit into memory."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from atoll.comm.config.run import RunConfig
from atoll.node.participant.batches import RunTokens, Share
from atoll.node.participant.participant import bounded_loss


def next_token_loss(model: nn.Module, sequences: Tensor) -> Tensor:
    """Mean nats a token of predicting each next token of (B, T + 1)."""
    logits = model(sequences[:, :-1])  # (B, T, V)
    return F.cross_entropy(logits.float().flatten(0, 1), sequences[:, 1:].flatten())


def accumulate(model: nn.Module, sequences: Tensor, micro_batch: int = 0) -> Tensor:
    """Add the gradient of the mean loss over the sequences, (B, T + 1), to the parameters' gradients; return the
    loss. `micro_batch`: sequences in one forward pass; 0: all. The ranks' gradients are averaged once, with the
    last of them."""
    pieces = torch.split(sequences, micro_batch or len(sequences))
    total = torch.zeros((), device=sequences.device)
    for number, piece in enumerate(pieces, 1):
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(number == len(pieces))
        loss = next_token_loss(model, piece) * (len(piece) / len(sequences))
        loss.backward()  # type: ignore[no-untyped-call]
        total += loss.detach()
    return total


@torch.no_grad()
def validation_loss(
    model: nn.Module, run: RunConfig, data: RunTokens, share: Share, device: torch.device
) -> float:
    """The mean loss over this rank's share of the run's `val_batches` validation batches."""
    model.eval()
    loss, size = 0.0, run.inner.batch_size
    for number in range(run.data.val_batches):
        indices = range(number * size, (number + 1) * size)[share.of(size)]
        loss += bounded_loss(next_token_loss(model, data.validation(indices).to(device)).item())
    return loss / run.data.val_batches
