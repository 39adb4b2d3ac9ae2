"""A stream says what it is for before anything else; a relay does what its limits say."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.node.gateway.stream_header import (
    PREFIX_BYTES,
    SENTENCES,
    Answer,
    BadHeader,
    Purpose,
    RelayBook,
    RelayLimits,
    Service,
    StreamHeader,
    length_behind,
    read_answer,
    read_header,
    write_header,
)

A, B, C = (b"\x12\x20" + letter * 32 for letter in (b"a", b"b", b"c"))
SERVICES = st.sampled_from([Service.DATA, Service.COORDINATOR])
HEADERS = st.one_of(
    st.builds(StreamHeader, st.just(Purpose.OPEN), SERVICES),
    st.builds(StreamHeader, st.just(Purpose.RELAY), SERVICES, st.sampled_from([A, B, C])),
    st.just(StreamHeader(Purpose.HOLD)),
)


@given(HEADERS)
def test_a_header_is_read_back_as_it_was_written(header: StreamHeader) -> None:
    data = write_header(header)
    assert read_header(data) == header and PREFIX_BYTES + length_behind(data[:PREFIX_BYTES]) == len(data)


@given(st.one_of(st.binary(max_size=80), st.binary(max_size=80).map(lambda rest: b"AGS1" + rest)))
def test_any_bytes_are_one_header_or_none(data: bytes) -> None:
    try:
        header = read_header(data)
    except BadHeader:
        return
    assert write_header(header) == data


@pytest.mark.parametrize(
    "header",
    [
        StreamHeader(Purpose.OPEN, Service.DATA, A),
        StreamHeader(Purpose.OPEN),
        StreamHeader(Purpose.RELAY, Service.DATA),
        StreamHeader(Purpose.RELAY, Service.DATA, A[:-1]),
        StreamHeader(Purpose.HOLD, Service.DATA),
    ],
)
def test_a_header_that_contradicts_itself_is_refused(header: StreamHeader) -> None:
    with pytest.raises(BadHeader):
        read_header(write_header(header))


def test_every_answer_has_a_byte_and_a_sentence() -> None:
    assert [read_answer(bytes([answer])) for answer in Answer] == list(Answer) == list(SENTENCES)
    for data in (b"", b"\0", b"\x01\x01"):
        with pytest.raises(BadHeader):
            read_answer(data)


def test_who_is_no_relay_does_nothing_for_others() -> None:
    book = RelayBook(RelayLimits())
    assert book.hold(A) is book.begin(A, B) is Answer.NO_RELAY


def test_a_relay_reaches_only_those_that_asked_for_it_and_are_there() -> None:
    book = RelayBook(RelayLimits(streams=4))
    assert book.begin(A, B) is Answer.NOT_HELD
    assert book.hold(B) is book.hold(B) is Answer.YES and book.hold(B) is Answer.FULL  # it came back, once
    book.let_go(B)
    assert book.begin(A, B) is Answer.YES
    book.let_go(B)
    assert book.begin(A, B) is Answer.NOT_HELD and book.held == 0


def test_a_relay_has_places_for_so_many_streams_and_so_many_of_one_peer() -> None:
    book = RelayBook(RelayLimits(streams=3, streams_of_peer=2, held=2))
    assert [book.hold(peer) for peer in (A, B, C)] == [Answer.YES, Answer.YES, Answer.FULL]
    assert [book.begin(C, A) for _ in range(3)] == [Answer.YES, Answer.YES, Answer.FULL]
    assert book.begin(B, A) is book.begin(C, B) is Answer.FULL  # of A, and of C
    assert book.begin(b"d", B) is Answer.YES and book.begin(b"e", B) is Answer.FULL  # of all
    book.end(C, A)
    assert book.begin(b"e", B) is Answer.YES and book.count == 3
