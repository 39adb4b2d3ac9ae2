"""Data sources: what every kind promises, and what each says about bad input."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atoll.comm.config.model import ModelConfig
from atoll.comm.config.run import DataConfig, DataKind, RunConfig
from atoll.comm.errors import AtollError, ConfigError, ResourceError
from atoll.node.config import NodeConfig
from atoll.node.data.samples import Array, Sample, Source
from atoll.node.data.text import check_source, open_source, permuted

SEQ_LEN = 16


def run_of(kind: DataKind, tokenizer: str = "", seed: int = 0, vocab_size: int = 256) -> RunConfig:
    data = DataConfig(kind=kind, tokenizer=tokenizer, val_every=4)
    return RunConfig(seed=seed, data=data, model=ModelConfig(seq_len=SEQ_LEN, vocab_size=vocab_size))


def folder_of(path: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(text)
    return path


def tokens_of(sample: Sample) -> Array:
    """The (seq_len + 1,) tokens of a sample of one document."""
    return np.concatenate([sample.input_ids, sample.labels[-1:]])


def lines(first: int, count: int) -> str:
    """Text in which no 16 characters occur twice."""
    return "".join(f"line {hashlib.sha256(b'%d' % n).hexdigest()}\n" for n in range(first, first + count))


def words_tokenizer(path: Path, vocabulary: dict[str, int]) -> str:
    """A tokenizer.json that knows these words."""
    description: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "?"},
    }
    path.write_text(json.dumps(description))
    return str(path)


@pytest.fixture(params=[kind for kind in DataKind if kind is not DataKind.SCRIPT])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Source:
    """Each kind of source over about the same text."""
    kind: DataKind = request.param
    folder = folder_of(tmp_path / "text", {f"part{n}.txt": lines(100 * n, 20) for n in range(8)})
    words = {"?": 0, "line": 1}
    tokenizer = words_tokenizer(tmp_path / "tokenizer.json", words)
    run, node = run_of(kind, tokenizer), NodeConfig(data=str(folder))
    check_source(run, node)
    return open_source(run, node, tmp_path / "cache")


def test_every_kind_gives_samples_of_seq_len_and_one_token_the_same_for_the_same_index(
    opened: Source,
) -> None:
    for sample in (opened.train, opened.validation):
        for index in (0, 1, 7, 10_000_000):
            found = sample(index)
            assert {array.shape for array in found.arrays.values()} == {(SEQ_LEN,)}
            assert np.array_equal(found.input_ids[1:], found.labels[:-1])
            assert np.array_equal(found.position_ids, np.arange(SEQ_LEN))
            tokens = tokens_of(found)
            assert tokens.dtype == np.int64
            assert 0 <= tokens.min() and tokens.max() < 256
            assert np.array_equal(tokens, tokens_of(sample(index)))


@pytest.mark.parametrize("count", [1, 2, 3, 10, 64, 65, 1000])
def test_a_permutation_visits_every_index_once(count: int) -> None:
    image = [permuted(index, count, "key") for index in range(count)]
    assert sorted(image) == list(range(count))
    if count >= 64:
        assert image != list(range(count))
        assert image != [permuted(index, count, "other key") for index in range(count)]


def test_no_sample_is_repeated_within_an_epoch_and_the_next_epoch_has_another_order(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, {f"{n}.txt": lines(1000 * n, 40) for n in range(4)})
    source = open_source(run_of(DataKind.BYTES), NodeConfig(data=str(folder)), tmp_path)
    size = sum(len(lines(1000 * n, 40)) for n in range(3))  # the fourth file is validation
    epoch = (size - 1) // SEQ_LEN
    first = [tokens_of(source.train(index)).tobytes() for index in range(epoch)]
    second = [tokens_of(source.train(index)).tobytes() for index in range(epoch, 2 * epoch)]
    assert len(set(first)) == epoch
    assert set(first) == set(second)
    assert first != second


def test_the_order_depends_on_the_run_s_seed(tmp_path: Path) -> None:
    node = NodeConfig(data=str(folder_of(tmp_path, {"a.txt": lines(0, 100)})))
    orders = [open_source(run_of(DataKind.BYTES, seed=seed), node, tmp_path) for seed in (0, 1)]
    one, other = ([tokens_of(source.train(index)).tobytes() for index in range(20)] for source in orders)
    assert one != other


def test_samples_run_on_from_file_to_file_and_hold_the_files_bytes(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, {"a": "0123456789", "b": "", "c": lines(0, 9), "d": lines(50, 9)})
    source = open_source(run_of(DataKind.BYTES), NodeConfig(data=str(folder)), tmp_path)
    text = ("0123456789" + lines(0, 9)).encode()
    windows = {text[at : at + SEQ_LEN + 1] for at in range(0, len(text) - SEQ_LEN, SEQ_LEN)}
    assert {bytes(tokens_of(source.train(index)).astype(np.uint8)) for index in range(len(windows))} == windows


@pytest.mark.parametrize("files", [1, 3, 4, 9])
def test_validation_text_is_never_trained_on(files: int, tmp_path: Path) -> None:
    folder = folder_of(tmp_path, {f"{n}.txt": lines(1000 * n, 50) for n in range(files)})
    source = open_source(run_of(DataKind.BYTES), NodeConfig(data=str(folder)), tmp_path)
    train = {tokens_of(source.train(index)).tobytes() for index in range(1000)}
    validation = {tokens_of(source.validation(index)).tobytes() for index in range(1000)}
    assert train and validation
    assert not train & validation


def test_hidden_files_are_not_text(tmp_path: Path) -> None:
    folder_of(tmp_path, {".git/config": lines(0, 50), ".secret": lines(0, 50)})
    with pytest.raises(ResourceError, match="holds no file to train on"):
        check_source(run_of(DataKind.BYTES), NodeConfig(data=str(tmp_path)))


def test_text_is_tokenised_once_for_the_same_contents(tmp_path: Path) -> None:
    words = {"?": 0, **{f"w{n}": n for n in range(1, 200)}}
    run = run_of(DataKind.TEXT, words_tokenizer(tmp_path / "tokenizer.json", words))
    text = " ".join(f"w{n}" for n in range(1, 200))
    records = "\n".join(json.dumps({"text": f"w{n} w{n}", "url": "x"}) for n in range(1, 50))
    folder = folder_of(tmp_path / "text", {"a.md": text, "b.jsonl": records, "c.bin": "w1 " * 99})
    node, cache = NodeConfig(data=str(folder)), tmp_path / "cache"
    shares: list[float] = []
    first = open_source(run, node, cache, shares.append)
    assert len(shares) > 40 and shares[0] < max(shares) and all(0 < share <= 1 for share in shares)
    seen = np.concatenate([tokens_of(first.train(index)) for index in range(30)])
    assert set(seen) <= set(range(1, 200)) and len(set(seen)) > 150
    made = {file: file.stat().st_mtime_ns for file in cache.iterdir()}
    shares.clear()
    open_source(run, node, cache, shares.append)
    assert not shares
    assert {file: file.stat().st_mtime_ns for file in cache.iterdir()} == made
    (folder / "a.md").write_text(text + " w1")
    open_source(run, node, cache)
    assert len(list(cache.iterdir())) > len(made)


def refused(run: RunConfig, node: NodeConfig, cache: Path) -> AtollError:
    """The error of a source that cannot be opened, which the daemon's quick look must have found too."""
    with pytest.raises(AtollError) as opening:
        open_source(run, node, cache)
    with pytest.raises(AtollError) as checking:
        check_source(run, node)
    assert str(checking.value) == str(opening.value)
    return opening.value


def test_a_missing_or_empty_folder_is_named(tmp_path: Path) -> None:
    run = run_of(DataKind.BYTES)
    assert "give its folder, data=FOLDER" in str(refused(run, NodeConfig(), tmp_path))
    missing = refused(run, NodeConfig(data=f"{tmp_path}/gone"), tmp_path)
    assert isinstance(missing, ConfigError)
    assert f"data={tmp_path}/gone: there is no such folder" in str(missing)
    (tmp_path / "empty").mkdir()
    empty = refused(run, NodeConfig(data=f"{tmp_path}/empty"), tmp_path)
    assert isinstance(empty, ResourceError)
    assert f"{tmp_path}/empty holds no file to train on" in str(empty)


def test_samples_of_a_script_are_not_the_nodes_to_open(tmp_path: Path) -> None:
    error = refused(run_of(DataKind.SCRIPT), NodeConfig(data=str(tmp_path)), tmp_path)
    assert isinstance(error, ConfigError)
    assert "data.kind=script: join it with one, `atoll node join URL -- python train.py`" in str(error)


def test_too_little_text_is_counted(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "text", {"a.txt": "x" * 20})
    error = refused(run_of(DataKind.BYTES), NodeConfig(data=str(folder)), tmp_path)
    assert "has 10 tokens for training" in str(error)
    assert "model.seq_len=16 needs 17" in str(error)


def test_a_tokenizer_that_does_not_fit_the_model_is_refused(tmp_path: Path) -> None:
    node = NodeConfig(data=str(folder_of(tmp_path / "text", {"a.txt": lines(0, 99)})))
    large = words_tokenizer(tmp_path / "large.json", {"?": 0, "line": 300})
    error = refused(run_of(DataKind.TEXT, large), node, tmp_path)
    assert "token ids up to 300, and model.vocab_size is 256" in str(error)
    assert "model.vocab_size=301" in str(error)
    gone = refused(run_of(DataKind.TEXT, f"{tmp_path}/gone.json"), node, tmp_path)
    assert "there is no such file" in str(gone)
    (tmp_path / "bad.json").write_text("{}")
    bad = refused(run_of(DataKind.TEXT, f"{tmp_path}/bad.json"), node, tmp_path)
    assert "is not a tokenizer.json" in str(bad)


def test_a_record_without_text_is_named_by_file_and_line(tmp_path: Path) -> None:
    run = run_of(DataKind.TEXT, words_tokenizer(tmp_path / "tokenizer.json", {"?": 0}))
    folder = folder_of(tmp_path / "text", {"a.jsonl": '{"text": "fine"}\n{"txt": "not"}\n'})
    with pytest.raises(ConfigError, match=r"a\.jsonl line 2 is not an object with a string"):
        open_source(run, NodeConfig(data=str(folder)), tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []  # nothing half done is kept


def test_without_the_package_tokenizers_the_remedy_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    node = NodeConfig(data=str(folder_of(tmp_path / "text", {"a.txt": lines(0, 99)})))
    assert 'pip install "atoll[text]"' in str(refused(run_of(DataKind.TEXT, "tokenizer.json"), node, tmp_path))


def test_text_that_shrinks_under_a_running_node_is_an_error_with_its_name(tmp_path: Path) -> None:
    node = NodeConfig(data=str(folder_of(tmp_path, {"a.txt": lines(0, 100)})))
    source = open_source(run_of(DataKind.BYTES), node, tmp_path)
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(ResourceError, match=r"a\.txt became shorter"):
        source.train(0)


def test_data_does_not_import_torch() -> None:
    code = "import sys, atoll.node.data; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
