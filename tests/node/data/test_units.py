"""What a SOURCE names, and the units that its content is cut into."""

import gzip
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest
import zstandard
from corpora import jsonl

from atoll.comm.errors import ConfigError, ResourceError
from atoll.node.data import units as units_
from atoll.node.data.content import Content
from atoll.node.data.sources import HubSource, Kind, SourceFile, find_sources, listing_digest, parse_hub
from atoll.node.data.tokenise import PIECE_CHARACTERS, cut_text
from atoll.node.data.units import LinesUnit, Position, TextUnit, UnitRead, cut_point, read_units


def read(*paths: Path, start: Position = units_.BEGINNING) -> list[UnitRead]:
    return list(read_units(find_sources([str(path) for path in paths]), "text", start))


def texts(found: list[UnitRead]) -> Iterator[str]:
    """The documents of text units, put together."""
    parts = list[bytes]()
    for unit in (one.unit for one in found):
        assert isinstance(unit, TextUnit)
        for piece in unit.pieces:
            assert piece.begins == (not parts)
            parts.append(piece.text)
            if piece.ends:
                yield b"".join(parts).decode()
                parts = []
    assert not parts


def test_a_folder_is_its_files_in_order_and_a_glob_what_it_matches(tmp_path: Path) -> None:
    for name in ("b/z.txt", "b/a.md", "a.py", ".hidden.txt", ".git/x.txt", "c.bin", "d.jsonl.zst", "e.parquet.gz"):
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_bytes(b"x")
    found = find_sources([str(tmp_path / "in")])
    assert [f.name for f in found if isinstance(f, SourceFile)] == [
        "in/a.py",
        "in/b/a.md",
        "in/b/z.txt",
        "in/d.jsonl.zst",
    ]
    of_glob = find_sources([str(tmp_path / "in" / "**" / "*.txt")])
    assert [f.name for f in of_glob if isinstance(f, SourceFile)] == ["in/b/z.txt"]
    (records,) = find_sources([str(tmp_path / "in")], records_only=True)
    assert isinstance(records, SourceFile) and records.kind is Kind.LINES
    (tmp_path / "else").mkdir()
    (tmp_path / "in").rename(tmp_path / "else" / "in")
    assert listing_digest(find_sources([str(tmp_path / "else" / "in")])) == listing_digest(found)


@pytest.mark.parametrize(
    ("argument", "sentence"),
    [
        ("nothing.txt", r"nothing.txt: there is no such file or folder"),
        ("no*.txt", r"no\*.txt names no file to read: give .txt, .md, .py, .jsonl or .parquet files"),
        ("empty", r"empty holds no file to read"),
        ("a.bin", r"a.bin is not a file that is read here"),
        ("a.parquet.gz", r"a.parquet.gz is not a file that is read here"),
        ("https://host/a.txt", r"is a URL: fetch it first, or read it as datasets:json:data_files="),
        ("datasets:", r"datasets: names no data set"),
        ("datasets:c4:subset=en", r"there is no subset=; there are split=, name=, data_files="),
    ],
)
def test_an_argument_that_names_nothing_is_refused(
    tmp_path: Path, argument: str, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    for name in ("a.bin", "a.parquet.gz", "a.txt"):
        (tmp_path / name).touch()
    with pytest.raises(ConfigError, match=sentence):
        find_sources([argument])
    with pytest.raises(ConfigError, match="a.txt is plain text, and --chat wants conversations: give .jsonl or"):
        find_sources(["a.txt"], records_only=True)


@pytest.mark.parametrize(
    ("argument", "source"),
    [
        ("datasets:allenai/c4", HubSource("allenai/c4")),
        ("datasets:allenai/c4:validation", HubSource("allenai/c4", "validation")),
        ("datasets:c4:name=en:split=test", HubSource("c4", "test", "en")),
        ("datasets:json:data_files=/a/b.json", HubSource("json", data_files="/a/b.json")),
        (
            "datasets:json:data_files=https://host:80/b.json:revision=x",
            HubSource("json", data_files="https://host:80/b.json", revision="x"),
        ),
    ],
)
def test_a_data_set_of_hugging_faces_is_named_with_colons(argument: str, source: HubSource) -> None:
    assert parse_hub(argument) == source


def test_what_follows_a_unit_is_the_same_wherever_the_reading_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(units_, "UNIT_BYTES", 1000)
    (tmp_path / "in").mkdir()
    for i in range(30):
        (tmp_path / "in" / f"{i:02d}.txt").write_text("ü word\n" * (i * i))
    (tmp_path / "in" / "99.txt.gz").write_bytes(gzip.compress(b"ab " * 2000))
    lines = jsonl(tmp_path / "x.jsonl", [{"text": "y" * (i * i)} for i in range(60)])
    (tmp_path / "z.jsonl.zst").write_bytes(zstandard.compress(lines.read_bytes()))
    paths = [tmp_path / "in", lines, tmp_path / "z.jsonl.zst"]
    whole = read(*paths)
    assert len(whole) > 50
    for number, unit in enumerate(whole, 1):
        assert [one.unit for one in read(*paths, start=unit.behind)] == [one.unit for one in whole[number:]]
    assert [one.consumed for one in whole] == sorted(one.consumed for one in whole)


def test_a_long_text_is_cut_at_lines_and_nothing_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(units_, "UNIT_BYTES", 100)
    contents = ["a line\n" * 200, "word " * 300, "ö" * 777, "x" * 100, "x" * 101, "\n" * 500, "ab", "\ufefföx"]
    for i, text in enumerate(contents):
        (tmp_path / f"{i}.txt").write_text(text)
    found = read(tmp_path)
    assert list(texts(found)) == [text.removeprefix("\ufeff") for text in contents]
    pieces = [piece for one in found if isinstance(one.unit, TextUnit) for piece in one.unit.pieces]
    assert all(piece.text.endswith(b"\n") for piece in pieces if piece.place.endswith("0.txt"))
    assert all(piece.text.startswith(b" ") or piece.begins for piece in pieces if piece.place.endswith("1.txt"))
    assert max(len(piece.text) for piece in pieces) <= 100
    assert cut_point(b"x" + "é".encode() * 50) == 99  # not within a character


def test_a_line_of_any_length_is_one_and_one_too_long_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(units_, "UNIT_BYTES", 100)
    monkeypatch.setattr(units_, "MAX_RECORD_BYTES", 1000)
    lines = [b"a" * 10, b"b" * 700, b"c" * 1001, b"d" * 5, b"e" * 99, b"f" * 100, b"g" * 5000]
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines))
    found = read(tmp_path / "a.jsonl")
    units = [one.unit for one in found if isinstance(one.unit, LinesUnit)]
    assert b"".join(unit.lines for unit in units).split() == [lines[i] for i in (0, 1, 3, 4, 5)]
    by_first = {unit.first: unit.lines.split() for unit in units if unit.lines}
    assert by_first[1][0] == lines[0] and by_first[2][0] == lines[1] and by_first[4][0] == lines[3]
    left_out = [sentence for one in found for sentence in one.skipped]
    assert len(left_out) == 2
    assert left_out[0].startswith("a.jsonl line 3: 0 MB, and a record has")
    assert left_out[1].startswith("a.jsonl line 7: ")


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    """A quarter of a gibibyte in one line, in a few kilobytes of zstd; the same as text and as a record."""
    compressor = zstandard.ZstdCompressor(level=1).compressobj()
    data = b"".join(compressor.compress(b"x" * (1 << 20)) for _ in range(256)) + compressor.flush()
    for name in ("a.txt.zst", "a.jsonl.zst"):
        (tmp_path / name).write_bytes(data)
        tracemalloc.start()
        size = sum(one.size for one in read_units(find_sources([str(tmp_path / name)]), "text"))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert size == (256 << 20 if "txt" in name else 0)
        assert peak < (200 << 20)


@pytest.mark.parametrize("name", ["a.txt.gz", "a.txt.zst"])
def test_a_compressed_file_cut_short_or_damaged_is_named(tmp_path: Path, name: str) -> None:
    compress = gzip.compress if name.endswith("gz") else zstandard.compress
    data = compress(bytes(range(256)) * 400)
    (tmp_path / name).write_bytes(data[: len(data) // 2])
    with pytest.raises(ResourceError, match=rf"{name} is damaged or cut short near byte \d+"):
        read(tmp_path / name)
    (tmp_path / name).write_bytes(b"not compressed")
    with pytest.raises(ResourceError, match=rf"{name} is damaged"):
        read(tmp_path / name)


def test_frames_one_after_the_other_are_one_content(tmp_path: Path) -> None:
    frames = [zstandard.compress(part) for part in (b"one ", b"", b"two ", b"three")]
    (tmp_path / "a.txt.zst").write_bytes(b"".join(frames))
    with Content(str(tmp_path / "a.txt.zst")) as content:
        content.skip(4)
        assert content.read(4) == b"two " and content.read(99) == b"three" and content.read(1) == b""


def test_pieces_for_the_tokenizer_are_short_and_end_where_words_do() -> None:
    for text in ("word " * 100_000, "line\n" * 100_000, "x" * 500_000, "short", ""):
        pieces = list(cut_text(text))
        assert "".join(pieces) == text
        assert all(0 < len(piece) <= PIECE_CHARACTERS for piece in pieces)
    assert all(piece.startswith(" ") for piece in list(cut_text("word " * 100_000))[1:])
