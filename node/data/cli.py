"""`atoll data build|check|show`: data sets that runs train on."""

import json
import time
from collections import Counter
from typing import Any

import click

from atoll.comm.cores import usable_cores
from atoll.comm.digest import digest
from atoll.comm.errors import ConfigError
from atoll.comm.extras import demand
from atoll.comm.options import json_option
from atoll.comm.terminal import plural, say, visible
from atoll.node.data.manifest import MAX_BLOCK_TOKENS, TRAIN, VALIDATION, Manifest

FEW_VALIDATION_DOCUMENTS = 20


@click.group()
def data() -> None:
    """Make and look at data sets for runs."""


@data.command()
@click.argument("sources", metavar="SOURCE...", nargs=-1, required=True)
@click.option("--tokenizer", required=True, help="A tokenizer.json, or the folder or URL of a model that has one.")
@click.option("--out", required=True, help="Folder or URL (s3://bucket/name) of the data set.")
@click.option("--end-of-text", default="", help="Token behind each document, where the tokenizer does not tell.")
@click.option(
    "--column", default="", show_default="text, or messages", help="Of records, that holds the document."
)
@click.option(
    "--chat", is_flag=True, help="Records are conversations; only the assistant's turns are to be learned."
)
@click.option(
    "--validation-every",
    default=100,
    show_default=True,
    type=click.IntRange(0),
    help="Every N-th document is for validation; 0: none.",
)
@click.option("--block-tokens", default=32768, show_default=True, help="Tokens of a block: the longest sample.")
@click.option(
    "--shard-blocks", default=2048, show_default=True, type=click.IntRange(1, 1 << 20), help="Blocks of a file."
)
@click.option("--workers", default=0, show_default="all cores", type=click.IntRange(0, 1024), help="Processes.")
@click.option("--name", default="", show_default="of the first source", help="Name of the data set, for people.")
@click.option("--work", default="", help="Folder to make files in that go to a URL; default: in ~/.cache/atoll.")
@click.option("--overwrite", is_flag=True, help="Remove the data set, or the beginning of one, that is there.")
@json_option
def build(
    sources: tuple[str, ...],
    tokenizer: str,
    out: str,
    end_of_text: str,
    column: str,
    chat: bool,
    validation_every: int,
    block_tokens: int,
    shard_blocks: int,
    workers: int,
    name: str,
    work: str,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Make a data set of the documents of SOURCE...

    \b
    A SOURCE is a file, a folder or a glob of
      .txt .md .py   a document each
      .jsonl         one a line, in "text"
      .parquet       one a row, in the column "text"
    (all but .parquet also as .gz or .zst), or what Hugging Face's datasets reads:
      datasets:NAME_OR_PATH[:SPLIT]   datasets:json:data_files=FILE:split=train
      (keys: split, name, data_files, data_dir, revision)

    Killed half-way, the same command goes on where it was. The same sources, tokenizer and options give the same
    bytes. A record that cannot be read is left out, counted and named.
    """
    demand("atoll data build", *(["tokenizers", "jinja2"] if chat else ["tokenizers"]))
    from atoll.node.data.build import BuildOptions, BuildProgress, build
    from atoll.node.data.destination import Destination
    from atoll.node.data.progress import ProgressBar
    from atoll.node.data.sources import SourceFile, find_sources, left_out_files
    from atoll.node.data.tokenizer_files import read_tokenizer_files

    if validation_every == 1:
        raise ConfigError(
            "--validation-every 1 leaves nothing to train on: give 2 or more, or 0 for no validation"
        )
    if not 8 <= block_tokens <= MAX_BLOCK_TOKENS or block_tokens % 8:
        raise ConfigError(f"--block-tokens {block_tokens}: it must be a multiple of 8 up to {MAX_BLOCK_TOKENS}")
    unread = Counter[str]()
    found = find_sources(sources, records_only=chat, left_out=unread)
    options = BuildOptions(
        read_tokenizer_files(tokenizer),
        end_of_text,
        column or ("messages" if chat else "text"),
        chat,
        validation_every,
        block_tokens,
        shard_blocks,
        name,
    )
    destination = Destination(out, work)
    if overwrite:
        with destination.taken():
            destination.clear()
    files = [source for source in found if isinstance(source, SourceFile)]
    total = sum(file.size for file in files) if len(files) == len(found) else None
    began, latest = time.monotonic(), None

    def show(progress: BuildProgress) -> None:
        nonlocal latest
        latest = progress
        skipped = progress.skipped
        left_out = f", {skipped:,} {plural('record', skipped)} left out" if skipped else ""
        bar.show(
            progress.consumed,
            f"{progress.tokens / 1e6:,.1f} M tokens, "
            f"{progress.documents:,} {plural('document', progress.documents)}{left_out}",
        )

    with ProgressBar("building", total, as_json) as bar:
        manifest = build(
            destination, sources, found, options, workers or usable_cores(), show, lambda line: say(line, err=True)
        )
    replaced = latest.replaced if latest is not None else 0
    said = [left_out_files(unread), f"{replaced:,} {plural('file', replaced)} not UTF-8" if replaced else ""]
    if line := "; ".join(filter(None, said)):
        say(f"{line}{', of which unreadable characters were replaced' if replaced else ''}", err=True)
    _warn_of_validation(manifest, validation_every)
    _tell_built(manifest, out, destination.local, time.monotonic() - began, as_json)


def _warn_of_validation(manifest: Manifest, every: int) -> None:
    """Say where a data set has too few documents for validation, or none."""
    count, name = manifest.documents // every if every else 0, f"slice {VALIDATION}"
    remedy = "a smaller --validation-every" if every else "--validation-every"
    if not count:
        made = f"the sources have {manifest.documents:,} {plural('document', manifest.documents)}"
        click.echo(f"there is no {name}, which runs look for: {made}; {remedy} makes one", err=True)
    elif count < FEW_VALIDATION_DOCUMENTS:
        few = f"{count} {plural('document', count)}"
        click.echo(f"the {name} has only {few}: a loss of so few says little; {remedy} gives more", err=True)


def _tell_built(manifest: Manifest, out: str, local: bool, seconds: float, as_json: bool) -> None:
    slices = {name: manifest.tokens(name) for name in sorted({shard.slice for shard in manifest.shards})}
    found = digest(manifest.encode()).hex()
    if as_json:
        click.echo(
            json.dumps(
                {
                    "url": out,
                    "digest": found,
                    "name": manifest.name,
                    "documents": manifest.documents,
                    "tokens": slices,
                    "shards": len(manifest.shards),
                    "vocab_size": manifest.vocab_size,
                    "skipped": {"count": manifest.skipped.count, "examples": list(manifest.skipped.examples)},
                    "seconds": round(seconds, 3),
                }
            )
        )
        return
    if count := manifest.skipped.count:
        click.echo(f"{count:,} {plural('record', count)} left out:", err=True)
        for example in manifest.skipped.examples[:10]:
            say(f"  {example}", err=True)
    tokens = ", ".join(f"{count:,} tokens in {name}" for name, count in slices.items())
    documents = f"{manifest.documents:,} {plural('document', manifest.documents)}"
    click.echo(f"{out}: {documents}, {tokens}, {seconds:,.0f} s")
    if local:
        click.echo(
            "serve this folder by a web server that knows ranges, or copy it to a store; in the run's config:"
        )
    click.echo(f"data.url={'<its URL>' if local else out} data.digest={found}")


@data.command()
@click.argument("url")
@click.option("--slice", "slice_name", default="", show_default="all", help="Read one slice only.")
@json_option
def check(url: str, slice_name: str, as_json: bool) -> None:
    """Read the data set at URL whole, compare every digest, and print what a run's config needs of it."""
    from atoll.node.data.check import check
    from atoll.node.data.progress import ProgressBar

    with ProgressBar("checking", 100, as_json) as bar:
        report = check(
            url, slice_name, lambda done, all_: bar.show(100 * done // all_, f"{done:,} of {all_:,} blocks")
        )
    manifest = report.manifest
    said: dict[str, Any] = {
        "url": url,
        "digest": report.digest,
        "name": manifest.name,
        "documents": report.documents,
        "tokens": report.tokens,
        "learned": report.learned,
        "vocab_size": manifest.vocab_size,
        "largest_id": report.largest_id,
        "distinct_ids": report.distinct_ids,
        "frequent": [list(pair) for pair in report.frequent],
        "block_tokens": manifest.block_tokens,
        "masked": manifest.masked,
        "skipped": manifest.skipped.count,
    }
    if as_json:
        click.echo(json.dumps(said))
        return
    total = sum(report.tokens.values())
    say(f"{manifest.name} is whole: every block has the digest that it was built with")
    for name, count in report.tokens.items():
        say(f"{name:>14}  {count:,} tokens, {report.documents[name]:,} documents")
    click.echo(f"{'blocks':>14}  of {manifest.block_tokens:,} tokens: the longest sample")
    if manifest.masked:
        click.echo(f"{'learned':>14}  {report.learned:,} tokens, {100 * report.learned / total:.1f} %")
    click.echo(
        f"{'vocabulary':>14}  {manifest.vocab_size:,}; {report.distinct_ids:,} ids are used, the largest is "
        f"{report.largest_id:,}"
    )
    frequent = ", ".join(f"{i} ({100 * count / total:.1f} %)" for i, count in report.frequent)
    click.echo(f"{'most frequent':>14}  ids {frequent}")
    if manifest.skipped.count:
        count = manifest.skipped.count
        click.echo(f"{'left out':>14}  {count:,} {plural('record', count)} of the sources")
    click.echo(f"data.url={url} data.digest={report.digest}")


@data.command()
@click.argument("url")
@click.argument("index", type=click.IntRange(0))
@click.option("--slice", "slice_name", default=TRAIN, show_default=True, help="The slice to show samples of.")
@click.option(
    "--seq-len",
    default=0,
    show_default="a whole block",
    type=click.IntRange(0, MAX_BLOCK_TOKENS),
    help="Show sample INDEX of so many tokens, in the order of the files.",
)
@json_option
def show(url: str, index: int, slice_name: str, seq_len: int, as_json: bool) -> None:
    """Print the text of block or sample INDEX of the data set at URL, counted from 0.

    A line of dashes is between documents; what is not to be learned is in ⟦brackets⟧.
    """
    demand("atoll data show", "tokenizers")
    from atoll.node.data.show import passages

    found = passages(url, index, slice_name, seq_len)
    if as_json:
        documents = [
            {
                "begins": p.begins,
                "runs": [{"text": r.text, "tokens": r.tokens, "learned": r.learned} for r in p.runs],
            }
            for p in found
        ]
        click.echo(json.dumps({"url": url, "slice": slice_name, "index": index, "documents": documents}))
        return
    for passage in found:
        count = sum(run.tokens for run in passage.runs)
        begun = "a document begins" if passage.begins else "a document goes on"
        click.echo(f"{'-' * 20} {begun}, {count:,} tokens {'-' * 20}")
        text = "".join(run.text if run.learned else f"⟦{run.text}⟧" for run in passage.runs)
        click.echo(visible(text, keep="\t\n"))
