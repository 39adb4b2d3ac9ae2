"""What a session that is no member's is answered."""

import pytest
from scenario import CONFIG

from atoll.comm.errors import Refused
from atoll.comm.ids import NodeId, PublicKey
from atoll.comm.replace import replace
from atoll.coordinator.service.sessions import SessionDirectory, session_of
from atoll.coordinator.state_machine import events as ev
from atoll.coordinator.state_machine import members as who
from atoll.coordinator.state_machine.state import State
from atoll.coordinator.state_machine.step import step

ADA = NodeId("n1")
KEY, ANOTHER = PublicKey(b"the key of ada"), PublicKey(b"another key")


def joined(state: State, life: int) -> State:
    state, _ = step(state, ev.Joined(ADA, life, "ada", "ada:1", "s3cret", key=KEY), float(life))
    return state


def newest(_: NodeId) -> int:
    return 7


def test_a_member_hears_of_its_newest_view_and_anybody_else_why_it_is_none() -> None:
    first = joined(replace(State(CONFIG), incarnation=3), 1)
    sessions, session = SessionDirectory(first.members), session_of(first.members.here[ADA])
    ack = sessions.ack(session, first, newest)
    assert (ack.known, ack.incarnation, ack.version) == (True, 3, 7)
    assert sessions.ack("another.1", first, newest).reason == "the session is not a member's"
    again = joined(first, 2)
    assert sessions.ack(session, again, newest).reason == "n1 has joined again since: this session is over"
    gone, _ = step(first, ev.Leaving(ADA, 1, "its operator stopped it"), 3.0)
    assert not sessions.ack(session, gone, newest).known
    assert sessions.ack(session, gone, newest).reason == gone.members.departed[ADA].reason != ""


def test_a_node_that_was_forgotten_joins_as_a_new_one_under_the_secret_it_brings() -> None:
    state = joined(State(CONFIG), 1)
    sessions = SessionDirectory(state.members)
    assert sessions.admission("s3cret.1", KEY, state.members, "fresh").node == ADA
    members = who.forget(who.remove(state.members, ADA, who.MemberState.LEFT, "bye"), {ADA})
    admission = sessions.admission("s3cret.1", KEY, members, "s3cret")
    assert (admission.node, admission.life, admission.secret) == ("n2", 1, "s3cret")


def test_a_node_has_one_key_for_its_life_and_a_key_is_one_nodes() -> None:
    state, _ = step(joined(State(CONFIG), 1), ev.Connected(ADA, 1), 2.0)
    sessions = SessionDirectory(state.members)
    with pytest.raises(Refused, match="n1 has another key than the one in this state directory"):
        sessions.admission("s3cret.1", ANOTHER, state.members, "fresh")
    with pytest.raises(Refused, match="n1 .ada. is a member with the key of this state directory"):
        sessions.admission("unknown.1", KEY, state.members, "fresh")
    assert sessions.admission("unknown.1", ANOTHER, state.members, "fresh").node == "n2"


def test_who_is_not_connected_and_lost_its_session_comes_back_by_its_key() -> None:
    away = joined(State(CONFIG), 1)
    for state in (away, step(away, ev.Leaving(ADA, 1, "bye"), 3.0)[0]):
        admission = SessionDirectory(state.members).admission("unknown.1", KEY, state.members, "fresh")
        assert (admission.node, admission.life, admission.secret) == (ADA, 2, "fresh")


def test_a_node_of_a_journal_without_keys_brings_the_first_one() -> None:
    state, _ = step(State(CONFIG), ev.Joined(ADA, 1, "ada", "ada:1", "s3cret"), 1.0)
    assert SessionDirectory(state.members).admission("s3cret.1", KEY, state.members, "fresh").node == ADA


def test_a_node_has_one_secret_however_often_it_comes_back_by_its_key() -> None:
    state = joined(State(CONFIG), 1)
    sessions = SessionDirectory(state.members)
    for life in range(2, 30):
        admission = sessions.admission(f"unknown{life}.1", KEY, state.members, f"secret{life}")
        assert (admission.node, admission.life) == (ADA, life)
        event = ev.Joined(ADA, life, "ada", "ada:1", admission.secret, key=KEY)
        state, _ = step(state, event, float(life))
        earlier = f"secret{life - 1}" if life > 2 else "s3cret"
        sessions.enter(admission.secret, ADA)
        assert sessions.holder(earlier, state.members) is None, "as after a restart of the coordinator"
        assert sessions.member(session_of(state.members.here[ADA]), state.members) is not None
    again = SessionDirectory(state.members)
    assert vars(sessions) == vars(again), "what is kept is what a restart rebuilds"


def test_a_secret_that_is_entered_again_stays() -> None:
    state = joined(State(CONFIG), 1)
    sessions = SessionDirectory(state.members)
    sessions.enter("s3cret", ADA)
    assert sessions.holder("s3cret.1", state.members) is not None
