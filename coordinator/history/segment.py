"""A segment: the records of 128 consecutive rounds in one file that does not change any more.

    magic       8 bytes, "atollrec"
    format      1 byte
    size        4 bytes, of the header
    header      msgpack, `SegmentHeader`: which rounds, the series of their figures, the body's size and digest
    body        a zstandard frame of msgpack, `_Body`: the records (`record_codec`), and what was noted meanwhile

All numbers are little-endian. The header alone is enough for a curve of a whole run. Neighbouring records are much
alike, so together they take a third less than each by itself.
"""

import hashlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec
import zstandard

from atoll.comm.codecs.codec import Malformed
from atoll.comm.codecs.zstd import unpack as zstd_unpack
from atoll.comm.decode_errors import DECODE_ERRORS
from atoll.coordinator.history import record_codec
from atoll.coordinator.history.record_codec import BadRecord
from atoll.coordinator.history.series import SERIES, Row, pack_series, unpack_series
from atoll.coordinator.state_machine.events import CommitRecord, Note

ROUNDS = 128  # of a segment; the first begins with round 1
MAGIC, FORMAT = b"atollrec", 1
PREFIX_SIZE = len(MAGIC) + 1 + 4
MAX_HEADER_BYTES = 1 << 20
MAX_BODY_BYTES = 1 << 30  # unpacked
LEVEL = 9  # of zstandard: a segment is written once
DIGEST_SIZE = 16


class SegmentHeader(msgspec.Struct, frozen=True):
    """What a segment's first bytes say of it."""

    run: str
    first: int  # rounds
    last: int
    members: bool  # False: what was known of single members was dropped
    size: int  # bytes of the body, as it lies there
    unpacked: int
    digest: bytes  # of the body, as it lies there
    series: list[bytes]  # a column for each name of `SERIES`


class _Body(msgspec.Struct, array_like=True):
    records: list[bytes]
    notes: list[tuple[float, Note]]


class Segment(NamedTuple):
    """A segment, whole."""

    header: SegmentHeader
    records: list[bytes]  # as `record_codec` has them
    notes: list[tuple[float, Note]]  # with their times

    @property
    def rows(self) -> list[Row]:
        """The figures of its rounds. Raises `BadColumn`."""
        return [tuple(row) for row in unpack_series(self.header.series, len(self.records)).tolist()]

    def decoded(self, since: int = 0) -> Iterator[CommitRecord]:
        """The records of the rounds after `since`, each decoded when it is asked for: one of a thousand members
        takes 2 MB. Raises `BadRecord`."""
        skipped = max(since + 1 - self.header.first, 0)
        return map(record_codec.decode, self.records[skipped:])


def name_of(first: int, last: int) -> str:
    """The file's name: names sort as rounds do."""
    return f"rounds-{first:012d}-{last:012d}.records"


def rounds_of(name: str) -> tuple[int, int] | None:
    """The first and last round of the segment with this name; None: it is none's."""
    head, first, last = (name.removesuffix(".records").split("-") + ["", ""])[:3]
    if head != "rounds" or not (first.isdecimal() and last.isdecimal()):
        return None
    sound = 0 < int(first) <= int(last) < int(first) + ROUNDS and name == name_of(int(first), int(last))
    return (int(first), int(last)) if sound else None


def write(
    run: str,
    rows: Sequence[Row],
    records: Sequence[bytes],
    notes: Sequence[tuple[float, Note]],
    members: bool = True,
) -> bytes:
    """The bytes of a segment of consecutive rounds: their figures (`series_row`), their records as `record_codec`
    has them, and what was noted meanwhile. `members`: whether the records say what was known of single members."""
    body = msgspec.msgpack.encode(_Body([record_codec.plain(data) for data in records], list(notes)))
    packed = zstandard.ZstdCompressor(level=LEVEL, write_content_size=True).compress(body)
    header = SegmentHeader(
        run=run,
        first=int(rows[0][0]),
        last=int(rows[-1][0]),
        members=members,
        size=len(packed),
        unpacked=len(body),
        digest=_digest(packed),
        series=pack_series(rows),
    )
    head = msgspec.msgpack.encode(header)
    return b"".join((MAGIC, bytes([FORMAT]), len(head).to_bytes(4, "little"), head, packed))


def header_size(prefix: bytes) -> int:
    """The bytes of the header behind the first `PREFIX_SIZE` bytes. Raises `BadRecord`."""
    if len(prefix) < PREFIX_SIZE or prefix[: len(MAGIC)] != MAGIC:
        raise BadRecord("it is no segment of commit records")
    if (found := prefix[len(MAGIC)]) != FORMAT:
        raise BadRecord(f"it has format {found}, this version of atoll reads {FORMAT}")
    size = int.from_bytes(prefix[len(MAGIC) + 1 : PREFIX_SIZE], "little")
    if not 0 < size <= MAX_HEADER_BYTES:
        raise BadRecord(f"its header is said to have {size} bytes, {MAX_HEADER_BYTES} are the most")
    return size


def read_header(head: bytes) -> SegmentHeader:
    """The header. Raises `BadRecord`."""
    try:
        header = msgspec.msgpack.decode(head, type=SegmentHeader)
    except DECODE_ERRORS as error:
        raise BadRecord(f"its header is spoiled: {error}") from None
    count = header.last - header.first + 1
    sound = 0 < count <= ROUNDS and header.first > 0 and len(header.series) == len(SERIES)
    if not sound or not (0 < header.size <= MAX_BODY_BYTES and 0 < header.unpacked <= MAX_BODY_BYTES):
        raise BadRecord(f"its header is spoiled: rounds {header.first} to {header.last}, {header.unpacked} bytes")
    return header


def read(data: bytes) -> Segment:
    """The segment that `write` wrote. Raises `BadRecord` for other bytes."""
    end = PREFIX_SIZE + header_size(data[:PREFIX_SIZE])
    header = read_header(data[PREFIX_SIZE:end])
    packed = memoryview(data)[end:]
    if len(packed) != header.size or _digest(packed) != header.digest:
        raise BadRecord(f"rounds {header.first} to {header.last} do not match their digest")
    try:
        body = msgspec.msgpack.decode(zstd_unpack(packed, header.unpacked), type=_Body)
    except (Malformed, *DECODE_ERRORS) as error:
        raise BadRecord(f"rounds {header.first} to {header.last} are spoiled: {error}") from None
    if len(body.records) != header.last - header.first + 1:
        raise BadRecord(f"it has {len(body.records)} records of rounds {header.first} to {header.last}")
    return Segment(header, body.records, body.notes)


def _digest(data: bytes | memoryview) -> bytes:
    return hashlib.blake2b(data, digest_size=DIGEST_SIZE).digest()
