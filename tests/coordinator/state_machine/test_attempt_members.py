"""Who is in a round's next attempt: liars gain nothing by having others left out of it."""

from collections.abc import Container

import pytest
from audit_world import AuditWorld, Lies, liar
from member_story import Story

from atoll.comm.bitmap import places
from atoll.comm.ids import NodeId
from atoll.comm.replace import replace
from atoll.coordinator.state_machine import events as ev

N1, N2 = NodeId("n1"), NodeId("n2")
LIARS = {N1, N2}
Pairs = tuple[tuple[int, int], ...]


def lose(world: AuditWorld, node: int, peer: int) -> None:
    """One says that it cannot reach the other, as soon as there is an attempt."""
    while world.state.round.plan is None:
        world.now += 0.25
        world.feed(ev.Tick())
    fence = world.state.round.plan.fence
    world.feed(ev.PeerUnreachable(NodeId(f"n{node}"), 1, NodeId(f"n{peer}"), fence, "reset"))


def leave_out(words: Pairs, blinks: Pairs, lies: Lies) -> AuditWorld:
    """A round in which liars said twice, or once of who had no session for a moment, that they reach these not."""
    world = AuditWorld(b"7", lies, audit="1e-9", norms=True)
    for node, peer in (*words, *words):
        lose(world, node, peer)
    for node, peer in blinks:
        world.feed(ev.Disconnected(NodeId(f"n{peer}"), 1))
        lose(world, node, peer)
        world.now += 0.1
        world.feed(ev.Connected(NodeId(f"n{peer}"), 1))
    return world


def seal(world: AuditWorld) -> None:
    while world.state.round.plan is None:
        world.now += 0.25
        world.feed(ev.Tick())
    for event in list(world.due()):
        if isinstance(event, ev.ChunksSealed):
            world.feed(event)


def act_alone(world: AuditWorld, nodes: Container[NodeId]) -> None:
    """For most of a second nobody but these does anything."""
    for _ in range(8):
        world.now += 0.1
        for event in list(world.due()):
            if getattr(event, "node", None) in nodes:
                world.feed(event)
        world.feed(ev.Tick())


def say_too_long(world: AuditWorld, owner: NodeId) -> int:
    """Both liars say so of what this owner sealed last; the chunk."""
    r = world.state.round
    assert r.plan is not None
    c = max((c for c, s in r.ledger.sealed.items() if s.by == owner), key=lambda c: r.ledger.since[c])
    fence = r.plan.fence._replace(attempt=r.ledger.since[c])
    for node in (N1, N2):
        world.feed(ev.SealOutsized(node, 1, fence, c, r.ledger.sealed[c].digest, 9.0))
    return c


@pytest.mark.parametrize("minimum", [1, 2])
def test_who_is_back_first_when_all_streams_broke_is_not_alone_in_the_next_attempt(minimum: int) -> None:
    """As many as the run needs would be enough, and nothing can be audited among two."""
    lies = liar(1, "seal") | (liar(2, "seal") if minimum == 2 else {})
    world = AuditWorld(b"n1", lies, audit="1000")
    members = replace(world.state.config.members, minimum=minimum)
    world.state = replace(world.state, config=replace(world.state.config, members=members))
    for node in list(world.state.members.here):
        world.feed(ev.Disconnected(node, 1))
    world.now += 0.1
    for node in lies:
        world.feed(ev.Connected(node, 1))
    lose(world, 1, 3)
    act_alone(world, lies)
    assert not world.state.committed
    for node in list(world.state.members.here):
        world.feed(ev.Connected(node, 1))
    world.run()
    assert not world.wrong() and world.convicted() <= set(lies), world.notes


@pytest.mark.parametrize(
    ("words", "blinks"),
    [(((1, 8), (2, 7)), ((1, 6), (2, 5))), ((), ((1, 6), (2, 5), (1, 7), (2, 8))), (((1, 8), (2, 7)), ((1, 6),))],
)
def test_two_who_have_others_left_out_convict_nobody_who_is_honest(words: Pairs, blinks: Pairs) -> None:
    """Of four that are left two are a majority of three voices, but not of the round's."""
    world = leave_out(words, blinks, liar(1, "audit") | liar(2, "audit"))
    seal(world)
    assert len(world.state.round.ledger.members) <= 5
    honest = next(s.by for s in world.state.round.ledger.sealed.values() if s.by not in LIARS)
    say_too_long(world, honest)
    world.run()
    assert world.convicted() | world.charged().keys() <= LIARS, world.notes


def slander(world: AuditWorld, c: int, victim: NodeId) -> None:
    """Play the audit of the chunk, in which both liars say that the victim shows them nothing."""
    for _ in range(4):
        r = world.state.round
        if r.plan is None or c not in r.audits:
            return
        for node in r.audits[c].named:
            if (audit := world.state.round.audits.get(c)) is None or node in audit.voices:
                continue
            said = world.finding(node, audit)
            if node in LIARS:
                receipt = world.receipt(audit, list(places(audit.inputs)), node).pack()
                said = replace(said, digest=b"", receipts=(receipt,), silent=(world.place(victim),))
            world.feed(said)


def test_two_who_have_others_left_out_have_nobody_charged_with_showing_nothing() -> None:
    world = leave_out(((1, 8), (2, 7)), ((1, 6),), liar(1, "mute") | liar(2, "mute"))
    seal(world)
    slander(world, say_too_long(world, NodeId("n3")), NodeId("n5"))
    assert any("n5 showed some auditors nothing" in note for note in world.notes), world.notes
    assert not world.charged()


def test_where_others_were_left_out_an_attempt_has_a_quorum_all_the_same() -> None:
    """Then honest members are among those that own and audit."""
    world = leave_out(((1, 8), (2, 7)), ((1, 6), (2, 5), (1, 3)), liar(1, "seal") | liar(2, "seal"))
    seal(world)
    members = world.state.round.ledger.members
    assert len(set(members) - LIARS) >= 2 and len(members) >= 4, members


@pytest.mark.parametrize("sealed", [False, True])
def test_an_audit_waits_for_auditors_that_are_away_for_a_moment(sealed: bool) -> None:
    """Else a friend would be the only one to look at what an owner forged, before or after all streams broke."""
    world = AuditWorld(b"n1", liar(1, "seal") | liar(2, "cover"), audit="1000")
    honest = [node for node in world.state.members.here if node not in LIARS]
    if sealed:
        seal(world)
    for node in honest:
        world.feed(ev.Disconnected(node, 1))
    act_alone(world, LIARS)
    for node in honest:
        world.feed(ev.Connected(node, 1))
    world.run()
    assert not world.wrong() and world.convicted() == {N1}, world.notes


@pytest.mark.parametrize("names", ["ab", "abc"])
def test_who_breaks_off_each_attempt_is_out_of_the_round_though_a_quorum_needs_it(names: str) -> None:
    """Two of three would be no quorum of three quarters, and one of two none of any."""
    story = Story(list(names), names[-1])
    rounds = replace(story.state.config.rounds, quorum=0.75)
    members = replace(story.state.config.members, minimum=1)
    story.state = replace(story.state, config=replace(story.state.config, rounds=rounds, members=members))
    story.train()
    for _ in range(8):
        if story.state.committed:
            break
        if story.state.round.plan is not None and story.contributes(story.liar):
            story.do("disconnect", [names[-1]])
            story.do("lost", ["a", names[-1]])
            story.do("connect", [names[-1]])
        story.do("wait", ["1"])
    story.reduce()
    assert story.state.pending is not None and story.state.pending.attempts <= 3
    assert story.liar not in story.state.pending.contributors


def test_an_audit_in_doubt_waits_for_auditors_that_are_away_for_a_moment() -> None:
    """Else two friends would be most of those who looked, where the others need longer than all streams last."""
    friends = liar(1, "seal") | liar(2, "cover") | liar(3, "cover")
    world = AuditWorld(b"n1", friends, audit="1000")
    honest = [node for node in world.state.members.here if node not in friends]
    seal(world)
    doubted = 0
    for c, audit in list(world.state.round.audits.items()):
        if audit.owner != N1 or len(friends.keys() & audit.named.keys()) != 1:
            continue
        for node in audit.named:
            world.feed(world.finding(node, audit))
        doubted += world.state.round.audits[c].wide
        for node in friends.keys() & world.state.round.audits[c].named.keys() - audit.named.keys():
            world.feed(world.finding(node, world.state.round.audits[c]))
    assert doubted
    for node in honest:
        world.feed(ev.Disconnected(node, 1))
    act_alone(world, friends)
    for node in honest:
        world.feed(ev.Connected(node, 1))
    world.run()
    assert not world.wrong() and world.convicted() == {N1}, world.notes


def test_no_verdict_that_is_beyond_doubt_waits_for_who_is_away() -> None:
    world = AuditWorld(b"n1", liar(1, "seal"), audit="1000")
    seal(world)
    world.feed(ev.Disconnected(NodeId("n8"), 1))
    while not world.convicted():
        found = [e for e in world.due() if isinstance(e, ev.AuditReported) and e.node != "n8"]
        assert found, world.notes
        for event in found:
            world.feed(event)
    assert world.convicted() == {N1} and NodeId("n8") in world.state.members.here


def without_end(names: str, leaves: str, reducers: str, liar: str, rest: str) -> Story:
    """A round in which the liar says of the `rest`, in turn, that it cannot reach them, in each attempt that
    counts on both; the others do their part."""
    story = Story(list(names), liar, leaves, reducers)
    story.train()
    for turn in range(60):
        if story.state.committed:
            return story
        there = [n for n in rest if story.contributes(story.node(n))]
        if story.state.round.plan is not None and there and story.contributes(story.liar):
            story.do("lost", [liar, there[0] if there[0] in reducers else there[turn % len(there)]])
        elif story.state.round.plan is not None:
            story.reduce()
            return story
        story.do("wait", ["1"])
    raise AssertionError(story.state.round.reason)


def test_a_reducer_that_says_it_cannot_reach_the_other_one_does_not_hold_up_a_round_of_leaves() -> None:
    assert without_end("abcd", "abcd", "rs", "r", "s").state.committed


def test_the_one_that_can_be_dialled_is_left_out_of_a_round_for_which_a_reducer_is_there() -> None:
    """It says that it cannot reach the reducer, and then leaf after leaf."""
    story = without_end("abcd", "bcd", "r", "a", "rbcd")
    assert story.state.pending is not None and story.liar not in story.state.pending.contributors
