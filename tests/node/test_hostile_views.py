"""Whatever views a coordinator sends, in whatever order: the node's machine takes each in finite time, and a plan
is one that can be carried out, or refused with a sentence."""

import math
from itertools import product

import pytest
from google.protobuf.message import DecodeError
from hostile import messages, nearly
from hypothesis import event, given
from hypothesis import strategies as st

from atoll.comm.bitmap import bitmap
from atoll.comm.plan import NOBODY, InvalidPlan
from atoll.comm.proto import atoll_pb2 as pb
from atoll.node.control.reports import plan_of
from atoll.node.state_machine.events import (
    Event,
    MoveFailed,
    Rejoined,
    StateMoved,
    TrainerDown,
    TrainerSilent,
    TrainerUp,
    ViewArrived,
)
from atoll.node.state_machine.state import State
from atoll.node.state_machine.step import step
from atoll.node.trainer_channel import Evaluated, Reached, Ready, Waits

PHASES = st.sampled_from(["inner", "collecting", "reducing", "waiting", "finished", ""])
STATES = st.sampled_from(["active", "synced", "recovering", "evicted", ""])
SMALL = st.integers(0, 3)


@st.composite
def plausible(draw: st.DrawFn) -> pb.View:
    """A view of a run that is about where the node is, so that it is not just waited for."""
    view = draw(messages(pb.View))
    view.version, view.incarnation = draw(st.integers(0, 9)), 1
    view.phase, view.you, view.committed = draw(PHASES), draw(STATES), draw(SMALL)
    view.state_digest = draw(st.sampled_from([b"", b"state"]))
    view.has_state, view.finished = draw(st.booleans()), False
    view.train.round = draw(SMALL)
    if draw(st.booleans()):
        view.ClearField("plan")
    return view


def happenings(layout: pb.LayoutReported) -> list[Event]:
    """What may come of a node's trainer and of its effects, at any time."""
    return [
        *(TrainerUp(layout), TrainerDown(), TrainerSilent(99.0), Rejoined()),
        *(StateMoved(0, b"state"), StateMoved(1, b"other"), MoveFailed(-1)),
        *(Reached(1), Ready(1, 3, 2.0, 12, 1.0, True), Waits(1), Evaluated(1, 2.0)),
    ]


WHOLE, TURNS = pb.LayoutReported(numel=9), pb.LayoutReported(numel=9, fragments=[4, 5])
VIEWS = st.one_of(messages(pb.View), plausible()).map(ViewArrived)


@pytest.mark.long
@given(
    st.sampled_from([WHOLE, TURNS]).flatmap(lambda m: st.lists(VIEWS | st.sampled_from(happenings(m)), max_size=9))
)
def test_any_views_between_any_events_are_taken(events: list[Event]) -> None:
    state = State()
    for happened in events:
        state, effects = step(state, happened)
        assert len(effects) < 12
        assert state.phase


@given(nearly(pb.View(version=1, plan=pb.Plan(owners=[0, 1], kept=b"\x01")).SerializeToString()))
def test_bytes_that_are_no_view_are_noticed_as_such(data: bytes) -> None:
    try:
        view = pb.View.FromString(data)
    except DecodeError:
        return
    step(step(State(), TrainerUp(WHOLE))[0], ViewArrived(view))


CHANGES = ["gone", "owner", "relay", "kept", "region", "weight", "name"]


@st.composite
def nearly_plans(draw: st.DrawFn) -> pb.Plan:
    """In one or two levels; right, before something of it was changed."""
    count, chunks, layered = draw(st.integers(2, 4)), draw(st.integers(1, 3)), draw(st.booleans())
    members, near = range(count), [[i for i in range(count) if i % 2 == g] for g in (0, 1)]
    plan = pb.Plan(round=1, attempt=draw(SMALL), length=1.0)
    for i in members:
        plan.members.add(node_id=f"n{i}", weight=1.0, scale=1.0, norm=1.0)
    plan.owners.extend(draw(st.lists(st.sampled_from(members), min_size=chunks, max_size=chunks)))
    if layered:
        plan.layered = bitmap(range(chunks), chunks)
        plan.regions.extend(i % 2 for i in members)
        for g in (0, 1):
            plan.relays.extend(o if o % 2 == g else draw(st.sampled_from(near[g])) for o in plan.owners)
    for change in draw(
        st.lists(st.sampled_from(["gone", "owner", "relay", "kept", "region", "weight", "name"]), max_size=2)
    ):
        member = plan.members[draw(st.sampled_from(members))]
        place = draw(st.sampled_from([*members, NOBODY, count]))
        match change:
            case "gone":
                member.gone = True
            case "owner":
                plan.owners[0] = place
            case "relay" if layered:
                plan.relays[-1] = place
            case "kept":
                plan.kept = draw(st.sampled_from([b"\x01", b"\xff"]))
            case "region" if layered:
                plan.regions[-1] = draw(SMALL)
            case "weight":
                member.weight = draw(st.sampled_from([0.0, -1.0, 1e308, math.nan]))
            case "name":
                member.node_id = "n0"
    return plan


@given(st.one_of(messages(pb.Plan), nearly_plans()))
def test_any_plan_can_be_carried_out_or_is_refused_with_a_sentence(wire: pb.Plan) -> None:
    plan = plan_of(wire)
    try:
        plan.validate()
    except InvalidPlan as error:
        assert len(str(error)) > 20
        event("refused")
        return
    event("in two levels" if plan.layered else "flat")
    chunks, places = range(len(plan.owners)), range(len(plan.members))
    for c, place in product(chunks, places):
        destination = plan.destination(c, place)
        assert destination == NOBODY or not plan.members[destination].gone
        assert plan.relays_for(c, place) in (True, False)
    for place, member in enumerate(plan.members):
        assert len(plan.receive_shares(place)) == len(plan.members)
        assert member.gone or plan.index(member.node) == place
