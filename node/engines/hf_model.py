"""A model of transformers' on this rank: built from its config alone, sharded, with or without LoRA adapters, and
given its values.

`build` promises the class that transformers itself has for the config, never code of a repository, and attention
of torch's operations (its `scaled_dot_product_attention`, or the architecture's own formula), with masks that keep
packed documents apart by their positions. `initialise` and `initialise_adapters` promise the same numbers for the
same seed, whatever the number of ranks: each draws whole tensors and keeps its own blocks.
"""

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from atoll.comm.config.hf import BaseDtype, HfConfig, LoraConfig
from atoll.comm.errors import ConfigError
from atoll.node.participant.flat_vector import local_block, local_tensor, trainable

DTYPES = {BaseDtype.FP32: torch.float32, BaseDtype.BF16: torch.bfloat16}
PROBE_TOKENS = 8  # of a sample of two documents
PROBE_DEVIATION = 0.1  # of the small model's matrices
PROBE_TOLERANCE = 1e-4  # of the largest logit
PROBE_SIZES = {
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 2),
    **dict.fromkeys(("vocab_size", "intermediate_size", "moe_intermediate_size", "ffn_dim", "n_inner"), 64),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 8),
}
PROBE_SPECIAL_TOKENS = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 0)
ALL_LINEAR = "all-linear"  # peft's word for every linear layer but the head
BASE_LAYER = ".base_layer."  # in the name of a frozen matrix that has an adapter
# Parameters by what is done with them: 6 FLOP for each and token, forward and twice backward; where only what
# flows through is differentiated, 4.
TRAINED_FLOPS, FROZEN_FLOPS = 6, 4


def build(hf: HfConfig, tell: Callable[[str], None] = lambda sentence: None) -> nn.Module:
    """The model with its adapters, parameters on the meta device, buffers with their values. `tell` takes what the
    volunteer should know of it. Raises `ConfigError` for what transformers or peft has not, and for what cannot be
    trained on packed documents."""
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM

    config = model_config(hf)
    kind = AutoModelForCausalLM._model_mapping[type(config)]
    attention = "sdpa" if kind._supports_sdpa else "eager"
    dtype = DTYPES[hf.dtype] if hf.lora.rank else torch.float32
    with init_empty_weights(include_buffers=False):
        try:
            model = AutoModelForCausalLM.from_config(
                config, dtype=dtype, attn_implementation=attention, trust_remote_code=False
            )
        except Exception as error:  # of each architecture its own
            raise ConfigError(f"transformers cannot build {hf.architecture}: {_sentence(error)}") from error
        if getattr(model, "_is_stateful", False):
            raise ConfigError(
                f"{hf.architecture} keeps a state from token to token, by which documents that are packed into "
                "one sample would reach one another: train an architecture with attention alone"
            )
        if hf.lora.rank:
            add_adapters(model, hf.lora)
    check_isolation(hf, tell)  # not in the context above: its parameters have values
    model.tie_weights()
    model.config.use_cache = False
    assert isinstance(model, nn.Module)
    return model


def check_isolation(hf: HfConfig, tell: Callable[[str], None]) -> None:
    """Raise `ConfigError` where a token's logits depend on a later token, or on another document of the sample:
    asked of a small model of the class on the CPU. What cannot be made small, or computed there, is refused, too,
    unless the run assumes that it is as it should be: `tell` is told then."""
    from transformers import AutoModelForCausalLM

    small = HfConfig(config=json.dumps(_small(hf.content) | PROBE_SPECIAL_TOKENS), dtype=BaseDtype.FP32)
    try:
        config = model_config(small)
        kind = AutoModelForCausalLM._model_mapping[type(config)]
        attention = "sdpa" if kind._supports_sdpa else "eager"
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(
                config, dtype=torch.float32, attn_implementation=attention, trust_remote_code=False
            ).eval()
            for parameter in model.parameters():  # as initialised, attention may move little
                if parameter.ndim > 1:
                    nn.init.normal_(parameter, std=PROBE_DEVIATION)
        earlier, later = _probe(model, 0), _probe(model, PROBE_TOKENS - 1)
    except Exception as error:  # of each architecture its own
        untried = (
            f"whether {hf.architecture} keeps documents apart that share a sample could not be tried on a small "
            f"model of it ({_sentence(error)})"
        )
        if not hf.assume_isolation:
            raise ConfigError(
                f"{untried}: where you know that it does, or each sample is one document, set "
                "hf.assume_isolation=true"
            ) from None
        tell(f"{untried}: the run assumes that it does, hf.assume_isolation")
        return
    if earlier or later:
        reason = "a token sees those after it" if later else "documents in one sample see one another"
        raise ConfigError(
            f"{hf.architecture} cannot be trained on packed documents: in transformers' model of it {reason}; "
            "train another architecture"
        )


@torch.no_grad()
def _probe(model: nn.Module, changed: int) -> bool:
    """Whether another token at this place changes the logits of a place that it must not reach: of two documents
    of equal length one after the other, all of the other one, and in its own what is before."""
    half = PROBE_TOKENS // 2
    tokens = torch.arange(1, PROBE_TOKENS + 1)[None]
    other = tokens.clone()
    other[0, changed] = PROBE_TOKENS + 1
    positions = torch.arange(half).repeat(2)[None]
    one, two = (model(input_ids=t, position_ids=positions, use_cache=False).logits[0] for t in (tokens, other))
    differs = (one - two).abs().amax(dim=-1) > PROBE_TOLERANCE * one.abs().amax()
    return bool(differs[half:].any() if changed < half else differs[:changed].any())


def _small(content: dict[str, Any]) -> dict[str, Any]:
    """The config with two layers and few tokens, and those within it; widths stay as they are."""
    made: dict[str, Any] = {
        key: _small(value) if isinstance(value, dict) else value for key, value in content.items()
    }
    made |= {key: min(made[key], most) for key, most in PROBE_SIZES.items() if isinstance(made.get(key), int)}
    if isinstance(kinds := made.get("layer_types"), list):
        made["layer_types"] = kinds[: PROBE_SIZES["num_hidden_layers"]]
    return made | PROBE_SPECIAL_TOKENS if "vocab_size" in made else made


def model_config(hf: HfConfig) -> Any:
    """transformers' configuration of the model. Raises `ConfigError` for an architecture that it has not."""
    import transformers
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    content = hf.content
    kind = content.pop("model_type")
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ConfigError(
            f"transformers {transformers.__version__} has no language model of hf.config's architecture "
            f"{hf.architecture} (model_type {kind}): upgrade it if a newer one has, or train another model"
        )
    try:
        return AutoConfig.for_model(kind, **content)
    except Exception as error:  # its validators raise their own
        raise ConfigError(f"hf.config is no configuration of {hf.architecture}: {_sentence(error)}") from error


def add_adapters(model: nn.Module, lora: LoraConfig) -> None:
    """Add LoRA adapters to the model and freeze all else. Raises `ConfigError` where a target matches
    nothing."""
    import peft

    names = [name for name, _ in model.named_modules()]
    for target in lora.targets:
        if not any(name == target or name.endswith(f".{target}") for name in names):
            raise ConfigError(
                f"hf.lora.targets has {target!r}, which no module of {type(model).__name__} is called; it has "
                f"{', '.join(linear_names(model))}"
            )
    settings = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=list(lora.targets) or ALL_LINEAR,
        task_type="CAUSAL_LM",
    )
    try:
        peft.inject_adapter_in_model(settings, model, low_cpu_mem_usage=True)
    except ValueError as error:
        raise ConfigError(f"peft cannot put the run's adapters into the model: {_sentence(error)}") from error
    for parameter in trainable([model]).values():
        parameter.data = parameter.data.float()


def linear_names(model: nn.Module) -> list[str]:
    """The last parts of the names of the model's linear layers."""
    linear = (name for name, module in model.named_modules() if isinstance(module, nn.Linear))
    return sorted({name.rpartition(".")[2] for name in linear})


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The layers, which are sharded, compiled and computed again one by one."""
    kinds = set(getattr(model, "_no_split_modules", None) or ())
    return [m for m in model.modules() if any(kind.__name__ in kinds for kind in type(m).__mro__)]


def materialise(model: nn.Module, device: torch.device) -> None:
    """Give the parameters memory on the device, without values, and move the buffers there with theirs. Tied
    parameters stay tied."""
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for key, parameter in module._parameters.items():
            places.setdefault(id(parameter), []).append((module, key))
    model.to_empty(device=device)
    for (module, key), *others in places.values():
        for other, its_key in others:
            other._parameters[its_key] = module._parameters[key]
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name])


def frozen(model: nn.Module) -> dict[str, Tensor]:
    """The parameters that require no gradient, by their names without adapters, as files of weights have them."""
    return {
        name.replace(BASE_LAYER, "."): parameter
        for name, parameter in model.named_parameters()
        if not parameter.requires_grad
    }


def tied_names(model: nn.Module) -> set[str]:
    """The further names of parameters that the model has under several, without adapters."""
    every = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return {name.replace(BASE_LAYER, ".") for name in every - {name for name, _ in model.named_parameters()}}


@torch.no_grad()
def initialise_adapters(model: nn.Module, seed: int) -> None:
    """Fill the adapters as LoRA begins (arXiv 2106.09685, section 4.1): of the product B A that is added, A is
    random, uniform within 1 / sqrt(inputs) as in the authors' code, and B zero; of an embedding's the other way
    round, with a normal B, as peft has it. A function of the seed and of the parameter's name."""
    for name, parameter in trainable([model]).items():
        block = local_block(parameter)
        if block.numel:
            local_tensor(parameter).copy_(adapter_value(name, tuple(parameter.shape), seed)[block.slices])


def adapter_value(name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """The initial value of one adapter's matrix, fp32."""
    value, generator = torch.zeros(shape), torch.Generator().manual_seed(_number(seed, name))
    if re.search(r"\.lora_A\.", name):
        value.uniform_(-1 / math.sqrt(shape[1]), 1 / math.sqrt(shape[1]), generator=generator)
    elif re.search(r"\.lora_embedding_B\.", name):
        value.normal_(generator=generator)
    return value


@torch.no_grad()
def initialise(model: nn.Module, seed: int) -> None:
    """Fill every parameter as transformers initialises this architecture: layer by layer, each as a whole, so that
    no rank has more than one layer of the model in memory besides its own part."""
    layers = {id(layer) for layer in layers_of(model)}
    done = set[int]()
    for name, module in model.named_modules():
        if id(module) in layers:
            _initialise_whole(model, list(module.modules()), name, seed, done)
    for name, module in model.named_modules():
        _initialise_whole(model, [module], name, seed, done)


def _initialise_whole(model: Any, modules: list[nn.Module], name: str, seed: int, done: set[int]) -> None:
    """Initialise the parameters of these modules that are not `done` (a tied one is, at its second place)."""
    every = [(module, key, p) for module in modules for key, p in module._parameters.items() if p is not None]
    places = [(module, key, p) for module, key, p in every if id(p) not in done]
    if not places:
        return
    done.update(id(parameter) for _, _, parameter in places)
    with torch.random.fork_rng(devices=[]), _replaced(places) as wholes:
        torch.default_generator.manual_seed(_number(seed, name))  # of the CPU, where the values are made
        for module in reversed(modules):  # what is within first, as by transformers
            model._init_weights(module)
    for (_, _, parameter), whole in zip(places, wholes, strict=True):
        block = local_block(parameter)
        if block.numel:
            local_tensor(parameter).copy_(whole.detach()[block.slices])


@contextmanager
def _replaced(places: list[tuple[nn.Module, str, nn.Parameter]]) -> Iterator[list[nn.Parameter]]:
    """Whole fp32 parameters on the CPU in the places of those that are there, which come back."""
    wholes = [nn.Parameter(torch.zeros(tuple(parameter.shape))) for _, _, parameter in places]
    for (module, key, _), whole in zip(places, wholes, strict=True):
        module._parameters[key] = whole
    try:
        yield wholes
    finally:
        for module, key, parameter in places:
            module._parameters[key] = parameter


def _number(seed: int, name: str) -> int:
    """The random seed of what has this name in a run of this seed."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:8], "little", signed=True)


def flops_per_token(model: nn.Module, seq_len: int) -> float:
    """Floating-point operations for a token, forward and backward: 6 N + 12 L d T (PaLM, arXiv 2204.02311,
    appendix B) for N trained parameters that multiply, and 4 for each frozen one, whose gradient is not computed.
    An embedding multiplies only where it is the output head as well."""
    looked_up = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    head = getattr(model.get_output_embeddings(), "weight", None)  # type: ignore[operator]
    count = sum(
        parameter.numel() * (TRAINED_FLOPS if parameter.requires_grad else FROZEN_FLOPS)
        for parameter in model.parameters()
        if id(parameter) not in looked_up or parameter is head
    )
    config = model.config.get_text_config()  # type: ignore[union-attr, operator]
    through = 1.0 if all(p.requires_grad for p in model.parameters()) else FROZEN_FLOPS / TRAINED_FLOPS
    return float(count + 12 * through * config.num_hidden_layers * config.hidden_size * seq_len)


def _sentence(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
