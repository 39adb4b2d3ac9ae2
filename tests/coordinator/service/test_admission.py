"""Whose connections the members accept: told to members, and changed with the run's key when one is expelled."""

import asyncio
from pathlib import Path

from control_nodes import Code, coordinator, refused
from scenario import Run

from atoll.comm.ids import Epoch, Incarnation, NodeId, Round
from atoll.comm.plan import Fence
from atoll.comm.proto import atoll_pb2 as pb
from atoll.comm.replace import replace
from atoll.coordinator.service.data_keys import DataKeys
from atoll.coordinator.service.view_dispatch import LIST_INTERVAL_PER_VIEW, MANY_STREAMS, ViewDispatch
from atoll.coordinator.state_machine import events as ev
from atoll.coordinator.state_machine.conduct import Evidence, Offence, charge
from atoll.coordinator.state_machine.state import AttemptState, State
from atoll.coordinator.state_machine.step import step

ADA, BO, EVE = NodeId("n1"), NodeId("n2"), NodeId("n3")
KEYS = DataKeys(b"a secret of thirty-two bytes, or so")


def joined(*names: str) -> State:
    run = Run()
    run.do("join", list(names))
    return run.state


def shown(dispatch: ViewDispatch, node: NodeId) -> pb.View:
    latest = dispatch.streams[node].next()
    assert latest is not None
    return pb.View.FromString(latest.encode())


def watched(state: State, *nodes: NodeId) -> ViewDispatch:
    dispatch = ViewDispatch(state, KEYS.key)
    for node in nodes:
        dispatch.open(node, 1, lambda: None)
    list(dispatch.update(state, 100.0))
    return dispatch


def test_an_expulsion_changes_the_key_which_all_but_the_expelled_one_are_told() -> None:
    before = joined("ada", "bo", "eve")
    dispatch = watched(before, ADA, BO, EVE)
    first = {node: shown(dispatch, node).roster for node in (ADA, BO, EVE)}
    assert {a.data_key for a in first.values()} == {KEYS.key(0)}
    assert [m.node_id for m in first[ADA].members] == [ADA, BO, EVE]
    state = charge(before, EVE, Evidence(1, Offence.FORGED_SEAL, "it sealed another mean"), [])
    list(dispatch.update(state, 101.0))
    for node in (ADA, BO):
        told = shown(dispatch, node).roster
        assert (told.data_key, told.data_key_number, list(told.gone)) == (KEYS.key(1), 1, [EVE])
    last = shown(dispatch, EVE)
    assert last.you == "evicted" and not last.HasField("roster") and KEYS.key(1) not in last.SerializeToString()


def test_who_is_silent_or_says_good_bye_takes_no_key_with_it() -> None:
    state = joined("ada", "bo", "eve")
    for event in (ev.Leaving(EVE, 1, "bye"), ev.Expired(BO, 1, "silent")):
        state, _ = step(state, event, 200.0)
    assert state.expulsions == 0


def test_of_many_members_the_list_is_told_now_and_then_but_an_expulsion_at_once() -> None:
    state = joined(*(f"m{i}" for i in range(MANY_STREAMS + 1)))
    dispatch = watched(state, *state.members.here)
    shown(dispatch, ADA)
    more, _ = step(state, ev.Joined(NodeId("n899"), 1, "one", "one:1", "r"), 100.0)
    assert len(list(dispatch.update(more, 100.0))) == MANY_STREAMS + 1
    shown(dispatch, ADA)
    more, _ = step(more, ev.Joined(NodeId("n900"), 1, "late", "late:1", "s"), 100.0)
    assert not list(dispatch.update(more, 100.01))
    due = 100.0 + LIST_INTERVAL_PER_VIEW * (MANY_STREAMS + 1)
    assert dispatch.update_at == due
    assert len(list(dispatch.update(more, due))) == MANY_STREAMS + 1
    assert [m.node_id for m in shown(dispatch, ADA).roster.members] == ["n900"]
    late, _ = step(more, ev.Joined(NodeId("n901"), 1, "later", "later:1", "t"), 100.0)
    fence = Fence(Incarnation(1), Epoch(1), Round(1), 1)
    planned = replace(late, round=replace(late.round, plan=AttemptState(fence, 0.0, 0.0)))
    assert not list(dispatch.update(late, due + 0.001))
    assert len(list(dispatch.update(planned, due + 0.002))) == MANY_STREAMS + 1, "a plan may name whom it has not"
    assert [m.node_id for m in shown(dispatch, ADA).roster.members] == ["n901"]
    out = charge(more, EVE, Evidence(1, Offence.FORGED_SEAL, "it sealed another mean"), [])
    list(dispatch.update(out, due + 0.001))
    assert shown(dispatch, ADA).roster.data_key_number == 1


def test_the_keys_are_those_of_rfc_5869_and_each_is_another() -> None:
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    info = b"key " + (7).to_bytes(8, "big")
    derived = HKDF(SHA256(), 32, b"atoll data plane", info).derive(b"a secret of thirty-two bytes, or so")
    assert KEYS.key(7) == derived
    assert len({KEYS.key(n) for n in range(100)} | {DataKeys(b"another").key(0)}) == 101


def test_a_restart_keeps_keys_and_mark_and_who_is_banned_is_not_let_in_again(tmp_path: Path) -> None:
    async def story() -> None:
        async with coordinator(tmp_path) as c:
            ada, eve = c.node(), c.node()
            first = await ada.join()
            await eve.join()
            assert first.data_key and first.data_key_number == 0 and len(first.mark) == 16
            machine = c.event_loop._machine
            machine.state = charge(machine.state, eve.node, Evidence(1, Offence.FORGED_SEAL, "it lied"), [])
            again = await ada.join(ada.session)
            assert again.mark == first.mark
            assert again.data_key_number == 1 and again.data_key != first.data_key
            eve.session = ""
            assert "banned" in await refused(eve.join("6" * 32), Code.PERMISSION_DENIED)
        async with coordinator(tmp_path) as c:
            bo = c.node()
            reply = await bo.join()
            assert (reply.mark, reply.data_key) == (again.mark, again.data_key)
            evil = c.node()
            evil.key = eve.key
            assert "banned" in await refused(evil.join("6" * 32), Code.PERMISSION_DENIED)

    asyncio.run(story())
