"""A commit record as bytes: what the journal keeps of a round, and what a segment is made of.

    byte 0      FORMAT
    byte 1      PLAIN: the rest is msgpack; PACKED: it is its size (4 bytes, little-endian) and a zstandard frame

The msgpack is an array of the fields of `_Body`. It names each node once, in one column of all of them, ascending;
everything else speaks of nodes by their places in that column. What is said of each of some nodes is a pair: a
bitmap of the places of those of whom it is said (empty: of all), and a column of numbers (`columns`), or the like.

A quiet round of 8 members takes less than 1 kB, each further member less than 60 bytes; what was said of one in
which something went wrong takes some 200 bytes more. Numbers come back as they were;
those of few digits (`atoll.comm.rounding`) take fewer bytes.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import fields
from functools import cached_property
from itertools import accumulate, islice
from math import isnan, nan
from typing import Any, TypeVar

import msgspec

from atoll.comm.bitmap import bitmap, places
from atoll.comm.codecs.codec import Malformed
from atoll.comm.codecs.zstd import pack as zstd_pack
from atoll.comm.codecs.zstd import unpack as zstd_unpack
from atoll.comm.decode_errors import DECODE_ERRORS
from atoll.comm.ids import NodeId
from atoll.coordinator.causes.explanation import Verdict
from atoll.coordinator.history.columns import Number, pack, unpack
from atoll.coordinator.history.series import PHASES, Row
from atoll.coordinator.state_machine.events import CommitRecord, Decision, Failure, Passage, TrainerFigures

FORMAT = 1
PLAIN, PACKED = 0, 1
PACK_FROM = 700  # bytes; smaller ones hardly shrink
MAX_BYTES = 64 << 20  # of a record, unpacked
MAX_NODES = 1 << 20
MAX_SPANS = 1 << 22  # of samples, of all nodes
COUNTS = ("bytes_up", "bytes_down")  # fields with an integer for each node
MEASURES = ("contributors", "shares", "norms", "scales", "losses")  # with a float for each
DIGESTS = ("sealed_digest", "state_digest", "config_digest")  # hexadecimal, here their bytes
FIGURES = TrainerFigures.__struct_fields__
FLOATS = ("train_loss", "val_loss", "predicted")
FLOAT_DICTS = ("seconds", "predictions", "goodput")
# Keys of theirs that take one byte. New ones go to the end.
KEYS = (
    *("inner", "collect", "reduce", "commit", "flat", "two_level"),
    *("sync", "recovering", "waiting", "paused", "down", "lost", "starting", "open"),
)
SECOND_PARTS = (10, 1000)
# What spoiled bytes end in: a float that is no number, or none that an integer could be, too.
SPOILED = (Malformed, IndexError, StopIteration, OverflowError, ValueError, *DECODE_ERRORS)
T = TypeVar("T")


class _Some(msgspec.Struct, array_like=True):
    """A number of each of some nodes."""

    where: bytes  # bitmap of their places; empty: all
    numbers: bytes  # column


class _Scalars(msgspec.Struct, array_like=True):
    """The fields of a commit record that are not of single nodes."""

    round: int
    epoch: int
    attempts: int
    tokens: int
    reason: str
    sealed_digest: bytes
    levels: int
    state_digest: bytes
    digests_equal: bool | None
    fragment: int
    void: bool
    committed_at: float
    config_digest: bytes
    decisions: tuple[Decision, ...]
    # Records of before lack what follows.
    verdict: list[Any] | Verdict | None = None  # its fields, of which the last may be missing; before, by name
    passage: Passage | None = None


class _Floats(msgspec.Struct, array_like=True):
    """The floats of a commit record that are not of single nodes: of the fields that are one (NaN for None), then
    of those that are a dict."""

    keys: list[list[int | str]]  # of each dict; a number is a place in KEYS
    column: bytes


class _Body(msgspec.Struct, array_like=True):
    scalars: _Scalars
    floats: _Floats
    count: int  # of nodes
    nodes: bytes  # column of the numbers in their ids, each as the distance to the one before
    members: bytes  # bitmap
    counts: list[_Some]
    measures: list[_Some]
    rates: list[_Some]  # up, down
    figures: list[_Some]
    spans: _Some  # of samples: how many each has
    firsts: bytes  # columns, over all spans
    lengths: bytes
    digests: bytes  # bitmap of who told one
    odd_digests: dict[int, bytes]  # by place: those that are not the record's own
    named: bytes  # bitmap
    names: list[str]
    regions: list[list[int]]  # of places
    lacking: list[tuple[list[int], list[int]]]  # places of contributors, the chunks that lack all of them
    # Records of before lack what follows.
    # By bucket (a number is a place in KEYS), and in what part of 1 s.
    spent: list[tuple[int | str, _Some, int]] = []
    failures: tuple[Failure, ...] = ()
    exchange: _Some | None = None


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Body).decode
SCALARS = _Scalars.__struct_fields__
VERDICT = tuple(field.name for field in fields(Verdict))


class BadRecord(ValueError):
    """The bytes are no commit record."""


def encode(record: CommitRecord) -> bytes:
    """The record as bytes. Raises ValueError for node ids and digests that no run gives."""
    nodes = _Nodes.of(record)
    spans = [record.samples[n] for n in nodes.order if n in record.samples]
    body = _Body(
        scalars=_Scalars(**{name: _scalar(record, name) for name in SCALARS}),
        floats=_packed_floats(record),
        count=len(nodes.order),
        nodes=nodes.packed(),
        members=nodes.where(record.members),
        counts=[nodes.some(getattr(record, name)) for name in COUNTS],
        measures=[nodes.some(getattr(record, name)) for name in MEASURES],
        rates=[nodes.some({n: pair[i] for n, pair in record.rates.items()}) for i in (0, 1)],
        figures=[nodes.some({n: getattr(f, name) for n, f in record.figures.items()}) for name in FIGURES],
        spans=nodes.some({n: len(of) for n, of in record.samples.items()}),
        firsts=pack([first for of in spans for first, _ in of]),
        lengths=pack([length for of in spans for _, length in of]),
        digests=nodes.where(record.digests),
        odd_digests={
            nodes.place[n]: bytes.fromhex(d) for n, d in record.digests.items() if d != record.state_digest
        },
        named=nodes.where(record.names),
        names=[record.names[n] for n in nodes.order if n in record.names],
        regions=[nodes.places(region) for region in record.regions],
        lacking=[(nodes.places(who), chunks) for who, chunks in _inverted(record.lacking).items()],
        spent=[(_short(bucket), *_seconds(nodes, of)) for bucket, of in _by_bucket(record.spent).items()],
        failures=record.failures,
        exchange=nodes.some(record.exchange),
    )
    whole = _encode(body)
    if len(whole) < PACK_FROM:
        return bytes((FORMAT, PLAIN)) + whole
    return bytes((FORMAT, PACKED)) + len(whole).to_bytes(4, "little") + zstd_pack(whole)


def decode(data: bytes) -> CommitRecord:
    """The record that `encode` made these bytes of. Raises `BadRecord` for others."""
    try:
        return _record(_decode(_unpacked(data)))
    except SPOILED as error:
        raise _spoiled(error) from None


def plain(data: bytes) -> bytes:
    """The same record, not compressed by itself. Raises `BadRecord`."""
    try:
        return bytes((FORMAT, PLAIN)) + _unpacked(data)
    except SPOILED as error:
        raise _spoiled(error) from None


def _unpacked(data: bytes) -> bytes:
    if data[:1] != bytes((FORMAT,)):
        raise BadRecord(f"it begins with {data[:1]!r}, this version of atoll reads format {FORMAT}")
    if data[1] == PLAIN:
        return data[2:]
    size = int.from_bytes(data[2:6], "little")
    if data[1] != PACKED or size > MAX_BYTES:
        raise BadRecord(f"it says that it has {size} bytes, {MAX_BYTES} are the most")
    return zstd_unpack(memoryview(data)[6:], size)


def _record(body: _Body) -> CommitRecord:
    nodes = _Nodes.unpacked(body.nodes, body.count)
    scalars: dict[str, Any] = {name: getattr(body.scalars, name) for name in SCALARS}
    scalars |= {name: scalars[name].hex() for name in DIGESTS}
    if isinstance(verdict := scalars["verdict"], list):
        scalars["verdict"] = msgspec.convert(dict(zip(VERDICT, verdict, strict=False)), Verdict)
    scalars |= _floats(body.floats)
    of_nodes: dict[str, Any] = {
        **{name: nodes.each(some, int) for name, some in zip(COUNTS, body.counts, strict=True)},
        **{name: nodes.each(some, float) for name, some in zip(MEASURES, body.measures, strict=True)},
    }
    up, down = (nodes.each(some, float) for some in body.rates)
    figures = [nodes.each(some, float) for some in body.figures]
    if any(of.keys() != figures[0].keys() for of in figures):
        raise BadRecord("not every trainer has all figures")
    told = nodes.at(body.digests)
    odd = {nodes.order[place]: digest.hex() for place, digest in body.odd_digests.items()}
    return CommitRecord(
        **scalars,
        **of_nodes,
        members=tuple(nodes.at(body.members)),
        rates={n: (up[n], down[n]) for n in up},
        figures=dict(zip(figures[0], map(TrainerFigures, *(of.values() for of in figures)), strict=True)),
        samples=_samples(nodes.each(body.spans, int), body.firsts, body.lengths),
        digests={n: odd.get(n, scalars["state_digest"]) for n in told},
        names=dict(zip(nodes.at(body.named), body.names, strict=True)),
        regions=tuple(tuple(nodes.order[place] for place in region) for region in body.regions),
        lacking={c: tuple(nodes.order[place] for place in who) for who, chunks in body.lacking for c in chunks},
        spent=_by_node({_long(k): _parts(nodes.each(some, float), part) for k, some, part in body.spent}),
        failures=body.failures,
        exchange=nodes.each(body.exchange, float) if body.exchange is not None else {},
    )


class RecordView:
    """A record's bytes, of which only what is asked for is unpacked: for looks at a little of many rounds."""

    def __init__(self, data: bytes) -> None:
        """Raises `BadRecord`."""
        try:
            self._body = _decode(_unpacked(data))
        except SPOILED as error:
            raise _spoiled(error) from None

    @property
    def round(self) -> int:
        return self._body.scalars.round

    @property
    def void(self) -> bool:
        return self._body.scalars.void

    @property
    def committed_at(self) -> float:
        """Seconds since 1970."""
        return self._body.scalars.committed_at

    @property
    def decisions(self) -> tuple[Decision, ...]:
        return self._body.scalars.decisions

    @property
    def failures(self) -> tuple[Failure, ...]:
        return self._body.failures

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds of the round's phases. Raises `BadRecord`."""
        try:
            found: dict[str, float] = _floats(self._body.floats)["seconds"]
        except SPOILED as error:
            raise _spoiled(error) from None
        return found

    @property
    def row(self) -> Row:
        """The record's figures, as `series_row` has them. Raises `BadRecord`."""
        body, scalars = self._body, self._body.scalars
        try:
            floats, up, down = _floats(body.floats), *(_numbers(some, body.count) for some in body.counts)
            contributors = body.measures[MEASURES.index("contributors")]
            return (
                *(scalars.round, scalars.committed_at, scalars.tokens),
                nan if scalars.void else floats["train_loss"],
                nan if floats["val_loss"] is None else floats["val_loss"],
                *(_size(body.members, body.count), _size(contributors.where, body.count), scalars.attempts),
                *(floats["seconds"].get(phase, 0.0) for phase in PHASES),
                *(sum(up), sum(down), scalars.void),
            )
        except SPOILED as error:
            raise _spoiled(error) from None

    def of_nodes(self, field: str) -> dict[NodeId, float]:
        """The numbers of one of the fields in `COUNTS`, `MEASURES` or `FIGURES`, by node. Raises `BadRecord`, and
        KeyError for another field."""
        body = self._body
        try:
            for group, found in ((COUNTS, body.counts), (MEASURES, body.measures), (FIGURES, body.figures)):
                if field in group:
                    return self._nodes.each(found[group.index(field)], float)
        except SPOILED as error:
            raise _spoiled(error) from None
        raise KeyError(field)

    def spent_by(self, node: NodeId) -> dict[str, float]:
        """The node's seconds in each bucket (`record.spent`). Raises `BadRecord`."""
        found = dict[str, float]()
        try:
            for key, some, part in self._body.spent:
                seconds = _parts(self._nodes.each(some, float), part)
                if node in seconds:
                    found[_long(key)] = seconds[node]
        except SPOILED as error:
            raise _spoiled(error) from None
        return found

    @property
    def names(self) -> dict[NodeId, str]:
        """The nodes' names. Raises `BadRecord`."""
        try:
            return dict(zip(self._nodes.at(self._body.named), self._body.names, strict=True))
        except SPOILED as error:
            raise _spoiled(error) from None

    @cached_property
    def _nodes(self) -> "_Nodes":
        return _Nodes.unpacked(self._body.nodes, self._body.count)


def _size(where: bytes, count: int) -> int:
    """How many of `count` nodes a bitmap names."""
    return int.from_bytes(where, "big").bit_count() if where else count


def _numbers(some: _Some, count: int) -> list[Number]:
    return unpack(some.numbers, _size(some.where, count))


def _spoiled(error: Exception) -> BadRecord:
    return BadRecord(f"the bytes of a commit record are spoiled: {error}")


class _Nodes:
    """The nodes that a record names, and their places."""

    def __init__(self, numbers: Collection[int]) -> None:
        """`numbers`: of their ids, ascending."""
        self._numbers = numbers
        self.order = [NodeId(f"n{number}") for number in numbers]
        self.place = {node: place for place, node in enumerate(self.order)}

    @classmethod
    def of(cls, record: CommitRecord) -> "_Nodes":
        """Those of a record. Raises ValueError for an id that the coordinator has not given."""
        found = {*record.members, *record.rates, *record.figures, *record.samples, *record.digests, *record.names}
        found |= record.spent.keys() | record.exchange.keys()
        for name in (*COUNTS, *MEASURES):
            found |= getattr(record, name).keys()
        for group in (*record.regions, *record.lacking.values()):
            found.update(group)
        return cls(sorted(int(node.removeprefix("n")) for node in found))

    @classmethod
    def unpacked(cls, column: bytes, count: int) -> "_Nodes":
        """Those that `packed` packed. Raises `BadRecord` or `BadColumn`."""
        if not 0 <= count <= MAX_NODES:
            raise BadRecord(f"it names {count} nodes, {MAX_NODES} are the most")
        steps = [int(step) for step in unpack(column, count)]
        if any(step < 1 for step in steps[1:]) or (steps and steps[0] < 0):
            raise BadRecord("its nodes do not ascend")
        return cls(list(accumulate(steps)))

    def packed(self) -> bytes:
        """The column of their numbers."""
        before = 0
        steps = []
        for number in self._numbers:
            steps.append(number - before)
            before = number
        return pack(steps)

    def places(self, nodes: Iterable[NodeId]) -> list[int]:
        return [self.place[node] for node in nodes]

    def where(self, nodes: Collection[NodeId]) -> bytes:
        """The bitmap of these; empty for all."""
        if len(nodes) == len(self.order):
            return b""
        return bitmap(self.places(nodes), max(len(self.order), 1))

    def at(self, where: bytes) -> list[NodeId]:
        """The nodes of a bitmap, ascending. Raises IndexError for one beyond them."""
        return [self.order[place] for place in places(where)] if where else self.order

    def some(self, of: Mapping[NodeId, Number]) -> _Some:
        return _Some(self.where(of), pack([of[n] for n in self.order if n in of]))

    def each(self, some: _Some, kind: type[T]) -> dict[NodeId, T]:
        """A number of this kind for each of some nodes. Raises `BadColumn`."""
        who = self.at(some.where)
        return dict(zip(who, map(kind, unpack(some.numbers, len(who))), strict=True))


def _packed_floats(record: CommitRecord) -> _Floats:
    dicts: list[dict[str, float]] = [getattr(record, name) for name in FLOAT_DICTS]
    singles = (getattr(record, name) for name in FLOATS)
    values = [nan if value is None else value for value in singles]
    values += [value for of in dicts for value in of.values()]
    return _Floats([[_short(key) for key in of] for of in dicts], pack(values))


def _floats(packed: _Floats) -> dict[str, Any]:
    numbers = map(float, unpack(packed.column, len(FLOATS) + sum(map(len, packed.keys))))
    found: dict[str, Any] = {name: next(numbers) for name in FLOATS}
    if isnan(found["val_loss"]):
        found["val_loss"] = None
    for name, keys in zip(FLOAT_DICTS, packed.keys, strict=True):
        found[name] = {_long(key): next(numbers) for key in keys}
    return found


def _short(key: str) -> int | str:
    return KEYS.index(key) if key in KEYS else key


def _long(key: int | str) -> str:
    """The key that `_short` made this of. Raises IndexError."""
    return KEYS[key] if isinstance(key, int) else key


def _seconds(nodes: _Nodes, of: Mapping[NodeId, float]) -> tuple[_Some, int]:
    """Seconds of each of some nodes: as tenths or thousandths where they are, which take fewer bytes."""
    for part in SECOND_PARTS:
        counts = {node: round(seconds * part) for node, seconds in of.items()}
        if all(counts[node] / part == seconds for node, seconds in of.items()):
            return nodes.some(counts), part
    return nodes.some(of), 1


def _parts(counts: Mapping[NodeId, float], part: int) -> dict[NodeId, float]:
    """The seconds that `_seconds` made these of. Raises `BadRecord`."""
    if part < 1:
        raise BadRecord(f"it counts in {part} parts of a second")
    return {node: count / part for node, count in counts.items()}


def _by_bucket(spent: Mapping[NodeId, Mapping[str, float]]) -> dict[str, dict[NodeId, float]]:
    found: dict[str, dict[NodeId, float]] = {}
    for node, of in spent.items():
        for bucket, seconds in of.items():
            found.setdefault(bucket, {})[node] = seconds
    return found


def _by_node(spent: Mapping[str, Mapping[NodeId, float]]) -> dict[NodeId, dict[str, float]]:
    found: dict[NodeId, dict[str, float]] = {}
    for bucket, of in spent.items():
        for node, seconds in of.items():
            found.setdefault(node, {})[bucket] = seconds
    return found


def _samples(
    spans: Mapping[NodeId, int], firsts: bytes, lengths: bytes
) -> dict[NodeId, tuple[tuple[int, int], ...]]:
    count = sum(spans.values())
    if count > MAX_SPANS or any(n < 0 for n in spans.values()):
        raise BadRecord(f"it has {count} spans of samples, {MAX_SPANS} are the most")
    all_spans = zip(map(int, unpack(firsts, count)), map(int, unpack(lengths, count)), strict=True)
    return {node: tuple(islice(all_spans, n)) for node, n in spans.items()}


def _inverted(lacking: Mapping[int, tuple[NodeId, ...]]) -> dict[tuple[NodeId, ...], list[int]]:
    """The chunks by who is missing in them: mostly the same in many."""
    found: dict[tuple[NodeId, ...], list[int]] = {}
    for chunk, who in lacking.items():
        found.setdefault(who, []).append(chunk)
    return found


def _scalar(record: CommitRecord, name: str) -> Any:
    value = getattr(record, name)
    if isinstance(value, Verdict):
        return [getattr(value, field) for field in VERDICT]
    return bytes.fromhex(value) if name in DIGESTS else value
