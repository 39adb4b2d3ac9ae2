"""Whatever bytes come from elsewhere: each decoder takes them, or refuses them with one of the errors that its
callers know, and takes memory in proportion to them."""

import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from functools import cache

import pytest
from fuzz import corpus
from fuzz.decoders import DECODERS, DEEP, ODD, Decoder
from fuzz.edge import MEMBERS, Edge, fenced, play, script
from hostile import FLOATS, messages, nearly
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.comm.evidence import Offence
from atoll.comm.ids import NodeId
from atoll.comm.proto import atoll_pb2 as pb
from atoll.coordinator.state_machine.audit_voices import VoiceKind

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
    spoiled(name, 8 if name == "coordinator" else 40)()


@pytest.mark.long
@pytest.mark.parametrize("name", DECODERS)
def test_many_spoiled_bytes_are_taken_or_refused(name: str) -> None:
    spoiled(name, 60 if name == "coordinator" else 600)()


NODES = st.integers(0, MEMBERS + 1).map(lambda i: NodeId(f"n{i}"))
LENGTHS = st.one_of(st.sampled_from([0.0, 5e-324, 1e-300, 2.0**-149, 1e-30, 1.0, 1e15, 1e30]), FLOATS)
SHARES = st.one_of(st.sampled_from([5e-324, 1e-300, 1e-30, 0.5, 1.0]), st.floats(0, 1), FLOATS)
# Bits that differ in what is signed: one of the first digest, one anywhere, any.
BITS = st.one_of(
    st.integers(4, 19).map(lambda at: bytes(at) + b"\1"),
    st.integers(0, 600).map(lambda at: bytes(at) + b"\1"),
    st.binary(max_size=40),
)
SHOWN = st.one_of(st.just(b"\0"), st.just(b"\0"), BITS)  # more often than not as it was signed
ANSWERS = st.builds(
    pb.AuditReported,
    chunk=st.integers(0, 3),
    digest=st.one_of(st.just(b""), st.binary(min_size=16, max_size=16)),
    receipts=st.lists(SHOWN, max_size=2),
    silent=st.one_of(st.just([]), st.just([]), st.lists(st.integers(0, MEMBERS), max_size=2)),
    shown=st.one_of(st.just(b""), SHOWN),
    relay=st.one_of(st.just(0), st.just(0), st.integers(0, MEMBERS)),
)
Step = Callable[[Edge], None]
LIES: st.SearchStrategy[Step] = st.one_of(
    st.builds(lambda first, said: lambda edge: edge.answer(first, said), st.integers(0, MEMBERS), ANSWERS),
    st.builds(lambda first, said: lambda edge: edge.answer(first, said), st.integers(0, MEMBERS), ANSWERS),
    st.builds(lambda n: lambda edge: edge.forge(n), NODES),
    st.builds(lambda n, bits: lambda edge: edge.sign_otherwise(n, bits), NODES, BITS),
)
STEPS: st.SearchStrategy[Step] = st.one_of(
    st.just(Edge.tick),
    st.just(Edge.behave),
    st.builds(lambda n, said: lambda edge: edge.report(n, said), NODES, messages(pb.ReportRequest)),
    st.builds(
        lambda n, said: lambda edge: edge.report(n, fenced(said, edge.fence)), NODES, messages(pb.ReportRequest)
    ),
    LIES,
)


def reached(most: int, behaved: int, steps: st.SearchStrategy[list[Step]]) -> Edge:
    """Take such steps after good behaviour, in many runs; all that they reached, as if in one."""
    total = Edge()

    @settings(max_examples=most)
    @given(st.integers(0, behaved), steps)
    def take(before: int, steps: list[Step]) -> None:
        edge = Edge()
        for step in [Edge.behave] * before + steps:
            step(edge)
        edge.end()
        total.voices.update(edge.voices)
        total.convicted |= edge.convicted
        total.replays += edge.replays

    take()
    return total


def test_any_reports_of_members_in_any_order_leave_the_state_sound_and_the_run_going() -> None:
    total = reached(30, 20, st.lists(STEPS, max_size=20))
    assert {VoiceKind.WELL, VoiceKind.FALSE} <= total.voices.keys() and total.replays, total.voices


def audited(step: Step) -> Step:
    """The step, once a member is to answer an audit."""

    def take(edge: Edge) -> None:
        for _ in range(30):
            if edge.audit is not None:
                break
            edge.behave()
            edge.tick()
        step(edge)

    return take


@pytest.mark.long
def test_any_answers_to_audits_convict_nobody_that_does_what_it_is_asked_to() -> None:
    total = reached(150, 4, st.lists(LIES.map(audited), min_size=1, max_size=8))
    proofs = {VoiceKind.TWO_INPUTS, VoiceKind.UNSOUND}  # which take two members: the script below has them
    assert total.voices.keys() >= COME_TO - proofs and total.replays, total.voices
    assert Offence.FORGED_SEAL in total.convicted


COME_TO = {*VoiceKind} - {VoiceKind.RELAY}  # of a run whose members are all of one region


def test_the_script_of_the_coordinators_edge_reaches_all_that_audits_come_to() -> None:
    edge = play(script())
    assert edge.voices.keys() == COME_TO and edge.replays
    assert edge.convicted == {Offence.FORGED_SEAL, Offence.FORGED_INPUT}


@settings(max_examples=50)
@given(st.integers(0, 12), st.lists(st.tuples(LENGTHS, SHARES), min_size=12, max_size=40))
def test_any_numbers_in_what_members_are_asked_for_leave_plans_that_can_be_carried_out(
    before: int, told: list[tuple[float, float]]
) -> None:
    edge = Edge()
    for _ in range(before):
        edge.behave()
    for number, (x, y) in enumerate(told):
        edge.tell(NodeId(f"n{number % (MEMBERS - 1) + 1}"), x, y)
        if number % 12 == 11:  # what was refused is told well
            edge.tick(2.0)
            edge.behave()
    edge.end()
