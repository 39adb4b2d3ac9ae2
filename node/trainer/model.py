"""The model of a run: a small modern decoder, the module of a plugin, or the volunteer's own.

`build` promises a module whose `forward(tokens)` maps (B, T) int64 to logits (B, T, V); the decoder's takes
targets, too, and then returns the loss, and positions, which separate documents. `init_parameters` promises the
same numbers for the same seed and parameter names, whatever the number of local ranks: each rank draws the whole
tensor of a parameter and keeps the block it owns; and bit for bit the same on every machine, as members of a run
compare what they make. The trainer calls both.
"""

import hashlib
import importlib
import math
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atoll.comm.config.model import ModelConfig
from atoll.comm.config.plugin import PluginGroup
from atoll.comm.config.run import RunConfig
from atoll.comm.errors import ConfigError
from atoll.node.participant.flat_vector import local_block, local_tensor
from atoll.node.trainer.attention import Attention
from atoll.node.trainer.attention_mask import Mask, attention_mask, begin_at_zero
from atoll.node.trainer.chunked_loss import chunked_cross_entropy
from atoll.node.trainer.exact_normal import exact_normal
from atoll.node.trainer.rotary import Rotary

INIT_STD = 0.02


class FeedForward(nn.Module):
    """SwiGLU (arXiv 2002.05202) from (B, T, dim) to (B, T, dim)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.dim, config.ffn_dim, bias=config.ffn_bias)
        self.up = nn.Linear(config.dim, config.ffn_dim, bias=config.ffn_bias)
        self.down = nn.Linear(config.ffn_dim, config.dim, bias=config.ffn_bias)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.down(F.silu(self.gate(x)) * self.up(x)))


class DecoderBlock(nn.Module):
    """Attention, then feed-forward, each normed before and added to the residual stream (B, T, dim)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, config.norm_eps)
        self.attention = Attention(config)
        self.ffn_norm = nn.RMSNorm(config.dim, config.norm_eps)
        self.ffn = FeedForward(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Mask | None = None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin, mask)
        return cast(Tensor, x + self.ffn(self.ffn_norm(x)))


class Decoder(nn.Module):
    """The run's own model. `blocks` is what the trainer shards one by one."""

    separates_documents = True  # its `forward` takes positions

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.rotary = Rotary.of(config)
        self.window = config.sliding_window
        self.embedding = nn.Embedding(config.vocab_size, config.dim)
        self.blocks = nn.ModuleList(DecoderBlock(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.dim, config.norm_eps)
        # A tied head reads the embedding's weight in forward: the weight has one name in the flat vector.
        self.head = None if config.tied_head else nn.Linear(config.dim, config.vocab_size, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor | None = None, positions: Tensor | None = None) -> Tensor:
        """Logits (B, T, vocab_size) of the token after each of `tokens`, (B, T) int64; with `targets`, (B, T)
        int64, the mean cross entropy of those that are not -100, for which the logits of all tokens are never
        held at once. `positions`, (B, T) int64, count from 0 at the beginning of each document, and attention does
        not cross it; None: each sample is one."""
        x = self.embedding(tokens)  # (B, T, dim)
        cos, sin, mask = self._attention(tokens, positions)
        for block in self.blocks:
            x = block(x, cos, sin, mask)
        x = self.norm(x)
        head = self.embedding.weight if self.head is None else self.head.weight  # (V, dim)
        if targets is not None:  # here, where FSDP2 has gathered the head
            return chunked_cross_entropy(x.flatten(0, 1), head, targets.flatten())
        return F.linear(x, head)  # (B, T, V)

    def _attention(self, tokens: Tensor, positions: Tensor | None) -> tuple[Tensor, Tensor, Mask | None]:
        """Cosine, sine and mask of all blocks' attention."""
        length, device = tokens.shape[1], tokens.device
        if positions is not None and device.type == "cpu" and begin_at_zero(positions):
            positions = None  # not asked of a GPU, which would have to be waited for
        cos, sin = self.rotary.angles(length, positions, device)
        return cos, sin, attention_mask(length, positions, self.window, self.rotary.head_dim, device)


def build(config: ModelConfig) -> nn.Module:
    """The run's own model; `blocks` is its `nn.ModuleList`."""
    return Decoder(config)


def build_custom(path: str, config: ModelConfig) -> nn.Module:
    """The module that `path`, "package.module:function", returns for `config`, or a `ConfigError`."""
    module_name, _, function = path.partition(":")
    try:
        model = getattr(importlib.import_module(module_name), function)(config)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"model={path}: {error}; install the package here, or name its folder in PYTHONPATH"
        ) from error
    except Exception as error:  # the volunteer's code may raise anything
        raise ConfigError(f"model={path} did not build: {type(error).__name__}: {error}") from error
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model={path} returned a {type(model).__name__}: it must return a torch.nn.Module")
    return model.float()


def build_for(run: RunConfig, path: str = "") -> nn.Module:
    """The model that a node of the run trains: the volunteer's own, if there is a `path`; the one of the run's
    plugin, if it names one; else the built-in one. Raises `AtollError`."""
    if path:
        return build_custom(path, run.model)
    if (plugin := run.plugin(PluginGroup.MODELS)) is None:
        return build(run.model)
    model = plugin.call(run.model)
    if not isinstance(model, nn.Module):
        raise plugin.unusable(f"returned a {type(model).__name__}: it must return a torch.nn.Module")
    return model.float()


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The modules that the trainer shards and compiles one by one; none if the model does not name its
    `blocks`."""
    blocks = getattr(model, "blocks", None)
    return list(blocks) if isinstance(blocks, nn.ModuleList) else []


@torch.no_grad()
def init_parameters(model: nn.Module, seed: int) -> None:
    """Fill every parameter, or this rank's shard of it, with its initial value."""
    depth = len(blocks_of(model)) or 1
    for name, parameter in model.named_parameters():
        block = local_block(parameter)
        if block.numel:
            full = initial_value(name, tuple(parameter.shape), depth, seed)
            local_tensor(parameter).copy_(full[block.slices])


def initial_value(name: str, shape: tuple[int, ...], depth: int, seed: int) -> Tensor:
    """The initial value of one parameter, by its name: norms 1, biases 0, the rest normal.

    What projects back onto the residual stream starts smaller, by 1/sqrt(2 * depth) as in GPT-2: the stream's
    variance then does not grow with depth.
    """
    if len(shape) < 2:
        return torch.zeros(shape) if name.endswith("bias") else torch.ones(shape)
    residual = name.endswith(("attention.output.weight", "ffn.down.weight"))
    std = INIT_STD / math.sqrt(2 * depth) if residual else INIT_STD
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.from_numpy(exact_normal(math.prod(shape), std, int.from_bytes(digest[:8], "little"))).view(shape)
