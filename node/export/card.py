"""The model card of an export, README.md: which run and round it is of, on which data, by whom, and how to load
it.

Pure: facts in, Markdown out. The card says nothing that is not known, and no address of a run's machines or
stores.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from atoll.comm.config.engine import Engine
from atoll.comm.config.run import DataKind, RunConfig
from atoll.node.export.model_files import ModelFiles
from atoll.node.export.tokenizer import DataSource
from atoll.node.export.weights import StateFacts, WeightDtype

MAX_CONTRIBUTORS = 200  # that are listed by name
MAX_NAME = 80  # characters of a node's name
PUNCTUATION = "\\`*_{}[]<>()#+-.!|~&:"  # has a meaning in Markdown


@dataclass(frozen=True, slots=True)
class CardFacts:
    """All that a card is made of."""

    config: RunConfig
    state: StateFacts
    model: ModelFiles
    dtype: WeightDtype
    n_params: int
    sources: Sequence[DataSource] = ()
    contributors: Sequence[tuple[str, int]] = ()  # name and tokens, the most first
    val_loss: float | None = None  # nats a token, of this state
    tokenizer: bool = False  # its files are beside the card


def card(facts: CardFacts) -> str:
    """The text of README.md."""
    return "\n".join(
        [
            *_front_matter(facts),
            f"# {_plain(facts.config.name)}",
            "",
            _first_sentence(facts),
            "",
            *_table(_run_rows(facts)),
            "## Training",
            "",
            *_table(_training_rows(facts)),
            *_contributors(facts),
            "## Use",
            "",
            *_usage(facts),
        ]
    )


def _front_matter(facts: CardFacts) -> list[str]:
    lines = ["---"]
    if facts.model.transformers:
        library = "peft" if facts.model.adapters else "transformers"
        lines += [f"library_name: {library}", "pipeline_tag: text-generation"]
    if base := _base_model(facts):
        lines.append(f"base_model: {json.dumps(base)}")
    hub = [s.url.removeprefix("hf://datasets/") for s in facts.sources if s.url.startswith("hf://datasets/")]
    if names := sorted({"/".join(url.split("/")[:2]) for url in hub}):
        lines += ["datasets:", *(f"- {json.dumps(name)}" for name in names)]
    return [*lines, "tags:", "- atoll", "- diloco", "- decentralized-training", "---", ""]


def _base_model(facts: CardFacts) -> str:
    """The model of the Hub that adapters are of; empty: there is none, or it is a folder of the nodes'."""
    base = facts.model.config.get("base_model_name_or_path") if facts.model.adapters else None
    return str(base) if re.fullmatch(r"[\w.-]+/[\w.-]+", str(base)) else ""


def _first_sentence(facts: CardFacts) -> str:
    kind, weights = "model", "weights"
    if facts.model.adapters:
        kind, weights = "set of LoRA adapters", "adapters"
    elif facts.model.architectures:
        kind = f"`{facts.model.architectures[0]}`"
    base = f" for {_plain(_base_model(facts))}" if _base_model(facts) else ""
    return (
        f"A {kind} with {facts.n_params:,} parameters{base}, trained by the members of the Atoll run "
        f"{_plain(facts.config.name)}: low-communication data-parallel training (DiLoCo) on machines that share "
        f"nothing but the internet. These are the run's {weights} after the outer step of round "
        f"{facts.state.round:,}."
    )


def _run_rows(facts: CardFacts) -> list[tuple[str, str]]:
    state = facts.state
    after = "" if state.tokens_round == state.round else f" after round {state.tokens_round:,}"
    rows = [
        ("Run", f"{_plain(state.run)} (`{state.run_id}`)"),
        ("Rounds", f"{state.round:,}"),
        ("Tokens", f"{state.tokens:,}{after}"),
        ("State digest", f"`{state.state_digest}` (as the round's commit record has it)"),
    ]
    if facts.val_loss is not None:
        rows.append(("Validation loss", f"{facts.val_loss:.4f} nats a token"))
    total = sum(source.weight for source in facts.sources)
    for source in facts.sources:
        name = _plain(source.manifest.name) if source.manifest is not None else "not known"
        share = f", {100 * source.weight / total:.3g} % of the samples" if len(facts.sources) > 1 else ""
        rows.append(("Data set", f"{name} (`{source.digest}`){share}"))
    if not facts.sources:
        rows.append(("Data", _data_without_name(facts.config.data.kind)))
    weights = "fp32, as trained" if facts.dtype is WeightDtype.FP32 else "bf16, rounded from fp32"
    return [*rows, ("Weights", weights)]


def _data_without_name(kind: DataKind) -> str:
    match kind:
        case DataKind.STDLIB:
            return "the Python standard library's own source, as bytes: a token is a byte"
        case DataKind.BYTES:
            return "text files of each node, as bytes: a token is a byte"
        case DataKind.PLUGIN:
            return "those of the run's plugin, a package that each node has"
        case _:
            return "each node's own; the run does not name it"


def _training_rows(facts: CardFacts) -> list[tuple[str, str]]:
    run = facts.config
    model, inner, outer, rounds = run.model, run.inner, run.outer, run.rounds
    shape = (
        f"{model.layers} layers of {model.dim}, {model.heads} heads ({model.kv_heads} for keys and values), "
        f"{model.ffn_dim} in the feed-forward part, vocabulary of {model.vocab_size:,}, "
        f"{model.seq_len:,} tokens of context"
    )
    described = facts.model.transformers and run.engine is Engine.BUILTIN
    rows = [("Model", shape)] if described else [("Engine", str(run.engine))]
    if run.engine is Engine.TORCHTITAN:
        rows.append(("Model", f"torchtitan's {_plain(run.titan.config)}"))
    if run.engine is Engine.HF:
        adapters = f", LoRA adapters of rank {run.hf.lora.rank}" if run.hf.lora.rank else ""
        rows.append(("Model", f"transformers' {_plain(run.hf.architecture)}{adapters}"))
    if run.model.plugin:
        rows.append(("Model", f"the plugin {_plain(run.model.plugin)}"))
    rule = f"the plugin {_plain(outer.plugin)}" if outer.plugin else "Nesterov"
    return [
        *rows,
        (
            "Inner optimizer",
            f"{inner.optimizer}, peak learning rate {inner.peak_lr:g}, {inner.batch_size} sequences a step and "
            "node",
        ),
        ("Outer optimizer", f"{rule}, learning rate {outer.lr:g}, momentum {outer.momentum:g}"),
        ("Rounds of", f"{rounds.inner_steps:,} inner steps, exchanged as {run.reduce.codec}"),
        ("Seed", str(run.seed)),
    ]


def _contributors(facts: CardFacts) -> list[str]:
    if not facts.contributors:
        return []
    shown, rest = facts.contributors[:MAX_CONTRIBUTORS], facts.contributors[MAX_CONTRIBUTORS:]
    total = sum(tokens for _, tokens in facts.contributors)
    if rest:
        shown = [*shown, (f"{len(rest):,} more", sum(tokens for _, tokens in rest))]
    rows = [f"| {_plain(name[:MAX_NAME])} | {n:,} | {100 * n / max(total, 1):.1f} % |" for name, n in shown]
    return ["## Contributors", "", "| node | tokens | share |", "|---|---:|---:|", *rows, ""]


def _usage(facts: CardFacts) -> list[str]:
    if not facts.model.transformers:
        return [
            "The tensors have the names of the parameters of the model that was trained; `config.json` says which "
            "it is. Load them with `safetensors.torch.load_file`.",
            "",
        ]
    library, loader = ("peft", "AutoPeft") if facts.model.adapters else ("transformers", "Auto")
    lines = ["```python", f"from {library} import {loader}ModelForCausalLM"]
    load = [f'model = {loader}ModelForCausalLM.from_pretrained("THIS_FOLDER_OR_REPOSITORY")']
    if facts.tokenizer:
        lines.append("from transformers import AutoTokenizer")
        load.insert(0, 'tokenizer = AutoTokenizer.from_pretrained("THIS_FOLDER_OR_REPOSITORY")')
    lines += ["", *load, "```", ""]
    if not facts.tokenizer:
        by_bytes = facts.config.data.kind in (DataKind.STDLIB, DataKind.BYTES)
        why = "a token is a byte of UTF-8" if by_bytes else "give the one that the run was trained with"
        lines += [f"There is no tokenizer among these files: {why}.", ""]
    return lines


def _table(rows: Sequence[tuple[str, str]]) -> list[str]:
    return ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows), ""]


def _plain(text: str) -> str:
    """Text that others chose, such as a node's name, as Markdown that shows it and does nothing else."""
    line = "".join(c if c.isprintable() else " " for c in text)
    return "".join("\\" + c if c in PUNCTUATION else c for c in line)
