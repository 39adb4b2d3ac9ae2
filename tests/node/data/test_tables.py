"""Records of Parquet tables and of what Hugging Face's datasets reads, offline."""

import tracemalloc
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pytest
from corpora import InlinePool, built, content, jsonl, tokenizer_folder
from pyarrow import parquet

from atoll.comm.errors import ConfigError, ResourceError
from atoll.node.data import build as build_
from atoll.node.data import units as units_
from atoll.node.data.sources import find_sources
from atoll.node.data.units import RowsUnit, read_units

TEXTS = [f"text {i} " + "the cat " * (i % 7) for i in range(300)]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tokenizer_folder(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(autouse=True)
def inline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(build_, "TokeniserPool", InlinePool)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))


def table(path: Path, rows: int = 37, **columns: object) -> Path:
    parquet.write_table(pyarrow.table({"number": list(range(len(TEXTS))), **columns}), path, row_group_size=rows)
    return path


def test_every_way_to_the_same_records_gives_the_same_tokens(tmp_path: Path, tokenizer: Path) -> None:
    lines = jsonl(tmp_path / "a.jsonl", [{"text": text} for text in TEXTS])
    (tmp_path / "folder").mkdir()
    jsonl(tmp_path / "folder" / "train.jsonl", [{"text": text} for text in TEXTS])
    datasets.Dataset.from_dict({"text": TEXTS}).save_to_disk(tmp_path / "saved")
    expected = None
    for source in (
        lines,
        table(tmp_path / "a.parquet", text=TEXTS),
        table(tmp_path / "b.parquet", text=[text.encode() for text in TEXTS]),
        f"datasets:json:data_files={lines}",
        f"datasets:json:data_files={lines}:split=train",
        f"datasets:parquet:data_files={tmp_path / 'a.parquet'}",
        f"datasets:{tmp_path / 'folder'}:train",
        f"datasets:{tmp_path / 'saved'}",
    ):
        out = tmp_path / "set"
        manifest = built(out, [source], tokenizer)
        assert manifest.documents == len(TEXTS)
        found = [array.tolist() for name in ("train", "validation") for array in content(out, name)]
        expected = expected or found
        assert found == expected
        out.rename(tmp_path / f"done-{len(list(tmp_path.iterdir()))}")


def test_what_follows_a_row_is_the_same_wherever_the_reading_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(units_, "UNIT_BYTES", 700)
    for argument in (
        str(table(tmp_path / "a.parquet", text=TEXTS)),
        f"datasets:parquet:data_files={tmp_path / 'a.parquet'}",
    ):
        sources = find_sources([argument])
        whole = list(read_units(sources, "text"))
        rows = [row for read in whole if isinstance(read.unit, RowsUnit) for row in read.unit.rows]
        assert rows == TEXTS and len(whole) > 10
        for number, read in list(enumerate(whole, 1))[::4]:
            assert [r.unit for r in read_units(sources, "text", read.behind)] == [r.unit for r in whole[number:]]


def test_a_row_without_text_is_left_out_by_its_number(tmp_path: Path, tokenizer: Path) -> None:
    values = [*TEXTS[:2], None, "", *TEXTS[4:]]
    manifest = built(tmp_path / "set", [table(tmp_path / "a.parquet", text=values)], tokenizer)
    assert manifest.skipped.count == 2
    assert manifest.skipped.examples == ("a.parquet row 3: it has no text", "a.parquet row 4: its text is empty")


def test_a_row_too_long_is_named(tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(units_, "MAX_RECORD_BYTES", 1000)
    manifest = built(tmp_path / "set", [table(tmp_path / "a.parquet", text=[*TEXTS[:299], "x" * 1001])], tokenizer)
    assert manifest.documents == 299
    assert manifest.skipped.examples[0].startswith("a.parquet row 300: 0 MB, and a record has")


def test_a_table_or_data_set_without_the_column_says_what_it_has(tmp_path: Path, tokenizer: Path) -> None:
    path = table(tmp_path / "a.parquet", body=TEXTS)
    for source in (path, f"datasets:parquet:data_files={path}"):
        with pytest.raises(ConfigError, match="has no column 'text': it has number, body; say --column NAME"):
            built(tmp_path / "set", [source], tokenizer)
    assert built(tmp_path / "body", [path], tokenizer, column="body").documents == 300


def test_what_is_no_table_or_data_set_is_a_sentence(tmp_path: Path, tokenizer: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1 not")
    with pytest.raises(ResourceError, match="a.parquet cannot be read as Parquet"):
        built(tmp_path / "set", [tmp_path / "a.parquet"], tokenizer)
    with pytest.raises(ConfigError, match="cannot be opened: "):
        built(tmp_path / "set", [f"datasets:{tmp_path / 'nothing'}"], tokenizer)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("declared", [False, True])
def test_a_text_that_is_in_many_rows_is_once_in_memory(nested: bool, declared: bool, tmp_path: Path) -> None:
    text = pyarrow.array(["a" * (4 << 20)])
    rows: Any = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 1024, pyarrow.int32()), text)
    if nested:
        messages = pyarrow.StructArray.from_arrays([rows], ["content"])
        rows = pyarrow.ListArray.from_arrays(pyarrow.array(range(1025), pyarrow.int32()), messages)
    parquet.write_table(pyarrow.table({"text": rows}), path := tmp_path / "a.parquet", store_schema=declared)
    assert path.stat().st_size < 1 << 20
    default = pyarrow.default_memory_pool()
    pyarrow.set_memory_pool(pool := pyarrow.proxy_memory_pool(default))
    tracemalloc.start()
    try:
        unit = next(read_units(find_sources([str(path)]), "text")).unit
        assert pool.max_memory() + tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()
        pyarrow.set_memory_pool(default)
    assert isinstance(unit, RowsUnit) and len(unit.rows) == 1
