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
    st.builds(StreamHeader, st.just(Purpose.PASS), SERVICES),
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
        StreamHeader(Purpose.OPEN, Service.PUNCH),
        StreamHeader(Purpose.PASS, Service.DATA, A),
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


HOME, AWAY = "203.0.113.0", "198.51.100.0"  # networks


def test_who_is_no_relay_does_nothing_for_others() -> None:
    book = RelayBook(RelayLimits())
    assert book.hold(A, HOME)[0] is book.begin(A, B, HOME) is Answer.NO_RELAY


def test_a_relay_reaches_only_those_that_asked_for_it_and_are_there() -> None:
    book = RelayBook(RelayLimits(streams=4))
    assert book.begin(A, B, HOME) is Answer.NOT_HELD
    (first, one, _), (again, other, _) = book.hold(B, HOME), book.hold(B, HOME)  # it came back, once
    assert first is again is Answer.YES and book.hold(B, HOME)[0] is Answer.FULL
    book.let_go(one)
    assert book.begin(A, B, HOME) is Answer.YES
    book.let_go(other)
    assert book.begin(A, B, HOME) is Answer.NOT_HELD and book.held == 0


def test_a_relay_has_places_for_so_many_streams_and_so_many_of_one_peer() -> None:
    book = RelayBook(RelayLimits(streams=3, streams_of_peer=2))
    for peer in (A, B, C):
        assert book.hold(peer, HOME)[0] is Answer.YES
    assert [book.begin(C, A, AWAY) for _ in range(3)] == [Answer.YES, Answer.YES, Answer.FULL]
    assert book.begin(B, A, AWAY) is book.begin(C, B, AWAY) is Answer.FULL  # of A, and of C
    assert book.begin(b"d", B, AWAY) is Answer.YES and book.begin(b"e", B, AWAY) is Answer.FULL  # of all
    book.end(C, A, AWAY)
    assert book.begin(b"e", B, AWAY) is Answer.YES and book.count == 3


def test_a_network_has_few_of_a_relays_places_however_many_peers_it_calls_itself() -> None:
    book = RelayBook(RelayLimits(streams=9, streams_of_network=2, held=5, held_of_network=3))
    _, honest, _ = book.hold(A, HOME)
    for number in range(200):  # ids are free
        answer, _, displaced = book.hold(bytes([number]), f"198.51.{number % 2}.0")
        assert answer is Answer.YES and displaced != honest
    assert book.held == 5
    assert book.begin(B, A, AWAY) is book.begin(C, A, AWAY) is Answer.YES
    assert book.begin(b"another", A, AWAY) is Answer.FULL
    assert book.begin(b"d", A, HOME) is Answer.YES


def test_a_relay_that_is_told_to_stop_takes_nothing_new_and_lets_pass_what_there_is() -> None:
    book = RelayBook(RelayLimits(streams=9))
    book.hold(A, HOME)
    assert book.begin(B, A, HOME) is Answer.YES
    book.limit(0)
    assert book.begin(C, A, HOME) is book.hold(C, HOME)[0] is Answer.NO_RELAY
    book.end(B, A, HOME)
    assert book.count == 0
