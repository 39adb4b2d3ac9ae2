"""Commit records as bytes: they come back whole, take few bytes, and spoiled ones are refused."""

import random
from dataclasses import fields

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from journal_contents import record as any_record
from journal_contents import sample
from long_runs import long_record

from atoll.comm.ids import NodeId
from atoll.comm.replace import replace
from atoll.coordinator.causes.explanation import Confidence, Kind, Verdict
from atoll.coordinator.history.record_codec import (
    COUNTS,
    FIGURES,
    FORMAT,
    MEASURES,
    SCALARS,
    BadRecord,
    RecordView,
    decode,
    encode,
    plain,
)
from atoll.coordinator.history.series import series_row
from atoll.coordinator.state_machine.events import Decision


@pytest.mark.parametrize("members", [0, 1, 8, 1000])
def test_a_record_comes_back_as_it_was(members: int) -> None:
    record = long_record(7, members)
    assert decode(encode(record)) == record == decode(plain(encode(record)))


@pytest.mark.parametrize("members", [0, 1, 8, 300])
def test_a_view_has_of_a_record_what_the_record_has(members: int) -> None:
    record = replace(long_record(7, members), decisions=(sample(Decision),))
    view = RecordView(encode(record))
    assert (view.round, view.void, view.committed_at) == (record.round, record.void, record.committed_at)
    assert (view.decisions, view.seconds, view.names) == (record.decisions, record.seconds, record.names)
    for field in (*COUNTS, *MEASURES):
        assert view.of_nodes(field) == getattr(record, field)
    for field in FIGURES:
        assert view.of_nodes(field) == {n: getattr(f, field) for n, f in record.figures.items()}
    with pytest.raises(KeyError):
        view.of_nodes("samples")
    for changed in (record, replace(record, void=True, val_loss=None), replace(record, val_loss=2.5, seconds={})):
        np.testing.assert_array_equal(RecordView(encode(changed)).row, series_row(changed))


def test_every_field_comes_back() -> None:
    record = replace(any_record(3), decisions=(sample(Decision),))
    found = decode(encode(record))
    assert found == record and all(getattr(found, name) for name in record.__struct_fields__)


def test_a_record_of_before_has_no_seconds_of_nodes_and_no_failures() -> None:
    record = long_record(7, 8)
    fields_ = msgspec.msgpack.decode(plain(encode(record))[2:])
    old = bytes((FORMAT, 0)) + msgspec.msgpack.encode(fields_[:-3])
    assert decode(old) == replace(record, spent={}, failures=(), exchange={})


def test_where_time_went_comes_back_to_the_tenth_or_thousandth_of_a_second_and_costs_six_bytes_a_node() -> None:
    record = long_record(7, 1000)
    odd = replace(record, spent={n: {"down": 3.25, "lost": -1e-9} | of for n, of in record.spent.items()})
    for changed in (odd, replace(record, spent={NodeId("n1"): {"another bucket": 0.125}})):
        assert decode(encode(changed)) == changed
    assert len(encode(record)) - len(encode(replace(record, spent={}))) < 6.5 * 1000


def test_a_quiet_rounds_record_takes_1_kb_at_8_members_and_less_than_60_bytes_for_each_more() -> None:
    sizes = {members: len(encode(long_record(50_000, members))) for members in (8, 16, 64, 1000)}
    assert sizes[8] <= 1000, sizes
    for members in (16, 64, 1000):
        assert (sizes[members] - sizes[8]) / (members - 8) < 60, sizes


PATH = ("n1", "gpu-17", "n2", "vm-4711")
VERDICT = Verdict(
    *(Kind.SLOW_LINK, *PATH),
    "the path from gpu-17 to vm-4711 carried 12.3 Mbit/s, it was 98.2 before: 8.4 s of the exchange",
    *(Confidence.AGREED, 8.4, 9.1),
    facts=(("bytes", "13107200"), ("seconds on their way", "8.5"), ("rate before", "98.2 Mbit/s")),
    beside=("ada-1's trainer took 4.2 s longer than usual for its steps",),
)


def test_with_a_verdict_too_a_record_takes_1_kb_at_8_members() -> None:
    for members in (8, 64, 1000):
        quiet = long_record(50_000, members)
        blamed = len(encode(replace(quiet, verdict=VERDICT)))
        assert blamed - len(encode(quiet)) < 300 and (members > 8 or blamed <= 1000), (members, blamed)


def test_a_verdict_comes_back_also_from_a_record_of_before_that_has_it_by_names() -> None:
    record = replace(long_record(7, 8), verdict=VERDICT)
    assert decode(encode(record)) == record
    body = msgspec.msgpack.decode(plain(encode(record))[2:])
    values = body[0][SCALARS.index("verdict")]
    fewer = dict(zip([f.name for f in fields(Verdict)], values, strict=True)) | {"beside": []}
    body[0][SCALARS.index("verdict")] = fewer
    assert decode(bytes((FORMAT, 0)) + msgspec.msgpack.encode(body)) == replace(
        record, verdict=replace(VERDICT, beside=())
    )


def test_a_spoiled_verdict_is_refused() -> None:
    body = msgspec.msgpack.decode(plain(encode(replace(long_record(7, 8), verdict=VERDICT)))[2:])
    for spoiled in ([], ["no kind", *(1,) * 10], [*body[0][SCALARS.index("verdict")][:-1], 7]):
        body[0][SCALARS.index("verdict")] = spoiled
        with pytest.raises(BadRecord, match="spoiled"):
            decode(bytes((FORMAT, 0)) + msgspec.msgpack.encode(body))


@pytest.mark.hypothesis
@given(st.integers(0, 2**32 - 1), st.sampled_from([1, 8, 100]))
def test_spoiled_bytes_are_refused_or_are_a_record(seed: int, members: int) -> None:
    rng = random.Random(seed)
    data = bytearray(encode(long_record(3, members)))
    for _ in range(rng.randrange(1, 4)):
        data[rng.randrange(len(data))] = rng.randrange(256)
    try:
        decode(bytes(data[: rng.choice([len(data), rng.randrange(len(data))])]))
    except BadRecord:
        pass
    try:
        view = RecordView(bytes(data))
        assert view.names is not None and view.seconds is not None
        for field in (*COUNTS, *MEASURES, *FIGURES):
            view.of_nodes(field)
    except BadRecord:
        pass


@pytest.mark.parametrize(
    "data", [b"", bytes([FORMAT]), bytes([FORMAT, 1]), bytes([FORMAT, 1, 255, 255, 255, 255]), bytes([9, 0])]
)
def test_what_is_no_record_is_refused(data: bytes) -> None:
    with pytest.raises(BadRecord):
        decode(data)
    with pytest.raises(BadRecord):
        RecordView(data)
