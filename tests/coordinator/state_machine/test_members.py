"""Membership where a transcript would be too long: many members, and verdicts of drawn moments."""

import random

import pytest

from atoll.comm.config.run import MembersConfig, RunConfig
from atoll.comm.ids import NodeId
from atoll.comm.replace import replace
from atoll.coordinator.state_machine import events as ev
from atoll.coordinator.state_machine import members
from atoll.coordinator.state_machine.members import MAX_DEPARTED, MemberState
from atoll.coordinator.state_machine.state import State
from atoll.coordinator.state_machine.step import step

CONFIG = RunConfig(members=MembersConfig(lease=10.0, reconnect=2.0, stall=30.0))


def joined(state: State, node: NodeId, now: float = 0.0) -> State:
    for event in (ev.Joined(node, 1, str(node), f"{node}:1", f"session of {node}"), ev.Connected(node, 1)):
        state, _ = step(state, event, now)
    return state


def test_who_went_longest_ago_is_forgotten_when_too_many_are_gone() -> None:
    first = NodeId("n1")
    state = joined(State(CONFIG), first)
    for event in (ev.LayoutReported(first, 1, 40, b"layout"), ev.StateReported(first, 1, 0, b"state")):
        state, _ = step(state, event, 0.0)
    lease = state.leases.by_node[first]
    state, _ = step(state, ev.Expired(first, 1, "silent"), 1.0)
    for i in range(2, MAX_DEPARTED + 2):
        assert first in state.members.departed and state.leases.by_node == {first: lease}, "it may still come back"
        node = NodeId(f"n{state.members.next_id}")
        assert node == f"n{i}"
        state, _ = step(joined(state, node), ev.Leaving(node, 1, "bye"), 1.0)
    assert first not in state.members.departed and len(state.members.departed) == MAX_DEPARTED
    assert state.leases.free == lease and not state.leases.by_node


@pytest.mark.parametrize("seed", range(20))
def test_a_verdict_that_was_taken_is_not_given_again(seed: int) -> None:
    """So the journal has one line for each change of mind, not one a tick."""
    rng = random.Random(seed)
    state, now, awaited = State(CONFIG), 100.0, set[NodeId]()
    for i in range(1, 9):
        node = NodeId(f"n{i}")
        state = joined(state, node)
        member = replace(
            state.members.here[node],
            connected=rng.random() < 0.5,
            heard_at=now - rng.uniform(0, 12),
            moved_at=now - rng.uniform(0, 33),
            suspect_at=now - rng.uniform(-3, 3),
            expire_at=now - rng.uniform(-9, 1),
            state=MemberState.SYNCED,
            suspected=rng.choice([None, "it is silent"]),
        )
        awaited |= {node} if rng.random() < 0.5 else set()
        state = replace(state, members=replace(state.members, here=state.members.here | {node: member}))
    verdicts = members.judge(state.members, CONFIG.members, awaited, now)
    for verdict in verdicts:
        state, effects = step(state, verdict, now)
        assert effects, "and each is told"
    assert not members.judge(state.members, CONFIG.members, awaited, now)


@pytest.mark.parametrize("seed", range(5))
def test_a_member_that_is_heard_and_moves_is_never_judged(seed: int) -> None:
    rng = random.Random(seed)
    node, now = NodeId("n1"), 0.0
    state, _ = step(joined(State(CONFIG), node), ev.Stepped(node, 1), now)
    for i in range(200):
        now += rng.uniform(0, 4.9)
        state, _ = step(state, ev.Heartbeat(node, 1, "inner", 1, i), now)
        assert not members.judge(state.members, CONFIG.members, {node}, now)


def test_the_first_step_of_a_life_is_entered_once_and_what_an_earlier_one_took_is_none() -> None:
    node, limits = NodeId("n1"), CONFIG.members
    state = joined(State(CONFIG), node)
    for beat, verdicts in (((0, 7), []), ((3, 0), []), ((3, 5), [ev.Stepped(node, 1)])):
        state, _ = step(state, ev.Heartbeat(node, 1, "inner", *beat), 1.0)
        assert members.judge(state.members, limits, (), 1.0) == verdicts, beat
    state, _ = step(state, ev.Stepped(node, 1), 1.0)
    assert not members.judge(state.members, limits, (), 1.0) and state.members.here[node].stepped
    state, _ = step(state, ev.Joined(node, 2, str(node), f"{node}:1", f"session of {node}"), 1.0)
    assert not state.members.here[node].stepped
    for beat, verdicts in (((3, 5), []), ((3, 6), [ev.Stepped(node, 2)])):
        state, _ = step(state, ev.Heartbeat(node, 2, "inner", *beat), 2.0)
        assert members.judge(state.members, limits, (), 2.0) == verdicts, "the hung trainer may be the same"


def test_a_pause_is_entered_once_and_its_end_is_no_step() -> None:
    node, limits = NodeId("n1"), CONFIG.members
    state, _ = step(joined(State(CONFIG), node), ev.Stepped(node, 1), 0.0)
    for now, says, verdicts in (
        (10.0, True, [ev.Paused(node, 1)]),
        (11.0, True, []),
        (12.0, False, [ev.Resumed(node, 1)]),
        (13.0, False, []),
        (13.5, True, []),  # too soon: it is idle anyway
        (16.0, True, [ev.Paused(node, 1)]),
    ):
        state, _ = step(state, ev.Heartbeat(node, 1, "inner", 4, 7, says), now)
        assert members.judge(state.members, limits, (), now) == verdicts, now
        for verdict in verdicts:
            state, _ = step(state, verdict, now)
        assert state.members.idle == {node}, "it has taken no step since"
    state, _ = step(state, ev.Heartbeat(node, 1, "inner", 4, 8), 17.0)
    found = members.judge(state.members, limits, (), 17.0)
    assert found == [ev.Stepped(node, 1), ev.Resumed(node, 1)]


def test_that_a_member_saves_bytes_is_entered_at_once_and_its_end_and_no_more_often_than_pauses_are() -> None:
    node, limits = NodeId("n1"), CONFIG.members
    state, _ = step(joined(State(CONFIG), node), ev.Stepped(node, 1), 0.0)
    for now, paused, saves, verdicts in (
        (10.0, True, False, [ev.Paused(node, 1)]),
        (11.0, True, True, []),  # too soon after the pause
        (15.0, True, True, [ev.Paused(node, 1, True)]),
        (16.0, True, True, []),
        (17.0, True, False, [ev.Paused(node, 1)]),
        (18.0, True, True, []),  # too soon after it began the last time
        (20.0, True, True, [ev.Paused(node, 1, True)]),
        (21.0, False, False, [ev.Resumed(node, 1)]),
        (30.0, False, True, [ev.Paused(node, 1, True)]),  # who exchanges nothing takes no steps
    ):
        state, _ = step(state, ev.Heartbeat(node, 1, "inner", 4, 7, paused, saves), now)
        assert members.judge(state.members, limits, (), now) == verdicts, now
        for verdict in verdicts:
            state, _ = step(state, verdict, now)
        member = state.members.here[node]
        assert (node in state.members.saving) == member.saves_bytes <= member.paused
    state, _ = step(state, ev.Leaving(node, 1, "enough"), 31.0)
    assert not state.members.saving


def test_a_reducer_that_was_paused_is_waited_for_no_more_than_before() -> None:
    node = NodeId("n1")
    state, _ = step(State(CONFIG), ev.Joined(node, 1, "rex", "n1:1", "session", role=members.REDUCER), 0.0)
    before = state.members.here[node]
    for event in (ev.Paused(node, 1, True), ev.Resumed(node, 1)):
        state, _ = step(state, event, 10.0)
    assert replace(state.members.here[node], paused_at=before.paused_at) == before and not state.members.idle


def test_a_suspect_goes_on_in_its_state_and_is_shown_as_a_suspect_with_the_reason() -> None:
    node = NodeId("n1")
    state, _ = step(joined(State(CONFIG), node), ev.Suspected(node, 1, "it is silent for 6 s"), 6.0)
    member = state.members.here[node]
    assert (member.state, member.shown_state) == (MemberState.JOINING, "suspect")
    assert member.shown_reason == "it is silent for 6 s" and member.reason == "starting its trainer"
    assert state.members.suspects == {node} and not state.members.of(MemberState.JOINING)
    state, _ = step(state, ev.LayoutReported(node, 1, 40, b"layout"), 6.1)
    assert state.members.here[node].shown_state == "suspect", "a report is no heartbeat"
    state, _ = step(state, ev.SuspicionCleared(node, 1), 6.2)
    member = state.members.here[node]
    assert (member.state, member.shown_state, member.shown_reason) == (
        MemberState.RECOVERING,
        "recovering",
        "fetches the live state",
    )
    assert not state.members.suspects and state.members.of(MemberState.RECOVERING) == (node,)
