"""Hugging Face's config.json and the run's `ModelConfig`: each from the other.

The families are those that Atoll's own decoder computes as transformers does: Llama, Mistral, Qwen 2 and Qwen 3.
Reading promises that every field that matters is obeyed, with the family's default where it is absent, and that
anything else is refused: a field that is neither obeyed nor known to be without effect may change what the model
computes. Each refusal is a `ConfigError` that names the architecture and the field. `atoll.comm.config.load` reads
a run's `model: FOLDER` with it, `atoll.node.checkpoint` what lies beside weights, and writes what it exports.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from atoll.comm.config.model import ModelConfig, RopeType
from atoll.comm.config.rules import LARGEST_INT
from atoll.comm.errors import ConfigError

CONFIG = "config.json"
MAX_DEFAULT_SEQ_LEN = 2048  # tokens of a training sequence where only the config.json says how long one may be
ANOTHER_ENGINE = "set engine: hf, which builds it by transformers"


@dataclass(frozen=True, slots=True)
class Family:
    """A family of models by its `model_type`, with what transformers takes where config.json is silent."""

    architecture: str
    max_positions: int
    kv_heads: int | None = None  # None: as many as there are heads
    head_dim: int | None = None  # None: hidden_size / num_attention_heads
    sliding_window: int | None = None


FAMILIES = {
    "llama": Family("LlamaForCausalLM", 2048),
    "mistral": Family("MistralForCausalLM", 131_072, kv_heads=8, sliding_window=4096),
    "qwen2": Family("Qwen2ForCausalLM", 32_768, kv_heads=32),
    "qwen3": Family("Qwen3ForCausalLM", 32_768, kv_heads=32, head_dim=128),
}
LARGEST_NUMBER = 1e30  # no rope base, factor or epsilon is larger
DEFAULT_EPS, DEFAULT_BASE = 1e-6, 10_000.0  # of all four

# Fields that change nothing in what the model computes of tokens in training as Atoll does it.
WITHOUT_EFFECT = frozenset(
    # descriptions, and what is done around the model
    "architectures model_type name transformers_version unsloth_fixed unsloth_version dtype torch_dtype "
    "torchscript tokenizer_class bos_token_id eos_token_id pad_token_id sep_token_id unk_token_id "
    "model_max_length id2label label2id problem_type finetuning_task task_specific_params return_dict "
    "output_attentions output_hidden_states chunk_size_feed_forward gradient_checkpointing use_cache "
    # the beginning of a training that was
    "attention_dropout initializer_range pretraining_tp "
    # generation
    "max_length min_length max_new_tokens do_sample temperature top_k top_p typical_p repetition_penalty "
    "length_penalty num_beams num_return_sequences".split()
)
WITHOUT_EFFECT_WHEN_FALSE = frozenset(
    "attention_bias mlp_bias use_mrope is_encoder_decoder is_decoder add_cross_attention "
    "tie_encoder_decoder".split()
)
EMPTY: tuple[Any, ...] = (None, "", [], {})


def read_model(text: bytes | str, where: str) -> ModelConfig:
    """Translate the text of a config.json; `where` names it in sentences. The sequences are as long as the model
    takes, up to `MAX_DEFAULT_SEQ_LEN`. Raises `ConfigError` for what is no config.json, and for a model that
    Atoll's own decoder does not compute."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        raise ConfigError(f"{where} is not valid JSON") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{where} does not hold keys and values: it is no model's config.json")
    return to_model(found, where)


def to_model(found: Mapping[str, Any], where: str = "config.json") -> ModelConfig:
    """Translate the contents of a config.json, as `read_model` does."""
    fields = _Fields(found, where)
    family = FAMILIES[fields.model_type]
    qwen, llama = fields.model_type in ("qwen2", "qwen3"), fields.model_type == "llama"
    heads, dim = fields.integer("num_attention_heads"), fields.integer("hidden_size")
    max_positions = fields.integer("max_position_embeddings", family.max_positions)
    biased = fields.model_type == "qwen2"  # whatever its config.json says
    attention_bias = fields.boolean("attention_bias") if llama or fields.model_type == "qwen3" else False
    head_dim = fields.optional("head_dim", family.head_dim) or 0
    if head_dim * heads == dim:
        head_dim = 0
    if (activation := fields.take("hidden_act", "silu")) not in ("silu", "swish"):
        raise fields.refusal("hidden_act", activation, "Atoll's own decoder has silu")
    rope = _rope(fields, max_positions)
    model = ModelConfig(
        vocab_size=fields.integer("vocab_size"),
        dim=dim,
        layers=fields.integer("num_hidden_layers"),
        heads=heads,
        kv_heads=fields.optional("num_key_value_heads", family.kv_heads) or heads,
        head_dim=head_dim,
        ffn_dim=fields.integer("intermediate_size"),
        seq_len=min(max_positions, MAX_DEFAULT_SEQ_LEN),
        max_positions=max_positions,
        sliding_window=_sliding_window(fields, family, max_positions, qwen),
        norm_eps=fields.number("rms_norm_eps", DEFAULT_EPS),
        qk_norm=fields.model_type == "qwen3",
        qkv_bias=biased or attention_bias,
        attention_output_bias=attention_bias,
        ffn_bias=fields.boolean("mlp_bias") if llama else False,
        tied_head=fields.boolean("tie_word_embeddings"),
        **rope,
    )
    fields.check_rest()
    for holds, sentence in model.rules():
        if not holds:
            raise ConfigError(f"{where} is of no model that can be built: {sentence}")
    return model


class _Fields:
    """The fields of a config.json; what is not asked for must be without effect."""

    def __init__(self, found: Mapping[str, Any], where: str) -> None:
        self._found, self.where, self._taken = found, where, set[str]()
        names = found.get("architectures")
        architecture = names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""
        self.model_type = str(found.get("model_type"))
        known = FAMILIES.get(self.model_type)
        self.architecture = architecture or (known.architecture if known else self.model_type)
        if known is None:
            raise ConfigError(
                f"{where} is of {self.architecture} (model_type {self.model_type}), and Atoll's own decoder "
                f"computes {', '.join(FAMILIES)}: {ANOTHER_ENGINE} if it has it"
            )
        if architecture not in ("", known.architecture):
            raise ConfigError(
                f"{where} is of {architecture}, and Atoll's own decoder predicts the next token, as "
                f"{known.architecture} does: give the folder of that one"
            )

    def refusal(self, key: str, value: Any, why: str) -> ConfigError:
        """The error that a field's value is refused with."""
        shown = json.dumps(value)
        shown = shown if len(shown) < 200 else f"{shown[:200]}..."
        return ConfigError(f"{self.where} ({self.architecture}) has {key} = {shown}: {why}; {ANOTHER_ENGINE}")

    def take(self, key: str, default: Any = None) -> Any:
        """The value of a field; `default` where it is absent or null."""
        self._taken.add(key)
        value = self._found.get(key)
        return default if value is None else value

    def optional(self, key: str, default: int | None) -> int | None:
        """A field that is an integer above 0, or null."""
        self._taken.add(key)
        if (value := self._found.get(key, default)) is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= LARGEST_INT:
            raise ConfigError(f"{self.where} has {key} = {json.dumps(value)[:80]}: it must be an integer above 0")
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        """A field that is an integer above 0."""
        value = self.optional(key, default)
        value = default if value is None else value
        if value is None:
            raise ConfigError(f"{self.where} lacks {key}: it is no whole config.json of a {self.model_type} model")
        return value

    def number(self, key: str, default: float) -> float:
        """A field that is a finite number above 0."""
        return as_number(self.take(key, default), f"{self.where} has {key}")

    def boolean(self, key: str) -> bool:
        """A field that is true or false; false where it is absent."""
        value = self.take(key, False)
        if not isinstance(value, bool):
            raise ConfigError(f"{self.where} has {key} = {json.dumps(value)[:80]}: it must be true or false")
        return value

    def check_rest(self) -> None:
        """Refuse a field that was not asked for and may have an effect."""
        for key, value in self._found.items():
            if key in self._taken or key in WITHOUT_EFFECT or key.startswith("_") or value in EMPTY:
                continue
            if key in WITHOUT_EFFECT_WHEN_FALSE and value is False:
                continue
            raise self.refusal(
                key, value, "Atoll does not know what that changes; if nothing, take it out of a copy of the file"
            )


def as_number(value: Any, what: str) -> float:
    """A finite number above 0, or a `ConfigError` that begins with `what`."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < LARGEST_NUMBER:
        raise ConfigError(f"{what} = {json.dumps(value)[:80]}: it must be a finite number above 0")
    return float(value)


def _sliding_window(fields: _Fields, family: Family, max_positions: int, qwen: bool) -> int:
    """Tokens of the window that every layer has; 0: none has an effect."""
    if fields.model_type == "llama":
        return 0
    window = fields.optional("sliding_window", family.sliding_window if not qwen else 4096) or 0
    if not qwen:
        return window
    used = fields.boolean("use_sliding_window")
    first, layers = fields.take("max_window_layers", 28), fields.integer("num_hidden_layers")
    kinds = fields.take("layer_types")
    if kinds is None:
        first = first if isinstance(first, int) else 0
        kinds = ["full_attention"] if first > 0 or not (used and window) else []
        kinds += ["sliding_attention"] if first < layers and used and window else []
    if not isinstance(kinds, list) or not all(isinstance(kind, str) for kind in kinds):
        raise fields.refusal("layer_types", kinds, "it must be a list of names")
    if set(kinds) == {"full_attention"}:
        return 0
    if set(kinds) == {"sliding_attention"} and used and window:
        return window
    if set(kinds) <= {"full_attention", "sliding_attention"} and window >= max_positions:
        return 0  # no sequence is longer
    raise fields.refusal(
        "layer_types", sorted(set(kinds)), "Atoll's own decoder has one kind of attention in all layers"
    )


def _rope(fields: _Fields, max_positions: int) -> dict[str, Any]:
    """The fields of rotary positions, from transformers 4's `rope_theta` and `rope_scaling` or 5's
    `rope_parameters`."""
    base, partial = fields.number("rope_theta", DEFAULT_BASE), fields.take("partial_rotary_factor", 1)
    key, found = "rope_scaling", fields.take("rope_scaling")
    parameters, original = fields.take("rope_parameters"), fields.take("original_max_position_embeddings")
    if not found:
        key, found = "rope_parameters", parameters or {}
    if not isinstance(found, dict):
        raise fields.refusal(key, found, "it must hold keys and values")
    rest = dict(found)
    what = f"{fields.where} has {key}: "
    type_, old_type = rest.pop("rope_type", None), rest.pop("type", None)
    type_ = type_ or old_type or "default"
    base = as_number(rest.pop("rope_theta", None) or base, f"{what}rope_theta")
    if (partial := rest.pop("partial_rotary_factor", None) or partial) != 1:
        raise fields.refusal("partial_rotary_factor", partial, "Atoll's own decoder turns whole heads")
    if type_ not in [str(known) for known in RopeType]:
        raise fields.refusal(f"{key}.rope_type", type_, f"Atoll's own decoder has {', '.join(RopeType)}")
    rope: dict[str, Any] = {"rope_base": base, "rope_type": RopeType(type_)}
    if rope["rope_type"] is not RopeType.DEFAULT:
        rope["rope_factor"] = as_number(rest.pop("factor", None), f"{what}factor")
    if rope["rope_type"] is RopeType.LLAMA3:
        for theirs in ("low_freq_factor", "high_freq_factor"):
            rope[f"rope_{theirs}"] = as_number(rest.pop(theirs, None), f"{what}{theirs}")
        length = original or rest.get("original_max_position_embeddings") or max_positions
        rope["rope_original_length"] = int(as_number(length, f"{what}original_max_position_embeddings"))
    rest.pop("original_max_position_embeddings", None)  # of no effect in the other types
    if others := {theirs: value for theirs, value in rest.items() if value is not None}:
        raise fields.refusal(key, others, f"Atoll's own decoder knows no such rope of type {type_}")
    return rope


def to_hf(model: ModelConfig) -> dict[str, Any]:
    """The contents of the config.json with which transformers builds the run's own model, as the family that it
    is. Which tokens begin and end a text is the tokenizer's to say. Raises `ConfigError` for a model of no
    family."""
    type_ = family_of(model)
    rope: dict[str, Any] = {"rope_type": str(model.rope_type), "rope_theta": model.rope_base}
    if model.rope_type is not RopeType.DEFAULT:
        rope["factor"] = model.rope_factor
    if model.rope_type is RopeType.LLAMA3:
        rope["low_freq_factor"] = model.rope_low_freq_factor
        rope["high_freq_factor"] = model.rope_high_freq_factor
        rope["original_max_position_embeddings"] = model.rope_original_length
    found: dict[str, Any] = {
        "architectures": [FAMILIES[type_].architecture],
        "model_type": type_,
        "vocab_size": model.vocab_size,
        "hidden_size": model.dim,
        "intermediate_size": model.ffn_dim,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_width,
        "max_position_embeddings": max(model.max_positions, model.seq_len),
        "hidden_act": "silu",
        "rms_norm_eps": model.norm_eps,
        "rope_theta": model.rope_base,  # transformers 4 reads this and rope_scaling, 5 the last
        "rope_scaling": rope if model.rope_type is not RopeType.DEFAULT else None,
        "rope_parameters": rope,
        "tie_word_embeddings": model.tied_head,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "use_cache": True,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "torch_dtype": "float32",
    }
    match type_:
        case "llama":
            found |= {"attention_bias": model.qkv_bias, "mlp_bias": model.ffn_bias}
        case "mistral":
            found |= {"sliding_window": model.sliding_window}
        case _:
            window = model.sliding_window or None
            kind = "sliding_attention" if window else "full_attention"
            found |= {
                "use_sliding_window": window is not None,
                "sliding_window": window,
                "max_window_layers": 0 if window else model.layers,
                "layer_types": [kind] * model.layers,
            }
            if type_ == "qwen3":
                found |= {"attention_bias": model.qkv_bias}
    return found


def family_of(model: ModelConfig) -> str:
    """The `model_type` under which transformers computes the run's own model. Raises `ConfigError` where it has
    none that does."""
    same_bias = model.qkv_bias == model.attention_output_bias
    if model.qk_norm and same_bias and not model.ffn_bias:
        return "qwen3"
    if model.qkv_bias and not (model.qk_norm or model.attention_output_bias or model.ffn_bias):
        return "qwen2"
    if model.sliding_window and not (model.qk_norm or model.qkv_bias or not same_bias or model.ffn_bias):
        return "mistral"
    if same_bias and not (model.qk_norm or model.sliding_window):
        return "llama"
    raise ConfigError(
        f"none of {', '.join(FAMILIES)} has this model's qk_norm={model.qk_norm}, qkv_bias={model.qkv_bias}, "
        f"attention_output_bias={model.attention_output_bias}, ffn_bias={model.ffn_bias} and "
        f"sliding_window={model.sliding_window} together: export it with --layout names"
    )
