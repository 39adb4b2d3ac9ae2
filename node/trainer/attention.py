"""Causal grouped-query attention (arXiv 2305.13245) with rotary positions, as the decoder's blocks have it."""

from typing import cast

from torch import Tensor, nn

from atoll.comm.config.model import ModelConfig
from atoll.node.trainer.attention_mask import Mask, attend
from atoll.node.trainer.rotary import rotate


class Attention(nn.Module):
    """Attention with the biases, and the norms of each head's query and key, that the config has."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_width
        wide, narrow = config.heads * self.head_dim, config.kv_heads * self.head_dim
        self.query = nn.Linear(config.dim, wide, bias=config.qkv_bias)
        self.key = nn.Linear(config.dim, narrow, bias=config.qkv_bias)
        self.value = nn.Linear(config.dim, narrow, bias=config.qkv_bias)
        self.output = nn.Linear(wide, config.dim, bias=config.attention_output_bias)
        self.query_norm = nn.RMSNorm(self.head_dim, config.norm_eps) if config.qk_norm else None
        self.key_norm = nn.RMSNorm(self.head_dim, config.norm_eps) if config.qk_norm else None

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Mask | None = None) -> Tensor:
        """Attend over `x`, (B, T, dim), as `mask` lets it; returns (B, T, dim). `cos`, `sin`: (T, head_dim / 2)
        or (B, 1, T, head_dim / 2) each, from `Rotary.angles`."""
        # (B, heads, T, head_dim) each
        q, k, v = (self._heads(project(x)) for project in (self.query, self.key, self.value))
        if self.query_norm is not None and self.key_norm is not None:
            q, k = self.query_norm(q), self.key_norm(k)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if x.device.type == "cpu":  # whose kernel takes four times as long in bf16 as in fp32
            q, k, v = q.float(), k.float(), v.float()
        mixed = attend(q, k, v, mask).to(x.dtype)
        return cast(Tensor, self.output(mixed.transpose(1, 2).flatten(2)))  # (B, T, dim)

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], -1, self.head_dim).transpose(1, 2)
