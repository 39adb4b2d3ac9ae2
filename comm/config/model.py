"""The model of a run: the sizes and the variant of its decoder.

The names are Atoll's own; `atoll.comm.config.hf_config` translates them from a Hugging Face config.json and back.
The decoder itself is `atoll.node.trainer.model`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from enum import StrEnum

from atoll.comm.config.plugin import name_rules
from atoll.comm.config.rules import MAX_LAYERS, Rule, positive, representable


class RopeType(StrEnum):
    """The ways in which rotary frequencies are stretched for sequences longer than those first trained on."""

    DEFAULT = "default"  # not at all
    LINEAR = "linear"  # all of them by the same factor (arXiv 2306.15595)
    LLAMA3 = "llama3"  # long wavelengths by the factor, short ones not at all (Llama 3.1)


@dataclass
class ModelConfig:
    """A decoder-only transformer: RMSNorm, rotary positions, SwiGLU, grouped-query attention; with the biases,
    norms, rope scaling and sliding window of Llama, Mistral and Qwen where they are set."""

    # name of an entry point of the group atoll.models, whose function builds the model of this section; empty:
    # Atoll's own decoder
    plugin: str = ""
    vocab_size: int = 256  # tokens
    dim: int = 128  # width of what goes from block to block
    layers: int = 4  # blocks
    heads: int = 4  # of queries, in a block
    kv_heads: int = 4  # fewer than heads: grouped-query attention
    head_dim: int = 0  # width of a head; 0: dim / heads
    ffn_dim: int = 344  # hidden width of SwiGLU
    seq_len: int = 128  # tokens
    max_positions: int = 0  # tokens of the longest sequence that the model is said to be for; 0: seq_len
    sliding_window: int = 0  # tokens that attention looks back on, each its own among them; 0: all
    rope_base: float = 10000.0  # of the wavelengths of rotary positions
    rope_type: RopeType = RopeType.DEFAULT
    rope_factor: float = 1.0  # for linear and llama3: by which wavelengths grow
    rope_low_freq_factor: float = (
        1.0  # for llama3: wavelengths above rope_original_length / this grow by the factor
    )
    rope_high_freq_factor: float = 4.0  # for llama3: wavelengths below rope_original_length / this stay
    rope_original_length: int = 8192  # for llama3: tokens of the sequences that it was first trained on
    norm_eps: float = 1e-5  # added to the mean square in RMSNorm
    qk_norm: bool = False  # RMSNorm of each head's query and key
    qkv_bias: bool = False  # of the projections to query, key and value
    attention_output_bias: bool = False  # of the projection behind attention
    ffn_bias: bool = False  # of the three projections of SwiGLU
    tied_head: bool = True  # the output head shares the embedding

    @property
    def head_width(self) -> int:
        """Elements of a head's query, key and value."""
        return self.head_dim or self.dim // self.heads

    @property
    def n_params(self) -> int:
        """Parameters of the flat vector."""
        width, query_and_kv = self.head_width, self.heads + 2 * self.kv_heads
        block = 2 * self.dim * width * (self.heads + self.kv_heads) + 3 * self.dim * self.ffn_dim + 2 * self.dim
        block += width * query_and_kv * self.qkv_bias + self.dim * self.attention_output_bias
        block += 2 * width * self.qk_norm + (2 * self.ffn_dim + self.dim) * self.ffn_bias
        embeddings = self.vocab_size * self.dim * (1 if self.tied_head else 2)
        return embeddings + self.layers * block + self.dim

    def rules(self) -> Iterator[Rule]:
        """Rules of a model that can be built."""
        yield from positive(
            "model",
            vocab_size=self.vocab_size,
            dim=self.dim,
            layers=self.layers,
            heads=self.heads,
            kv_heads=self.kv_heads,
            ffn_dim=self.ffn_dim,
            seq_len=self.seq_len,
            rope_base=self.rope_base,
            rope_original_length=self.rope_original_length,
        )
        yield from representable("model", self)
        yield from name_rules("model.plugin", self.plugin)
        if self.plugin:  # which decides what the rest means
            return
        yield self.layers <= MAX_LAYERS, f"model.layers is {self.layers}: {MAX_LAYERS} are the most"
        for key in ("head_dim", "max_positions", "sliding_window"):
            yield getattr(self, key) >= 0, f"model.{key} is {getattr(self, key)}: it must not be negative"
        yield (
            self.head_dim > 0 or self.dim % self.heads == 0,
            f"model.dim {self.dim} is not a multiple of model.heads {self.heads}",
        )
        yield (
            self.head_width % 2 == 0,
            f"model.dim / model.heads is {self.dim / self.heads:g}: rotary needs it even"
            if not self.head_dim
            else f"model.head_dim is {self.head_dim}: rotary needs it even",
        )
        yield (
            self.heads % self.kv_heads == 0,
            f"model.heads {self.heads} is not a multiple of model.kv_heads {self.kv_heads}",
        )
        yield self.rope_factor >= 1, f"model.rope_factor is {self.rope_factor}: it must be 1 or more"
        yield (
            self.rope_type is not RopeType.DEFAULT or self.rope_factor == 1,
            f"model.rope_factor is {self.rope_factor} and model.rope_type is default, which has none: set "
            "model.rope_type to linear or llama3",
        )
        yield (
            0 < self.rope_low_freq_factor < self.rope_high_freq_factor,
            f"model.rope_low_freq_factor {self.rope_low_freq_factor} must be above 0 and below "
            f"model.rope_high_freq_factor {self.rope_high_freq_factor}",
        )


def differences(one: ModelConfig, other: ModelConfig) -> Iterator[str]:
    """Names of the fields in which the models differ: in a parameter's shape or in what they compute of the same
    parameters. How long sequences are is no difference, nor a window that is longer than those of `other`."""
    used = {"rope_factor"} if other.rope_type is not RopeType.DEFAULT else set[str]()
    if other.rope_type is RopeType.LLAMA3:
        used |= {"rope_low_freq_factor", "rope_high_freq_factor", "rope_original_length"}
    for item in fields(ModelConfig):
        match item.name:
            case "seq_len" | "max_positions":
                continue
            case "head_dim":
                differ = one.head_width != other.head_width
            case "sliding_window":
                windows = {min(m.sliding_window or other.seq_len, other.seq_len) for m in (one, other)}
                differ = len(windows) > 1
            case "rope_factor" | "rope_low_freq_factor" | "rope_high_freq_factor" | "rope_original_length" as name:
                differ = name in used and getattr(one, name) != getattr(other, name)
            case name:
                differ = getattr(one, name) != getattr(other, name)
        if differ:
            yield item.name
