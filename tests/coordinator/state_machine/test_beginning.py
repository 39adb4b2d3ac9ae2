"""The model of a run, and who decides on it: liars who come first, who go again, and who have no trainer."""

import pytest
import scenario

from atoll.comm.digest import digest
from atoll.comm.ids import Epoch, Incarnation, NodeId, PublicKey, Round
from atoll.comm.plan import Fence
from atoll.comm.replace import replace
from atoll.coordinator.service.view import view
from atoll.coordinator.state_machine import events as ev
from atoll.coordinator.state_machine.beginning import MAX_STALLS
from atoll.coordinator.state_machine.members import MemberState

TRAINERS = ["ada", "bo", "cy"]
MINE = (scenario.NUMEL, digest(b"layout"))


def commits_a_round(run: scenario.Run, names: list[str]) -> None:
    run.do("state", [*names, "0"])
    run.steps()
    run.do("seal", [run.name(n) for n in sorted({n for n in run.state.round.ledger.owners if n is not None})])
    run.do("held", names)
    run.do("state", [*names, "1"])
    assert run.state.committed == 1 and set(run.state.makers) == set(map(run.node, names))


@pytest.mark.parametrize("liars", [["eve"], ["eve", "mal"]])
def test_who_comes_first_and_has_another_model_is_out_once_two_agree_and_the_run_goes_on(liars: list[str]) -> None:
    run = scenario.Run()
    run.do("knock", [*liars, "bo", "cy"])
    run.do("connect", [*liars, "bo", "cy"])
    for liar in liars:
        run.do("layout", [liar, f"model of {liar}".replace(" ", "-")])
    run.do("layout", ["bo", "layout"])
    run.do("layout", ["cy", "layout"])
    for liar in liars:
        member = run.state.members.departed[run.node(liar)]
        assert member.state is MemberState.EVICTED
        assert (
            member.reason.startswith("its model has 40 parameters in layout")
            and "the run's has 40" in member.reason
        )
    assert run.state.layout == MINE
    commits_a_round(run, ["bo", "cy"])


def test_what_one_told_who_is_gone_is_forgotten_though_a_reducer_is_there() -> None:
    """Else all who come after would have another model than the run, and nobody would have that one."""
    run = scenario.Run()
    run.do("reducer", ["red"])
    run.do("join", ["red"])
    run.do("knock", ["eve", "bo", "cy"])
    run.do("connect", ["eve", "bo", "cy"])
    run.do("layout", ["eve", "made-up"])
    run.do("leave", ["eve"])
    assert run.state.layout is None
    run.do("layout", ["bo", "layout"])
    assert run.state.layout == MINE and run.state.members.here[run.node("bo")].state is MemberState.RECOVERING
    run.do("layout", ["cy", "layout"])
    commits_a_round(run, ["bo", "cy"])


def test_a_reducer_has_no_model_and_tells_no_layout_and_no_state() -> None:
    run = scenario.Run()
    run.do("reducer", ["red"])
    run.do("join", ["red"])
    run.do("layout", ["red", "made-up"])
    assert run.state.layout is None and not run.state.beginning.layouts
    run.do("join", ["ada", "bo"])
    commits_a_round(run, ["ada", "bo"])
    red = run.state.members.here[run.node("red")]
    run.feed(ev.StateReported(red.node, red.life, 1, run.state.digest))
    assert red.node not in run.state.holders
    run.do("leave", ["ada", "bo"])
    assert run.state.state_lost and not run.state.state_held, "nobody has it: it is waited for whoever brings it"


def test_one_alone_that_comes_back_with_another_model_has_the_runs() -> None:
    run = scenario.Run()
    run.do("join", ["ada"])
    run.do("knock", ["ada"])
    run.do("connect", ["ada"])
    run.do("layout", ["ada", "mended"])
    assert run.state.layout == (scenario.NUMEL, digest(b"mended"))
    run.do("knock", ["bo"])
    run.do("connect", ["bo"])
    run.do("layout", ["bo", "mended"])
    commits_a_round(run, ["ada", "bo"])


def reducing(names: list[str]) -> scenario.Run:
    """A first round is being reduced among these, "red" only owns chunks; all seals are audited."""
    run = scenario.Run()
    run.config = replace(run.config, security=replace(run.config.security, audit="1000"))
    run.state = replace(run.state, config=run.config, nonce=b"nonce")
    run.do("set", ["members.start", "3"])
    run.do("set", ["members.minimum", "3"])
    for i, name in enumerate(names, 1):
        node, role = NodeId(f"n{i}"), "reducer" if name == "red" else ""
        key = PublicKey(bytes([i]) * 32)
        run.feed(ev.Joined(node, 1, name, f"{name}:1", f"session of {name}", role=role, key=key))
        run.feed(ev.Connected(node, 1))
        if not role:
            run.feed(ev.LayoutReported(node, 1, *MINE))
    run.do("state", [*TRAINERS, "0"])
    run.steps()
    assert run.state.round.salt and set(run.state.round.ledger.owners) <= set(map(run.node, names))
    return run


def restarted(run: scenario.Run, names: list[str], layout: tuple[int, bytes] | None = None) -> None:
    run.do("knock", names)
    for node, life in map(run.who, names):
        run.feed(ev.Connected(node, life))
        if layout is not None:
            run.feed(ev.LayoutReported(node, life, *layout))


def all_restarted(run: scenario.Run, who: str, layout: tuple[int, bytes] | None = None) -> ev.ChunksSealed:
    """All trainers begin anew. Returns what this owner has sealed and not said before the last one did."""
    restarted(run, TRAINERS[:-1], layout)
    ledger, (node, life) = run.state.round.ledger, run.who(who)
    chunk = max(c for c, owner in enumerate(ledger.owners) if owner == node)
    seals, fence = ((chunk, digest(b"late"), run.alive()),), Fence(Incarnation(1), Epoch(1), Round(1), 1)
    fence = fence._replace(attempt=ledger.since[chunk])
    restarted(run, TRAINERS[-1:], layout)
    return ev.ChunksSealed(node, life + (who != "red"), fence, seals, scenario.norms_of(ledger, seals))


@pytest.mark.parametrize("who", ["red", TRAINERS[-1]])
def test_a_seal_that_comes_when_the_run_has_no_model_any_more_changes_nothing(who: str) -> None:
    run = reducing(["red", *TRAINERS] if who == "red" else TRAINERS)
    late = all_restarted(run, who)
    run.do("knock", ["eve"])
    run.do("leave", ["eve"])
    assert run.state.layout is None
    before = run.state
    run.feed(late)
    assert run.state == before and not run.state.round.ledger.sealed
    for node in run.state.members.here:
        view(run.state, node)


@pytest.mark.parametrize("who", ["red", TRAINERS[-1]])
def test_a_seal_of_a_round_that_everybody_has_left_is_of_no_round(who: str) -> None:
    """Those who come next may have a model of fewer chunks."""
    run = reducing(["red", *TRAINERS])
    late = all_restarted(run, who, (10, digest(b"smaller")))
    before = run.state
    run.feed(late)
    assert run.state == before and not run.state.round.ledger.sealed and not run.state.round.audits


def test_two_that_are_asked_and_do_not_answer_do_not_keep_others_from_making_state_0() -> None:
    """However their heartbeats move, and however often they begin anew."""
    run = scenario.Run()
    run.do("set", ["members.start", "1"])
    run.do("set", ["members.minimum", "1"])
    run.do("join", ["eve"])
    run.do("state", ["eve", "0"])
    run.do("commit", [])
    run.do("join", ["mal", "max"])
    assert {*run.state.beginning.asked} == {run.node("mal"), run.node("max")}
    run.do("join", ["ada"])
    assert run.node("ada") not in run.state.beginning.asked
    run.do("wait", [str(MAX_STALLS * run.config.members.stall + 1)])
    assert run.node("ada") in run.state.beginning.asked
    run.do("state", ["ada", "0"])
    assert run.state.beginning.agreed


def test_who_begins_anew_instead_of_answering_takes_no_place_from_a_new_one() -> None:
    run = scenario.Run()
    run.do("set", ["members.start", "1"])
    run.do("set", ["members.minimum", "1"])
    run.do("join", ["eve"])
    run.do("state", ["eve", "0"])
    run.do("commit", [])
    run.do("join", ["mal", "max"])
    for name in ("mal", "max"):
        run.do("back", [name])
    assert len(run.state.beginning.asked) == 2, "it may have been an accident"
    run.do("join", ["ada"])
    assert run.node("ada") in run.state.beginning.asked


def test_who_is_back_first_after_all_streams_broke_does_not_name_state_0_alone() -> None:
    run = scenario.Run()
    run.do("set", ["members.start", "1"])
    run.do("set", ["members.minimum", "1"])
    run.do("join", ["mal", "ada", "bo", "cy"])
    assert {*run.state.beginning.asked} == {run.node("mal"), run.node("ada")}
    run.do("disconnect", ["mal", "ada", "bo", "cy"])
    run.do("connect", ["mal"])
    run.do("state", ["mal", "0", "made-up"])
    assert not run.state.digest
    run.do("connect", ["ada", "bo", "cy"])
    run.do("state", ["ada", "0"])
    run.do("state", ["bo", "0"])
    ada = run.state.members.here[run.node("ada")]
    assert run.state.beginning.agreed == run.state.digest == ada.state_digest
