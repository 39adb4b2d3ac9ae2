"""Members that cost the others time, or say what is not, over many rounds: each is remembered, and nobody else is
held to account for it."""

from collections import Counter

import pytest
import scenario
from member_story import Story

from atoll.comm.evidence import Offence
from atoll.comm.ids import NodeId
from atoll.comm.replace import replace
from atoll.coordinator.state_machine import conduct, lateness
from atoll.coordinator.state_machine import events as ev
from atoll.coordinator.state_machine.members import MemberState
from atoll.coordinator.state_machine.state import Phase, order

NAMES = ["a", "b", "c", "d", "e", "f", "g", "h"]
ROUNDS = 20


def test_who_never_seals_costs_one_round_and_owns_nothing_then() -> None:
    story = Story(NAMES, "c")
    seconds, owned = list[float](), list[bool]()
    for _ in range(ROUNDS):
        story.train()
        owned.append(story.liar in story.owners())
        seconds.append(story.reduce(seals=False))
    assert sum(owned) == 1, "it owned chunks again"
    assert seconds[0] > 30 and max(seconds[1:]) <= 0.25, f"seconds of each reduce: {seconds}"
    assert {m.name for m in story.state.members.here.values()} == set(NAMES), "nobody is out"
    others = [n for n in story.state.members.here if n != story.liar]
    assert all(conduct.consequence(story.state, n) is None for n in others), "others are held to account"


def test_who_never_says_that_it_holds_the_chunks_costs_one_round_and_is_not_waited_for_then() -> None:
    story = Story(NAMES, "c")
    seconds, counted = list[float](), list[bool]()
    for _ in range(ROUNDS):
        story.train()
        seconds.append(story.reduce(holds=False))
        assert story.state.pending is not None
        counted.append(story.liar in story.state.pending.contributors)
    assert seconds[0] > 30 and max(seconds[1:]) <= 0.25, f"seconds of each reduce: {seconds}"
    assert all(counted), "its work is as good as any"
    others = [n for n in story.state.members.here if n != story.liar]
    assert all(conduct.consequence(story.state, n) is None for n in others), "others are held to account"


def test_who_is_silent_is_still_needed_where_the_run_has_nobody_else() -> None:
    story = Story(["a", "b"], "b")
    story.set("members.minimum", "2")
    for _ in range(8):
        story.train()
        assert set(story.state.round.participants) == {NodeId("n1"), NodeId("n2")}
        story.do("seal", ["a", "b"])
        story.do("held", ["a"])
        story.do("wait", ["61"])
        story.reduce()
    assert not conduct.may_contribute(story.state, story.liar), "it is told, and the run goes on with it"
    assert not conduct.refusal(story.state, story.liar)


def test_a_timeout_follows_the_prediction() -> None:
    story = Story(NAMES, "c")
    measured(story)
    story.set("rounds.reduce_timeout", "6000")
    story.train()
    plan = story.state.round.plan
    assert plan is not None and 0 < plan.predicted < 10
    assert 30 < story.reduce(seals=False, limit=7000) < 40 + 10 * plan.predicted


def unmeasured(story: Story) -> None:
    """All were in exchanges, which were too small to measure a link by."""
    here = story.state.members.here
    told = {n: replace(m, up=0.0, down=0.0, seen_up=0.0, seen_down=0.0, measured=9) for n, m in here.items()}
    story.state = replace(story.state, members=replace(story.state.members, here=told))


def test_where_exchanges_are_too_small_to_measure_links_by_a_timeout_follows_what_they_took() -> None:
    """Else who never seals would cost a run of a small model ten minutes, where its rounds take seconds."""
    story = Story(NAMES, "c")
    story.set("rounds.reduce_timeout", "6000")
    for _ in range(4):
        story.train()
        story.do("wait", ["0.5"])
        story.reduce()
        unmeasured(story)
    story.train()
    plan = story.state.round.plan
    assert plan is not None and not plan.predicted and 0 < plan.patience < 20
    assert 10 < story.reduce(seals=False, limit=7000) < 20, "such a round's time, and ten times its exchange"


def test_who_comes_new_to_a_run_whose_exchanges_are_small_has_no_more_time_than_others_and_is_not_struck() -> None:
    story = Story(NAMES, "c")
    story.set("rounds.reduce_timeout", "600")
    for _ in range(4):
        story.train()
        story.do("wait", ["0.5"])
        story.reduce()
        unmeasured(story)
    here = story.state.members.here
    new = here | {story.liar: replace(here[story.liar], measured=0, exchanged=False)}
    story.state = replace(story.state, members=replace(story.state.members, here=new))
    story.train()
    assert 10 < story.reduce(holds=False, limit=700) < 20
    assert conduct.owes_time(story.state, story.liar) and not story.state.conduct.decisions


def hold_up(story: Story, what: str) -> float:
    """One reduce in which the liar does its part at the last moment, all others at once; the seconds that it
    took."""
    began, number = story.now, story.state.round.number
    names = [story.name(n) for n in story.state.round.ledger.members]
    for node in sorted(story.owners()):
        if node != story.liar or what != "seals":
            story.do("seal", [story.name(node)])
    last = lateness.reduce_timeout(story.state) - 0.25
    late = what == "seals" and story.liar in story.owners()
    late |= what == "holds" and story.liar in story.state.round.ledger.members
    if late and what == "holds":
        story.do("held", [name for name in names if name != story.name(story.liar)])
    while late and story.state.round.number == number and story.now - began < last:
        story.do("wait", ["0.25"])
    if story.state.round.number > number:  # nobody waited for it
        story.tell()
        return story.now - began
    if late and what == "seals":  # and then half of the others are far from it
        story.do("seal", [story.name(story.liar)])
        story.do("held", names[:4])
        story.do("wait", ["2"])
    done = names[4:] if late and what == "seals" else [story.name(story.liar)] if late else names
    story.do("held", done)
    assert story.state.round.number == number + 1
    story.tell()
    return story.now - began


def test_who_seals_at_the_last_moment_owns_nothing_then_and_has_nobody_else_struck() -> None:
    story = Story(NAMES, "a")
    seconds = list[float]()
    for _ in range(ROUNDS):
        story.train()
        seconds.append(hold_up(story, "seals"))
    assert sum(s > 3 for s in seconds) <= 2, f"seconds of each reduce: {seconds}"
    assert set(story.state.conduct.strikes) == {"n1"}


def test_who_says_at_the_last_moment_that_it_holds_the_chunks_is_not_waited_for_then() -> None:
    story = Story(NAMES, "a")
    seconds = list[float]()
    for _ in range(ROUNDS):
        story.train()
        seconds.append(hold_up(story, "holds"))
    assert sum(s > 1 for s in seconds) <= 2, f"seconds of each reduce: {seconds}"
    assert set(story.state.conduct.strikes) == {"n1"}


def test_who_finishes_its_step_at_the_last_moment_costs_the_others_a_tenth_of_a_round() -> None:
    story = Story(NAMES, "c", rounds__inner_steps="300", rounds__collect="60", members__stall="1e6")
    for _ in range(3):
        began = story.now
        story.do("wait", ["300"])
        others = [name for name in NAMES if name != "c"]
        story.do("reached", others)
        while story.state.round.phase is Phase.INNER:
            story.do("wait", ["0.25"])
        story.do("ready", [*others, "steps=300"])
        closed = story.now
        while story.state.round.phase is Phase.COLLECTING:
            story.do("wait", ["0.25"])
        assert story.now - closed < 1 + 0.1 * (closed - began)
        story.do("ready", ["c", "steps=1"])
        story.reduce()


def collect(story: Story, late: str, seconds: float, then: str = "ready") -> float:
    """A round in which all have their steps, and this one says so much later, or not, that it can contribute, or
    goes `then` in another way; the seconds that the others waited for it. It is back once all others hold the
    round."""
    story.do("wait", ["10"])
    names = [story.name(n) for n in story.state.round.participants]
    story.do("reached", names)
    while story.state.round.phase is Phase.INNER:
        story.do("wait", ["0.25"])
    closed = story.now
    story.do("ready", [name for name in names if name != late])
    while story.state.round.phase is Phase.COLLECTING:
        story.do("wait", ["0.25"])
        if story.now - closed >= seconds and late in names:
            story.do(then, [late])
            names.remove(late)
    waited = story.now - closed
    if then == "disconnect" and late and late not in names:
        story.do("connect", [late])
    story.reduce()
    if then in ("leave", "back") and late and late not in names:
        if then == "leave":
            story.do("back", [late])
        story.do("state", [late, str(story.state.committed)])
    return waited


@pytest.mark.parametrize("seconds", [4.75, 100.0])
def test_who_is_late_with_its_work_is_not_waited_for_in_the_next_rounds(seconds: float) -> None:
    story = Story(NAMES, "c")
    waited = [collect(story, "c" if k >= 3 else "", seconds) for k in range(12)]
    assert waited[3] >= 4.75 and sum(s > 1 for s in waited) <= 3, waited  # its own step takes a second
    assert not story.state.conduct.decisions, "that is held against nobody"
    assert set(story.state.conduct.strikes) == {"n3"}


@pytest.mark.parametrize("then", ["disconnect", "leave", "back"])
def test_who_is_late_with_its_work_and_goes_just_before_it_is_left_out_is_not_waited_for_then(then: str) -> None:
    story = Story(NAMES, "c")
    waited = [collect(story, "c" if k >= 3 else "", 4.25, then) for k in range(12)]
    assert waited[3] >= 4.25 and sum(s > 1 for s in waited) <= 3, waited
    assert not story.state.conduct.decisions and set(story.state.conduct.strikes) == {"n3"}


def test_who_is_waited_for_in_the_exchange_and_goes_just_before_it_is_late_is_not_waited_for_then() -> None:
    for how in ("good-bye", "saves bytes", "broken", "put out", "accuses"):
        story, seconds = Story(NAMES, "c"), list[float]()
        for _ in range(ROUNDS):
            story.train()
            seconds.append(hold_up_and_go(story, how))
        assert sum(s > 3 for s in seconds) <= 2, f"{how}: seconds of each reduce: {seconds}"
        assert set(story.state.conduct.strikes) == {"n3"}


def hold_up_and_go(story: Story, how: str) -> float:
    """A reduce in which the liar does not say that it holds the chunks, and ends its part in it just before it
    would be late; then it is back. The seconds that the reduce took."""
    began, r = story.now, story.state.round
    name, number, there = story.name(story.liar), r.number, story.contributes(story.liar)
    for node in sorted(story.owners(), key=order):
        story.do("seal", [story.name(node)])
    if there:
        story.do("held", [story.name(n) for n in r.ledger.members if n != story.liar])
    waits = there and story.state.round.number == number
    while waits and story.state.round.number == number and story.now - began < 59 and how != "put out":
        story.do("wait", ["0.25"])
    if waits and story.state.round.number == number:
        match how:
            case "good-bye":
                story.do("leave", [name])
            case "saves bytes":
                story.do("pause", [name, "bytes"])
                story.do("wait", ["0.25"])
            case "accuses":
                story.do("lost", [name, next(n for n in NAMES if story.node(n) in story.owners() and n != name)])
            case "broken":
                story.do("disconnect", [name])  # now it owes the time, and nobody waits for it any more
                if story.state.round.number == number:
                    story.do("lost", ["a", name])
            case _:
                story.do("wait", ["55"])
                story.do("disconnect", [name])
                while story.liar in story.state.members.here:  # its heartbeats go on
                    beat = ev.Heartbeat(story.liar, story.member(story.liar).life, "reduce", number, 1)
                    story.feed(beat)
                    story.do("wait", ["0.25"])
    if story.state.round.number == number:
        story.reduce(holds=how == "accuses")
    else:
        story.tell()
    seconds = story.now - began
    if how == "saves bytes" and waits:
        story.do("resume", [name])
        story.do("wait", ["1"])
    if story.liar not in story.state.members.here:
        story.do("back", [name])
    story.do("state", [name, str(story.state.committed)])
    return seconds


def test_who_is_put_out_though_its_heartbeats_go_on_is_struck_for_what_that_cost() -> None:
    story = Story(NAMES, "c")
    story.train()
    story.do("seal", NAMES)
    story.do("held", [name for name in NAMES if name != "c"])
    story.do("disconnect", ["c"])
    while story.liar in story.state.members.here:
        story.feed(ev.Heartbeat(story.liar, 1, "reduce", 1, 1))
        story.do("wait", ["0.25"])
    assert story.state.conduct.strikes["n3"].delay == (1, 1.0), "two seconds, where a round takes ten"


def test_a_reducer_that_seals_last_in_each_exchange_owns_nothing_for_as_long_as_that_cost() -> None:
    story = Story(NAMES, reduce__chunk="4")  # ten chunks
    story.do("reducer", ["helper"])
    story.do("join", ["helper"])
    seconds = list[float]()
    for _ in range(ROUNDS):
        story.train()
        began, helper = story.now, story.node("helper")
        story.do("seal", [story.name(n) for n in sorted(story.owners() - {helper}, key=order)])
        if helper in story.owners():
            story.do("wait", ["9"])
            story.do("seal", ["helper"])
        story.do("held", NAMES)
        seconds.append(story.now - began)
        story.tell()
    assert sum(s > 1 for s in seconds) == 2, seconds


def measured(story: Story) -> None:
    """All links are known."""
    here = story.state.members.here
    told = {n: replace(m, up=40.0, down=40.0, measured=9, exchanged=True) for n, m in here.items()}
    rates = {n: replace(m, seen_up=40.0, seen_down=40.0) for n, m in told.items()}
    story.state = replace(story.state, members=replace(story.state.members, here=rates))


def test_an_owner_that_one_contributor_holds_up_for_as_long_as_it_may_is_not_struck() -> None:
    """It seals last, and may not have named who held it up: nobody but the two can know."""
    story = Story(NAMES, "c", rounds__reduce_timeout="600")
    measured(story)
    story.train()
    plan = story.state.round.plan
    assert plan is not None and story.liar in story.owners() and plan.patience > 14
    story.do("seal", [name for name in NAMES if name != "c"])
    story.do("wait", [f"{int(4 * plan.patience) / 4}"])
    story.do("seal", ["c"])
    story.do("held", NAMES)
    assert story.state.committed == 1
    assert not story.state.conduct.decisions, "others may have held it up"
    assert conduct.owes_time(story.state, story.liar)


def test_an_owner_that_seals_later_than_it_may_be_held_up_is_struck() -> None:
    story = Story(NAMES, "c", rounds__reduce_timeout="600")
    measured(story)
    story.train()
    plan = story.state.round.plan
    assert plan is not None and story.liar in story.owners()
    story.do("seal", [name for name in NAMES if name != "c"])
    story.do("wait", [f"{int(4 * plan.patience) / 4 + 2 * plan.expected + 2:g}"])
    story.do("seal", ["c"])
    story.do("held", NAMES)
    assert story.state.committed == 1 and story.state.conduct.decisions == 1


def test_who_pauses_once_in_short_rounds_counts_in_all_others_and_is_trusted_again() -> None:
    """For seven seconds, in the middle of an exchange."""
    story = Story(NAMES, "c", rounds__reduce_timeout="6")
    counted, owned, owing = list[bool](), list[bool](), list[bool]()
    for k in range(ROUNDS):
        story.train()
        owned.append(story.liar in story.owners())
        owing.append(conduct.owes_time(story.state, story.liar))
        story.reduce(seals=k != 2, holds=k != 2)
        assert story.state.pending is not None
        counted.append(story.liar in story.state.pending.contributors)
    assert all(counted), "its work was left out"
    assert owned == [not owes for owes in owing] and sum(owing) == 6, owing
    assert not conduct.owes_time(story.state, story.liar) and conduct.may_contribute(story.state, story.liar)


def test_who_falls_silent_in_every_reduce_is_not_waited_for_after_a_few_rounds() -> None:
    story, seconds = Story(NAMES, "c"), list[dict[str, float]]()
    for _ in range(2 * ROUNDS):
        story.train()
        number = story.state.round.number
        if there := story.liar in story.state.round.participants:
            story.do("silent", ["c"])
            story.do("seal", [name for name in NAMES if name != "c"])
            if story.state.round.ledger.complete:
                story.do("held", [story.name(n) for n in story.state.round.ledger.members if n != story.liar])
            story.do("wait", ["10.25"])
            assert story.liar not in story.state.members.here
        story.reduce() if story.state.round.number == number else story.tell()
        assert story.state.pending is not None
        seconds.append(story.state.pending.seconds)
        if there:
            story.do("talk", ["c"])
            story.do("back", ["c"])
            story.do("state", ["c", str(story.state.committed)])
    exchanges = [record["reduce"] + record["commit"] for record in seconds]
    assert sum(s > 1 for s in exchanges) <= 4, f"seconds of each exchange: {exchanges}"
    assert set(story.state.conduct.strikes) == {"n3"}


def accuse(story: Story, accuser: str, accused: str, number: int) -> None:
    """Twice in the round, as far as it has a say in it."""
    for _ in range(2):
        for _ in range(40):
            if story.state.round.phase is Phase.REDUCING:
                break
            story.do("wait", ["0.25"])
        if story.state.round.number == number and story.contributes(story.node(accuser)):
            story.do("lost", [accuser, accused])


def break_off(story: Story, how: str, after: float) -> None:
    """An exchange from which the liar is gone so many seconds after it was planned; and it is back at once."""
    story.train()
    story.do("wait", [f"{after:g}"])
    if how == "good-bye":
        story.do("leave", ["c"])
    elif how in ("broken", "resumed"):
        story.do("disconnect", ["c"])
        attempt = str(story.state.round.ledger.attempt)
        for name in NAMES:
            if name != "c":
                story.do("lost", [name, "c", f"attempt={attempt}"])
    story.do("connect" if how == "resumed" else "back", ["c"])
    story.do("state", ["c", str(story.state.committed)])
    story.reduce()


def test_who_says_good_bye_in_the_middle_of_each_exchange_owns_nothing_and_then_its_work_is_not_taken() -> None:
    story = Story(NAMES, "c")
    owned, took_part = list[bool](), list[bool]()
    for _ in range(ROUNDS):
        break_off(story, "good-bye", 0.0)
        owned.append(story.liar in story.owners())
        took_part.append(story.liar in story.state.round.participants)
    assert not any(owned[1:]), "what it owned the others had to do again in each round"
    assert sum(took_part) <= 9, "it cost each round an attempt, and no chunk with its work can be audited"
    assert set(story.state.conduct.strikes) == {"n3"}


@pytest.mark.parametrize("how", ["anew", "broken", "resumed"])
def test_whose_life_ends_in_each_exchange_is_left_out_for_what_that_costs(how: str) -> None:
    story = Story(NAMES, "c")
    took_part = list[bool]()
    for _ in range(ROUNDS):
        break_off(story, how, 2.0)
        took_part.append(story.liar in story.state.round.participants)
    assert not all(took_part[6:12]), "it cost each round two seconds"
    assert set(story.state.conduct.strikes) == {"n3"}


def test_half_of_the_quorum_does_not_tell_how_long_the_inner_steps_take() -> None:
    """One of four has them a second after the round began, as it says; one more is the quorum."""
    run = scenario.Run()
    run.config = replace(run.config, members=replace(run.config.members, stall=3000.0))
    run.state = replace(run.state, config=run.config)
    run.do("begin", ["ada", "bo", "cy", "dee"])
    run.do("wait", ["1"])
    run.do("ready", ["dee"])
    run.do("wait", ["299"])
    run.do("ready", ["ada"])
    assert run.state.inner_time == pytest.approx(300.0)


def test_one_word_of_a_member_whose_stream_is_broken_for_a_moment_puts_it_out_of_one_attempt() -> None:
    story = Story(NAMES, "a")
    story.train()
    story.do("disconnect", ["c"])
    story.do("lost", ["a", "c"])
    story.do("wait", ["0.25"])
    story.do("connect", ["c"])
    story.reduce()
    story.train()
    assert story.node("c") in story.state.round.participants
    assert not story.state.conduct.strikes


def test_two_in_league_end_attempts_in_two_rounds_by_losing_a_session_and_saying_so() -> None:
    """Then neither owns anything, so that they need no path to each other. Nobody can tell who of them lies."""
    story, attempts = Story(NAMES, "a"), list[int]()
    for _ in range(8):
        story.train()
        if story.state.round.plan is not None:
            story.do("disconnect", ["c"])
            story.do("lost", ["a", "c"])
            story.do("connect", ["c"])
        story.reduce()
        assert story.state.pending is not None
        attempts.append(story.state.pending.attempts)
    assert attempts[2:] == [1] * 6, attempts
    assert not story.state.conduct.strikes


@pytest.mark.parametrize("partners", ["ab", "abde"])
def test_who_loses_its_session_to_one_after_the_other_takes_no_owner_with_it_and_is_charged(partners: str) -> None:
    """Each of them says alone, and rightly, that it cannot be reached. For the word of two nobody is struck, and
    who blinked to both is not waited for."""
    story, owners = Story(NAMES, "c"), list[set[str]]()
    for k in range(12):
        story.train()
        owners.append({story.name(node) for node in story.owners()})
        if story.liar in story.state.round.participants:
            story.do("wait", ["2"])
            story.do("disconnect", ["c"])
            story.do("lost", [partners[k % len(partners)], "c"])
            story.do("connect", ["c"])
        story.reduce()
    assert all(found == {"a", "b", "d", "e"} for found in owners[4:]), owners  # of so many chunks
    (strikes,) = story.state.conduct.strikes.values()
    assert strikes.node == story.liar and strikes.owes_until > 0
    assert bool(strikes.latest) == (len(partners) > 2)


def test_one_word_of_each_other_puts_nobody_out_while_all_streams_are_broken() -> None:
    """As when the coordinator's own link breaks, and the liar is back first."""
    story = Story(NAMES, "a")
    story.train()
    story.do("disconnect", NAMES)
    story.do("connect", ["a"])
    for name in NAMES[1:]:
        story.do("wait", ["1"])
        if story.state.round.plan is not None:
            story.do("lost", ["a", name])
    story.do("connect", NAMES[1:])
    story.reduce()
    assert {story.node(name) for name in NAMES} == set(story.state.members.here)
    assert not story.state.conduct.strikes


def test_who_dies_once_in_an_exchange_goes_on_as_before() -> None:
    story = Story(NAMES, "c")
    break_off(story, "anew", 2.0)
    break_off(story, "none", 0.0)
    assert conduct.may_own(story.state, story.liar) and conduct.may_contribute(story.state, story.liar)


def test_who_accuses_one_member_in_every_round_does_not_keep_it_out() -> None:
    story = Story(NAMES, "a")
    victim, counted = story.node("h"), list[bool]()
    for _ in range(ROUNDS):
        story.train()
        accuse(story, "a", "h", story.state.round.number)
        story.reduce()
        pending = story.state.pending
        counted.append(pending is not None and victim in pending.contributors)
    assert sum(counted) >= ROUNDS - 3, f"h counted in {counted}"
    assert all(counted[5:]), f"h counted in {counted}"
    assert conduct.consequence(story.state, victim) is None


def test_who_accuses_one_after_the_other_is_left_out() -> None:
    story = Story(NAMES, "a")
    counted, attempts = Counter[str](), list[int]()
    for k in range(ROUNDS):
        story.train()
        accuse(story, "a", NAMES[1 + k % 7], story.state.round.number)
        story.reduce()
        pending = story.state.pending
        assert pending is not None
        counted.update(story.name(n) for n in pending.contributors)
        attempts.append(pending.attempts)
    assert all(counted[name] >= ROUNDS - 4 for name in NAMES[1:]), counted
    assert counted["a"] < ROUNDS - 4 and min(attempts[10:]) == 1, (counted, attempts)
    strikes = story.state.conduct.strikes["n1"]
    assert Offence.ACCUSER in strikes.latest and strikes.quarantines, "it is held to account for it"
    assert all(conduct.may_contribute(story.state, story.node(name)) for name in NAMES[1:])


def test_two_who_accuse_one_do_not_keep_it_out() -> None:
    story = Story(NAMES)
    victim, counted = story.node("h"), list[bool]()
    for _ in range(ROUNDS):
        story.train()
        number = story.state.round.number
        accuse(story, "a", "h", number)
        accuse(story, "b", "h", number)
        story.reduce()
        pending = story.state.pending
        counted.append(pending is not None and victim in pending.contributors)
    assert sum(counted) >= ROUNDS - 3, f"h counted in {counted}"
    assert conduct.may_contribute(story.state, victim)


def test_a_path_that_is_really_broken_keeps_neither_of_its_ends_out() -> None:
    story = Story(NAMES)
    counted = Counter[str]()
    for _ in range(ROUNDS):
        story.train()
        for _ in range(2):
            ends = [story.node(name) for name in ("c", "h")]
            needed = all(story.contributes(n) for n in ends) and story.owners().intersection(ends)
            if needed:
                story.do("lost", ["c", "h"])
                story.do("lost", ["h", "c"])
                while story.state.round.phase is not Phase.REDUCING:
                    story.do("wait", ["0.25"])
        story.reduce()
        pending = story.state.pending
        assert pending is not None
        counted.update(story.name(n) for n in pending.contributors)
    assert all(counted[name] >= ROUNDS - 3 for name in NAMES), counted
    assert all(conduct.may_contribute(story.state, n) for n in story.state.members.here)


def claim_too_much(story: Story, name: str) -> None:
    node = story.node(name)
    lease = story.state.leases.by_node[node]
    work = ev.Contribution(10_000, 10, 2.0, 1.0, lease[0][0])
    story.feed(ev.ContributionReady(node, story.member(node).life, story.state.round.number, work))


def test_who_is_evicted_for_a_lie_and_comes_back_at_once_is_not_trusted_as_before() -> None:
    story = Story(NAMES, "c")
    story.train()
    story.reduce()
    for _ in range(2):
        claim_too_much(story, "c")
        assert story.liar not in story.state.members.here
        story.do("back", ["c"])
        story.do("state", ["c", str(story.state.committed)])
        story.train()
        story.reduce()
        story.train()
        assert story.liar not in story.owners()
        story.reduce()
    for _ in range(10):
        assert story.liar not in story.state.round.participants, "its work is taken after two lies"
        assert "its work is not taken" in story.state.members.here[story.liar].shown_reason
        story.train()
        story.reduce()
    for _ in range(10):
        story.train()
        story.reduce()
    assert story.liar in story.state.round.participants and not story.state.members.here[story.liar].shown_reason


def test_who_lies_again_and_again_is_refused() -> None:
    story, lies = Story(NAMES, "c"), 0
    for _ in range(30):
        if story.liar in story.state.round.participants:
            claim_too_much(story, "c")
            lies += 1
            if conduct.refusal(story.state, story.liar):
                break
            story.do("back", ["c"])
            story.do("state", ["c", str(story.state.committed)])
        story.train()
        story.reduce()
    assert lies == 3 and story.liar not in story.state.members.here
    assert "too often" in conduct.refusal(story.state, story.liar)


def test_only_the_lone_liar_of_a_dispute_is_struck() -> None:
    story = Story(NAMES[:5], "c")
    story.train()
    story.do("seal", NAMES[:5])
    story.do("held", ["a", "b", "d", "e"])
    story.do("held", ["c", "word=other"])
    story.do("held", ["c", "word=other", "proven=1"])
    assert story.liar not in story.state.members.here
    assert not conduct.may_own(story.state, story.liar)
    others = [n for n in story.state.members.here if n != story.liar]
    assert len(others) == 4 and all(conduct.consequence(story.state, n) is None for n in others)


def test_a_member_that_is_gone_is_not_late() -> None:
    story = Story(NAMES, "c")
    for _ in range(8):
        story.train()
        story.do("disconnect", ["c"])
        story.do("wait", ["1"])
        story.do("connect", ["c"])
        story.reduce(seals=False, holds=False)
    assert {story.name(n) for n in story.state.members.here} >= set(NAMES) - {"c"}


def test_for_whom_a_commit_did_not_wait_says_which_state_it_has_where_the_round_is_void() -> None:
    story = Story(["a", "b", "c"], "c")
    story.train()
    story.reduce(holds=False)  # it owes the others time
    story.train()
    story.do("seal", ["a", "b", "c"])
    story.do("held", ["a", "b"])
    story.do("wait", ["1"])
    assert story.state.unawaited == {story.liar} and story.state.committed == 2
    story.do("state", ["a", "2"])
    story.do("state", ["b", "2", "flipped"])  # nobody can tell which is right, and the third one has state 1
    assert story.state.pending is None and story.state.tokens == 30
    member = story.member(story.liar)
    assert (member.state, member.state_round) == (MemberState.RECOVERING, -1)
    story.do("state", ["c", "2"])  # it has made it meanwhile, as it may
    assert story.member(story.liar).state is MemberState.RECOVERING, "it fetches what the run has"
    story.do("state", ["c", "2", "as=1"])
    assert story.member(story.liar).state_round == 2
    assert not story.state.unawaited
