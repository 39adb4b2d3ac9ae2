"""When a stream of views is woken, and when it ends; what the simulation does not show."""

from contextlib import closing

from scenario import Run

from atoll.comm.ids import NodeId
from atoll.comm.proto import atoll_pb2 as pb
from atoll.comm.replace import replace
from atoll.coordinator.service.view_dispatch import REASON_INTERVAL, ViewDispatch
from atoll.coordinator.state_machine.conduct import Evidence, Offence, charge
from atoll.coordinator.state_machine.state import State

ADA = NodeId("n1")


def played(*commands: str) -> State:
    play = Run()
    for command in commands:
        play.do(command.split()[0], command.split()[1:])
    return play.state


def for_another_reason(state: State, reason: str) -> State:
    return replace(state, round=replace(state.round, reason=reason))


def test_a_later_stream_of_a_node_ends_the_earlier_one_after_its_latest_view() -> None:
    state, woken = played("join a"), list[str]()
    dispatch = ViewDispatch(state)
    first = dispatch.open(ADA, 1, lambda: woken.append("first"))
    assert list(dispatch.update(state, 0.0)) == [first] and woken == ["first"]
    second = dispatch.open(ADA, 1, lambda: woken.append("second"))
    assert first.ended and woken == ["first", "first"]
    assert first.next() is not None and first.next() is None and not first.idle
    assert not dispatch.close(first), "the node has another"
    assert list(dispatch.update(state, 0.0)) == [second] and not second.ended
    assert second.next() is not None and second.next() is None and second.idle


def test_an_update_wakes_nobody_for_whom_nothing_changed() -> None:
    state = played("join a b")
    dispatch = ViewDispatch(state)
    for node in ("n1", "n2"):
        dispatch.open(NodeId(node), 1, lambda: None)
    assert len(list(dispatch.update(state, 0.0))) == 2
    assert not list(dispatch.update(state, 0.0)) and dispatch.version(ADA) == 1


def test_a_member_of_which_something_is_held_is_told_so() -> None:
    state = played("begin a b c")
    dispatch = ViewDispatch(state)
    streams = [dispatch.open(NodeId(node), 1, lambda: None) for node in ("n1", "n2")]
    list(dispatch.update(state, 0.0))
    for k in range(3):
        state = charge(state, ADA, Evidence(k, Offence.LATE, "it was late"), [])
    assert list(dispatch.update(state, 0.0)) == streams[:1]
    views = [pb.View.FromString(view.encode()) for view in iter(streams[0].next, None)]
    assert views[-1].penalty.startswith("this node merges no chunks before round")


def test_a_reason_alone_is_shown_at_most_once_in_its_interval_and_then_the_latest() -> None:
    state = played("join a")
    dispatch = ViewDispatch(state)
    stream = dispatch.open(ADA, 1, lambda: None)
    list(dispatch.update(for_another_reason(state, "one is ready"), 100.0))
    assert dispatch.update_at is None
    assert not list(dispatch.update(for_another_reason(state, "two are ready"), 100.5))
    assert dispatch.update_at == 100.0 + REASON_INTERVAL
    assert not list(dispatch.update(for_another_reason(state, "three are ready"), 101.0))
    assert list(dispatch.update(for_another_reason(state, "three are ready"), dispatch.update_at)) == [stream]
    latest = stream.next()
    assert latest is not None and pb.View.FromString(latest.encode()).reason == "three are ready"
    assert dispatch.update_at is None


def test_a_reason_that_is_what_is_shown_again_before_it_was_due_is_held_back_no_longer() -> None:
    """Else the dispatcher would be woken for it again and again."""
    state = played("join a")
    dispatch = ViewDispatch(state)
    stream = dispatch.open(ADA, 1, lambda: None)
    one, two = for_another_reason(state, "one is ready"), for_another_reason(state, "two are ready")
    assert list(dispatch.update(one, 100.0)) == [stream]
    assert not list(dispatch.update(two, 100.5)) and dispatch.update_at == 100.0 + REASON_INTERVAL
    assert not list(dispatch.update(one, 101.0)) and dispatch.update_at is None
    assert not list(dispatch.update(two, 101.5)) and dispatch.update_at == 100.0 + REASON_INTERVAL
    assert list(dispatch.update(two, 102.0)) == [stream]


def test_what_members_wait_for_is_urgent_and_who_was_not_reached_before_it_is_reached_by_the_next_update() -> None:
    state, reducing = played("begin a b c"), played("reducing a b c")
    dispatch = ViewDispatch(state)
    streams = [dispatch.open(NodeId(f"n{i}"), 1, lambda: None) for i in (1, 2, 3)]
    list(dispatch.update(state, 0.0))
    other = for_another_reason(state, "one is ready")
    assert not dispatch.is_urgent(other)
    with closing(dispatch.update(other, 100.0)) as shown:
        assert next(shown) is streams[0]
        assert dispatch.is_urgent(reducing)
    assert list(dispatch.update(other, 100.0)) == streams[1:], "the first has it"
    with closing(dispatch.update(reducing, 100.0)) as shown:
        first = next(shown)
        assert not dispatch.is_urgent(reducing)
    assert {first, *dispatch.update(reducing, 100.1)} == set(streams)
    views = [view for stream in streams if (view := stream.next()) is not None]
    assert [pb.View.FromString(view.encode()).phase for view in views] == ["reducing"] * 3


def test_who_is_last_to_have_a_plan_is_first_to_have_the_next_order() -> None:
    state, reducing = played("begin a b c"), played("reducing a b c")
    dispatch = ViewDispatch(state)
    streams = [dispatch.open(NodeId(f"n{i}"), 1, lambda: None) for i in (1, 2, 3)]
    assert list(dispatch.update(state, 0.0)) == streams
    assert list(dispatch.update(reducing, 1.0)) == streams[::-1]


def test_a_stream_of_a_node_that_has_the_roster_does_not_bring_it_again() -> None:
    state = played("join a b")
    dispatch = ViewDispatch(state, lambda number: b"key")
    first = dispatch.open(ADA, 1, lambda: None)
    list(dispatch.update(state, 0.0))
    told = [pb.View.FromString(view.encode()).roster for view in iter(first.next, None)][-1]
    assert [m.node_id for m in told.members] == ["n1", "n2"] and told.data_key
    for roster, members in ((told.digest, 0), (b"another", 2)):
        again = dispatch.open(ADA, 1, lambda: None, roster)
        list(dispatch.update(state, 0.0))
        said = [pb.View.FromString(view.encode()).roster for view in iter(again.next, None)][-1]
        assert said.digest == told.digest and len(said.members) == members and bool(said.data_key) is bool(members)


def test_streams_are_woken_in_the_order_in_which_their_nodes_joined() -> None:
    """The order of a set is another one in each process, and the simulation's seeds are to be repeatable."""
    state = played("join a b c d e f g h i j k l")
    dispatch = ViewDispatch(state)
    streams = [dispatch.open(NodeId(f"n{i}"), 1, lambda: None) for i in range(12, 0, -1)]
    assert list(dispatch.update(state, 0.0)) == streams[::-1]
