"""Batches for a trainer's tests, made of sequences."""

import torch
from torch import Tensor

from atoll.node.data.samples import UNLEARNED
from atoll.node.participant.batches import Batch


def batch_of(sequences: Tensor) -> Batch:
    """A batch of the sequences, (B, T + 1), each one document."""
    count, length = sequences[:, 1:].shape
    positions = torch.arange(length).repeat(count, 1)
    return {"input_ids": sequences[:, :-1], "labels": sequences[:, 1:], "position_ids": positions}


def masked(sequences: Tensor, learned: Tensor) -> Batch:
    """A batch in which those next tokens of (B, T + 1) are learned for which `learned`, (B, T), is true."""
    batch = batch_of(sequences)
    return batch | {"labels": batch["labels"].masked_fill(~learned, UNLEARNED)}
