"""The run's own model (`atoll.node.trainer.model`) under the names that Hugging Face's families give its tensors:
Llama, Mistral, Qwen 2 and Qwen 3, who all name them alike.

It is the same network under other names: rotary positions turn the pairs (i, i + D/2) in both, so no row of the
query or key moves, and the flat vector stays as it is. A tied head has no tensor of its own in either. The
config.json that goes with them is `atoll.comm.config.hf_config`'s.
"""

from atoll.comm.config.model import ModelConfig
from atoll.comm.errors import ConfigError
from atoll.node.checkpoint.snapshots import TensorShapes

TOP_NAMES = {
    "embedding.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}
MODULES = {  # of a block
    "attention_norm": "input_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.query_norm": "self_attn.q_norm",
    "attention.key_norm": "self_attn.k_norm",
    "attention.output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn.gate": "mlp.gate_proj",
    "ffn.up": "mlp.up_proj",
    "ffn.down": "mlp.down_proj",
}
# Of tied heads, which some files have a second time, and of old files, which have the rotary frequencies.
SPARE_HEAD, SPARE_SUFFIX = "lm_head.weight", ".rotary_emb.inv_freq"


def config_beside(weights: str) -> str:
    """The name of the file beside a file of weights that says what model they are of: config.json for
    model.safetensors and for shards, as transformers looks for it; X.config.json for X.safetensors, so that
    several exports can be in one folder."""
    stem = weights.removesuffix(".safetensors")
    return "config.json" if stem in ("model", weights) else f"{stem}.config.json"


def to_hf_names(layout: TensorShapes, model: ModelConfig) -> TensorShapes:
    """Rename the run's own model's tensors to Hugging Face's; their order and shapes stay. Raises `ConfigError` if
    they are not the tensors of `model`."""
    expected = shapes(model)
    if dict(layout) != expected:
        odd = min(set(layout) ^ set(expected.items()))
        raise ConfigError(
            f"these parameters are not those of the run's own model ({odd[0]} differs): export them with "
            "--layout names"
        )
    return tuple((hf_name(name), shape) for name, shape in layout)


def hf_name(name: str) -> str:
    """Hugging Face's name of one of the run's own model's tensors."""
    if (top := TOP_NAMES.get(name)) is not None:
        return top
    _, block, inside = name.split(".", 2)
    module, _, kind = inside.rpartition(".")
    return f"model.layers.{block}.{MODULES[module]}.{kind}"


def is_spare(name: str, model: ModelConfig) -> bool:
    """Whether a tensor of Hugging Face's names says nothing that the others do not."""
    return name.endswith(SPARE_SUFFIX) or (model.tied_head and name == SPARE_HEAD)


def shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of each parameter of the run's own model."""
    dim, ffn = model.dim, model.ffn_dim
    wide, narrow = model.heads * model.head_width, model.kv_heads * model.head_width
    matrices = {
        "attention.query": (wide, dim),
        "attention.key": (narrow, dim),
        "attention.value": (narrow, dim),
        "attention.output": (dim, wide),
        "ffn.gate": (ffn, dim),
        "ffn.up": (ffn, dim),
        "ffn.down": (dim, ffn),
    }
    biased = {"attention.query", "attention.key", "attention.value"} if model.qkv_bias else set[str]()
    biased |= {"attention.output"} if model.attention_output_bias else set()
    biased |= {"ffn.gate", "ffn.up", "ffn.down"} if model.ffn_bias else set()
    block: dict[str, tuple[int, ...]] = {"attention_norm.weight": (dim,), "ffn_norm.weight": (dim,)}
    block |= {f"{name}.weight": shape for name, shape in matrices.items()}
    block |= {f"{name}.bias": (matrices[name][0],) for name in biased}
    if model.qk_norm:
        block |= {f"attention.{name}.weight": (model.head_width,) for name in ("query_norm", "key_norm")}
    found: dict[str, tuple[int, ...]] = {"embedding.weight": (model.vocab_size, dim), "norm.weight": (dim,)}
    if not model.tied_head:
        found["head.weight"] = (model.vocab_size, dim)
    for i in range(model.layers):
        found |= {f"blocks.{i}.{name}": shape for name, shape in block.items()}
    return found
