"""`atoll export --out FOLDER`: the anchor of a node's newest state as a whole Hugging Face model folder.

    model*.safetensors            the weights (`weights`)
    config.json, generation_config.json
    tokenizer.json, ...           where the run has a tokenizer (`tokenizer`)
    README.md                     the model card (`card`)

The folder appears whole or not at all, and in the place of an earlier export if that is asked for. Of a model of
any size no more than a chunk is in memory.
"""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from atoll.comm.config.plugin import PluginGroup
from atoll.comm.config.run import RunConfig
from atoll.comm.errors import AtollError, ConfigError
from atoll.comm.files import Room, room
from atoll.comm.folders import atomic_folder
from atoll.node.checkpoint.saved_run import SavedRun, choose_run
from atoll.node.data.manifest import TOKENIZER
from atoll.node.export.card import HUB_NAME, CardFacts, base_model, card
from atoll.node.export.commit_records import CommitRecords
from atoll.node.export.model_files import ModelFiles, TensorNaming, default_naming, model_files, with_base
from atoll.node.export.newest_state import ExportResult, write_newest, write_round
from atoll.node.export.tokenizer import (
    COMPANIONS,
    DataSource,
    TokenizerExport,
    data_sources,
    json_object,
    read_source,
    tokenizer_of_path,
    tokenizer_of_source,
)
from atoll.node.export.weights import (
    INDEX_SUFFIX,
    SUFFIX,
    StateFacts,
    WeightDtype,
    WeightFile,
    file_size,
    index_of,
    read_facts,
    split_into_files,
    state_facts,
    write_weights,
)

CARD, GENERATION_CONFIG = "README.md", "generation_config.json"
SHARD_BYTES = 5_000_000_000
SMALL_FILES_BYTES = 1 << 20  # configs, card and index, about
# The files that an export writes, and what huggingface_hub leaves in a folder that it sends.
OURS = re.compile(
    r"(model|adapter_model)(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?|(adapter_|generation_)?config\.json|"
    rf"{re.escape(CARD)}|\.cache|" + "|".join(map(re.escape, (TOKENIZER, *COMPANIONS)))
)


@dataclass(frozen=True, slots=True)
class FolderOptions:
    """The user's choices for an exported folder."""

    naming: TensorNaming | None = None  # None: what transformers loads, where it can
    dtype: WeightDtype = WeightDtype.BF16
    shard_bytes: int = SHARD_BYTES
    tokenizer: Path | None = None  # None: the data set's
    overwrite: bool = False  # replace an earlier export
    base: str = ""  # ORG/NAME of the model that the run began with, or has adapters for; empty: as its config says
    license: str = ""  # the Hub's identifier, for the card

    def check(self) -> None:
        """Raise `ConfigError` for a base or a license that the Hub has no such name for."""
        if self.base and not re.fullmatch(HUB_NAME, self.base):
            raise ConfigError(f"--base is {self.base!r}: write ORG/NAME, as the Hugging Face Hub has it")
        if self.license and not re.fullmatch(r"[a-z0-9][a-z0-9.-]*", self.license):
            raise ConfigError(f"--license is {self.license!r}: write the Hub's identifier, such as apache-2.0")


@dataclass(frozen=True, slots=True)
class _Surroundings:
    """Whatever is in the folder besides the model, which is got before anything is written."""

    tokenizer: TokenizerExport | None
    sources: tuple[DataSource, ...]
    notes: tuple[str, ...]


class FolderExporter:
    """Writes folders of one run. The tokenizer and the data sets' manifests are fetched once."""

    def __init__(
        self,
        state_dir: Path,
        run: str = "",
        options: FolderOptions = FolderOptions(),
        records: Callable[[], CommitRecords | None] = lambda: None,
        room: Room = room,
    ) -> None:
        """`run`: name or mark, where the node has kept several; `records`: asked before each export for the run's
        commit records, None where there are none."""
        self._state_dir, self._run, self._options = state_dir, run, options
        self._records, self._room = records, room
        self._surroundings: _Surroundings | None = None

    def export(self, out: Path, round_: int | None = None) -> ExportResult:
        """Write the state of `round_`, or of the newest round that is whole, to the folder `out`. Raises
        `ConfigError`, `ResourceError`, or what `records` raises."""
        self._options.check()
        check_replaceable(out, self._options.overwrite)
        if self._surroundings is None:
            self._surroundings = _surroundings(choose_run(self._state_dir, self._run), self._options)
        records = self._records()

        def write(saved: SavedRun, round_: int) -> ExportResult:
            return self._write(saved, round_, out, records)

        if round_ is None:
            return write_newest(self._state_dir, self._run, out, write)
        return write_round(self._state_dir, self._run, round_, out, write)

    def _write(self, saved: SavedRun, round_: int, out: Path, records: CommitRecords | None) -> ExportResult:
        options, around = self._options, self._surroundings
        assert around is not None, "export has got it"
        naming = default_naming(saved) if options.naming is None else options.naming
        model = with_base(model_files(saved, naming), options.base)
        files = split_into_files(model.tensors, options.dtype, options.shard_bytes, model.stem)
        facts = state_facts(saved, round_)
        extra = dict(around.tokenizer.files) if around.tokenizer is not None else {}
        size = sum(file_size(file, options.dtype, facts) for file in files)
        size += sum(map(len, extra.values())) + SMALL_FILES_BYTES
        out.parent.mkdir(parents=True, exist_ok=True)
        with atomic_folder(out, size, self._room) as folder:
            facts = _write_weights(folder, saved, files, options.dtype, facts)
            contributors, val_loss = list[tuple[str, int]](), None
            if records is not None:
                records.check_digest(round_, facts.state_digest)
                contributors = records.contributors(round_)
                if (record := records.rounds.get(round_)) is not None:
                    facts = replace(facts, tokens=record.tokens, tokens_round=round_)
                    val_loss = record.val_loss
            if len(files) > 1:
                extra[model.stem + INDEX_SUFFIX] = index_of(files, options.dtype)
            extra |= _configs(model, facts, options.dtype, around.tokenizer)
            about = CardFacts(
                saved.manifest.run,
                facts,
                model,
                options.dtype,
                saved.chunks.numel,
                around.sources,
                contributors,
                val_loss,
                around.tokenizer is not None,
                options.base,
                options.license,
                plugin_packages(saved.manifest.run),
            )
            extra[CARD] = card(about).encode()
            for name, data in extra.items():
                (folder / name).write_bytes(data)
        notes = (*around.notes, *_card_notes(about, records is not None))
        return ExportResult(facts.run, round_, saved.chunks.numel, facts.state_digest, notes)


def check_replaceable(out: Path, overwrite: bool) -> None:
    """Raise `ConfigError` unless `out` can become an export's folder: it is not there, is empty, or is an earlier
    export that is to be overwritten."""
    if not out.exists() and not out.is_symlink():
        return
    if not out.is_dir() or out.is_symlink():
        raise ConfigError(
            f"{out} is not a folder: give --out FOLDER, or a path that ends in .safetensors for a single file"
        )
    inside = sorted(path.name for path in out.iterdir())
    if not inside:
        return
    if foreign := [name for name in inside if not OURS.fullmatch(name)]:
        raise ConfigError(f"{out} has {foreign[0]}, which no export writes: give --out another folder")
    if not is_export(out):
        raise ConfigError(f"{out} is a model's folder that no export has written: give --out another folder")
    if not overwrite:
        raise ConfigError(f"{out} is an export already: give --overwrite, or --out another folder")


def is_export(folder: Path) -> bool:
    """Whether a file of weights in the folder says of which run it is."""
    return any(read_facts(path).get("run_id") for path in folder.glob(f"*{SUFFIX}"))


def _surroundings(saved: SavedRun, options: FolderOptions) -> _Surroundings:
    run = saved.manifest.run
    sources, notes = list(data_sources(run.data)), list[str]()
    for i, source in enumerate(sources):
        try:
            sources[i] = read_source(source)
        except AtollError as error:
            if options.tokenizer is None:
                raise
            notes.append(f"the card does not name the data set: {error}")
    manifest = sources[0].manifest if sources else None
    tokenizer: TokenizerExport | None = None
    if options.tokenizer is not None:
        end_of_text = manifest.end_of_text if manifest is not None else None
        tokenizer = tokenizer_of_path(options.tokenizer, run, end_of_text)
        if "eos_token_id" not in tokenizer.ids:
            notes.append(
                f"{options.tokenizer} does not say which token ends a text, and generation will not know it: give "
                "a folder whose tokenizer_config.json has an eos_token"
            )
    elif sources:
        tokenizer = tokenizer_of_source(sources[0], run)
    else:
        notes.append(
            f"no tokenizer is written: run {run.name} has data.kind={run.data.kind}, which names none "
            "(give one with --tokenizer, if there is one)"
        )
    return _Surroundings(tokenizer, tuple(sources), tuple(notes))


def plugin_packages(run: RunConfig) -> tuple[str, ...]:
    """The packages that the run's plugins are of: as its config says, else those that this machine has."""
    if run.plugin_packages:
        return tuple(run.plugin_packages)
    plugins = (plugin for group in PluginGroup if (plugin := run.plugin(group)) is not None)
    return tuple(dict.fromkeys(package for plugin in plugins if (package := plugin.package)))


def _card_notes(about: CardFacts, with_records: bool) -> Iterator[str]:
    """What the card lacks, and who can say it."""
    if not with_records:
        yield "the card is without tokens, loss and contributors: give --coordinator URL, or --rounds rounds.jsonl"
    if about.model.adapters and not base_model(about):
        yield (
            "the adapters do not say which model they are for: the run's hf.base is a folder; give --base "
            "ORG/NAME, as the Hub calls it"
        )
    elif about.config.init_from and not base_model(about):
        yield "the card does not name what the run began with: give --base ORG/NAME, if the Hub has it"


def _write_weights(
    folder: Path, saved: SavedRun, files: tuple[WeightFile, ...], dtype: WeightDtype, facts: StateFacts
) -> StateFacts:
    opened = {file.name: open(folder / file.name, "xb", buffering=0) for file in files}
    try:
        return write_weights(saved, files, dtype, facts, {name: file.fileno() for name, file in opened.items()})
    finally:
        for file in opened.values():
            file.close()


def _configs(
    model: ModelFiles, facts: StateFacts, dtype: WeightDtype, tokenizer: TokenizerExport | None
) -> dict[str, bytes]:
    """The model's config and what `generate` begins with."""
    if not model.transformers:
        return {model.config_name: _json({**facts.texts(), **model.config})}
    ids = dict(tokenizer.ids) if tokenizer is not None else {}
    ends = {"eos_token_id": list(tokenizer.ends)} if tokenizer is not None and len(tokenizer.ends) > 1 else {}
    if model.adapters:
        generation_of_adapters = {GENERATION_CONFIG: _json(ids | ends)} if ids else {}
        return {model.config_name: _json(model.config), **generation_of_adapters}
    config = model.config | {"dtype": dtype.torch_name, "torch_dtype": dtype.torch_name} | ids
    given = tokenizer.files.get(GENERATION_CONFIG) if tokenizer is not None else None
    generation = {"_from_model_config": True} if given is None else json_object(given, GENERATION_CONFIG)
    return {model.config_name: _json(config), GENERATION_CONFIG: _json({**ids, **ends, **generation})}


def _json(value: dict[str, Any]) -> bytes:
    return json.dumps(value, indent=2, ensure_ascii=False).encode() + b"\n"
