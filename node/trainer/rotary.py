"""Rotary positions (RoFormer, arXiv 2104.09864): the angles by which attention turns queries and keys.

Computed in every forward pass, not stored: a buffer would be lost when the model is built on the meta device. The
decoder asks once for all of its blocks.
"""

import math
from dataclasses import dataclass
from typing import assert_never

import torch
from torch import Tensor

from atoll.comm.config.model import ModelConfig, RopeType


@dataclass(frozen=True)
class Rotary:
    """The frequencies of a model's rotary positions."""

    head_dim: int
    base: float
    type: RopeType
    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_length: int  # tokens

    @classmethod
    def of(cls, config: ModelConfig) -> "Rotary":
        """The frequencies that a model's config says."""
        return cls(
            config.head_width,
            config.rope_base,
            config.rope_type,
            config.rope_factor,
            config.rope_low_freq_factor,
            config.rope_high_freq_factor,
            config.rope_original_length,
        )

    def frequencies(self, device: torch.device) -> Tensor:
        """Radians a position of each pair of elements, (head_dim / 2,) fp32."""
        pairs = torch.arange(0, self.head_dim, 2, device=device, dtype=torch.float32)
        plain = self.base ** (-pairs / self.head_dim)
        match self.type:
            case RopeType.DEFAULT:
                return plain
            case RopeType.LINEAR:
                return plain / self.factor
            case RopeType.LLAMA3:
                # Rotations in the original length; between the two factors, a blend (Llama 3.1's apply_scaling).
                rotations = self.original_length * plain / (2 * math.pi)
                low, high = self.low_freq_factor, self.high_freq_factor
                share = ((rotations - low) / (high - low)).clamp(0, 1)  # that stays as it is
                return (1 - share) * plain / self.factor + share * plain
            case _:
                assert_never(self.type)

    def angles(self, length: int, positions: Tensor | None, device: torch.device) -> tuple[Tensor, Tensor]:
        """Cosine and sine of each position's angles, fp32: (T, head_dim / 2) each for positions 0 ... T - 1, the
        `length`; (B, 1, T, head_dim / 2) for `positions`, (B, T)."""
        if positions is None:
            at = torch.arange(length, device=device, dtype=torch.float32)
            angle = torch.outer(at, self.frequencies(device))
        else:
            angle = positions[:, None, :, None].float() * self.frequencies(device)
        return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs (x[i], x[i + D/2]) of (B, heads, T, D) by their position's angle."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1).to(x.dtype)
