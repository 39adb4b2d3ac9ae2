"""A config.json is obeyed in every field that matters, or refused with the field's name."""

import json
from dataclasses import replace
from typing import Any

import pytest

from atoll.comm.config.hf_config import FAMILIES, family_of, read_model, to_hf
from atoll.comm.config.model import ModelConfig, RopeType, differences
from atoll.comm.errors import ConfigError

LLAMA_3_2: dict[str, Any] = {  # meta-llama/Llama-3.2-1B
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.45.0.dev0",
    "use_cache": True,
    "vocab_size": 128256,
}
QWEN_2_5: dict[str, Any] = {  # Qwen/Qwen2.5-0.5B
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "max_window_layers": 24,
    "model_type": "qwen2",
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "use_mrope": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN_3: dict[str, Any] = {  # Qwen/Qwen3-0.6B
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
MISTRAL: dict[str, Any] = {  # mistralai/Mistral-7B-v0.1
    "architectures": ["MistralForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mistral",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
}


def read(found: dict[str, Any]) -> ModelConfig:
    return read_model(json.dumps(found), "config.json")


@pytest.mark.parametrize(
    "found, n_params",
    [(LLAMA_3_2, 1_235_814_400), (QWEN_2_5, 494_032_768), (QWEN_3, 596_049_920), (MISTRAL, 7_241_732_096)],
    ids=["Llama 3.2", "Qwen 2.5", "Qwen 3", "Mistral"],
)
def test_published_models_have_as_many_parameters_as_published(found: dict[str, Any], n_params: int) -> None:
    model = read(found)
    assert model.n_params == n_params
    assert (model.seq_len, model.max_positions) == (2048, found["max_position_embeddings"])
    assert read(to_hf(model)) == model
    assert family_of(model) == found["model_type"]


def test_what_makes_the_families_differ_is_read() -> None:
    llama, qwen_2, qwen_3, mistral = map(read, (LLAMA_3_2, QWEN_2_5, QWEN_3, MISTRAL))
    assert (llama.rope_type, llama.rope_factor, llama.rope_original_length) == (RopeType.LLAMA3, 32.0, 8192)
    assert (llama.head_dim, llama.norm_eps, llama.rope_base) == (0, 1e-5, 500_000.0)
    assert qwen_2.qkv_bias and not qwen_2.attention_output_bias and not qwen_2.sliding_window
    assert qwen_3.qk_norm and not qwen_3.qkv_bias and qwen_3.head_width == 128 != qwen_3.dim // qwen_3.heads
    assert mistral.sliding_window == 4096 and not mistral.tied_head


def test_transformers_5_writes_rope_elsewhere() -> None:
    scaling = LLAMA_3_2["rope_scaling"] | {"rope_theta": 500_000.0}
    newer = {key: value for key, value in LLAMA_3_2.items() if not key.startswith("rope_")}
    assert read(newer | {"rope_parameters": scaling}) == read(LLAMA_3_2)


def test_sequences_are_no_longer_than_the_model_takes() -> None:
    assert read(LLAMA_3_2 | {"rope_scaling": None, "max_position_embeddings": 512}).seq_len == 512


@pytest.mark.parametrize(
    "found, change, sentence",
    [
        (LLAMA_3_2, {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel .*engine: hf"),
        (LLAMA_3_2, {"model_type": None, "architectures": None}, "is of None"),
        (LLAMA_3_2, {"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        (LLAMA_3_2, {"hidden_act": "gelu"}, r"\(LlamaForCausalLM\) has hidden_act = \"gelu\": .*engine: hf"),
        (LLAMA_3_2, {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, 'rope_type = "yarn": .*engine: hf'),
        (LLAMA_3_2, {"rope_scaling": {"type": "dynamic", "factor": 4.0}}, 'rope_type = "dynamic"'),
        (LLAMA_3_2, {"rope_scaling": {"type": "linear"}}, "factor = null: it must be a finite number"),
        (LLAMA_3_2, {"rope_scaling": {"type": "linear", "factor": "4"}}, 'factor = "4"'),
        (LLAMA_3_2, {"rope_scaling": {"type": "linear", "factor": 2.0, "attention_factor": 2.0}}, "attention_fac"),
        (LLAMA_3_2, {"rope_scaling": "linear"}, "rope_scaling"),
        (LLAMA_3_2, {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        (LLAMA_3_2, {"quantization_config": {"bits": 4}}, "quantization_config"),
        (LLAMA_3_2, {"logits_scaling": 8.0}, "logits_scaling = 8.0: Atoll does not know what that changes"),
        (LLAMA_3_2, {"is_causal": False}, "is_causal = false"),
        (LLAMA_3_2, {"hidden_size": None}, "lacks hidden_size"),
        (LLAMA_3_2, {"hidden_size": "2048"}, 'hidden_size = "2048": it must be an integer'),
        (LLAMA_3_2, {"num_hidden_layers": True}, "num_hidden_layers = true"),
        (LLAMA_3_2, {"vocab_size": 1 << 60}, "vocab_size"),
        (LLAMA_3_2, {"rms_norm_eps": float("nan")}, "rms_norm_eps = NaN"),
        (LLAMA_3_2, {"tie_word_embeddings": 1}, "tie_word_embeddings = 1: it must be true or false"),
        (LLAMA_3_2, {"num_key_value_heads": 5}, "model.heads 32 is not a multiple of model.kv_heads 5"),
        (QWEN_2_5, {"mlp_bias": True}, "mlp_bias = true"),
        (
            QWEN_2_5,
            {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 9},
            "one kind of atten",
        ),
        (QWEN_3, {"layer_types": ["chunked_attention"] * 28}, "layer_types"),
        (MISTRAL, {"attention_bias": True}, "attention_bias = true"),
        (MISTRAL, {"sliding_window": -1}, "sliding_window = -1"),
    ],
)
def test_what_the_decoder_does_not_compute_is_refused_by_name(
    found: dict[str, Any], change: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        read(found | change)


@pytest.mark.parametrize("text", ["", "[]", "[" * 100_000, '{"model_type": ["llama"]}', "null"])
def test_what_is_no_config_json_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="config.json"):
        read_model(text, "config.json")


def test_a_model_of_no_family_has_no_config_json() -> None:
    with pytest.raises(ConfigError, match="qk_norm=True.*ffn_bias=True.* together: export it with --layout names"):
        to_hf(ModelConfig(qk_norm=True, ffn_bias=True))
    assert {family_of(read(found)) for found in (LLAMA_3_2, QWEN_2_5, QWEN_3, MISTRAL)} == FAMILIES.keys()


def test_models_differ_in_what_they_compute_and_not_in_how_long_their_sequences_are() -> None:
    llama = read(LLAMA_3_2)
    assert list(differences(llama, replace(llama, seq_len=7, max_positions=9, head_dim=64))) == []
    assert list(differences(llama, replace(llama, rope_type=RopeType.DEFAULT))) == ["rope_type"]
    assert list(differences(llama, replace(llama, rope_factor=8.0, norm_eps=1e-6))) == ["rope_factor", "norm_eps"]
    plain = replace(llama, rope_type=RopeType.DEFAULT, rope_factor=1.0)
    assert list(differences(plain, replace(plain, rope_original_length=5))) == [], "it has no part in it"
    mistral = read(MISTRAL)
    assert list(differences(mistral, replace(mistral, sliding_window=0))) == [], "sequences are shorter"
    assert list(differences(mistral, replace(mistral, sliding_window=0, seq_len=4097))) == ["sliding_window"]
