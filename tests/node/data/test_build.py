"""A data set of documents: its tokens, the same bytes on every way to them, and what is left out by name."""

import gzip
import json
import multiprocessing
import signal
import subprocess
import sys
from pathlib import Path

import fsspec
import msgspec
import numpy as np
import psutil
import pytest
import zstandard
from click.testing import CliRunner, Result
from corpora import END, InlinePool, built, content, files, jsonl, tokenizer_folder
from tokenizers import Tokenizer

from atoll.comm.digest import digest
from atoll.comm.errors import ConfigError, ResourceError
from atoll.node.data import build as build_
from atoll.node.data.build import BuildProgress, BuildState
from atoll.node.data.cli import data
from atoll.node.data.destination import STATE
from atoll.node.data.manifest import MANIFEST, Manifest

DEADLINE = 60.0  # seconds


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tokenizer_folder(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def inline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_, "TokeniserPool", InlinePool)


def documents(count: int) -> list[str]:
    """Texts of different lengths."""
    return [f"document {i}: {'the cat sat on the mat. ' * (i % 17 + 1)}\nç€😀 {i}" for i in range(count)]


def reference(texts: list[str], tokenizer: Path, every: int) -> dict[str, tuple[list[int], list[int]]]:
    """Tokens of each slice, and where documents begin, in the plainest way."""
    tok = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    slices: dict[str, tuple[list[int], list[int]]] = {"train": ([], []), "validation": ([], [])}
    for number, text in enumerate(texts, 1):
        tokens, begins = slices["train" if number % every else "validation"]
        begins.append(len(tokens))
        tokens += [*tok.encode(text).ids, 0]
    return slices


@pytest.mark.usefixtures("inline")
def test_each_document_is_there_once_in_order_with_its_end_and_every_nth_is_for_validation(
    tmp_path: Path, tokenizer: Path
) -> None:
    texts = documents(83)
    source = jsonl(tmp_path / "a.jsonl", [{"text": text} for text in texts])
    manifest = built(tmp_path / "set", [source], tokenizer)
    assert manifest.documents == 83 and manifest.skipped.count == 0 and not manifest.masked
    for name, (tokens, begins) in reference(texts, tokenizer, 5).items():
        found, starts, _learned = content(tmp_path / "set", name)
        assert found.tolist() == tokens
        assert np.flatnonzero(starts).tolist() == begins
        *full, last = manifest.slice(name)
        assert all(shard.blocks == 16 and shard.tokens == 16 * 64 for shard in full)
        assert manifest.tokens(name) == len(tokens)
    assert len(manifest.slice("train")) > 3
    padding = (tmp_path / "set" / f"{last.name}.tokens").read_bytes()[-64 * 2 - 8 :]
    assert padding[2 * (last.tokens % 64) : 128] == bytes(128 - 2 * (last.tokens % 64))


def mixture(folder: Path) -> list[Path]:
    """Sources of all kinds that need no other package, two units long."""
    (folder / "texts").mkdir(parents=True)
    for i, text in enumerate(documents(30)):
        (folder / "texts" / f"{i:02d}.md").write_text(text)
    (folder / "texts" / "long.txt").write_text("a line of it\n" * 100_000)
    lines = "".join(json.dumps({"text": text}) + "\n" for text in documents(200)).encode()
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(lines + b"{not json\n"))
    frames = [zstandard.ZstdCompressor().compress(part) for part in (lines[:999], lines[999:])]
    (folder / "b.jsonl.zst").write_bytes(b"".join(frames))
    return [folder / "texts", folder / "*.jsonl.*"]


@pytest.mark.long
def test_the_bytes_are_the_same_for_any_number_of_processes(tmp_path: Path, tokenizer: Path) -> None:
    sources = mixture(tmp_path / "in")
    sets = list[dict[str, bytes]]()
    for workers in (1, 2, 5):
        built(tmp_path / f"{workers}", sources, tokenizer, workers=workers, name="same", shard_blocks=64)
        sets.append(files(tmp_path / f"{workers}"))
    assert sets[0] == sets[1] == sets[2]
    assert MANIFEST in sets[0] and "build.json" not in sets[0] and len(sets[0]) > 6


class Crash(Exception):
    """The end of a build at a chosen moment."""


@pytest.mark.usefixtures("inline")
@pytest.mark.parametrize("moments", [(1,), (2, 1), (3, 1, 1), (4, 4)])
def test_a_build_that_ended_at_any_moment_goes_on_to_the_same_bytes(
    tmp_path: Path, tokenizer: Path, moments: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("atoll.node.data.units.UNIT_BYTES", 20_000)
    source = jsonl(tmp_path / "a.jsonl", [{"text": text} for text in documents(400)])
    (tmp_path / "b.txt").write_text("".join(documents(300)))
    sources = [source, tmp_path / "b.txt"]
    built(tmp_path / "whole", sources, tokenizer, name="same")
    seen = list[BuildProgress]()
    for moment in moments:
        left = moment

        def crash(progress: BuildProgress) -> None:
            nonlocal left
            seen.append(progress)
            left -= 1
            if not left:
                raise Crash

        with pytest.raises(Crash):
            built(tmp_path / "set", sources, tokenizer, show=crash, name="same")
        assert not (tmp_path / "set" / MANIFEST).exists()
    built(tmp_path / "set", sources, tokenizer, name="same", show=seen.append)
    assert files(tmp_path / "set") == files(tmp_path / "whole")


KILLED = """
import multiprocessing, os, signal, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from corpora import built
def show(progress):
    if progress.shards >= 2:
        print(progress.shards, *(child.pid for child in multiprocessing.active_children()), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
if __name__ == "__main__":
    out, source, tokenizer = sys.argv[2:]
    built(Path(out), [source], Path(tokenizer), show, workers=2, shard_blocks=4096, name="same")
"""


@pytest.mark.long
def test_a_process_killed_half_way_leaves_no_other_behind_and_at_most_a_shard_to_do_again(
    tmp_path: Path, tokenizer: Path
) -> None:
    source = jsonl(tmp_path / "a.jsonl", [{"text": text * 8} for text in documents(2000)])
    built(tmp_path / "whole", [source], tokenizer, workers=2, shard_blocks=4096, name="same")
    (tmp_path / "killed.py").write_text(KILLED)
    tests = str(Path(__file__).parent.parent.parent)
    arguments = (tmp_path / "killed.py", tests, tmp_path / "set", source, tokenizer)
    command = [sys.executable, *map(str, arguments)]
    child = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=DEADLINE)
    assert child.returncode == -signal.SIGKILL
    shards, *processes = map(int, child.stdout.split())
    assert len(processes) == 2
    alive = [psutil.Process(pid) for pid in processes if psutil.pid_exists(pid)]
    assert psutil.wait_procs(alive, DEADLINE)[1] == []
    assert not (tmp_path / "set" / MANIFEST).exists()
    state = msgspec.json.decode((tmp_path / "set" / STATE).read_bytes(), type=BuildState)
    assert len(state.shards) >= shards - 1  # the last one is done again
    seen = list[BuildProgress]()
    built(tmp_path / "set", [source], tokenizer, seen.append, workers=2, shard_blocks=4096, name="same")
    assert seen[0].tokens > state.tokens > 0
    assert files(tmp_path / "set") == files(tmp_path / "whole")


@pytest.mark.usefixtures("inline")
def test_another_tokenizer_other_sources_or_options_do_not_go_on_with_a_build(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash(progress: BuildProgress) -> None:
        if (tmp_path / "set" / STATE).exists():
            raise Crash

    monkeypatch.setattr("atoll.node.data.units.UNIT_BYTES", 20_000)
    source = jsonl(tmp_path / "a.jsonl", [{"text": text} for text in documents(400)])
    with pytest.raises(Crash):
        built(tmp_path / "set", [source], tokenizer, show=crash)
    with pytest.raises(ConfigError, match="with other --block-tokens: go on"):
        built(tmp_path / "set", [source], tokenizer, block_tokens=128)
    other = jsonl(tmp_path / "b.jsonl", [{"text": "x"}])
    with pytest.raises(ConfigError, match="with other sources: go on"):
        built(tmp_path / "set", [source, other], tokenizer)
    another = tokenizer_folder(tmp_path / "other")
    (another / "tokenizer.json").write_bytes((another / "tokenizer.json").read_bytes() + b"\n")
    with pytest.raises(ConfigError, match="with other tokenizer: go on"):
        built(tmp_path / "set", [source], another)
    (tmp_path / "set" / STATE).write_text("{")
    with pytest.raises(ConfigError, match="is damaged, .*begin anew with --overwrite"):
        built(tmp_path / "set", [source], tokenizer)


@pytest.mark.usefixtures("inline")
def test_where_things_lie_does_not_change_the_bytes(tmp_path: Path, tokenizer: Path) -> None:
    sets = list[dict[str, bytes]]()
    for place in ("here", "there/below"):
        folder = tmp_path / place / "corpus"
        jsonl(folder / "a.jsonl", [{"text": text} for text in documents(20)] + [{}])
        built(tmp_path / place / f"out-{len(sets)}", [folder], tokenizer)
        sets.append(files(tmp_path / place / f"out-{len(sets)}"))
    assert sets[0] == sets[1]
    assert Manifest.decode(sets[0][MANIFEST]).name == "corpus"


@pytest.mark.usefixtures("inline")
def test_a_data_set_that_is_there_stays(tmp_path: Path, tokenizer: Path) -> None:
    source = jsonl(tmp_path / "a.jsonl", [{"text": text} for text in documents(20)])
    built(tmp_path / "set", [source], tokenizer)
    before = files(tmp_path / "set")
    with pytest.raises(ConfigError, match="has a data set already: build elsewhere, or give --overwrite"):
        built(tmp_path / "set", [source], tokenizer)
    assert {k: v for k, v in files(tmp_path / "set").items() if k != "build.lock"} == before


@pytest.mark.usefixtures("inline")
def test_damaged_records_are_left_out_counted_and_named(tmp_path: Path, tokenizer: Path) -> None:
    lines = [
        b'{"text": "good"}',
        b'{"text": "cut sho',
        b'{"title": "no text"}',
        b'{"text": 7}',
        b'{"text": "caf\xe9"}',
        b'{"text": "\\ud800"}',
        b'{"text": ""}',
        b"",
        b"[" * 5000,
        b'["text"]',
        b'{"text": "good again"}',
    ]
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines))
    (tmp_path / "b.txt").write_bytes(b"")
    manifest = built(tmp_path / "set", [tmp_path / "a.jsonl", tmp_path / "b.txt"], tokenizer, validation_every=0)
    assert manifest.documents == 2
    assert manifest.skipped.count == 9
    for found, (place, reason) in zip(
        manifest.skipped.examples,
        [
            ("a.jsonl line 2", "it is not JSON"),
            ("a.jsonl line 3", "missing required field `text`"),
            ("a.jsonl line 4", "Expected `str`, got `int`"),
            ("a.jsonl line 5", "it is not UTF-8"),
            ("a.jsonl line 6", "it is not JSON"),
            ("a.jsonl line 7", "its text is empty"),
            ("a.jsonl line 9", ""),
            ("a.jsonl line 10", "Expected `object`"),
            ("b.txt", "it is empty"),
        ],
        strict=True,
    ):
        assert found.startswith(f"{place}: ") and reason in found, found
    tok = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    expected = [*tok.encode("good").ids, 0, *tok.encode("good again").ids, 0]
    assert content(tmp_path / "set", "train")[0].tolist() == expected


@pytest.mark.usefixtures("inline")
def test_sources_without_any_document_are_refused_with_the_first_reason(tmp_path: Path, tokenizer: Path) -> None:
    source = jsonl(tmp_path / "a.jsonl", [{"txt": "x"}] * 3)
    with pytest.raises(ConfigError, match="hold no document: 3 records left out; a.jsonl line 1: .*`text`"):
        built(tmp_path / "set", [source], tokenizer)
    assert not (tmp_path / "set" / MANIFEST).exists()


@pytest.mark.usefixtures("inline")
def test_a_build_without_a_document_is_not_in_the_way_of_the_next(tmp_path: Path, tokenizer: Path) -> None:
    source = jsonl(tmp_path / "a.jsonl", [{"txt": "x"}] * 3)
    with pytest.raises(ConfigError, match="hold no document"):
        built(tmp_path / "set", [source], tokenizer)
    assert not (tmp_path / "set").exists()
    assert built(tmp_path / "set", [source], tokenizer, column="txt").documents == 3
    (tmp_path / "b.parquet").write_bytes(b"damaged")
    with pytest.raises(ResourceError, match="cannot be read as Parquet"):
        built(tmp_path / "other", [tmp_path / "b.parquet"], tokenizer)
    assert not (tmp_path / "other").exists()


@pytest.mark.usefixtures("inline")
def test_conversations_that_are_read_as_texts_are_hinted_at(tmp_path: Path, tokenizer: Path) -> None:
    source = jsonl(tmp_path / "a.jsonl", [{"messages": [{"role": "user", "content": "x"}]}])
    with pytest.raises(ConfigError, match="1 record left out; a.jsonl line 1: .*which --chat reads"):
        built(tmp_path / "set", [source], tokenizer)


def build_by_command(*arguments: Path | str) -> Result:
    return CliRunner().invoke(data, ["build", *map(str, arguments)], catch_exceptions=False)


@pytest.mark.usefixtures("inline")
def test_what_is_left_out_of_a_folder_is_said_and_what_to_do_with_the_set(tmp_path: Path, tokenizer: Path) -> None:
    folder = tmp_path / "in"
    jsonl(folder / "a.jsonl", [{"text": text} for text in documents(300)])
    for name in ("b.html", "c.html", "d.pdf", "README"):
        (folder / name).write_text("x")
    (folder / "latin.txt").write_bytes(b"caf\xe9 " * 300_000)  # of several units
    (folder / "more.txt").write_bytes(b"caf\xe9")
    done = build_by_command(folder, "--tokenizer", tokenizer, "--out", tmp_path / "set")
    assert "4 files left out: 2 .html, 1 without a suffix, 1 .pdf" in done.stderr.replace(
        "1 .pdf, 1 without a suffix", "1 without a suffix, 1 .pdf"
    )
    assert "; 2 files not UTF-8, of which unreadable characters were replaced\n" in done.stderr
    assert "the slice validation has only 3 documents" in done.stderr
    *_, serve, keys = done.stdout.splitlines()
    assert serve.startswith("serve this folder by a web server that knows ranges")
    found = digest((tmp_path / "set" / MANIFEST).read_bytes()).hex()
    assert keys == f"data.url=<its URL> data.digest={found}"
    plenty = jsonl(tmp_path / "b.jsonl", [{"text": text} for text in documents(300)])
    quiet = build_by_command(
        plenty, "--tokenizer", tokenizer, "--validation-every", "9", "--out", tmp_path / "b"
    ).stderr
    assert "left out" not in quiet and "UTF-8" not in quiet and "the slice" not in quiet


@pytest.mark.usefixtures("inline")
def test_a_build_that_goes_on_says_from_where(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("atoll.node.data.units.UNIT_BYTES", 20_000)
    source = jsonl(tmp_path / "a.jsonl", [{"text": text} for text in documents(400)])

    def crash(progress: BuildProgress) -> None:
        if 2 * progress.consumed > source.stat().st_size:
            raise Crash

    with pytest.raises(Crash):
        built(tmp_path / "set", [source], tokenizer, show=crash)
    state = json.loads((tmp_path / "set" / "build.json").read_text())
    share = 100 * state["consumed"] // source.stat().st_size
    done = build_by_command(
        *(source, "--tokenizer", tokenizer, "--out", tmp_path / "set", "--block-tokens", "64"),
        *("--shard-blocks", "16", "--validation-every", "5"),
    )
    assert 0 < share < 100 and f"goes on at {share} %, behind {state['documents']} documents" in done.stderr


@pytest.mark.usefixtures("inline")
def test_a_file_that_is_no_tokenizer_is_named_as_it_was_given(tmp_path: Path) -> None:
    (tmp_path / "tok.json").write_text("{}")
    source = jsonl(tmp_path / "a.jsonl", [{"text": "x"}])
    with pytest.raises(ConfigError, match="tok.json is not a tokenizer's"):
        built(tmp_path / "set", [source], tmp_path / "tok.json")


@pytest.mark.usefixtures("inline")
def test_a_special_token_in_a_text_is_text(tmp_path: Path, tokenizer: Path) -> None:
    text = f"before {END} between <|im_start|>assistant behind"
    source = jsonl(tmp_path / "a.jsonl", [{"text": text}])
    built(tmp_path / "set", [source], tokenizer)
    found = content(tmp_path / "set", "train")[0].tolist()
    assert found[-1] == 0 and min(found[:-1]) > 2  # 0 to 2 are the special ones
    assert Tokenizer.from_file(str(tokenizer / "tokenizer.json")).decode(found[:-1]) == text


@pytest.mark.usefixtures("inline")
def test_what_the_tokenizer_came_with_is_beside_it_and_in_the_manifest(tmp_path: Path, tokenizer: Path) -> None:
    source = jsonl(tmp_path / "a.jsonl", [{"text": "x"}])
    manifest = built(tmp_path / "set", [source], tokenizer)
    assert set(manifest.tokenizer_files) == {"tokenizer_config.json"}
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "set" / name).read_bytes() == (tokenizer / name).read_bytes()
    assert manifest.sources == ("a.jsonl", f"1 file of {source.stat().st_size} bytes")
    assert set(manifest.packages) == {"atoll", "tokenizers"}


@pytest.mark.long
def test_a_worker_that_dies_is_a_sentence(tmp_path: Path, tokenizer: Path) -> None:
    source = jsonl(tmp_path / "a.jsonl", [{"text": text * 100} for text in documents(1500)])

    def kill(progress: BuildProgress) -> None:
        for child in multiprocessing.active_children():
            child.kill()

    with pytest.raises(ResourceError, match="a process that tokenises ended by itself"):
        built(tmp_path / "set", [source], tokenizer, show=kill, workers=2)


@pytest.fixture
def bucket(s3: str, monkeypatch: pytest.MonkeyPatch) -> str:
    environment = {
        "AWS_ENDPOINT_URL": s3,
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    fsspec.filesystem("s3", skip_instance_cache=True).mkdir("sets")
    return "s3://sets/corpus"


@pytest.mark.long
@pytest.mark.usefixtures("inline")
def test_in_a_store_the_set_is_there_once_it_is_whole(
    tmp_path: Path, tokenizer: Path, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr("atoll.node.data.units.UNIT_BYTES", 20_000)
    source = jsonl(tmp_path / "a.jsonl", [{"text": text} for text in documents(400)])
    built(tmp_path / "whole", [source], tokenizer)

    def crash(progress: BuildProgress) -> None:
        if progress.shards >= 5:
            raise Crash

    fs = fsspec.filesystem("s3")
    with pytest.raises(Crash):
        built(bucket, [source], tokenizer, show=crash)
    assert not fs.exists(f"{bucket}/{MANIFEST}")
    built(bucket, [source], tokenizer)
    fs.invalidate_cache()
    there = {path.rpartition("/")[2]: fs.cat_file(path) for path in fs.find(bucket)}
    assert there == files(tmp_path / "whole")
    assert Manifest.decode(there[MANIFEST]).name == "a"
    left = [path for path in (tmp_path / "home").rglob("*") if path.is_file()]
    assert left == []
