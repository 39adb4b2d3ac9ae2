"""The run's own model (`atoll.node.trainer.model`) in the layout that Hugging Face's `LlamaForCausalLM` loads.

It is the same network under other names: rotary positions turn the pairs (i, i + D/2) in both, so no row of the
query or key moves, and the flat vector stays as it is. A tied head has no tensor of its own in either.
"""

from typing import Any

from atoll.comm.config.run import ModelConfig
from atoll.comm.errors import ConfigError
from atoll.node.checkpoint.snapshots import TensorShapes

TOP_NAMES = {
    "embedding.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}
BLOCK_NAMES = {
    "attention_norm.weight": "input_layernorm.weight",
    "attention.query.weight": "self_attn.q_proj.weight",
    "attention.key.weight": "self_attn.k_proj.weight",
    "attention.value.weight": "self_attn.v_proj.weight",
    "attention.output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn.gate.weight": "mlp.gate_proj.weight",
    "ffn.up.weight": "mlp.up_proj.weight",
    "ffn.down.weight": "mlp.down_proj.weight",
}


def to_llama_names(layout: TensorShapes, model: ModelConfig) -> TensorShapes:
    """Rename the run's own model's tensors to those of Hugging Face's Llama; their order and shapes stay. Raises
    `ConfigError` if they are not the tensors of `model`."""
    expected = shapes(model)
    if dict(layout) != expected:
        odd = min(set(layout) ^ set(expected.items()))
        raise ConfigError(
            f"these parameters are not those of the run's own model ({odd[0]} differs): export them with "
            "--layout names"
        )
    names = {**TOP_NAMES}
    for i in range(model.layers):
        names |= {f"blocks.{i}.{ours}": f"model.layers.{i}.{theirs}" for ours, theirs in BLOCK_NAMES.items()}
    return tuple((names[name], shape) for name, shape in layout)


def shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of each parameter of the run's own model."""
    dim, wide, group = model.dim, model.ffn_dim, model.dim // model.heads * model.kv_heads
    block: dict[str, tuple[int, ...]] = {
        "attention_norm.weight": (dim,),
        "attention.query.weight": (dim, dim),
        "attention.key.weight": (group, dim),
        "attention.value.weight": (group, dim),
        "attention.output.weight": (dim, dim),
        "ffn_norm.weight": (dim,),
        "ffn.gate.weight": (wide, dim),
        "ffn.up.weight": (wide, dim),
        "ffn.down.weight": (dim, wide),
    }
    found: dict[str, tuple[int, ...]] = {"embedding.weight": (model.vocab_size, dim), "norm.weight": (dim,)}
    if not model.tied_head:
        found["head.weight"] = (model.vocab_size, dim)
    for i in range(model.layers):
        found |= {f"blocks.{i}.{name}": shape for name, shape in block.items()}
    return found


def config(model: ModelConfig) -> dict[str, Any]:
    """The `config.json` with which transformers builds the run's own model as `LlamaForCausalLM`. Which tokens
    begin and end a text is the tokenizer's to say."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": model.vocab_size,
        "hidden_size": model.dim,
        "intermediate_size": model.ffn_dim,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.dim // model.heads,
        "max_position_embeddings": model.seq_len,
        "hidden_act": "silu",
        "rms_norm_eps": model.norm_eps,
        "rope_theta": model.rope_base,  # transformers 4 reads this, 5 the next
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rope_base},
        "tie_word_embeddings": model.tied_head,
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "use_cache": True,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "torch_dtype": "float32",
    }
