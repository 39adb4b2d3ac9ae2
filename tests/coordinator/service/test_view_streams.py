"""Who gets a view, and which one."""

import asyncio
import random
from typing import cast

import pytest
import scenario
from scenario import CONFIG, Run

from atoll.comm.config.run import CheckpointConfig
from atoll.comm.ids import NodeId
from atoll.comm.proto import atoll_pb2 as pb
from atoll.comm.replace import replace
from atoll.coordinator.service import view, view_dispatch
from atoll.coordinator.service.event_loop import EventLoop
from atoll.coordinator.service.metrics import Metrics
from atoll.coordinator.service.roster import no_key
from atoll.coordinator.service.view_dispatch import VersionedView, ViewDispatch
from atoll.coordinator.service.view_streams import StreamReader, ViewStreams
from atoll.coordinator.state_machine import events as ev
from atoll.coordinator.state_machine.state import State
from atoll.coordinator.state_machine.step import step

ADA = NodeId("n1")


def test_a_slow_reader_gets_the_latest_view_and_none_of_those_in_between() -> None:
    async def story() -> list[int]:
        common, reader = view.common_view(State(CONFIG)), StreamReader(ViewDispatch(State(CONFIG)), ADA, 1, b"")
        mine = view.node_view(State(CONFIG), common, ADA)
        views, stream = reader.views(), reader.stream
        versions = []
        for latest in (3, 7):
            for version in range(latest - 2, latest + 1):
                stream.set_view(VersionedView(common, mine, version))
            versions.append(pb.View.FromString(await anext(views)).version)
        stream.set_view(VersionedView(common, mine, 9))
        stream.end()
        return [*versions, *[pb.View.FromString(raw).version async for raw in views]]

    assert asyncio.run(story()) == [3, 7, 9]


class StateAlone:
    """As much of the event loop as streams of views go by."""

    draining = False

    def __init__(self, state: State) -> None:
        self.state = state

    def crowd(self) -> None:
        pass


def test_a_roster_that_is_due_before_a_reason_that_was_held_back_is_shown_when_it_is_due() -> None:
    """Else who joins a large run is refused by members that have not heard of it."""
    names = [f"m{i}" for i in range(view_dispatch.MANY_STREAMS + 1)]
    play = Run()
    play.do("join", names)
    nodes = tuple(play.state.members.here)

    async def story() -> tuple[float | None, float | None]:
        loop = StateAlone(play.state)
        streams = ViewStreams(cast(EventLoop, loop), Metrics(), no_key)
        for node in nodes:
            streams.open(node, 1, b"")

        async def show(reason: str, joins: str = "") -> float | None:
            play.do("knock", [joins] if joins else [])
            loop.state = replace(play.state, round=replace(play.state.round, reason=reason))
            await streams.update()
            return streams.update_due

        await show("it waits")
        assert await show("it waits", "first") is None, "both are shown at once the first time"
        return await show("it waits for another reason"), await show("it waits for another reason", "second")

    reason_at, due = asyncio.run(story())
    assert reason_at is not None and due is not None and due < reason_at


def draw(rng: random.Random, state: State, node: NodeId) -> ev.Event:
    """Something that `node` may say in this state, or that is said of it."""
    life, r, lease = 1, state.round, state.leases.by_node.get(node, ())
    member = state.members.here.get(node) or state.members.departed.get(node)
    life = member.life if member is not None else 0
    said: list[ev.Event] = [
        ev.Joined(node, life + 1, str(node), f"{node}:1", f"session of {node}"),
        ev.Connected(node, life),
        ev.Disconnected(node, life),
        ev.Suspected(node, life, "silent"),
        ev.SuspicionCleared(node, life),
        ev.Expired(node, life, "silent"),
        ev.Leaving(node, life, "bye"),
    ]
    usual: list[ev.Event] = [
        ev.LayoutReported(node, life, 40, b"layout"),
        ev.StateReported(node, life, state.committed, b"state"),
        ev.StepsReached(node, life, r.number),
        ev.LossEvaluated(node, life, state.committed, 3.0),
        ev.Tick(),
    ]
    if lease:
        usual.append(
            ev.ContributionReady(
                node, life, r.number, ev.Contribution(1, rng.choice((4, 10)), 2.0, 1.0, lease[0][0])
            )
        )
    if r.plan is not None:
        owned = tuple((c, bytes(16), b"\xff") for c, owner in enumerate(r.ledger.owners) if owner == node)
        root = r.ledger.root if r.ledger.complete else bytes(16)
        usual += [
            ev.ChunksSealed(node, life, r.plan.fence, owned, scenario.norms_of(r.ledger, owned)),
            ev.ReduceComplete(node, life, r.plan.fence, root, 1, 1),
        ]
    return rng.choice(usual if rng.random() < 0.97 else said)


def parts(common: view.CommonView) -> tuple[object, ...]:
    return common.facts, common.train, common.plan, common.donors, common.keepers


def play(seed: int) -> int:
    """Draw events, and hold what is worked out for a few nodes against all; return how many rounds committed."""
    rng, now = random.Random(seed), 0.0
    config = replace(CONFIG, checkpoint=CheckpointConfig(copies=seed % 3))
    nodes = [NodeId(f"n{i}") for i in range(1, 5)]
    state, _ = step(State(config), ev.Started(1), now)
    for node in nodes:
        for event in (ev.Joined(node, 1, str(node), f"{node}:1", f"session of {node}"), ev.Connected(node, 1)):
            state, _ = step(state, event, now)
    common = view.common_view(state)
    own = {node: view.node_view(state, common, node) for node in nodes}
    for _ in range(400):
        now += rng.choice((0.0, 0.1, 1.0))
        before, old, was = state, common, own
        for _ in range(rng.randrange(1, 4)):
            state, _ = step(state, draw(rng, state, rng.choice(nodes)), now)
        common = view.common_view(state, old)
        assert parts(common) == parts(view.common_view(state))
        own = {node: view.node_view(state, common, node) for node in nodes}
        touched = view.affected_nodes(before, state)
        if touched is not None and parts(common) == parts(old):
            assert {node for node in nodes if own[node] != was[node]} <= touched
    return state.committed


@pytest.mark.long
@pytest.mark.parametrize("seed", range(0, 60, 10))
def test_who_is_not_touched_by_an_event_needs_no_new_view(seed: int) -> None:
    assert sum(play(k) for k in range(seed, seed + 10)) > 0


def test_so_many_nodes_keep_copies_as_the_run_says_and_first_those_that_can_be_dialled() -> None:
    state = State(replace(CONFIG, checkpoint=CheckpointConfig(copies=2)))
    for i, (leaf, role) in enumerate([(False, "reducer"), (True, ""), (False, ""), (False, ""), (False, "")], 1):
        node = NodeId(f"n{i}")
        state, _ = step(state, ev.Joined(node, 1, node, f"{node}:1", node, leaf, role), 0.0)

    def keepers() -> list[str]:
        return [node for node in state.members.here if view.view(state, node).keeps]

    assert keepers() == ["n3", "n4"]
    state, _ = step(state, ev.Leaving(NodeId("n3"), 1, "bye"), 1.0)
    assert keepers() == ["n4", "n5"]
    state, _ = step(state, ev.Leaving(NodeId("n5"), 1, "bye"), 1.0)
    assert keepers() == ["n2", "n4"]
    state = replace(state, config=CONFIG)
    assert keepers() == ["n2", "n4"], "all but the reducer"


def test_who_keeps_copies_sends_them_to_the_remote_store_in_turn() -> None:
    state = State(replace(CONFIG, checkpoint=CheckpointConfig(remote="s3://bucket", copies=2)))
    for i in range(1, 7):
        state, _ = step(state, ev.Joined(NodeId(f"n{i}"), 1, f"n{i}", f"n{i}:1", f"n{i}", i == 1), 0.0)

    def turns() -> dict[str, int]:
        found = {node: view.view(state, node).upload for node in state.members.here}
        return {node: turn for node, turn in found.items() if turn}

    assert turns() == {"n2": 1, "n3": 2}
    state, _ = step(state, ev.Leaving(NodeId("n2"), 1, "bye"), 1.0)
    assert turns() == {"n3": 1, "n4": 2}
    state = replace(state, config=replace(CONFIG, checkpoint=CheckpointConfig(remote="s3://bucket")))
    assert turns() == {"n3": 1, "n4": 2, "n5": 3, "n6": 4}
    assert not view.view(replace(state, config=CONFIG), NodeId("n3")).upload


def told(state: State, node: str) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """From whom, and at which address, `node` gets the state; and whom it dials to offer it."""
    seen = view.view(state, NodeId(node))
    return [(d.node_id, d.address) for d in seen.donors], [(d.node_id, d.address) for d in seen.serve]


def test_where_only_leaves_have_the_state_they_dial_those_who_need_it_or_pass_it_on() -> None:
    play = Run()
    for command in ("leaf a b c", "begin a b e", "commit", "leave e"):
        play.do(command.split()[0], command.split()[1:])
    assert told(play.state, "n1") == ([], []) and told(play.state, "n2") == ([], [])
    play.do("join", ["c"])
    assert told(play.state, "n4") == told(play.state, "n1") == ([], [])  # there is nobody to pass it on
    play.do("join", ["d"])
    assert told(play.state, "n5") == ([("n5", "")], [])
    assert told(play.state, "n4") == ([("n5", "d:1")], [])
    assert told(play.state, "n1") == told(play.state, "n2") == ([], [("n5", "d:1")])
    play.do("state", ["d", str(play.state.committed)])
    assert told(play.state, "n4") == ([("n5", "d:1")], []) and told(play.state, "n1") == ([], [])


def test_who_is_left_hears_that_nobody_has_the_state_any_more() -> None:
    play = Run()
    for command in ("join a b", "begin a b", "commit"):
        play.do(command.split()[0], command.split()[1:])
    play.do("join", ["c"])
    c = NodeId("n3")
    assert not view.view(play.state, c).lost
    play.do("leave", ["a"])
    play.do("leave", ["b"])
    assert view.view(play.state, c).lost


def test_who_cannot_make_the_first_state_that_leaves_have_is_offered_it() -> None:
    play = Run()
    for command in ("leaf a b c", "join a"):
        play.do(command.split()[0], command.split()[1:])
    play.feed(ev.Joined(NodeId("n2"), 1, "r", "r:1", "session of r", role="reducer"))
    play.feed(ev.Connected(NodeId("n2"), 1))
    play.do("state", ["a", "0"])
    play.do("join", ["b", "c"])
    assert view.view(play.state, NodeId("n3")).initialise and view.view(play.state, NodeId("n4")).initialise
    assert told(play.state, "n1") == told(play.state, "n3") == ([], [])
    play.do("state", ["b", "0"])
    play.do("state", ["c", "0", "as=another machine's"])
    assert not any(view.view(play.state, NodeId(n)).initialise for n in ("n1", "n3", "n4"))
    assert told(play.state, "n4") == ([("n2", "r:1")], [])
    assert told(play.state, "n1") == told(play.state, "n3") == ([], [("n2", "r:1")])


def test_a_leaf_hears_at_once_that_it_is_to_offer_the_state() -> None:
    """Also where nothing else that all are told has changed."""

    play = Run()
    for command in ("leaf a b c", "reducer r", "join a r", "state a 0", "join b", "state b 0", "join c"):
        play.do(command.split()[0], command.split()[1:])
    dispatch = ViewDispatch(play.state)
    streams = {n: dispatch.open(NodeId(n), 1, lambda: None) for n in ("n1", "n2", "n3", "n4")}
    assert len(list(dispatch.update(play.state, 0.0))) == 4
    play.do("state", ["c", "0", "as=another machine's"])
    assert streams["n1"] in list(dispatch.update(play.state, 0.0))
    latest = streams["n1"].latest
    assert latest is not None and [d[0] for d in latest.mine.serve] == ["n2"]


def test_leaves_offer_the_state_to_a_member_that_the_round_was_committed_without() -> None:
    """It can be dialled, and is a round behind, as those are who are about to apply it; but it holds nothing."""
    play = Run()
    for command in (
        "leaf a b",
        "reducer r",
        "join r",
        "reducing a b c",
        "seal r",
        "wait 61",
        "seal r",
        "held a b",
    ):
        play.do(command.split()[0], command.split()[1:])
    assert play.state.committed == 1
    play.do("state", ["a", "b", "1"])
    assert told(play.state, "n2") == told(play.state, "n3") == ([], [("n1", "r:1"), ("n4", "c:1")])
    assert told(play.state, "n4") == ([("n4", "")], [])


def test_leaves_go_on_offering_while_they_apply_the_next_round() -> None:
    """Else they would dial anew with each round, and where rounds are short never be there when they are asked."""
    play = Run()
    for command in ("leaf a b c", "begin a b", "join c"):
        play.do(command.split()[0], command.split()[1:])
    play.feed(ev.Joined(NodeId("n4"), 1, "r", "r:1", "session of r", role="reducer"))
    play.feed(ev.Connected(NodeId("n4"), 1))

    def commit() -> None:
        play.steps()
        play.do("seal", ["r"])
        play.do("reduce", [])

    commit()
    play.do("state", ["a", "b", "1"])
    offered = told(play.state, "n1")
    assert offered == told(play.state, "n2") == ([], [("n4", "r:1")])
    commit()
    assert play.state.committed == 2 and not play.state.state_held
    assert told(play.state, "n3") == ([("n4", "r:1")], [])
    for node in ("n1", "n2"):
        assert told(play.state, node)[1] == offered[1]
