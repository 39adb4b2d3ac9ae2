"""`atoll data check` and `show`: what is damaged is named, and a sample's text can be read."""

import http.server
import json
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner
from corpora import InlinePool, built, content, jsonl, tokenizer_folder
from data_sets import web_server

from atoll.comm.digest import digest
from atoll.comm.errors import ConfigError, Refused, ResourceError, Unreachable
from atoll.node.data import build as build_
from atoll.node.data.check import check
from atoll.node.data.cli import data
from atoll.node.data.manifest import MANIFEST, Manifest
from atoll.node.data.reader import DamagedData, store_errors
from atoll.node.data.show import passages

TEXTS = [f"document {i}: " + "the cat sat on the mat. " * (i % 9 + 1) for i in range(60)]


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    return tokenizer_folder(tmp_path / "tokenizer")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return jsonl(tmp_path / "a.jsonl", [{"text": text} for text in TEXTS])


@pytest.fixture
def out(tmp_path: Path, tokenizer: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(build_, "TokeniserPool", InlinePool)
    built(tmp_path / "set", [source], tokenizer)
    return tmp_path / "set"


def whole(url: Path | str, slice_name: str = "") -> object:
    return check(str(url), slice_name, lambda done, total: None)


def test_a_url_with_a_query_is_read_as_nodes_read_it(out: Path) -> None:
    with web_server(out) as web:
        assert whole(f"{web.url}/?signature=secret") == whole(out)
        assert {name for name, _ in web.requests} >= {MANIFEST, "train-00000.tokens"}


def test_a_whole_set_is_told_by_its_digest_and_its_tokens(out: Path) -> None:
    seen = list[tuple[int, int]]()
    report = check(str(out), "", lambda done, total: seen.append((done, total)))
    assert report.digest == digest((out / MANIFEST).read_bytes()).hex()
    assert report.documents == {"train": 48, "validation": 12}
    tokens = [token for name in ("train", "validation") for token in content(out, name)[0].tolist()]
    assert sum(report.tokens.values()) == len(tokens) == report.learned
    assert report.largest_id == max(tokens) and report.distinct_ids == len(set(tokens))
    assert all(count == tokens.count(token) for token, count in report.frequent)
    assert seen[-1][0] == seen[-1][1] == sum(shard.blocks for shard in report.manifest.shards)
    one = check(str(out), "validation", lambda done, total: None)
    assert one.documents == {"validation": 12}


def change(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_a_changed_byte_is_named_with_its_shard_and_block(out: Path) -> None:
    change(out / "train-00000.tokens", 136 * 3 + 5)  # a block is 64 tokens and 64 bits
    with pytest.raises(DamagedData, match=r"train-00000.tokens is damaged: block 3 of 16 has not the digest"):
        whole(out)
    assert whole(out, "validation")


def test_a_shard_cut_short_is_named_with_the_block(out: Path) -> None:
    path = out / "train-00000.tokens"
    path.write_bytes(path.read_bytes()[: 136 * 5 + 7])
    with pytest.raises(DamagedData, match=r"is cut short: block 5 of 16 has 7 of 136 bytes"):
        whole(out)
    path.unlink()
    with pytest.raises(DamagedData, match=r"set lacks train-00000.tokens"):
        whole(out)


@pytest.mark.parametrize("name", ["train-00000.digests", "tokenizer.json", "tokenizer_config.json"])
def test_another_small_file_than_the_manifests_is_named(out: Path, name: str) -> None:
    change(out / name, 3)
    with pytest.raises(DamagedData, match=rf"{name} has the digest [0-9a-f]+, and the manifest has"):
        whole(out)
    (out / name).unlink()
    with pytest.raises(DamagedData, match=f"lacks {name}"):
        whole(out)


def test_names_in_a_manifest_do_nothing_to_a_terminal(out: Path) -> None:
    manifest = Manifest.decode((out / MANIFEST).read_bytes())
    (out / MANIFEST).write_bytes(msgspec.structs.replace(manifest, name="a\x1b[2J\nb").encode())
    said = CliRunner().invoke(data, ["check", str(out)], catch_exceptions=False).output
    assert r"a\x1b[2J\nb is whole" in said and "\x1b" not in said


def test_tokens_beyond_the_vocabulary_and_missing_documents_are_a_builders_fault(out: Path) -> None:
    manifest = Manifest.decode((out / MANIFEST).read_bytes())
    (out / MANIFEST).write_bytes(msgspec.structs.replace(manifest, vocab_size=100).encode())
    with pytest.raises(
        DamagedData, match=r"block 0 of train-00000 has the token \d+, and the manifest's vocab_size"
    ):
        whole(out)
    (out / MANIFEST).write_bytes(msgspec.structs.replace(manifest, documents=61).encode())
    with pytest.raises(DamagedData, match="has 60 documents, and its manifest says 61"):
        whole(out)


def test_no_data_set_and_an_unfinished_one_are_a_sentence(tmp_path: Path, out: Path) -> None:
    (out / MANIFEST).unlink()
    for url in (out, tmp_path / "nothing"):
        with pytest.raises(
            ConfigError, match="there is no data set at .*: it has no manifest.json, or its building"
        ):
            whole(url)


@pytest.mark.parametrize(
    ("error", "kind"),
    [(PermissionError("403"), Refused), (ValueError("x"), Unreachable), (OSError(), Unreachable)],
)
def test_what_a_store_raises_has_its_exit_code(error: Exception, kind: type[Exception]) -> None:
    with pytest.raises(kind, match="s3://bucket/x"), store_errors("s3://bucket/x"):
        raise error


class RangeHandler(http.server.SimpleHTTPRequestHandler):
    """Serves parts of files, as real servers do."""

    def do_GET(self) -> None:
        asked = self.headers.get("Range")
        path = Path(self.translate_path(self.path))
        if asked is None or not path.is_file():
            super().do_GET()
            return
        first, last = asked.removeprefix("bytes=").split("-")
        part = path.read_bytes()[int(first) : int(last) + 1]
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {first}-{last}/{path.stat().st_size}")
        self.send_header("Content-Length", str(len(part)))
        self.end_headers()
        self.wfile.write(part)

    def log_message(self, *_: object) -> None: ...


class WholeFiles(http.server.SimpleHTTPRequestHandler):
    """Python's own, which knows no parts."""

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def served(request: pytest.FixtureRequest, out: Path) -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(request.param, directory=out.parent))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/set"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("served", [RangeHandler], indirect=True)
def test_a_set_on_a_web_server_is_read_in_parts(served: str, out: Path) -> None:
    assert whole(served) == whole(out)
    assert passages(served, 3, "train", 0) == passages(str(out), 3, "train", 0)
    change(out / "train-00000.tokens", 0)
    with pytest.raises(DamagedData, match="block 0 of 16"):
        whole(served)
    with pytest.raises(ConfigError, match="there is no data set at"):
        whole(served.replace("/set", "/nothing"))


@pytest.mark.parametrize("served", [WholeFiles], indirect=True)
def test_a_web_server_that_knows_no_parts_is_a_sentence(served: str) -> None:
    with pytest.raises(ResourceError, match="the server answers with the whole file"):
        passages(served, 0, "train", 0)


@pytest.mark.parametrize("served", [WholeFiles], indirect=True)
def test_check_sees_that_nodes_would_get_no_parts(served: str) -> None:
    with pytest.raises(ResourceError, match="the server answers with the whole file .*`python -m http.server`"):
        whole(served)


def test_a_server_that_does_not_answer_is_not_one_without_the_data_set(out: Path) -> None:
    with web_server(out) as web:
        for status, kind in ((404, ConfigError), (410, ConfigError), (403, Refused), (503, Unreachable)):
            web.status = status
            for command in (["check", web.url], ["show", web.url, "0"]):
                said = CliRunner().invoke(data, command).exception
                assert isinstance(said, kind), (status, said)
    gone = CliRunner().invoke(data, ["check", web.url]).exception
    assert isinstance(gone, Unreachable) and gone.exit_code == 4


def test_a_blocks_text_is_shown_document_by_document(out: Path) -> None:
    tokens, begins, _learned = content(out, "train")
    blocks = -(-len(tokens) // 64)
    shown = [passage for i in range(blocks) for passage in passages(str(out), i, "train", 0)]
    texts = list[str]()
    for passage in shown:
        (run,) = passage.runs
        if passage.begins:
            texts.append(run.text)
        else:
            texts[-1] += run.text
    assert texts == [f"{text}<|endoftext|>" for i, text in enumerate(TEXTS, 1) if i % 5]
    assert sum(run.tokens for passage in shown for run in passage.runs) == len(tokens)
    assert begins.sum() == len(texts)


def test_a_sample_is_a_window_of_its_block(out: Path) -> None:
    windows = [passage.runs[0].tokens for i in range(4) for passage in passages(str(out), i, "train", 16)]
    assert sum(windows) == 64
    with pytest.raises(ConfigError, match="a sample of 65 tokens is longer than the data set's blocks of 64"):
        passages(str(out), 0, "train", 65)
    with pytest.raises(ConfigError, match=r"there is no number 9999: slice validation has \d+ samples, from 0"):
        passages(str(out), 9999, "validation", 16)
    with pytest.raises(ConfigError, match="no slice 'test': it has train, validation"):
        passages(str(out), 0, "test", 0)


def test_the_commands_tell_scripts_what_they_tell_people(
    tmp_path: Path, source: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build_, "TokeniserPool", InlinePool)
    source.write_text(source.read_text() + "{broken\n")
    command = ["build", str(source), "--tokenizer", str(tokenizer), "--out", str(tmp_path / "set")]
    runner = CliRunner()

    def run(*arguments: str) -> str:
        result = runner.invoke(data, arguments, catch_exceptions=False)
        assert result.exit_code == 0
        return result.stdout

    small = ("--block-tokens", "64", "--validation-every", "10", "--workers", "1")
    made = json.loads(run(*command, *small, "--json"))
    assert (
        made["documents"] == 60
        and made["skipped"]["count"] == 1
        and set(made["tokens"]) == {"train", "validation"}
    )
    report = json.loads(run("check", str(tmp_path / "set"), "--json"))
    assert report["digest"] == made["digest"] and report["tokens"] == made["tokens"] and report["skipped"] == 1
    first = json.loads(run("show", str(tmp_path / "set"), "0", "--seq-len", "8", "--json"))
    assert first["documents"][0]["begins"] and first["documents"][0]["runs"][0]["tokens"] == 8
    assert f"data.url={tmp_path / 'set'} data.digest={made['digest']}" in run("check", str(tmp_path / "set"))
    assert "a document begins, 8 tokens" in run("show", str(tmp_path / "set"), "0", "--seq-len", "8")
    said = run(*command, *small, "--overwrite")
    assert made["digest"] in said
    with pytest.raises(ConfigError, match="has a data set already"):
        run(*command, *small)


def test_masked_parts_are_in_brackets(tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_, "TokeniserPool", InlinePool)
    talk = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}]
    jsonl(tmp_path / "chat.jsonl", [{"messages": talk}])
    command = ["build", str(tmp_path / "chat.jsonl"), "--tokenizer", str(tokenizer), "--chat"]
    runner = CliRunner()
    made = runner.invoke(data, [*command, "--out", str(tmp_path / "chat")], catch_exceptions=False)
    assert "there is no slice validation" in made.stderr
    shown = runner.invoke(data, ["show", str(tmp_path / "chat"), "0"], catch_exceptions=False).stdout
    assert "⟦<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n⟧hi<|im_end|>\n⟦<|endoftext|>⟧" in shown


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--validation-every", "1"], "leaves nothing to train on"),
        (["--block-tokens", "12"], "--block-tokens 12: it must be a multiple of 8"),
        (["--end-of-text", "<none>"], "--end-of-text <none>: the tokenizer has no such token"),
        (["--tokenizer", "nothing"], "--tokenizer nothing: there is no nothing"),
    ],
)
def test_options_that_cannot_be_are_a_sentence(
    tmp_path: Path, source: Path, tokenizer: Path, arguments: list[str], sentence: str
) -> None:
    command = ["build", str(source), "--tokenizer", str(tokenizer), "--out", str(tmp_path / "set"), *arguments]
    with pytest.raises(ConfigError, match=sentence):
        CliRunner().invoke(data, command, catch_exceptions=False)
