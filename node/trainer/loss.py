"""The loss of next-token prediction and its gradient, in pieces that fit into memory."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from atoll.comm.config.run import RunConfig
from atoll.comm.faults import fault_point
from atoll.node.data.samples import UNLEARNED
from atoll.node.participant.batches import Batch, RunTokens, Share, learned, moved, pieces
from atoll.node.participant.rank_group import RankGroup
from atoll.node.participant.step_outcome import bounded_loss
from atoll.node.trainer.attention_mask import begin_at_zero
from atoll.node.trainer.chunked_loss import is_large
from atoll.node.trainer.model import Decoder


def placed(batch: Batch, device: torch.device) -> Batch:
    """The batch on the device, without positions where each sample is one document: the decoder then needs no
    mask. Asked here, because a GPU would have to be waited for."""
    if begin_at_zero(batch["position_ids"]):
        batch = {name: tensor for name, tensor in batch.items() if name != "position_ids"}
    return moved(batch, device)


def next_token_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Mean nats a token of predicting the batch's labels, over those that are learned; 0 where none is. A model
    that says that it `separates_documents` is given their positions, if the batch has them. The run's own model is
    not asked for the logits of all tokens where they are large."""
    tokens, labels, positions = batch["input_ids"], batch["labels"], batch.get("position_ids")
    if isinstance(model, Decoder) and is_large(labels.numel(), model.embedding.num_embeddings):
        loss: Tensor = model(tokens, labels, positions)
        return loss
    separates = positions is not None and getattr(model, "separates_documents", False)
    logits = model(tokens, positions=positions) if separates else model(tokens)  # (B, T, V)
    total = F.cross_entropy(
        logits.float().flatten(0, 1), labels.flatten(), ignore_index=UNLEARNED, reduction="sum"
    )
    return total / learned(batch).clamp(min=1)


def accumulate(
    model: nn.Module, batch: Batch, micro_batch: int = 0, reduce_each: bool = False, targets: float | None = None
) -> Tensor:
    """Add the gradient of the batch's loss to the parameters' gradients; return the loss: nats, of all that is
    learned, over `targets`. That is, of several ranks, the mean of their numbers of learned tokens: the mean of
    their losses, and gradients, is then that over all tokens; None: the batch's own. `micro_batch`: samples in
    one forward pass; 0: all. The ranks' gradients are averaged once, with the last of them; with `reduce_each`
    with each, so that no rank holds those of the whole model."""
    parts = pieces(batch, micro_batch)
    count = learned(batch).clamp(min=1) if targets is None else targets or 1.0
    total = torch.zeros((), device=batch["input_ids"].device)
    for number, part in enumerate(parts, 1):
        fault_point(f"trainer.micro_batch.{len(part['input_ids'])}")
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(reduce_each or number == len(parts))
        loss = next_token_loss(model, part) * (learned(part) / count)
        loss.backward()  # type: ignore[no-untyped-call]
        total += loss.detach()
    return total


@torch.no_grad()
def validation_loss(
    model: nn.Module, run: RunConfig, data: RunTokens, ranks: RankGroup, device: torch.device, micro_batch: int = 0
) -> float:
    """The mean loss over all learned tokens of the run's `val_batches` validation batches, of which each rank
    measures its share: on every rank the same. `micro_batch`: samples in one forward pass; 0: all of a batch."""
    model.eval()
    share, size, loss, count = Share(ranks.rank, ranks.size), run.inner.batch_size, 0.0, 0
    for number in range(run.data.val_batches):
        indices = range(number * size, (number + 1) * size)[share.of(size)]
        for part in pieces(data.validation(indices), micro_batch):
            tokens = int(learned(part))
            loss += bounded_loss(next_token_loss(model, placed(part, device)).item()) * tokens
            count += tokens
    loss, targets = ranks.total(loss, count)
    return loss / max(targets, 1.0)
