"""Tiny models of transformers, made from their configs, and runs that train them."""

from pathlib import Path
from typing import Any

import torch

from atoll.comm.config.engine import Engine
from atoll.comm.config.hf import HfConfig, LoraConfig, read_config
from atoll.comm.config.model import ModelConfig
from atoll.comm.config.run import InnerConfig, OptimizerName, RunConfig
from atoll.node.engines.hf_weights import BaseWeights

SEQ_LEN, BATCH = 32, 4
TARGETS = ["q_proj", "v_proj"]


def tiny_qwen(folder: Path, **changes: Any) -> Any:
    """A Qwen 2 of 2 million parameters with tied embeddings, and its folder as transformers writes it."""
    from transformers import AutoModelForCausalLM, Qwen2Config

    sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 2, "vocab_size": 320}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(
            Qwen2Config(**{**sizes, **heads, "tie_word_embeddings": True, **changes})
        )
    model.save_pretrained(folder)
    return model.eval()


def lora(folder: Path, **changes: Any) -> HfConfig:
    """Adapters of rank 8 in the model of a folder."""
    adapters = LoraConfig(**{"rank": 8, "targets": list(TARGETS), **changes})
    digest = BaseWeights.open(folder).digest()
    return HfConfig(config=read_config(str(folder)), base=str(folder), digest=digest, lora=adapters)


def run_of(hf: HfConfig, **changes: Any) -> RunConfig:
    """A run of short steps that trains the model."""
    inner = InnerConfig(optimizer=OptimizerName.ADAMW, lr=1e-3, batch_size=BATCH, warmup_tokens=512)
    settings = {"seed": 5, "model": ModelConfig(seq_len=SEQ_LEN, vocab_size=320), "inner": inner, **changes}
    return RunConfig(engine=Engine.HF, hf=hf, **settings)
