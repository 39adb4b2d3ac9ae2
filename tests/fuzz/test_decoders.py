"""Whatever bytes come from elsewhere: each decoder takes them, or refuses them with one of the errors that its
callers know, and takes memory in proportion to them."""

import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from functools import cache

import pytest
from fuzz import corpus
from fuzz.decoders import DECODERS, DEEP, ODD, Decoder
from fuzz.edge import MEMBERS, Edge, fenced
from hostile import FLOATS, messages, nearly
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.comm.ids import NodeId
from atoll.comm.proto import atoll_pb2 as pb

FACTOR = 200  # bytes of memory for one of input: a Python object for each few bytes of JSON


@cache
def examples(name: str) -> list[bytes]:
    """What a decoder is meant for. It has read that once: libraries are loaded then, and kernels compiled."""
    found = DECODERS[name].examples()
    for data in found:
        with suppress(*DECODERS[name].refusals):
            DECODERS[name].read(data)
    return found


def taken(decoder: Decoder, data: bytes) -> bool:
    """Whether the decoder takes these bytes; fails if it raises what it must not, or takes much memory."""
    tracemalloc.start()
    try:
        decoder.read(data)
    except decoder.refusals as error:
        assert str(error)
        return False
    finally:
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert most < FACTOR * len(data) + decoder.memory, f"{most} bytes of memory for {len(data)} bytes"
    return True


@pytest.mark.parametrize("name", DECODERS)
def test_what_a_decoder_is_meant_for_it_takes(name: str) -> None:
    assert any([taken(DECODERS[name], data) for data in examples(name)])


@pytest.mark.parametrize("name", DECODERS)
def test_deep_odd_and_earlier_inputs_are_taken_or_refused(name: str) -> None:
    examples(name)
    for data in (*DEEP, *ODD, *corpus.inputs(name)):
        taken(DECODERS[name], data)


def spoiled(name: str, most: int) -> Callable[[], None]:
    decoder = DECODERS[name]
    near = st.sampled_from(examples(name)).flatmap(nearly)

    @settings(max_examples=most)
    @given(st.one_of(near, near, st.binary(max_size=200)))
    def check(data: bytes) -> None:
        taken(decoder, data)

    return check


@pytest.mark.parametrize("name", DECODERS)
def test_spoiled_bytes_are_taken_or_refused(name: str) -> None:
    spoiled(name, 40)()


@pytest.mark.long
@pytest.mark.parametrize("name", DECODERS)
def test_many_spoiled_bytes_are_taken_or_refused(name: str) -> None:
    spoiled(name, 200 if name == "coordinator" else 2000)()


NODES = st.integers(0, MEMBERS + 1).map(lambda i: NodeId(f"n{i}"))
LENGTHS = st.one_of(st.sampled_from([0.0, 5e-324, 1e-300, 2.0**-149, 1e-30, 1.0, 1e15, 1e30]), FLOATS)
SHARES = st.one_of(st.sampled_from([5e-324, 1e-300, 1e-30, 0.5, 1.0]), st.floats(0, 1), FLOATS)
STEPS = st.one_of(
    st.just("tick"),
    st.just("behave"),
    st.tuples(NODES, messages(pb.ReportRequest), st.booleans()),
    st.tuples(NODES, messages(pb.ReportRequest), st.just(True)),
)


@settings(max_examples=30)
@given(st.integers(0, 12), st.lists(STEPS, max_size=20))
def test_any_reports_of_members_in_any_order_leave_the_state_sound_and_the_run_going(
    rounds: int, steps: list[str | tuple[NodeId, pb.ReportRequest, bool]]
) -> None:
    reported(rounds, steps)


def reported(behaved: int, steps: list[str | tuple[NodeId, pb.ReportRequest, bool]]) -> None:
    edge = Edge()
    for _ in range(behaved):
        edge.behave()
    for step in steps:
        if step == "tick":
            edge.tick()
        elif isinstance(step, str):
            edge.behave()
        else:
            node, request, current = step
            edge.report(node, fenced(request, edge.fence) if current else request)
    edge.end()


@settings(max_examples=100)
@given(st.integers(0, 12), st.lists(st.tuples(LENGTHS, SHARES), min_size=12, max_size=40))
def test_any_numbers_in_what_members_are_asked_for_leave_plans_that_can_be_carried_out(
    before: int, told: list[tuple[float, float]]
) -> None:
    edge = Edge()
    for _ in range(before):
        edge.behave()
    for number, (x, y) in enumerate(told):
        edge.tell(NodeId(f"n{number % MEMBERS + 1}"), x, y)
        if number % 12 == 11:  # what was refused is told well
            edge.tick(2.0)
            edge.behave()
    edge.end()
