"""Documents that share a sample do not see each other, however the model is computed."""

from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from rank_processes import on_ranks
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from atoll.comm.config.model import ModelConfig, RopeType
from atoll.node.checkpoint import hf_layout
from atoll.node.config import Checkpointing
from atoll.node.participant.rank_group import RankGroup
from atoll.node.trainer.accumulator import compile_blocks
from atoll.node.trainer.attention_mask import block_mask, compiled_flex_attention, dense_mask, document_numbers
from atoll.node.trainer.checkpointing import ActivationCheckpointing
from atoll.node.trainer.loss import next_token_loss, placed
from atoll.node.trainer.model import Decoder, blocks_of, init_parameters
from atoll.node.trainer.process import shard_model

SMALL = ModelConfig(vocab_size=256, dim=32, layers=2, heads=4, kv_heads=2, ffn_dim=48, seq_len=16)
LLAMA_3 = replace(SMALL, rope_type=RopeType.LLAMA3, rope_factor=8.0, rope_original_length=16)
VARIANTS = {
    "default": SMALL,
    "untied": replace(SMALL, tied_head=False, kv_heads=4),
    "rope of llama 3": LLAMA_3,
    "linear rope": replace(SMALL, rope_type=RopeType.LINEAR, rope_factor=2.0),
    "window": replace(SMALL, sliding_window=5),
    "biases": replace(SMALL, qkv_bias=True, attention_output_bias=True, ffn_bias=True),
    "norms and wide heads": replace(SMALL, qk_norm=True, head_dim=24),
}
LENGTHS = (7, 1, 24)  # of a sample's documents


def made(config: ModelConfig) -> Decoder:
    """A decoder whose attention is far from uniform."""
    model = Decoder(config)
    init_parameters(model, 0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5 if parameter.ndim > 1 else 1)
    return model


def packed(samples: int = 3) -> tuple[Tensor, Tensor]:
    """Tokens and positions of samples of three documents; the last sample is one."""
    tokens = torch.randint(256, (samples, sum(LENGTHS)), generator=torch.Generator().manual_seed(0))
    positions = torch.cat([torch.arange(length) for length in LENGTHS]).repeat(samples, 1)
    positions[-1] = torch.arange(sum(LENGTHS))
    return tokens, positions


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_config_says_each_parameter_of_each_variant(variant: str) -> None:
    config = VARIANTS[variant]
    built = {name: tuple(p.shape) for name, p in Decoder(config).named_parameters()}
    assert built == hf_layout.shapes(config)
    assert sum(torch.Size(shape).numel() for shape in built.values()) == config.n_params


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_document_has_the_logits_that_it_has_alone_whatever_is_before_it(variant: str) -> None:
    model, (tokens, positions) = made(VARIANTS[variant]), packed()
    changed = tokens.clone()
    changed[:, : LENGTHS[0]] = (changed[:, : LENGTHS[0]] + 1) % 256
    with torch.no_grad():
        found, after = model(tokens, positions=positions), model(changed, positions=positions)
        alone = [model(document) for document in torch.tensor_split(tokens[:-1], [7, 8], dim=1)]
        whole = model(tokens[-1:])
    assert found.std() > 0.5
    assert (found[:-1] - torch.cat(alone, dim=1)).abs().max() < 1e-5
    assert (found[-1:] - whole).abs().max() < 1e-5
    assert torch.equal(found[:-1, LENGTHS[0] :], after[:-1, LENGTHS[0] :])
    assert (found[:-1, : LENGTHS[0]] != after[:-1, : LENGTHS[0]]).any()
    assert (found[-1, LENGTHS[0] :] - after[-1, LENGTHS[0] :]).abs().max() > 1e-3, (
        "one document sees its beginning"
    )


def test_samples_of_one_document_are_computed_as_without_positions() -> None:
    model, (tokens, _) = made(SMALL), packed()
    positions = torch.arange(sum(LENGTHS)).repeat(len(tokens), 1)
    assert torch.equal(model(tokens, positions=positions), model(tokens))


def gradient(model: torch.nn.Module, tokens: Tensor, positions: Tensor) -> Tensor:
    """The gradient of the mean loss of the packed samples."""
    model(tokens, tokens.roll(-1, 1), positions).backward()
    found = [p.grad for p in model.parameters() if p.grad is not None]
    return torch.cat([(g.full_tensor() if isinstance(g, DTensor) else g).flatten() for g in found])


def apart(one: Tensor, other: Tensor) -> float:
    return float((one - other).norm() / other.norm())


@pytest.mark.parametrize("level", [Checkpointing.SELECTIVE, Checkpointing.FULL])
def test_checkpointing_computes_packed_samples_alike(level: Checkpointing) -> None:
    right, model = gradient(made(SMALL), *packed()), made(SMALL)
    ActivationCheckpointing(blocks_of(model)).set(level)
    assert apart(gradient(model, *packed()), right) < 1e-6


@pytest.mark.chaos
@pytest.mark.long
def test_compiled_blocks_compute_packed_samples_alike() -> None:
    tokens, positions = packed()
    right, model = gradient(made(SMALL), tokens, positions), made(SMALL)
    compile_blocks(model, dynamic=False)
    try:
        assert apart(gradient(model, tokens, positions), right) < 1e-5
        whole = positions[-1:].repeat(len(tokens), 1)
        model.zero_grad()
        assert apart(gradient(model, tokens, whole), gradient(made(SMALL), tokens, whole)) < 1e-5
    finally:
        torch.compiler.reset()


def sharded_alike(folder: Path) -> None:
    ranks = RankGroup.of_world()
    right, model = gradient(made(SMALL), *packed()), made(SMALL)
    shard_model(model, blocks_of(model), ranks, torch.device("cpu"), bf16=False)
    for level in (Checkpointing.NONE, Checkpointing.SELECTIVE):
        ActivationCheckpointing(blocks_of(model)).set(level)
        model.zero_grad()
        assert apart(gradient(model, *packed()), right) < 1e-6


def block_masks_alike(folder: Path) -> None:
    """As on a GPU; on a CPU flex attention has no backward pass."""
    ranks = RankGroup.of_world()
    tokens, positions = packed()

    def of_blocks(length: int, at: Tensor, window: int, head_dim: int, device: torch.device) -> BlockMask:
        return block_mask(length, document_numbers(at), window, device)

    model = made(replace(SMALL, sliding_window=9))
    with torch.no_grad():
        right = model(tokens, positions=positions)
        for bf16, bound in ((False, 1e-5), (True, 0.2)):
            sharded = made(replace(SMALL, sliding_window=9))
            shard_model(sharded, blocks_of(sharded), ranks, torch.device("cpu"), bf16)
            with (
                mock.patch("atoll.node.trainer.model.attention_mask", of_blocks),
                mock.patch("atoll.node.trainer.attention_mask.compiled_flex_attention", lambda: flex_attention),
            ):
                found = sharded(tokens, positions=positions)
            assert (found - right).abs().max() < bound < right.std()


@pytest.mark.chaos
@pytest.mark.long
def test_a_sharded_model_takes_the_masks_of_a_gpu(tmp_path: Path) -> None:
    on_ranks(2, tmp_path, block_masks_alike)


def test_a_sharded_model_computes_packed_samples_alike(tmp_path: Path) -> None:
    on_ranks(2, tmp_path, sharded_alike)


@pytest.mark.long
def test_flex_attention_compiles_and_gives_what_the_matrix_gives() -> None:
    _, positions = packed()
    numbers = document_numbers(positions)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(3, heads, 32, 16, generator=generator) for heads in (4, 2, 2))
    cpu = torch.device("cpu")
    blocks = block_mask(32, numbers, 0, cpu)
    try:
        found = compiled_flex_attention()(q, k, v, block_mask=blocks, enable_gqa=True)
    finally:
        torch.compiler.reset()
        compiled_flex_attention.cache_clear()
    seen = dense_mask(32, numbers, 0, cpu)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
    assert (found - expected).abs().max() < 1e-5


def test_positions_go_to_the_device_only_where_a_sample_has_several_documents() -> None:
    tokens, positions = packed()
    several = {"input_ids": tokens, "labels": tokens, "position_ids": positions}
    whole = several | {"position_ids": positions[-1:].repeat(len(tokens), 1)}
    cpu, model = torch.device("cpu"), made(SMALL)
    assert placed(several, cpu).keys() == several.keys() and "position_ids" not in placed(whole, cpu)
    assert next_token_loss(model, placed(several, cpu)) == model(tokens, tokens, positions)
    assert torch.equal(next_token_loss(model, placed(whole, cpu)), next_token_loss(model, whole))
