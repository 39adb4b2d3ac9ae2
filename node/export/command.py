"""The commands `atoll export` and `atoll eval`."""

import json
import re
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path

import click

from atoll.comm.errors import ConfigError, Unreachable
from atoll.comm.options import json_option
from atoll.comm.terminal import say
from atoll.node.export import commit_records, hub
from atoll.node.export.commit_records import CommitRecords
from atoll.node.export.evaluation import TASKS, EvaluationOptions, evaluate
from atoll.node.export.folder import FolderExporter, FolderOptions
from atoll.node.export.follow import Follower
from atoll.node.export.hub import HubRepository
from atoll.node.export.model_files import TensorNaming
from atoll.node.export.newest_state import ExportResult
from atoll.node.export.single_file import export as export_file
from atoll.node.export.weights import SUFFIX, WeightDtype

UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}
path_option = click.Path(path_type=Path)


@click.command()
@click.argument("state_dir", type=path_option)
@click.option(
    "--out", type=path_option, required=True, help="A folder to make, or a single file that ends in .safetensors."
)
@click.option(
    "--layout",
    type=click.Choice([naming.value for naming in TensorNaming]),
    default=None,
    show_default="llama for a folder, names for a file",
    help="What the tensors are called: the parameters' own names, or as transformers has them.",
)
@click.option(
    "--dtype",
    type=click.Choice([dtype.value for dtype in WeightDtype]),
    default=None,
    show_default="bf16 for a folder, fp32 for a file",
    help="The weights' number type.",
)
@click.option(
    "--shard-size", default="5GB", show_default=True, help="Weights of a folder are in files of at most so much."
)
@click.option(
    "--tokenizer",
    type=path_option,
    default=None,
    show_default="the run's data set's",
    help="A tokenizer.json, or a folder with one, for the exported folder.",
)
@click.option(
    "--rounds", type=path_option, default=None, help="The run's commit records, rounds.jsonl: who contributed."
)
@click.option("--coordinator", default="", help="HTTP URL of the coordinator's page: who contributed.")
@click.option(
    "--base",
    default="",
    metavar="ORG/NAME",
    show_default="as the run's config says",
    help="What the run began with, or its adapters are for, as the Hub calls it: for the card.",
)
@click.option("--license", "license_", default="", help="The Hub's identifier, such as apache-2.0: for the card.")
@click.option("--push", default="", metavar="ORG/NAME", help="Send the folder to the Hugging Face Hub.")
@click.option("--public", is_flag=True, help="The repository of --push is for everybody; else it is private.")
@click.option(
    "--every",
    type=click.IntRange(1),
    default=None,
    metavar="N",
    help="Stay, and export each Nth round as a folder in --out, until the run is finished.",
)
@click.option(
    "--keep", type=click.IntRange(0), default=3, show_default=True, help="Newest of them that stay; 0: all."
)
@click.option(
    "--run", default="", help="Which one, if the node has kept several: its name, or the start of its id."
)
@click.option("--overwrite", is_flag=True, help="Replace an earlier export.")
@click.option("--json", "as_json", is_flag=True, help="Say what was exported as one JSON object.")
def export(
    state_dir: Path,
    out: Path,
    layout: str | None,
    dtype: str | None,
    shard_size: str,
    tokenizer: Path | None,
    rounds: Path | None,
    coordinator: str,
    base: str,
    license_: str,
    push: str,
    public: bool,
    every: int | None,
    keep: int,
    run: str,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Write the model as a node has it on its disk: a whole Hugging Face model folder, or a single file.

    STATE_DIR is the node's (~/.local/state/atoll/node unless it was told another); its daemon may run
    meanwhile. A folder has weights, configs, the tokenizer of the run's data set, and a model card. The config of
    a single file X.safetensors is X.config.json beside it, of model.safetensors config.json.
    """
    state_dir, out = state_dir.expanduser(), out.expanduser()
    if out.suffix == SUFFIX:
        given = {"--tokenizer": tokenizer, "--rounds": rounds, "--coordinator": coordinator, "--push": push}
        given |= {"--base": base, "--license": license_}
        for name in (name for name, value in {**given, "--every": every}.items() if value):
            raise ConfigError(f"{name} is for a folder, and {out.name} is a single file: give --out FOLDER")
        naming, number = TensorNaming(layout or TensorNaming.NAMES), WeightDtype(dtype or WeightDtype.FP32)
        _tell(export_file(state_dir, out, naming, run, overwrite, dtype=number), out, as_json)
        return
    if public and not push:
        raise ConfigError("--public says who may see the repository of --push: give --push ORG/NAME")
    if rounds and coordinator:
        raise ConfigError("--rounds and --coordinator both say where the commit records are: give one")
    options = FolderOptions(
        TensorNaming(layout) if layout else None,
        WeightDtype(dtype or "bf16"),
        parse_size(shard_size),
        tokenizer.expanduser() if tokenizer is not None else None,
        overwrite,
        base,
        license_,
    )
    options.check()
    records = _records(rounds, coordinator, away=every is not None)
    repository = HubRepository(push, public, overwrite=overwrite) if push else None
    if repository is not None:
        hub.check(repository)
    exporter = FolderExporter(state_dir, run, options, records)
    with _interrupted_by_sigterm():
        if every is None:
            done = exporter.export(out)
            _tell(done, out, as_json)
            if repository is not None:
                _push(repository, done.run, done.round, out)
            return
        Follower(
            state_dir,
            run,
            out,
            every,
            keep,
            exporter,
            say,
            finished=partial(commit_records.is_finished, coordinator) if coordinator else None,
            publish=partial(_push, repository) if repository is not None else None,
        ).follow(threading.Event().wait)


@click.command("eval")
@click.argument("model", metavar="EXPORT", type=path_option)
@click.option(
    "--tasks", default=",".join(TASKS), show_default=True, help="Names of the harness's tasks, with commas."
)
@click.option("--include", type=path_option, default=None, help="A folder with tasks of your own (YAML).")
@click.option(
    "--few-shot",
    type=click.IntRange(0),
    default=None,
    show_default="as each task says",
    help="Examples before each question.",
)
@click.option("--limit", type=click.IntRange(1), default=None, help="Samples of each task at most.")
@click.option("--batch-size", type=click.IntRange(1), default=8, show_default=True, help="Sequences at once.")
@click.option("--device", default="", show_default="cuda if there is one", help="Such as cpu or cuda:0.")
@json_option
def eval_command(
    model: Path,
    tasks: str,
    include: Path | None,
    few_shot: int | None,
    limit: int | None,
    batch_size: int,
    device: str,
    as_json: bool,
) -> None:
    """Evaluate an exported folder with lm-evaluation-harness: pip install ".[eval]".

    The harness's own tasks fetch their data from the Hugging Face Hub.
    """
    names = tuple(name for name in tasks.split(",") if name)
    options = EvaluationOptions(names, include, few_shot, limit, batch_size, device)
    found = evaluate(model.expanduser(), options)
    if as_json:
        click.echo(json.dumps(found))
        return
    for task, figures in found["tasks"].items():
        shown = ", ".join(f"{name} {value:.4f}" for name, value in figures.items())
        click.echo(f"{task:>24}  {shown}")


def parse_size(text: str) -> int:
    """Bytes of a size such as 5GB or 500 MB. Raises `ConfigError`."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMG]?B)?", text.strip().upper())
    size = int(float(match[1]) * UNITS[(match[2] or "").removeprefix("B")]) if match else 0
    if size < 1:
        raise ConfigError(f"--shard-size is {text!r}: write a number with KB, MB or GB, such as 5GB")
    return size


def _tell(done: ExportResult, out: Path, as_json: bool) -> None:
    for note in done.notes:
        say(note, err=True)
    if as_json:
        click.echo(json.dumps({**asdict(done), "out": str(out)}))
    else:
        say(f"run {done.run}, round {done.round}: {done.n_params:,} parameters are in {out}")


def _push(repository: HubRepository, run: str, round_: int, folder: Path) -> None:
    url = hub.push(folder, repository, f"Round {round_} of run {run}")
    say(f"run {run}, round {round_}: sent to {url}", err=True)


def _records(rounds: Path | None, coordinator: str, away: bool) -> Callable[[], CommitRecords | None]:
    """Where the commit records come from. `away`: while the coordinator is, what it said last does."""
    if rounds is not None:
        path = rounds.expanduser()
        return lambda: commit_records.read_file(path)
    if not coordinator:
        return lambda: None
    latest: CommitRecords | None = None

    def fetched() -> CommitRecords | None:
        nonlocal latest
        try:
            latest = commit_records.fetch(coordinator)
        except Unreachable as error:
            if not away:
                raise
            say(str(error), err=True)
        return latest

    return fetched


@contextmanager
def _interrupted_by_sigterm() -> Iterator[None]:
    """Let SIGTERM end the command as Ctrl-C does, so that it leaves no half folder behind."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
