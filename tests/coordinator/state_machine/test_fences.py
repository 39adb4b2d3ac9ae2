"""What members report counts for the life, round and attempt that it names, and for no other."""

from collections.abc import Callable
from typing import get_args

import pytest
from scenario import Run, norms_of

from atoll.comm.ids import Epoch, Incarnation, NodeId, PublicKey, Round
from atoll.comm.plan import Fence
from atoll.comm.replace import replace
from atoll.coordinator.causes.account import Account
from atoll.coordinator.causes.observations import Observations
from atoll.coordinator.state_machine import events as ev
from atoll.coordinator.state_machine.audit_voices import parties
from atoll.coordinator.state_machine.changes import with_member
from atoll.coordinator.state_machine.ledger import Seal
from atoll.coordinator.state_machine.state import Audit, Inquiry, Replay, ReplayBook, State
from atoll.coordinator.state_machine.step import step

A, B = NodeId("n1"), NodeId("n2")
NOW = 11.0  # seconds; the attempt began at 10
Report = Callable[[Fence, int], ev.Event]  # of a fence and a life
REPORTS: dict[str, Report] = {
    "layout": lambda f, life: ev.LayoutReported(A, life, 41, b"another"),
    "state": lambda f, life: ev.StateReported(A, life, f.round - 1, b"w" * 16),
    "repair": lambda f, life: ev.StateRepaired(A, life, f.round - 1, 1, True),
    "steps": lambda f, life: ev.StepsReached(A, life, f.round),
    "contribution": lambda f, life: ev.ContributionReady(A, life, f.round, ev.Contribution(10, 10, 2.0, 1.0)),
    "seals": lambda f, life: ev.ChunksSealed(A, life, f, ((0, b"d" * 16, b"\xff"),)),
    "orphans": lambda f, life: ev.OrphansFound(A, life, f, ((0, b"d" * 16),)),
    "completion": lambda f, life: ev.ReduceComplete(A, life, f, b"r" * 16, 1, 1),
    "outsized": lambda f, life: ev.SealOutsized(A, life, f, 0, b"d" * 16, 3.0),
    "audit": lambda f, life: ev.AuditReported(A, life, f, 0, b"d" * 16),
    "replay": lambda f, life: ev.ReplayReported(A, life, f.round, B, False),
    "loss": lambda f, life: ev.LossEvaluated(A, life, f.round - 1, 2.0),
    "forgery": lambda f, life: ev.ChunkForged(A, life, B, f, 0),
    "missing": lambda f, life: ev.ChunksMissing(A, life, f, (0,)),
    "unreachable": lambda f, life: ev.PeerUnreachable(A, life, B, f, "reset"),
    "account": lambda f, life: ev.RoundAccounted(A, life, f.round, Account(steps=3)),
    "refused": lambda f, life: ev.ReportsRefused(A, life),
    "leave": lambda f, life: ev.Leaving(A, life, "bye"),
}
BY_LIFE_ALONE = {"layout", "repair", "refused", "leave"}  # which say nothing of a round, or change nothing
BY_ROUND = {
    "steps",
    "contribution",
    "seals",
    "orphans",
    "completion",
    "outsized",
    "audit",
    "replay",
    "forgery",
    "missing",
    "unreachable",
    "account",
}
BY_ATTEMPT = {"orphans", "forgery", "missing", "unreachable"}


def reducing() -> tuple[State, Fence]:
    run = Run()
    run.do("begin", ["a", "b", "c"])
    run.do("reducing", ["a", "b", "c"])
    assert run.state.round.plan is not None
    return run.state, run.state.round.plan.fence


def inner() -> tuple[State, Fence]:
    run = Run()
    run.do("begin", ["a", "b", "c"])
    return run.state, Fence(Incarnation(run.state.incarnation), Epoch(run.state.epoch), Round(1), 1)


def where(name: str) -> tuple[State, Fence]:
    """A state in which the report, rightly fenced, changes something."""
    state, fence = inner() if name in ("steps", "contribution", "loss") else reducing()
    if name == "missing":
        ledger = replace(state.round.ledger, sealed={c: None for c in range(4)})  # type: ignore[misc]
        state = replace(state, round=replace(state.round, wrong=frozenset({A}), ledger=ledger))
    if name == "audit":
        for member in state.members.here.values():
            state = with_member(state, replace(member, key=PublicKey(member.node.encode())))
        owner, since = state.round.ledger.owners[0], state.round.ledger.since[0]
        assert owner is not None
        ledger = replace(state.round.ledger, sealed={0: Seal(b"d" * 16, b"\x07", owner, since)})
        state = replace(state, round=replace(state.round, ledger=ledger))
        shown_by = parties(state, 0, b"\x07")
        assert shown_by is not None
        audit = Audit(0, since, owner, b"d" * 16, b"\x07", shown_by, seconds=9.0, wanted=2, named={A: NOW + 9})
        state = replace(state, round=replace(state.round, audits={0: audit}))
        state, _ = step(state, ev.Tick(), NOW)  # the other auditors are named
    if name == "outsized":
        seal = Seal(b"d" * 16, b"\x07", B, state.round.ledger.since[0])
        ledger = replace(state.round.ledger, sealed={0: seal}, owners=(B, *state.round.ledger.owners[1:]))
        state = replace(state, round=replace(state.round, ledger=ledger))
    if name == "replay":
        task = Replay(fence.round, B, "b", 1, ((0, 1),), 1, 0, 3, b"s", (0,), (1, 0, 2), NOW + 99)
        state = replace(state, replays=ReplayBook({A: task}))
    if name == "loss":
        state = replace(state, round=replace(state.round, evaluator=A))
    if name == "account":
        asked = Inquiry(Observations(fence.round, {}), frozenset({A, B}), until=NOW + 99)
        state = replace(state, inquiry=asked)
    return state, fence


@pytest.mark.parametrize("name", sorted(REPORTS))
def test_a_report_counts_in_its_life_and_in_no_other(name: str) -> None:
    state, fence = where(name)
    right = REPORTS[name](fence, 1)
    changed, effects = step(state, right, NOW)
    if name not in ("seals", "state"):  # whose rest is their own tests' to say
        assert (changed, effects) != (state, []), "the test has lost its point"
    for life in (0, 2):
        assert step(state, REPORTS[name](fence, life), NOW) == (state, [])


@pytest.mark.parametrize("name", sorted(BY_ROUND))
@pytest.mark.parametrize("by", [-1, 1])
def test_a_report_of_another_round_changes_nothing(name: str, by: int) -> None:
    state, fence = where(name)
    other = fence._replace(round=Round(fence.round + by))
    assert step(state, REPORTS[name](other, 1), NOW) == (state, [])


@pytest.mark.parametrize("by", [-2, 1, 7])
def test_a_state_of_another_round_or_its_loss_is_nobodys(by: int) -> None:
    for name in ("state", "loss"):
        state, fence = where(name)
        other = fence._replace(round=Round(fence.round + by))
        assert step(state, REPORTS[name](other, 1), NOW) == (state, [])


@pytest.mark.parametrize("name", sorted(BY_ATTEMPT))
@pytest.mark.parametrize(("field", "by"), [("incarnation", 1), ("incarnation", -1), ("epoch", 1), ("attempt", 1)])
def test_a_report_of_another_attempt_changes_nothing(name: str, field: str, by: int) -> None:
    state, fence = where(name)
    other = fence._replace(**{field: getattr(fence, field) + by})
    assert step(state, REPORTS[name](other, 1), NOW) == (state, [])


@pytest.mark.parametrize("by", [-1, 1])
def test_an_audit_is_of_the_attempt_in_which_the_owner_got_the_chunk(by: int) -> None:
    state, fence = where("audit")
    late = REPORTS["audit"](fence._replace(attempt=fence.attempt + by), 1)
    assert step(state, late, NOW) == (state, [])


@pytest.mark.parametrize("by", [-1, 1])
def test_a_seal_is_of_the_attempt_in_which_its_owner_got_the_chunk(by: int) -> None:
    state, fence = reducing()
    owner = state.round.ledger.owners[0]
    assert owner is not None
    seals = ((0, b"d" * 16, b"\x07"),)
    seal = ev.ChunksSealed(owner, 1, fence, seals, norms_of(state.round.ledger, seals))
    assert step(state, seal, NOW)[0] != state
    late = replace(seal, fence=fence._replace(attempt=fence.attempt + by))
    assert step(state, late, NOW) == (state, [])


def test_every_report_is_here() -> None:
    """A new kind of report has its fence looked at, too."""
    by_clock = {ev.Started, ev.HeardNobody, ev.Joined, ev.Connected, ev.Disconnected, ev.Heartbeat, ev.Suspected}
    by_clock |= {ev.SuspicionCleared, ev.Stepped, ev.Paused, ev.Resumed, ev.Expired, ev.Pardoned, ev.Tick}
    by_clock |= {ev.WritesResumed, ev.TrainersSeen, ev.Banned}
    _, fence = inner()
    assert {type(report(fence, 1)) for report in REPORTS.values()} == set(get_args(ev.Event)) - by_clock
    assert BY_LIFE_ALONE | BY_ROUND | {"state", "loss"} == REPORTS.keys()
