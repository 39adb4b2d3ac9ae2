"""Text files as a run's data: what both kinds promise, and what each says about bad input."""

import hashlib
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from atoll.comm.config.data import DataConfig, DataKind
from atoll.comm.config.model import ModelConfig
from atoll.comm.config.run import RunConfig
from atoll.comm.errors import AtollError, ConfigError, ResourceError
from atoll.node.config import NodeConfig
from atoll.node.data.samples import Array, Sample, Source
from atoll.node.data.source import check_source, open_source

SEQ_LEN = 16


def run_of(kind: DataKind, seed: int = 0) -> RunConfig:
    data = DataConfig(kind=kind, val_every=4)
    return RunConfig(seed=seed, data=data, model=ModelConfig(seq_len=SEQ_LEN))


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


@pytest.fixture(params=[DataKind.STDLIB, DataKind.BYTES])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Source:
    """Each kind of source over about the same text."""
    kind: DataKind = request.param
    folder = folder_of(tmp_path / "text", {f"part{n}.txt": lines(100 * n, 20) for n in range(8)})
    run, node = run_of(kind), NodeConfig(data=str(folder))
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


def test_text_that_shrinks_under_a_running_node_is_an_error_with_its_name(tmp_path: Path) -> None:
    node = NodeConfig(data=str(folder_of(tmp_path, {"a.txt": lines(0, 100)})))
    source = open_source(run_of(DataKind.BYTES), node, tmp_path)
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(ResourceError, match=r"a\.txt became shorter"):
        source.train(0)


def test_data_does_not_import_torch() -> None:
    code = "import sys, atoll.node.data.source; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
