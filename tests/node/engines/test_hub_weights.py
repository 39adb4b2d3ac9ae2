"""Weights are fetched from the hub within bounds, and while they are the node says how far it is."""

import re
import shutil
from pathlib import Path
from threading import Event

import pytest
from hf_models import lora, tiny_qwen
from hub_files import COMMIT, hub_of
from huggingface_hub import constants

from atoll.comm.config.hf import HfConfig
from atoll.comm.errors import ConfigError, ResourceError
from atoll.node.config import NodeConfig
from atoll.node.engines.hf_model import build
from atoll.node.engines.hf_weights import BaseWeights, largest_size, locate
from atoll.node.engines.hub_weights import DISK_RESERVE_BYTES, fetch_weights

URL = "hf://org/name"
SIZE = 4 << 20


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1 << 16)
    return tmp_path / "cache"


def ask(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the hub's client ask this server."""
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    template = f"{endpoint}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "repository"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(bytes(SIZE))
    (folder / "pytorch_model.bin").write_bytes(b"code may be in it")
    return folder


def test_the_weights_come_and_nothing_else_and_what_is_there_is_not_fetched_again(
    repository: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = list[str]()
    with hub_of(repository) as endpoint:
        ask(endpoint, monkeypatch)
        folder = locate(HfConfig(base=URL), NodeConfig(), SIZE, told.append)
        assert [path.name for path in folder.iterdir()] == ["model.safetensors"] and folder.name == COMMIT
        assert told == ["fetches the run's frozen weights: 0.004 GB"]
        (repository / "model.safetensors").unlink()
        (repository / "model.safetensors").write_bytes(bytes(SIZE))
        assert fetch_weights(URL, SIZE, told.append) == folder and len(told) == 1
    ask("http://127.0.0.1:9", monkeypatch)
    assert locate(HfConfig(base=URL), NodeConfig()) == folder, "the hub is gone, and the cache has them"
    with pytest.raises(ResourceError, match="cannot fetch the run's frozen weights hf://org/name: "):
        fetch_weights(URL)
    with pytest.raises(ResourceError, match="cannot fetch the run's frozen weights hf://org/other: .*base=FOLDER"):
        locate(HfConfig(base="hf://org/other"), NodeConfig())
    with pytest.raises(ConfigError, match="write hf://org/name, or"):
        fetch_weights("hf://other")


def test_of_a_model_in_shards_they_and_their_index_come(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["model-00001-of-00001.safetensors", "model.safetensors.index.json"]
    for name in names:
        (repository / name).write_bytes(b"{}")
    with hub_of(repository) as endpoint:
        ask(endpoint, monkeypatch)
        assert sorted(path.name for path in fetch_weights(URL, 4).iterdir()) == names


def test_what_is_larger_than_the_models_tensors_can_be_is_not_fetched(
    repository: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with hub_of(repository) as endpoint:
        ask(endpoint, monkeypatch)
        with pytest.raises(ConfigError, match="have 0.004 GB, and those of .* at most 0.002 GB: not"):
            fetch_weights(URL, SIZE // 2)
    assert not cache.exists()


def test_what_the_disk_has_no_room_for_is_not_fetched(
    repository: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage("/")._replace(free=DISK_RESERVE_BYTES + SIZE - 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
    with hub_of(repository) as endpoint:
        ask(endpoint, monkeypatch)
        with pytest.raises(ResourceError, match=rf"another 0.004 GB in {cache}, whose disk has .* base=FOLDER"):
            fetch_weights(URL)
    assert not cache.exists()


def test_a_download_says_how_far_it_is_while_it_goes_on(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told, second_half = list[str](), Event()

    def tell(sentence: str) -> None:
        told.append(sentence)
        if found := re.search(r"weights: (\d+) % of 0.004 GB", sentence):
            assert 0 < int(found[1]) <= 50 or second_half.is_set()
            second_half.set()

    with hub_of(repository, second_half=second_half) as endpoint:
        ask(endpoint, monkeypatch)
        folder = fetch_weights(URL, SIZE, tell, interval=0.01)
    assert second_half.is_set() and (folder / "model.safetensors").stat().st_size == SIZE
    assert len(told) == len(set(told)), "only what is new"


@pytest.mark.parametrize("tied", [True, False])
def test_the_largest_size_is_that_of_the_models_tensors_and_little_more(tmp_path: Path, tied: bool) -> None:
    tiny_qwen(tmp_path / "base", hidden_size=64, intermediate_size=128, tie_word_embeddings=tied)
    hf = lora(tmp_path / "base")
    size = sum(path.stat().st_size for path in BaseWeights.open(tmp_path / "base").files.values())
    assert size < largest_size(build(hf)) < size + (1 << 27)
