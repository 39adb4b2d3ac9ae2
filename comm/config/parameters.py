"""The parameters of Atoll's own decoder by name and shape, as its torch module has them, without torch.

The coordinator lays out the run's flat vector by it, before any node has built the model.
"""

from atoll.comm.config.model import ModelConfig

Shape = tuple[int, ...]


def decoder_shapes(model: ModelConfig) -> dict[str, Shape]:
    """The name and the shape of each parameter of the decoder (`atoll.node.trainer.model.Decoder`), in no order
    that counts."""
    wide, narrow = model.heads * model.head_width, model.kv_heads * model.head_width
    found: dict[str, Shape] = {"embedding.weight": (model.vocab_size, model.dim), "norm.weight": (model.dim,)}
    if not model.tied_head:
        found["head.weight"] = (model.vocab_size, model.dim)
    linear = (  # name, outputs, inputs, bias
        ("attention.query", wide, model.dim, model.qkv_bias),
        ("attention.key", narrow, model.dim, model.qkv_bias),
        ("attention.value", narrow, model.dim, model.qkv_bias),
        ("attention.output", model.dim, wide, model.attention_output_bias),
        ("ffn.gate", model.ffn_dim, model.dim, model.ffn_bias),
        ("ffn.up", model.ffn_dim, model.dim, model.ffn_bias),
        ("ffn.down", model.dim, model.ffn_dim, model.ffn_bias),
    )
    for number in range(model.layers):
        block = f"blocks.{number}"
        found[f"{block}.attention_norm.weight"] = found[f"{block}.ffn_norm.weight"] = (model.dim,)
        if model.qk_norm:
            found[f"{block}.attention.query_norm.weight"] = (model.head_width,)
            found[f"{block}.attention.key_norm.weight"] = (model.head_width,)
        for name, outputs, inputs, bias in linear:
            found[f"{block}.{name}.weight"] = (outputs, inputs)
            if bias:
                found[f"{block}.{name}.bias"] = (outputs,)
    return found
