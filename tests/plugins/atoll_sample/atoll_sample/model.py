"""A model that predicts each token from the one before it alone."""

from typing import cast

import torch
from torch import Tensor, nn

from atoll.comm.config.model import ModelConfig


class Bigram(nn.Module):
    """Logits (B, T, vocab_size) from tokens (B, T) int64, through `dim` numbers a token."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocab_size, config.dim)
        self.head = nn.Linear(config.dim, config.vocab_size)
        self.register_buffer("scale", torch.tensor(4.0))

    def forward(self, tokens: Tensor) -> Tensor:
        return cast(Tensor, self.head(self.scale * self.embedding(tokens)))


def build(config: ModelConfig) -> nn.Module:
    return Bigram(config)
