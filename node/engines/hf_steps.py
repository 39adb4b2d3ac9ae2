"""The gradient of a rank's share of a batch, and validation losses, of a model of transformers', in micro-batches.

A micro-batch has a fixed size, the node's `micro_batch`, or as many samples as make `MICRO_BATCH_TOKENS`. Where
memory does not suffice a node of one rank halves it, then computes activations again; of several ranks each would
wait for the others: their node ends with a sentence that says what to set.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from atoll.comm.config.run import RunConfig
from atoll.comm.errors import ConfigError
from atoll.comm.faults import fault_point
from atoll.node.config import Checkpointing, NodeConfig
from atoll.node.participant.batches import Batch, RunTokens, Share, learned, moved, pieces
from atoll.node.participant.daemon_link import is_out_of_memory
from atoll.node.participant.rank_group import RankGroup
from atoll.node.participant.step_outcome import bounded_loss
from atoll.node.trainer.unfinished_step import can_forget, forget_step

T = TypeVar("T")
MICRO_BATCH_TOKENS = 8192  # of a micro-batch whose size is not given


class HfSteps:
    """Computes gradients and losses of one rank. Every rank calls each method at the same time."""

    def __init__(
        self, model: nn.Module, run: RunConfig, node: NodeConfig, ranks: RankGroup, device: torch.device
    ) -> None:
        self._model, self._run, self._ranks, self._device = model, run, ranks, device
        share = Share(ranks.rank, ranks.size).of(run.inner.batch_size)
        size = node.micro_batch or max(1, MICRO_BATCH_TOKENS // run.model.seq_len)
        self._size = min(size, share.stop - share.start)
        has_checkpointing = bool(getattr(model, "supports_gradient_checkpointing", False))
        self._may_recompute = has_checkpointing and node.checkpointing is Checkpointing.AUTO
        # Gradients of the whole model may be more than a rank can hold; those of adapters are few.
        self._reduce_each = not run.hf.lora.rank
        self.tell: Callable[[str], None] = _nothing  # takes sentences for the node's log
        if node.checkpointing is Checkpointing.FULL:
            if not has_checkpointing:
                raise ConfigError(
                    f"checkpointing=full: transformers' {run.hf.architecture} has none; set checkpointing=auto"
                )
            self._recompute()

    def add(self, batch: Batch) -> Tensor:
        """Add the gradient of this rank's share of a batch to the parameters' gradients; return its loss. The mean
        of the ranks' losses, and of their gradients, is that over all learned tokens of the batch."""
        (total,) = self._ranks.total(float(learned(batch)))
        batch, targets = moved(batch, self._device), max(total, 1.0) / self._ranks.size
        return self._within_memory(lambda: self._accumulate(batch, targets))

    def validation_loss(self, data: RunTokens) -> float:
        """The mean loss over all learned tokens of the run's validation batches, the same on every rank."""
        self._model.eval()
        return self._within_memory(lambda: self._measure(data))

    @torch.no_grad()
    def _measure(self, data: RunTokens) -> float:
        loss, count, size = 0.0, 0, self._run.inner.batch_size
        share = Share(self._ranks.rank, self._ranks.size).of(size)
        for number in range(self._run.data.val_batches):
            indices = range(number * size, (number + 1) * size)[share]
            for part in pieces(data.validation(indices), self._size):
                tokens = int(learned(part))
                fault_point(f"trainer.validation.{len(part['input_ids'])}")
                summed = summed_loss(self._model, moved(part, self._device)).item()
                loss += bounded_loss(summed / max(tokens, 1)) * tokens
                count += tokens
        loss, targets = self._ranks.total(loss, count)
        return loss / max(targets, 1.0)

    def _accumulate(self, batch: Batch, targets: float) -> Tensor:
        parts = pieces(batch, self._size)
        total = torch.zeros((), device=self._device)
        for number, part in enumerate(parts, 1):
            fault_point(f"trainer.micro_batch.{len(part['input_ids'])}")
            if isinstance(self._model, FSDPModule):
                self._model.set_requires_gradient_sync(self._reduce_each or number == len(parts))
            loss = summed_loss(self._model, part) / targets
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        return total

    def _within_memory(self, compute: Callable[[], T]) -> T:
        while True:
            try:
                return compute()
            except (MemoryError, RuntimeError) as error:
                spent = self._size == 1 and not self._may_recompute
                goes_on = self._ranks.size == 1 and can_forget(self._model) and not spent
                if not goes_on or not is_out_of_memory(error):
                    raise
            # Only now: what was computed lives as long as the error's traceback.
            forget_step(self._model, self._device)
            if self._size > 1:
                self._size //= 2
                self.tell(f"ran out of memory: goes on with micro-batches of {self._size}")
            else:
                self._recompute()
                self.tell("ran out of memory: goes on with full checkpointing of activations")

    def _recompute(self) -> None:
        """Have each layer's backward pass compute the layer again, from the next forward pass on."""
        self._may_recompute = False
        model: Any = self._model
        enable = getattr(model, "activation_checkpointing_enable", None)  # of a later 5.x the only name
        (enable or model.gradient_checkpointing_enable)({"use_reentrant": False})


def summed_loss(model: nn.Module, batch: Batch) -> Tensor:
    """The sum of nats over the batch's learned tokens."""
    tokens, labels = batch["input_ids"], batch["labels"]
    # Without a mask: transformers makes one of the positions, where these begin anew within a sample.
    logits = model(input_ids=tokens, position_ids=batch["position_ids"], use_cache=False).logits  # (B, T, V)
    return F.cross_entropy(
        logits.float().flatten(0, 1), labels.flatten(), reduction="sum"
    )  # without those of -100


def _nothing(sentence: str) -> None:
    pass
