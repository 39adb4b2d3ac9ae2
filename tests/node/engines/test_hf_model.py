"""Models that transformers builds for a node: their values, their adapters, packed documents, what is refused."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hf_models import TARGETS, lora, run_of, tiny_qwen
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from atoll.comm.config.hf import BaseDtype, HfConfig, LoraConfig, read_config
from atoll.comm.errors import ConfigError
from atoll.comm.faults import FAULTS, Fault
from atoll.node.checkpoint.hf_adapters import CONFIG, STEM, adapter_config, flat_names, peft_names
from atoll.node.config import NodeConfig
from atoll.node.data.samples import UNLEARNED
from atoll.node.engines.hf_model import (
    build,
    flops_per_token,
    frozen,
    initialise,
    initialise_adapters,
    layers_of,
    materialise,
    tied_names,
)
from atoll.node.engines.hf_steps import HfSteps, summed_loss
from atoll.node.engines.hf_weights import BaseWeights, locate
from atoll.node.participant.flat_vector import layout_of, trainable
from atoll.node.participant.rank_group import RankGroup

CPU = torch.device("cpu")
SMALL = {"hidden_size": 64, "intermediate_size": 128}
OTHERS: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "llama": {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0,
                                  "high_freq_factor": 4.0, "original_max_position_embeddings": 64}},
    "mistral": {"sliding_window": 8},
    "gemma2": {"head_dim": 16, "sliding_window": 8},
}  # fmt: skip


def config_of(kind: str, **changes: Any) -> HfConfig:
    """The content of a config.json of a tiny model of this type."""
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 320}
    words = {"model_type": kind, "max_position_embeddings": 128, **sizes, **SMALL, **changes}
    return HfConfig(config=json.dumps(words))


def built(hf: HfConfig, seed: int = 3) -> nn.Module:
    """The model with all its values, as a node has it."""
    model = build(hf)
    materialise(model, CPU)
    if hf.lora.rank:
        BaseWeights.open(Path(hf.base)).read(frozen(model))
        initialise_adapters(model, seed)
    else:
        initialise(model, seed)
    return model.eval()


def moved_adapters(model: nn.Module) -> nn.Module:
    """The model with adapters that change what it computes."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in trainable([model]).values():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.05)
    return model


def logits(model: nn.Module, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
    positions = torch.arange(tokens.shape[1]).expand(len(tokens), -1) if positions is None else positions
    with torch.no_grad():
        found: Tensor = model(input_ids=tokens, position_ids=positions, use_cache=False).logits
    return found


def gradient_of(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def random_tokens(length: int = 32) -> Tensor:
    return torch.randint(320, (2, length), generator=torch.Generator().manual_seed(2))


def test_a_new_adapter_changes_nothing_and_a_trained_one_is_what_peft_loads(tmp_path: Path) -> None:
    from peft import PeftModel

    theirs, hf, tokens = tiny_qwen(tmp_path / "base", **SMALL), lora(tmp_path / "base"), random_tokens()
    plain = theirs(input_ids=tokens).logits.detach()
    ours = built(hf)
    assert torch.equal(logits(ours, tokens), plain)
    moved_adapters(ours)
    mine = logits(ours, tokens)
    assert (mine - plain).abs().max() > 0.1

    layout, parameters = layout_of(ours).shapes, trainable([ours])
    names = peft_names(layout)
    assert flat_names(names) == layout
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / CONFIG).write_text(json.dumps(adapter_config(hf, layout)))
    save_file(
        {peft: parameters[flat].detach() for (flat, _), (peft, _) in zip(layout, names, strict=True)},
        folder / f"{STEM}.safetensors",
    )
    loaded = PeftModel.from_pretrained(theirs, folder).eval()
    assert (logits(loaded, tokens) - mine).abs().max() < 1e-5

    again = tmp_path / "again"
    loaded.save_pretrained(again)
    assert {name: tuple(t.shape) for name, t in load_file(again / f"{STEM}.safetensors").items()} == dict(names)
    saved = json.loads((again / CONFIG).read_text())
    assert sorted(saved["target_modules"]) == TARGETS and saved["r"] == 8


def test_adapters_of_all_linear_layers_are_named_as_peft_finds_them(tmp_path: Path) -> None:
    tiny_qwen(tmp_path / "base", **SMALL)
    hf = lora(tmp_path / "base", targets=[])
    layout = layout_of(build(hf)).shapes
    leaves = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    assert adapter_config(hf, layout)["target_modules"] == leaves
    with pytest.raises(ConfigError, match="this run trains every parameter"):
        peft_names((("model.norm.weight", (64,)),))
    with pytest.raises(ConfigError, match="no LoRA adapter as peft writes it"):
        flat_names((("base_model.model.lm_head.weight", (320, 64)),))


def test_adapters_begin_by_the_seed_and_their_names(tmp_path: Path) -> None:
    tiny_qwen(tmp_path / "base", **SMALL)
    hf = lora(tmp_path / "base", targets=["q_proj", "embed_tokens"])
    one, same, other = (trainable([built(hf, seed)]) for seed in (1, 1, 2))
    for name, value in one.items():
        assert torch.equal(value, same[name]) and value.dtype == torch.float32
        begins_at_zero = ".lora_B." in name or "lora_embedding_A" in name
        assert begins_at_zero == (not value.any()) == torch.equal(value, other[name])
    a = [value for name, value in one.items() if ".lora_A." in name]
    assert (
        len(a) == 2 and not torch.equal(*a) and max(float(v.detach().abs().max()) for v in a) < 1 / 8
    )  # 1 / sqrt(64)


@pytest.mark.parametrize("kind", OTHERS)
def test_documents_that_are_packed_do_not_reach_one_another(kind: str) -> None:
    model, tokens = built(config_of(kind, **OTHERS[kind])), random_tokens()
    positions = torch.cat([torch.arange(12), torch.arange(20)]).expand(2, -1)
    other = tokens.clone()
    other[:, :12] = (other[:, :12] + 7) % 320
    packed, changed = logits(model, tokens, positions), logits(model, other, positions)
    assert (packed[:, :12] - changed[:, :12]).abs().max() > 1e-3
    assert (packed[:, 12:] - changed[:, 12:]).abs().max() < 1e-5
    assert (packed[:, 12:] - logits(model, tokens[:, 12:])).abs().max() < 1e-5


@pytest.mark.parametrize("kind", OTHERS)
def test_values_are_as_transformers_has_them(kind: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    hf = config_of(kind, **OTHERS[kind])
    content = hf.content
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(content.pop("model_type"), **content))
    ours, same, other = built(hf, 3), built(hf, 3), built(hf, 4)
    expected, found = dict(theirs.named_parameters()), dict(ours.named_parameters())
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], dict(same.named_parameters())[name])
        spread = float(value.detach().std())
        if spread == 0:
            assert torch.equal(found[name], value), name
        else:
            assert not torch.equal(found[name], dict(other.named_parameters())[name])
            assert float(found[name].detach().std()) == pytest.approx(spread, rel=0.1), name
    theirs.load_state_dict(ours.state_dict())
    tokens = random_tokens()
    assert (logits(theirs.eval(), tokens) - logits(ours, tokens)).abs().max() < 1e-5, "buffers, too"


def test_the_loss_is_the_mean_over_what_is_learned_in_micro_batches_of_any_size() -> None:
    hf = config_of("qwen2")
    tokens = random_tokens(33).repeat(2, 1)
    labels = tokens[:, 1:].clone()
    labels[0, :20], labels[3] = UNLEARNED, UNLEARNED
    batch = {"input_ids": tokens[:, :-1], "labels": labels, "position_ids": torch.arange(32).expand(4, -1)}
    results = []
    for size in (1, 3, 4):
        model = built(hf).train()
        steps = HfSteps(model, run_of(hf), NodeConfig(micro_batch=size), RankGroup(0, 1), CPU)
        loss = steps.add(batch)
        results.append(
            (float(loss), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
        )
    at_once = built(hf).train()
    expected = torch.nn.functional.cross_entropy(
        at_once(input_ids=batch["input_ids"]).logits.flatten(0, 1), labels.flatten()
    )
    expected.backward()  # type: ignore[no-untyped-call]
    gradient = gradient_of(at_once)
    for value, found in results:
        assert value == pytest.approx(float(expected.detach()), abs=1e-5)
        assert (found - gradient).abs().max() < 1e-6
    labels[:] = UNLEARNED
    assert float(summed_loss(at_once, batch)) == 0


@pytest.mark.long
def test_memory_that_does_not_suffice_takes_a_smaller_micro_batch_then_checkpoints_activations(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hf, failures, told = config_of("qwen2"), [4, 2, 1], list[str]()
    tokens = random_tokens(32).repeat(2, 1)
    batch = {"input_ids": tokens, "labels": tokens, "position_ids": torch.arange(32).expand(4, -1)}
    plain = built(hf).train()
    expected = HfSteps(plain, run_of(hf), NodeConfig(), RankGroup(0, 1), CPU).add(batch)

    def fail(point: str) -> None:
        if failures and point == f"trainer.micro_batch.{failures[0]}":
            failures.pop(0)
            raise MemoryError("can't allocate memory")

    monkeypatch.setattr("atoll.node.engines.hf_steps.fault_point", fail)
    model: Any = built(hf).train()
    steps = HfSteps(model, run_of(hf), NodeConfig(), RankGroup(0, 1), CPU)
    steps.tell = told.append
    assert float(steps.add(batch)) == pytest.approx(float(expected), abs=1e-5)
    assert model.model.layers[0].gradient_checkpointing and not failures
    assert [line.partition("with ")[2] for line in told] == [
        *("micro-batches of 2", "micro-batches of 1", "full checkpointing of activations"),
    ]
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        assert one.grad is not None and (one.grad - other.grad).abs().max() < 1e-6
    failures.append(1)
    with pytest.raises(MemoryError):
        steps.add(batch)


def test_an_evaluation_that_memory_does_not_suffice_for_begins_again_with_smaller_micro_batches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hf, tokens = config_of("qwen2"), random_tokens(32).repeat(2, 1)
    data: Any = SimpleNamespace(
        validation=lambda indices: {
            "input_ids": tokens,
            "labels": tokens,
            "position_ids": torch.arange(32).expand(4, -1),
        }
    )
    steps = HfSteps(built(hf), run_of(hf), NodeConfig(), RankGroup(0, 1), CPU)
    expected = steps.validation_loss(data)
    monkeypatch.setitem(FAULTS, "trainer.validation.4", Fault("trainer.validation.4", "memory"))
    assert steps.validation_loss(data) == pytest.approx(expected, abs=1e-5)


def test_frozen_weights_may_be_bf16_and_the_same_in_several_files(tmp_path: Path) -> None:
    theirs = tiny_qwen(tmp_path / "base", **SMALL)
    hf = lora(tmp_path / "base")
    theirs.save_pretrained(tmp_path / "parts", max_shard_size="60KB")
    assert len(list((tmp_path / "parts").glob("*.safetensors"))) > 2
    parts = replace(hf, base=str(tmp_path / "parts"), dtype=BaseDtype.BF16)
    assert BaseWeights.open(tmp_path / "parts").digest() == hf.digest
    model, tokens = built(parts), random_tokens()
    types = {p.dtype: p.requires_grad for p in model.parameters()}
    assert types == {torch.bfloat16: False, torch.float32: True}
    assert (logits(model, tokens).float() - logits(built(hf), tokens)).abs().max() < 0.05


def test_the_work_of_a_token_counts_what_is_trained_and_what_is_frozen(tmp_path: Path) -> None:
    theirs = tiny_qwen(tmp_path / "base", **SMALL)
    count, attention = sum(p.numel() for p in theirs.parameters()), 12 * 2 * 64 * 32
    whole = build(HfConfig(config=read_config(str(tmp_path / "base"))))
    assert flops_per_token(whole, 32) == 6 * count + attention
    adapted = build(lora(tmp_path / "base"))
    adapters = sum(p.numel() for p in trainable([adapted]).values())
    assert flops_per_token(adapted, 32) == pytest.approx(4 * count + 6 * adapters + attention * 2 / 3)
    assert len(layers_of(adapted)) == 2


REFUSED_CONFIGS = [
    (config_of("foolm", architectures=["FooForCausalLM"]), "hf.config's architecture FooForCausalLM"),
    (config_of("vit"), "no language model of hf.config's architecture vit"),
    (config_of("mamba", state_size=4), "keeps a state from token to token"),
    (config_of("qwen2", hidden_size="wide"), "hf.config is no configuration of qwen2: .*hidden_size"),
    (config_of("qwen2", num_attention_heads=5, num_key_value_heads=0), "transformers cannot build qwen2"),
]


@pytest.mark.parametrize(("hf", "sentence"), REFUSED_CONFIGS)
def test_a_model_that_transformers_cannot_build_is_refused_with_its_name(hf: HfConfig, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        build(hf)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("opt", "documents in one sample see one another"),
        ("bloom", "documents in one sample see one another"),
        ("bert", "a token sees those after it"),
    ],
)
def test_a_model_whose_tokens_see_other_documents_or_later_ones_is_refused(kind: str, reason: str) -> None:
    hf = config_of(kind, word_embed_proj_dim=64, architectures=["SomeModel"])
    with pytest.raises(ConfigError, match=f"SomeModel cannot be trained on packed documents: .*{reason}"):
        build(hf)


def test_a_model_of_which_it_cannot_be_tried_is_refused_unless_the_run_assumes_it() -> None:
    """Rotary positions of 64 of a head's 16 numbers: no model of it, however small, computes anything."""
    told, hf = list[str](), config_of("gptj")
    with pytest.raises(
        ConfigError, match=r"gptj keeps documents apart .* not be tried .*hf.assume_isolation=true$"
    ):
        build(hf, told.append)
    assert not told
    build(replace(hf, assume_isolation=True), told.append)
    (sentence,) = told
    assert sentence.endswith("): the run assumes that it does, hf.assume_isolation")
    mixing = config_of("bloom", word_embed_proj_dim=64)
    with pytest.raises(ConfigError, match="documents in one sample see one another"):
        build(replace(mixing, assume_isolation=True), told.append)


def test_a_target_that_no_module_is_called_is_refused_with_those_that_are() -> None:
    hf = replace(config_of("qwen2"), lora=LoraConfig(rank=2, targets=["q_proj", "query"]))
    with pytest.raises(ConfigError, match="'query', which no module of Qwen2ForCausalLM is called; it has down_p"):
        build(hf)
    with pytest.raises(ConfigError, match="peft cannot put the run's adapters into the model"):
        build(replace(hf, lora=LoraConfig(rank=2, targets=["mlp"])))


def test_frozen_weights_that_are_not_the_runs_are_refused(tmp_path: Path) -> None:
    tiny_qwen(tmp_path / "base", **SMALL)
    hf, file = lora(tmp_path / "base"), tmp_path / "base" / "model.safetensors"
    whole = load_file(file)
    model = build(hf)
    materialise(model, CPU)

    BaseWeights.open(tmp_path / "base").check(hf.digest)
    changed = {**whole, "model.norm.weight": whole["model.norm.weight"] + 1}
    save_file(changed, file)
    with pytest.raises(ConfigError, match=rf"digest is \w+, the run's hf.digest {hf.digest}: get the run's own"):
        BaseWeights.open(tmp_path / "base").check(hf.digest)
    with pytest.raises(ConfigError, match="there is no folder .*nothere .*base=FOLDER"):
        BaseWeights.open(tmp_path / "nothere")
    wrong = {
        "lacks model.norm.weight of the model's": {k: v for k, v in whole.items() if k != "model.norm.weight"},
        "has extra.weight, which hf.config's model has not": {**whole, "extra.weight": torch.ones(1)},
        r"model.norm.weight in .* has the shape \(3,\)": {**whole, "model.norm.weight": torch.ones(3)},
    }
    for sentence, tensors in wrong.items():
        save_file(tensors, file)
        with pytest.raises(ConfigError, match=sentence):
            BaseWeights.open(tmp_path / "base").read(frozen(model))
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(ConfigError, match="cannot read the weights in"):
        BaseWeights.open(tmp_path / "base")
    file.unlink()
    with pytest.raises(ConfigError, match="it is not there"):
        BaseWeights.open(tmp_path / "base")
    for text in ("[]", '{"weight_map": {"a": 5}}', "[" * 100_000):
        (tmp_path / "base" / "model.safetensors.index.json").write_text(text)
        with pytest.raises(ConfigError, match="index.json is damaged"):
            BaseWeights.open(tmp_path / "base")


def test_a_file_may_have_a_tied_tensor_under_both_names(tmp_path: Path) -> None:
    tiny_qwen(tmp_path / "base", tie_word_embeddings=True, **SMALL)
    hf, file = lora(tmp_path / "base"), tmp_path / "base" / "model.safetensors"
    whole = load_file(file)
    save_file({**whole, "lm_head.weight": whole["model.embed_tokens.weight"].clone()}, file)
    model = build(hf)
    materialise(model, CPU)
    BaseWeights.open(tmp_path / "base").read(frozen(model), tied_names(model))
    assert torch.equal(model.get_output_embeddings().weight, whole["model.embed_tokens.weight"])  # type: ignore[operator]


def test_a_node_has_its_own_folder_or_lets_the_run_name_one() -> None:
    hf = HfConfig(base="/data/base")
    assert locate(hf, NodeConfig(base="/mine")) == Path("/mine")
    assert locate(hf, NodeConfig(files=True)) == Path("/data/base")
    with pytest.raises(ConfigError, match="in the folder /data/base of each machine: say where this one has them"):
        locate(hf, NodeConfig())
