"""What a node believes of a manifest, and the bytes of a block."""

import msgspec
import numpy as np
import pytest

from atoll.comm.digest import digest
from atoll.comm.errors import ConfigError
from atoll.node.data.manifest import DTYPES, MAX_MANIFEST_BYTES, BlockFormat, Manifest, Shard, _rules

SHARD = Shard("train-00000", "train", blocks=2, tokens=120, digest="ab" * 16)
MANIFEST = Manifest(
    version=1,
    name="tiny",
    dtype="uint16",
    block_tokens=64,
    vocab_size=512,
    end_of_text=0,
    tokenizer="cd" * 16,
    masked=False,
    documents=3,
    shards=(SHARD,),
)


def test_a_manifest_is_the_same_after_a_trip_and_has_one_encoding() -> None:
    data = MANIFEST.encode()
    assert Manifest.decode(data, digest(data).hex()) == MANIFEST
    assert Manifest.decode(data).encode() == data
    assert MANIFEST.tokens("train") == 120


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"version": 2}, "version is 2"),
        ({"dtype": "float32"}, "dtype is 'float32'"),
        ({"block_tokens": 12}, "multiple of 8"),
        ({"block_tokens": 1 << 30}, "multiple of 8"),
        ({"end_of_text": 512}, "end_of_text is 512"),
        ({"tokenizer": "x"}, "must be a digest"),
        ({"shards": (SHARD, SHARD)}, "same name"),
        ({"shards": (msgspec.structs.replace(SHARD, name="../x"),)}, "a shard is named '../x'"),
        ({"shards": (msgspec.structs.replace(SHARD, tokens=129),)}, "129 tokens in 2 blocks"),
        ({"shards": (msgspec.structs.replace(SHARD, tokens=64),)}, "64 tokens in 2 blocks"),
        ({"shards": (msgspec.structs.replace(SHARD, blocks=0),)}, "has 0 blocks"),
        (
            {"shards": (msgspec.structs.replace(SHARD, blocks=(1 << 20) + 1, tokens=64 * ((1 << 20) + 1)),)},
            "has 1048577 blocks: it must be 1 to 1048576",
        ),
        ({"shards": (msgspec.structs.replace(SHARD, digest=""),)}, "the digest ''"),
    ],
)
def test_what_no_builder_writes_is_refused(changes: dict[str, object], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        Manifest.decode(msgspec.json.encode(msgspec.structs.replace(MANIFEST, **changes)))


def test_another_manifest_than_the_runs_and_no_manifest_are_refused() -> None:
    with pytest.raises(ConfigError, match="it is another data set"):
        Manifest.decode(MANIFEST.encode(), "00" * 16)
    with pytest.raises(ConfigError, match="is not a data set's"):
        Manifest.decode(b"<html>")


def test_a_slice_that_is_not_there_is_named_with_those_that_are() -> None:
    with pytest.raises(ConfigError, match="no slice 'validation': it has train"):
        MANIFEST.slice("validation")


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", list(DTYPES))
def test_a_block_comes_back_as_it_was(dtype: str, masked: bool) -> None:
    random = np.random.default_rng(0)
    layout = BlockFormat(DTYPES[dtype], 64, masked)
    tokens = random.integers(0, 1 << 16, 64)
    begins, learned = random.random((2, 64)) < 0.5
    data = layout.encode(tokens, begins, learned)
    assert len(data) == layout.size
    block = layout.decode(data)
    assert (block.tokens == tokens).all() and (block.begins == begins).all()
    assert (block.learned == (learned if masked else True)).all()


def test_the_first_rule_that_does_not_hold_ends_the_look_at_a_manifest() -> None:
    rules = _rules(msgspec.structs.replace(MANIFEST, version=2, shards=(SHARD,) * 1000))
    assert next(rules) == (False, "version is 2, and this Atoll reads 1")
    assert MAX_MANIFEST_BYTES == 32 << 20
