"""The model card of an export, README.md: which run and round it is of, on which data, by whom, and how to load
it.

Pure: facts in, Markdown out. The card says nothing that is not known, and no address of a run's machines or
stores.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from atoll.comm.config.data import DataKind
from atoll.comm.config.engine import Engine
from atoll.comm.config.run import RunConfig
from atoll.node.export.model_files import ModelFiles
from atoll.node.export.tokenizer import DataSource
from atoll.node.export.weights import StateFacts, WeightDtype

MAX_CONTRIBUTORS = 200  # that are listed by name
MAX_NAME = 80  # characters of a node's name
HUB_NAME = r"[\w.-]+/[\w.-]+"
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
    base: str = ""  # ORG/NAME of the model that the run began with, or has adapters for, where its user says it
    license: str = ""  # the Hub's identifier
    packages: Sequence[str] = ()  # NAME or NAME==VERSION, that have the run's plugins


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
    if facts.license:
        lines.append(f"license: {json.dumps(facts.license)}")
    if base := base_model(facts):
        lines.append(f"base_model: {json.dumps(base)}")
    hub = [s.url.removeprefix("hf://datasets/") for s in facts.sources if s.url.startswith("hf://datasets/")]
    if names := sorted({"/".join(url.split("/")[:2]) for url in hub}):
        lines += ["datasets:", *(f"- {json.dumps(name)}" for name in names)]
    return [*lines, "tags:", "- atoll", "- diloco", "- decentralized-training", "---", ""]


def base_model(facts: CardFacts) -> str:
    """ORG/NAME of the model of the Hub that adapters are for, or that the run began with; empty: there is none, or
    the run's config names it otherwise."""
    if facts.base:
        return facts.base
    if facts.model.adapters:
        base = str(facts.model.config.get("base_model_name_or_path"))
        return base if re.fullmatch(HUB_NAME, base) else ""
    found = re.match(rf"hf://(?!datasets/|spaces/)({HUB_NAME})(?:[@/]|$)", facts.config.init_from)
    return found[1] if found else ""


def _first_sentence(facts: CardFacts) -> str:
    kind, weights = "model", "weights"
    if facts.model.adapters:
        kind, weights = "set of LoRA adapters", "adapters"
    elif facts.model.architectures:
        kind = _plain(facts.model.architectures[0])
    named = base_model(facts) if facts.model.adapters else ""
    base = f" for {_plain(named)}" if named else ""
    return (
        f"A {kind} with {facts.n_params:,} parameters{base}, trained by the members of the Atoll run "
        f"{_plain(facts.config.name)}: low-communication data-parallel training (DiLoCo) on machines that share "
        f"nothing but the internet. These are the run's {weights} after the outer step of round "
        f"{facts.state.round:,}."
    )


def _run_rows(facts: CardFacts) -> list[tuple[str, str]]:
    state = facts.state
    rows = [("Run", f"{_plain(state.run)} (`{state.run_id}`)"), ("Rounds", f"{state.round:,}")]
    if state.tokens_round == state.round:  # else they are those of an earlier snapshot
        rows.append(("Tokens", f"{state.tokens:,}"))
    rows.append(("State digest", f"`{state.state_digest}` (as the round's commit record has it)"))
    if facts.val_loss is not None:
        rows.append(("Validation loss", f"{facts.val_loss:.4f} nats a token"))
    total = sum(source.weight for source in facts.sources)
    for source in facts.sources:
        name = _plain(source.manifest.name) if source.manifest is not None else "not known"
        share = f", {100 * source.weight / total:.3g} % of the samples" if len(facts.sources) > 1 else ""
        rows.append(("Data set", f"{name} (`{source.digest}`){share}"))
    if not facts.sources:
        rows.append(("Data", _data_without_name(facts)))
    weights = "fp32, as trained" if facts.dtype is WeightDtype.FP32 else "bf16, rounded from fp32"
    return [*rows, ("Weights", weights)]


def _data_without_name(facts: CardFacts) -> str:
    match (config := facts.config).data.kind:
        case DataKind.STDLIB:
            return "the Python standard library's own source, as bytes: a token is a byte"
        case DataKind.BYTES:
            return "text files of each node, as bytes: a token is a byte"
        case DataKind.PLUGIN:
            return f"those of {_plugin(facts, config.data.plugin)}, which each node has installed"
        case _:
            return "each node's own; the run does not name it"


def _training_rows(facts: CardFacts) -> list[tuple[str, str]]:
    run = facts.config
    model, inner, outer, rounds = run.model, run.inner, run.outer, run.rounds
    shape = (
        f"{model.layers} layers of {model.dim}, {model.heads} heads ({model.kv_heads} for keys and values), "
        f"{model.ffn_dim} in the feed-forward part, vocabulary of {model.vocab_size:,}"
    )
    described = facts.model.transformers and run.engine is Engine.BUILTIN
    rows = [("Model", shape)] if described else [("Engine", str(run.engine))]
    if run.engine is Engine.TORCHTITAN:
        rows.append(("Model", f"torchtitan's {_plain(run.titan.config)}"))
    if run.engine is Engine.HF:
        adapters = f", LoRA adapters of rank {run.hf.lora.rank}" if run.hf.lora.rank else ""
        rows.append(("Model", f"transformers' {_plain(run.hf.architecture)}{adapters}"))
    if run.model.plugin:
        rows.append(("Model", _plugin(facts, run.model.plugin)))
    rule = _plugin(facts, outer.plugin) if outer.plugin else "Nesterov"
    return [
        *rows,
        *_beginning(facts),
        *_lengths(facts),
        (
            "Inner optimizer",
            f"{inner.optimizer}, peak learning rate {inner.peak_lr:g}, {inner.batch_size} sequences a step and "
            "node",
        ),
        ("Outer optimizer", f"{rule}, learning rate {outer.lr:g}, momentum {outer.momentum:g}"),
        ("Rounds of", f"{rounds.inner_steps:,} inner steps, exchanged as {run.reduce.codec}"),
        ("Seed", str(run.seed)),
    ]


def _beginning(facts: CardFacts) -> list[tuple[str, str]]:
    """What the run began with, where its config names that."""
    run, base, rows = facts.config, _plain(base_model(facts)), list[tuple[str, str]]()
    if facts.model.adapters:
        rows.append(("Base model", base or "a folder of the run's nodes, which has no public name"))
    if run.init_from:
        named = base if base and not facts.model.adapters else ""
        rows.append(("Begun with", named or "weights of an earlier training, which have no public name"))
    return rows


def _lengths(facts: CardFacts) -> list[tuple[str, str]]:
    """How long the sequences were that the run trained on, and how long the model takes them."""
    run = facts.config
    if run.data.kind is DataKind.SCRIPT:
        return []
    longest = None
    if facts.model.transformers:
        model = run.model
        longest = run.hf.positions if run.engine is Engine.HF else max(model.max_positions, model.seq_len)
    takes = f"; the model takes up to {longest:,}" if longest else ""
    return [("Sequences", f"trained on {run.model.seq_len:,} tokens each{takes}")]


def _plugin(facts: CardFacts, name: str) -> str:
    """A plugin, and the packages that the run's plugins are of."""
    packages = ", ".join(facts.packages)
    return f"the plugin {_plain(name)}" + (f" ({_plain(packages)})" if packages else "")


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
    if facts.model.adapters and not base_model(facts):
        return [*_adapters_alone(), *_tokenizer_note(facts)]
    library, loader = ("peft", "AutoPeft") if facts.model.adapters else ("transformers", "Auto")
    lines = ["```python", f"from {library} import {loader}ModelForCausalLM"]
    load = [f'model = {loader}ModelForCausalLM.from_pretrained("THIS_FOLDER_OR_REPOSITORY")']
    if facts.tokenizer:
        lines.append("from transformers import AutoTokenizer")
        load.insert(0, 'tokenizer = AutoTokenizer.from_pretrained("THIS_FOLDER_OR_REPOSITORY")')
    return [*lines, "", *load, "```", "", *_tokenizer_note(facts)]


def _adapters_alone() -> list[str]:
    return [
        "```python",
        "from peft import PeftModel",
        "from transformers import AutoModelForCausalLM",
        "",
        'base = AutoModelForCausalLM.from_pretrained("BASE_MODEL")',
        'model = PeftModel.from_pretrained(base, "THIS_FOLDER_OR_REPOSITORY")',
        "```",
        "",
    ]


def _tokenizer_note(facts: CardFacts) -> list[str]:
    if facts.tokenizer:
        return []
    by_bytes = facts.config.data.kind in (DataKind.STDLIB, DataKind.BYTES)
    why = "a token is a byte of UTF-8" if by_bytes else "give the one that the run was trained with"
    return [f"There is no tokenizer among these files: {why}.", ""]


def _table(rows: Sequence[tuple[str, str]]) -> list[str]:
    return ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows), ""]


def _plain(text: str) -> str:
    """Text that others chose, such as a node's name, as Markdown that shows it and does nothing else."""
    line = "".join(c if c.isprintable() else " " for c in text)
    return "".join("\\" + c if c in PUNCTUATION else c for c in line)
