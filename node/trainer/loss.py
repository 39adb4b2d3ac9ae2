"""The loss of next-token prediction and its gradient, in pieces that fit into memory."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from atoll.comm.config.run import RunConfig
from atoll.comm.faults import fault_point
from atoll.node.participant.batches import RunTokens, Share
from atoll.node.participant.participant import bounded_loss
from atoll.node.trainer.chunked_loss import is_large
from atoll.node.trainer.model import Decoder


def next_token_loss(model: nn.Module, sequences: Tensor) -> Tensor:
    """Mean nats a token of predicting each next token of (B, T + 1). The run's own model is not asked for the
    logits of all tokens where they are large."""
    tokens, targets = sequences[:, :-1], sequences[:, 1:]
    if isinstance(model, Decoder) and is_large(targets.numel(), model.embedding.num_embeddings):
        loss: Tensor = model(tokens, targets)
        return loss
    logits = model(tokens)  # (B, T, V)
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def accumulate(model: nn.Module, sequences: Tensor, micro_batch: int = 0, reduce_each: bool = False) -> Tensor:
    """Add the gradient of the mean loss over the sequences, (B, T + 1), to the parameters' gradients; return the
    loss. `micro_batch`: sequences in one forward pass; 0: all. The ranks' gradients are averaged once, with the
    last of them; with `reduce_each` with each, so that no rank holds those of the whole model."""
    pieces = torch.split(sequences, micro_batch or len(sequences))
    total = torch.zeros((), device=sequences.device)
    for number, piece in enumerate(pieces, 1):
        fault_point(f"trainer.micro_batch.{len(piece)}")
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(reduce_each or number == len(pieces))
        loss = next_token_loss(model, piece) * (len(piece) / len(sequences))
        loss.backward()  # type: ignore[no-untyped-call]
        total += loss.detach()
    return total


@torch.no_grad()
def validation_loss(
    model: nn.Module, run: RunConfig, data: RunTokens, share: Share, device: torch.device, micro_batch: int = 0
) -> float:
    """The mean loss over this rank's share of the run's `val_batches` validation batches. `micro_batch`: sequences
    in one forward pass; 0: all of a batch."""
    model.eval()
    loss, size = 0.0, run.inner.batch_size
    for number in range(run.data.val_batches):
        indices = range(number * size, (number + 1) * size)[share.of(size)]
        sequences = data.validation(indices)
        for piece in torch.split(sequences, micro_batch or len(sequences)):
            mean = next_token_loss(model, piece.to(device)).item()
            loss += bounded_loss(mean) * (len(piece) / len(sequences))
    return loss / run.data.val_batches
