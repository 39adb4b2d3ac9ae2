"""Units of input: what one process tokenises at a time, about a mebibyte of whole records or of a long text's
piece.

`read_units` cuts the sources into units, the same for the same sources wherever it begins: each unit says where
the input stands behind it, and reading from there gives the units that follow. Of the input no more is in memory
than the unit at hand; a text of any length is cut at the ends of lines or at blanks, and a record that is longer
than `MAX_RECORD_BYTES` is left out by name.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from atoll.comm.errors import ConfigError, ResourceError
from atoll.comm.extras import demand
from atoll.node.data.content import Content
from atoll.node.data.hub import hub_rows
from atoll.node.data.sources import HubSource, Kind, Source, SourceFile

UNIT_BYTES = 1 << 20
MAX_RECORD_BYTES = 64 << 20
BYTE_ORDER_MARK = b"\xef\xbb\xbf"  # of UTF-8
MAX_ROWS = 4096  # of a table that are read at once
MAX_TEXTS = 4096  # small files in one unit


class Position(msgspec.Struct, frozen=True, array_like=True):
    """A place in the input: in source number `source`, behind `records` records and `bytes` bytes of it."""

    source: int = 0
    records: int = 0
    bytes: int = 0


BEGINNING = Position()


class TextPiece(msgspec.Struct, frozen=True, array_like=True):
    """A plain text, or a piece of a long one, which `begins` or `ends` there."""

    place: str
    text: bytes
    begins: bool
    ends: bool


class TextUnit(msgspec.Struct, frozen=True, tag="text", array_like=True):
    """Pieces of plain texts, in order."""

    pieces: tuple[TextPiece, ...]


class LinesUnit(msgspec.Struct, frozen=True, tag="lines", array_like=True):
    """Whole lines of JSON, of which the first is line number `first` of `place`."""

    place: str
    first: int
    lines: bytes


class RowsUnit(msgspec.Struct, frozen=True, tag="rows", array_like=True):
    """Values of a column, of which the first is row number `first` of `place`."""

    place: str
    first: int
    rows: list[Any]


Unit = TextUnit | LinesUnit | RowsUnit


@dataclass(frozen=True, slots=True)
class UnitRead:
    """A unit, the place behind it, and what was left out before it. `consumed`: bytes of all files read so far, as
    they lie on the disk."""

    unit: Unit
    size: int  # bytes
    behind: Position
    consumed: int
    skipped: tuple[str, ...] = ()


def read_units(sources: Sequence[Source], column: str, start: Position = BEGINNING) -> Iterator[UnitRead]:
    """The units of the sources from `start` on. `column`: of a table, what holds the document. Raises
    `ResourceError` for a file that cannot be read, and `ConfigError` for a table without the column."""
    texts = _TextPacker()
    before = 0  # bytes of the files that were passed
    for number, source in enumerate(sources):
        size = source.size if isinstance(source, SourceFile) else 0
        if number >= start.source:
            at = start if number == start.source else Position(number)
            if isinstance(source, SourceFile) and source.kind is Kind.TEXT:
                yield from texts.units(_text_pieces(source, at), before)
            else:
                yield from texts.rest()
                for read in _record_units(source, column, at):
                    yield replace(read, consumed=before + read.consumed)
        before += size
    yield from texts.rest()


def _record_units(source: Source, column: str, at: Position) -> Iterator[UnitRead]:
    match source:
        case HubSource():
            return _hub_units(source, column, at)
        case SourceFile(kind=Kind.LINES):
            return _line_units(source, at)
        case SourceFile(kind=Kind.TABLE):
            return _table_units(source, column, at)
    raise AssertionError(f"{source} has no records")


class _TextPacker:
    """Packs the pieces of plain texts, many small ones of them, into units."""

    def __init__(self) -> None:
        self._pieces, self._size = list[TextPiece](), 0
        self._behind, self._consumed = Position(), 0

    def units(self, pieces: Iterable[tuple[TextPiece, Position, int]], before: int) -> Iterator[UnitRead]:
        for piece, behind, consumed in pieces:
            self._pieces.append(piece)
            self._size += len(piece.text)
            self._behind, self._consumed = behind, before + consumed
            if self._size >= UNIT_BYTES or len(self._pieces) >= MAX_TEXTS:
                yield from self.rest()

    def rest(self) -> Iterator[UnitRead]:
        if self._pieces:
            unit = TextUnit(tuple(self._pieces))
            self._pieces, size, self._size = [], self._size, 0
            yield UnitRead(unit, size, self._behind, self._consumed)


def _text_pieces(source: SourceFile, at: Position) -> Iterator[tuple[TextPiece, Position, int]]:
    """The pieces of a plain text from `at` on, with the place behind each and the bytes of the file read so
    far."""
    with Content(source.path) as content:
        content.skip(at.bytes)
        here, buffer = at.bytes, b""
        while True:
            buffer += content.read(UNIT_BYTES + 1 - len(buffer))
            cut = len(buffer) if len(buffer) <= UNIT_BYTES else cut_point(buffer)
            piece, buffer = buffer[:cut], buffer[cut:]
            text = piece.removeprefix(BYTE_ORDER_MARK) if here == 0 else piece
            ends = not buffer
            behind = Position(at.source + 1) if ends else Position(at.source, 0, here + cut)
            yield TextPiece(source.name, text, here == 0, ends), behind, content.consumed
            if ends:
                return
            here += cut


def cut_point(data: bytes) -> int:
    """The place to cut a text that goes on: behind the last line that ends in its second half; else before a
    blank; else between two characters."""
    half, last = len(data) // 2, len(data) - 1
    if cut := data.rfind(b"\n", half, last) + 1:
        return cut
    if (cut := data.rfind(b" ", half, last)) > 0:
        return cut
    while last > 1 and data[last] & 0xC0 == 0x80:  # within a character's UTF-8
        last -= 1
    return last


def _line_units(source: SourceFile, at: Position) -> Iterator[UnitRead]:
    with Content(source.path) as content:
        content.skip(at.bytes)
        here, buffer = at, b""
        while buffer := buffer + content.read(UNIT_BYTES - len(buffer)):
            cut = buffer.rfind(b"\n") + 1
            skipped: tuple[str, ...] = ()
            if cut:
                lines, buffer, length = buffer[:cut], buffer[cut:], cut
            else:
                lines, buffer, length = _long_line(content, buffer)
                if length > MAX_RECORD_BYTES:
                    skipped = (f"{source.name} line {here.records + 1}: {_too_long(length)}",)
            unit = LinesUnit(source.name, here.records + 1, lines)
            count = 1 if skipped else lines.count(b"\n") + (not lines.endswith(b"\n"))
            here = Position(here.source, here.records + count, here.bytes + length)
            yield UnitRead(unit, len(lines), here, content.consumed, skipped)


def _long_line(content: Content, begun: bytes) -> tuple[bytes, bytes, int]:
    """The line that begins so, what was read behind it, and the line's length in bytes. The line is empty if it is
    longer than what is read."""
    parts, length = [begun], len(begun)
    while part := content.read(UNIT_BYTES):
        end = part.find(b"\n") + 1
        length += end or len(part)
        if length > MAX_RECORD_BYTES:
            parts = []
        else:
            parts.append(part[:end] if end else part)
        if end:
            return b"".join(parts), part[end:], length
    return b"".join(parts), b"", length


def _too_long(size: int) -> str:
    return f"{size / 1e6:,.0f} MB, and a record has {MAX_RECORD_BYTES / 1e6:,.0f} MB at most"


def _table_units(source: SourceFile, column: str, at: Position) -> Iterator[UnitRead]:
    demand(f"reading {source.name}", "pyarrow")
    import pyarrow
    from pyarrow import parquet

    try:
        settings: Any = {"memory_map": False, "buffer_size": UNIT_BYTES, "pre_buffer": False}
        with parquet.ParquetFile(source.path, **settings) as table:
            leaves = [path for path in _leaves(table) if path.split(".")[0] == column]
        # A text that is in many rows, and once in the file, is once in memory as well.
        with parquet.ParquetFile(source.path, read_dictionary=leaves, **settings) as table:
            if column not in (names := table.schema_arrow.names):
                raise ConfigError(
                    f"{source.name} has no column {column!r}: it has {', '.join(names)}; say --column NAME"
                )
            rows = _table_rows(table, column, at.records)
            share = source.size / max(1, table.metadata.num_rows)
            for read in _packed_rows(source.name, at, rows):
                yield replace(read, consumed=int(share * read.behind.records))
    except (pyarrow.ArrowException, OSError) as error:
        raise ResourceError(
            f"{source.path} cannot be read as Parquet, {error}: get it again, or leave it out"
        ) from error


def _leaves(table: Any) -> Iterator[str]:
    """The paths of a table's columns, and of those within them."""
    return (table.schema.column(number).path for number in range(len(table.schema)))


def _table_rows(table: Any, column: str, first: int) -> Iterator[Any]:
    """The values of a column from row `first` on, few in memory at a time."""
    for number in range(table.num_row_groups):
        group = table.metadata.row_group(number)
        if first >= group.num_rows:
            first -= group.num_rows
            continue
        rows = max(1, min(MAX_ROWS, group.num_rows * UNIT_BYTES // max(1, group.total_byte_size)))
        for batch in table.iter_batches(rows, [number], [column]):
            if first >= len(batch):
                first -= len(batch)
                continue
            for value in batch.column(0).slice(first):
                yield value.as_py()
            first = 0


def _hub_units(source: HubSource, column: str, at: Position) -> Iterator[UnitRead]:
    return _packed_rows(source.label, at, hub_rows(source, column, at.records))


def _packed_rows(place: str, at: Position, values: Iterable[Any]) -> Iterator[UnitRead]:
    """Units of the values, of which the first is row `at.records`, counted from 0."""
    rows, size, skipped = list[Any](), 0, list[str]()
    first = number = at.records
    for number, value in enumerate(values, at.records + 1):
        length = _size(value)
        if length > MAX_RECORD_BYTES:
            skipped.append(f"{place} row {number}: {_too_long(length)}")
            value = None
        rows.append(value)
        size += min(length, MAX_RECORD_BYTES) if value is not None else 0
        if size >= UNIT_BYTES or len(rows) >= MAX_ROWS:
            yield UnitRead(RowsUnit(place, first + 1, rows), size, Position(at.source, number), 0, tuple(skipped))
            rows, size, skipped, first = [], 0, [], number
    if rows:
        yield UnitRead(RowsUnit(place, first + 1, rows), size, Position(at.source, number), 0, tuple(skipped))


def _size(value: Any) -> int:
    """About the bytes of a value."""
    match value:
        case str() | bytes():
            return len(value)
        case list():
            return sum(map(_size, value))
        case dict():
            return sum(map(_size, value.values()))
    return 8
