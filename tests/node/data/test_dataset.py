"""A run's samples from data sets by URL or in a folder: the same everywhere, few bytes, and sentences."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_sets import END, WebServer, document_tokens, web_server, write_data_set

from atoll.comm.config.data import DataConfig, DataKind, DataSetConfig
from atoll.comm.config.model import ModelConfig
from atoll.comm.config.run import RunConfig
from atoll.comm.digest import DIGEST_SIZE, digest
from atoll.comm.errors import AtollError, ConfigError, ResourceError
from atoll.node.config import NodeConfig
from atoll.node.data.dataset import DataSetSource
from atoll.node.data.manifest import MANIFEST, BlockFormat, Manifest, Shard
from atoll.node.data.samples import UNLEARNED, Sample
from atoll.node.data.source import check_source, open_source

SEQ_LEN = 16


@pytest.fixture
def web(tmp_path: Path) -> Iterator[WebServer]:
    (tmp_path / "web").mkdir()
    with web_server(tmp_path / "web") as served:
        yield served


def run_of(*sets: DataSetConfig, seed: int = 0, vocab_size: int = 256, seq_len: int = SEQ_LEN) -> RunConfig:
    one = len(sets) == 1
    data = DataConfig(
        kind=DataKind.DATASET,
        url=sets[0].url if one else "",
        digest=sets[0].digest if one else "",
        mixture=[] if one else list(sets),
    )
    return RunConfig(seed=seed, data=data, model=ModelConfig(vocab_size=vocab_size, seq_len=seq_len))


def served(web: WebServer, name: str = "one", weight: float = 1.0, **shape: Any) -> DataSetConfig:
    return DataSetConfig(f"{web.url}/{name}", write_data_set(web.folder / name, **shape), weight)


def opened(run: RunConfig, cache: Path, node: NodeConfig | None = None) -> DataSetSource:
    found = open_source(run, node or NodeConfig(), cache)
    assert isinstance(found, DataSetSource)
    return found


def text_of(samples: list[Sample]) -> bytes:
    return b"".join(array.tobytes() for sample in samples for array in sample.arrays.values())


def windows(tokens: "np.ndarray[tuple[int], np.dtype[np.int64]]") -> set[bytes]:
    """The inputs of all windows of a slice, as its blocks of 64 tokens have them."""
    padded = np.concatenate([tokens, np.full(-len(tokens) % 64, END)])
    return {padded[at : at + SEQ_LEN].tobytes() for at in range(0, len(tokens) - 1, SEQ_LEN)}


def test_an_epoch_is_the_slice_and_the_validation_slice_is_never_trained_on(
    tmp_path: Path, web: WebServer
) -> None:
    source = opened(run_of(served(web)), tmp_path / "cache")
    train, validation = (windows(document_tokens(count, 256, seed)) for count, seed in ((4000, 0), (500, 1)))
    for epoch in range(2):
        first = epoch * len(train)
        inputs = [source.train(index).input_ids.tobytes() for index in range(first, first + len(train))]
        assert len(inputs) == len(set(inputs)) and set(inputs) == train
    seen = {source.validation(index).input_ids.tobytes() for index in range(2 * len(validation))}
    assert seen == validation and not seen & train


@pytest.mark.long
def test_samples_depend_on_seed_and_index_and_on_nothing_else(tmp_path: Path, web: WebServer) -> None:
    run = run_of(served(web, "one", 2.0), served(web, "two", seed=5))
    sources = [opened(run, tmp_path / f"{number}") for number in range(2)]
    sources[1].expect(iter(range(300, 0, -1)))
    forwards = [sources[0].train(index) for index in range(200)]
    backwards = [sources[1].train(index) for index in reversed(range(200))][::-1]
    assert text_of(forwards) == text_of(backwards)
    other = opened(replace(run, seed=1), tmp_path / "other")
    assert text_of([other.train(index) for index in range(200)]) != text_of(forwards)


def test_a_mixture_has_its_weights_and_each_data_set_its_own_epochs(tmp_path: Path, web: WebServer) -> None:
    run = run_of(served(web, "one", 3.0), served(web, "two", 1.0, seed=5, train=640, validation=200))
    source, small = opened(run, tmp_path / "cache"), windows(document_tokens(640, 256, 10))
    inputs = [source.train(index).input_ids.tobytes() for index in range(8 * len(small))]
    drawn = [sample for sample in inputs if sample in small]
    assert len(drawn) == 2 * len(small) and set(drawn[: len(small)]) == set(drawn[len(small) :]) == small
    evaluated = [source.validation(index).input_ids.tobytes() for index in range(40)]
    assert sum(sample in windows(document_tokens(200, 256, 11)) for sample in evaluated) == 10


def test_a_node_s_own_folder_is_read_instead_of_the_url(tmp_path: Path, web: WebServer) -> None:
    wanted = served(web)
    fetched = opened(run_of(wanted), tmp_path / "cache")
    right = text_of([fetched.train(index) for index in range(50)])
    shutil.copytree(web.folder / "one", tmp_path / "own")
    (tmp_path / "several").mkdir()
    shutil.copytree(web.folder / "one", tmp_path / "several" / "mine")
    asked = len(web.requests)
    for folder in ("own", "several"):
        node = NodeConfig(data=str(tmp_path / folder))
        check_source(run_of(wanted), node)
        own = opened(run_of(wanted), tmp_path / "other", node)
        assert text_of([own.train(index) for index in range(50)]) == right
    assert len(web.requests) == asked and not list((tmp_path / "other").rglob("*"))  # nothing is kept twice


def test_a_folder_by_url_needs_its_owners_leave(tmp_path: Path) -> None:
    run = run_of(DataSetConfig(str(tmp_path / "set"), write_data_set(tmp_path / "set")))
    with pytest.raises(ResourceError, match="only where the node has files=true"):
        check_source(run, NodeConfig())
    assert opened(run, tmp_path / "cache", NodeConfig(files=True)).train(0).input_ids.shape == (SEQ_LEN,)


def test_a_source_that_is_opened_again_fetches_nothing_again(tmp_path: Path, web: WebServer) -> None:
    run = run_of(served(web))
    first = opened(run, tmp_path / "cache")
    before = text_of([first.train(index) for index in range(100)])
    first.fetcher.close()
    asked = len(web.requests)
    again = opened(run, tmp_path / "cache")
    assert text_of([again.train(index) for index in range(100)]) == before and len(web.requests) == asked


def test_of_10_gb_a_restart_reads_the_blocks_that_it_needs(tmp_path: Path, web: WebServer) -> None:
    """Without a cache: as much as a node on a new disk reads. The shards are holes of a file system."""
    layout, blocks, count = BlockFormat(np.dtype("<u2"), 32768, False), 2048, 72
    empty = digest(bytes(layout.size)) * blocks
    folder = web.folder / "large"
    folder.mkdir()
    shards = []
    for number in range(count + 1):
        name = f"train-{number:05d}" if number < count else "validation-00000"
        with (folder / f"{name}.tokens").open("wb") as file:
            file.truncate(blocks * layout.size)
        (folder / f"{name}.digests").write_bytes(empty)
        shards.append(Shard(name, name[:-6], blocks, blocks * 32768, digest(empty).hex()))
    assert sum(path.stat().st_size for path in folder.iterdir()) > 10e9
    manifest = Manifest(1, "large", "uint16", 32768, 256, 0, "ab" * 16, False, documents=1, shards=tuple(shards))
    (folder / MANIFEST).write_bytes(manifest.encode())
    wanted = DataSetConfig(f"{web.url}/large", digest(manifest.encode()).hex())
    source = opened(run_of(wanted, seq_len=1024), tmp_path / "cache", NodeConfig(cache=0))
    source.expect(iter(range(10_000, 12_000)))
    for index in range(10_000, 12_000):  # two million tokens
        assert source.train(index).input_ids.shape == (1024,)
    assert web.total < 0.01 * 10e9
    listed = sum(size for name, size in web.given.items() if name.endswith(".digests"))
    assert listed <= (count + 1) * DIGEST_SIZE * blocks


def refused(run: RunConfig, node: NodeConfig, cache: Path) -> str:
    with pytest.raises(AtollError) as error:
        open_source(run, node, cache)
    assert isinstance(error.value, ConfigError | ResourceError)
    return str(error.value)


def test_what_is_not_the_runs_data_set_is_refused(tmp_path: Path, web: WebServer) -> None:
    wanted, node = served(web), NodeConfig()
    other = replace(wanted, digest="00" * 16)
    found = refused(run_of(other), node, tmp_path / "cache")
    assert f"has the digest {wanted.digest}, and the run's is {other.digest}" in found
    own = NodeConfig(data=str(web.folder / "one"))
    for said in (refused(run_of(other), own, tmp_path / "cache"), str(checked(run_of(other), own))):
        assert f"holds the data set with the digest {wanted.digest}, and the run's is {other.digest}" in said
    bare = NodeConfig(data=str(tmp_path))
    assert "there is no manifest.json in it; give the folder" in refused(run_of(wanted), bare, tmp_path / "cache")
    broken = b'{"version": 1}'
    (web.folder / "one" / MANIFEST).write_bytes(broken)
    bad = run_of(replace(wanted, digest=digest(broken).hex()))
    assert "manifest.json is not a data set's" in refused(bad, node, tmp_path / "cache")


def checked(run: RunConfig, node: NodeConfig) -> AtollError:
    with pytest.raises(AtollError) as error:
        check_source(run, node)
    return error.value


@pytest.mark.parametrize("status", [401, 403, 404])
def test_a_url_without_rights_is_said_at_the_start(status: int, tmp_path: Path, web: WebServer) -> None:
    run = run_of(served(web))
    web.status = status
    said = refused(run, NodeConfig(), tmp_path / "cache")
    assert (
        f"this node does not get the run's data set: {web.url}/one/manifest.json: the server says {status}" in said
    )
    assert "data=FOLDER" in said


def test_a_run_from_elsewhere_does_not_read_this_machines_network(tmp_path: Path, web: WebServer) -> None:
    run = run_of(served(web))
    with pytest.raises(ResourceError, match="own network .* files=true"):
        open_source(run, NodeConfig(), tmp_path / "cache", lan=False)
    assert not web.requests


def test_a_store_that_is_away_at_the_start_is_told_and_waited_for(tmp_path: Path, web: WebServer) -> None:
    wanted, told = served(web), list[str]()
    run = run_of(replace(wanted, url=f"{wanted.url}?signature=secret"))
    web.status = 503

    def tell(sentence: str) -> None:
        told.append(sentence)
        web.status = 0

    source = open_source(run, NodeConfig(), tmp_path / "cache", tell=tell)
    assert source.train(0).input_ids.shape == (SEQ_LEN,)
    (said,) = told
    assert "cannot fetch the run's data set, and tries again" in said and "503" in said
    assert "/manifest.json: the server" in said and "signature" not in said


def test_a_data_set_that_does_not_fit_the_model_is_refused(tmp_path: Path, web: WebServer) -> None:
    wanted = served(web, vocabulary=300)
    said = refused(run_of(wanted), NodeConfig(), tmp_path / "cache")
    assert "has tokens up to 299, and model.vocab_size is 256: the run needs model.vocab_size=300 or more" in said
    long = refused(run_of(wanted, vocab_size=300, seq_len=65), NodeConfig(), tmp_path / "cache")
    assert "has blocks of 64 tokens, and model.seq_len is 65: build it with larger ones" in long
    run = run_of(wanted, vocab_size=300)
    run.data.slice = "books"
    assert "has no slice 'books': it has train, validation" in refused(run, NodeConfig(), tmp_path / "cache")


@pytest.mark.parametrize(
    ("key", "value", "what"),
    [("tokenizer", "ba" * 16, "tokenizers"), ("end_of_text", 1, "tokens for the end of a text")],
)
def test_data_sets_of_different_tokenizers_are_not_mixed(
    key: str, value: object, what: str, tmp_path: Path, web: WebServer
) -> None:
    one, two = served(web, "one"), served(web, "two")
    path = web.folder / "two" / MANIFEST
    changed = json.loads(path.read_text()) | {key: value}
    path.write_text(json.dumps(changed))
    said = refused(
        run_of(one, replace(two, digest=digest(path.read_bytes()).hex())), NodeConfig(), tmp_path / "cache"
    )
    assert f"cannot be mixed: their {what} differ" in said


@pytest.mark.long
def test_a_damaged_block_s_samples_are_not_learned_and_the_others_are(tmp_path: Path, web: WebServer) -> None:
    wanted = served(web)
    path, size = web.folder / "one" / "train-00002.tokens", BlockFormat(np.dtype("<u2"), 64, False).size
    data = bytearray(path.read_bytes())
    data[3 * size] ^= 255
    path.write_bytes(data)
    source, told = opened(run_of(wanted), tmp_path / "cache"), list[str]()
    source.fetcher.tell = told.append
    epoch = [source.train(index) for index in range(250)]
    assert sum(bool((sample.labels == UNLEARNED).all()) for sample in epoch) == 4  # of its block
    assert len(told) == 1 and "train-00002.tokens are not those of the data set" in told[0]


def test_what_samples_leave_of_each_block_is_told_once(tmp_path: Path, web: WebServer) -> None:
    from atoll.node.participant.batches import RunTokens

    told, wanted = list[str](), served(web)
    for seq_len in (16, 20):
        tokens = RunTokens(opened(run_of(wanted, seq_len=seq_len), tmp_path / "cache"))
        tokens.listen(told.append, told.append)
        assert tokens[0]["input_ids"].shape == (seq_len,)
    (said,) = told
    assert (
        "samples of 20 tokens do not divide" in said and "last 4 tokens of each block, 6.2 % of the data" in said
    )


def test_the_mask_of_a_data_set_is_obeyed(tmp_path: Path) -> None:
    marked = write_data_set(tmp_path / "set", masked=True)
    run = run_of(DataSetConfig(str(tmp_path / "set"), marked))
    source = opened(run, tmp_path / "cache", NodeConfig(files=True))
    learned = [int((source.train(index).labels != UNLEARNED).sum()) for index in range(100)]
    assert max(learned) <= 11 and 900 < sum(learned) < 1100  # two of three, less the documents' beginnings


def test_the_daemons_look_asks_no_server_and_imports_no_torch(tmp_path: Path, web: WebServer) -> None:
    run = run_of(served(web))
    check_source(run, NodeConfig())
    assert not web.requests
    code = "import sys, atoll.node.data.source; sys.exit('torch' in sys.modules or 'fsspec' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
    assert json.loads((web.folder / "one" / MANIFEST).read_text())["name"] == "made"
