"""Who is asked for an account of a round, and whose answer counts; and that it counts for the verdict alone."""

from scenario import Run

from atoll.comm.ids import NodeId
from atoll.comm.incidents import IncidentKind
from atoll.comm.replace import replace
from atoll.coordinator.causes.account import Account, Incident, LinkAccount
from atoll.coordinator.state_machine import events as ev
from atoll.coordinator.state_machine.inquiry import MAX_ASKED

MANY = [f"m{k}" for k in range(MAX_ASKED + 6)]


def looked_into(names: list[str], hung: str) -> Run:
    """A run whose first round went on without the steps of one of these members; nobody answers."""
    run = Run()
    run.do("set", ["members.stall", "60"])
    run.do("begin", names)
    run.do("mum", names)
    others = [name for name in names if name != hung]
    run.do("hang", [hung])
    run.do("wait", ["10"])
    run.do("reached", others)
    run.do("wait", ["25"])
    run.do("ready", others)
    run.do("reduce", [])
    assert run.state.committed == 1
    return run


def account(run: Run, name: str, round_: int = 1) -> dict[NodeId, Account]:
    """The accounts there are once this member gave one of that round."""
    run.feed(ev.RoundAccounted(run.node(name), 1, round_, Account(steps=3)))
    assert run.state.inquiry is not None
    return run.state.inquiry.accounts


def test_an_account_counts_if_it_was_asked_for() -> None:
    run = looked_into(["ada", "bo", "cy"], "bo")
    assert account(run, "ada", round_=2) == {}, "of another round"
    assert account(run, "ada") == {run.node("ada"): Account(steps=3)}
    run.do("join", ["dan"])
    assert run.node("dan") not in account(run, "dan"), "it was not there"


def test_of_very_many_those_are_asked_of_whom_something_was_seen() -> None:
    hung = MANY[-1]
    run = looked_into(MANY, hung)
    assert run.state.inquiry is not None
    asked = run.state.inquiry.asked
    assert len(asked) == MAX_ASKED and run.node(hung) in asked
    outside = next(name for name in MANY if run.node(name) not in asked)
    assert run.node(outside) not in account(run, outside)


def test_whatever_a_member_tells_of_a_round_nothing_follows_but_its_verdict() -> None:
    run = looked_into(["ada", "bo", "cy"], "bo")
    bo = run.node("bo")
    lie = Account(
        still=1e6,
        incidents=tuple(Incident(kind, 0.0, bo, 1.0) for kind in IncidentKind),
        links=(LinkAccount(bo, 1, 1, 1e6, 1e9, 1000, 999, mute=1e6),),
        sent=1 << 50,
        limit_up=1.0,
    )
    before = run.state
    run.feed(ev.RoundAccounted(run.node("ada"), 1, 1, lie))
    run.mum.clear()
    run.answer()
    run.said.clear()
    run.feed(ev.TrainersSeen(1, ()))
    run.feed(ev.Tick())
    [note] = run.said
    assert run.state.inquiry is not None and run.state.inquiry.closed, note
    assert replace(run.state, inquiry=before.inquiry) == before
