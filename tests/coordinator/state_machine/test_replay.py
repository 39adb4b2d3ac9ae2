"""Replays of contributors' rounds, as the coordinator's machine decides on them."""

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import pytest
from audit_world import config, key_of

from atoll.comm.bitmap import bitmap
from atoll.comm.config.run import RunConfig, check
from atoll.comm.config.security import SecurityConfig
from atoll.comm.digest import digest
from atoll.comm.errors import ConfigError
from atoll.comm.evidence import Consequence, Offence
from atoll.comm.ids import NodeId
from atoll.comm.proto import atoll_pb2 as pb
from atoll.comm.replace import replace
from atoll.comm.strikes import Strikes
from atoll.coordinator.service.journaled_machine import decode, encode
from atoll.coordinator.service.view import affected_nodes, view
from atoll.coordinator.state_machine import events as ev
from atoll.coordinator.state_machine import leases as data
from atoll.coordinator.state_machine.conduct import identity
from atoll.coordinator.state_machine.events import Likeness
from atoll.coordinator.state_machine.members import VERIFIER
from atoll.coordinator.state_machine.replay import MIN_VALID, WARM_UP_REPLAYS
from atoll.coordinator.state_machine.state import Phase, Replay, State
from atoll.coordinator.state_machine.step import step

CHUNKS, STEPS = 16, 10
V, W = NodeId("n1"), NodeId("n2")  # the second one is a verifier where the world has two
HONEST, FALSE = Likeness(0.6, 1.0), Likeness(0.1, 1.0)
OTHERS = tuple(Likeness(0.3 + i / 100, 1.0) for i in range(4))


class World:
    """A run of a verifier, n1, or several, and contributors, round after round. `works`: what replays of a node
    find; `hiding`: who does not show a verifier what it contributed."""

    def __init__(
        self, count: int = 6, nonce: bytes = b"nonce", replay: float = 1.0, leaves: int = 0, verifiers: int = 1
    ) -> None:
        run = config("0.000001", count)
        run = dataclasses.replace(run, security=dataclasses.replace(run.security, replay=replay))
        self.state, self.now = State(run), 0.0
        self.works: dict[NodeId, Likeness] = {}
        self.told = dict[NodeId, dict[str, Any]]()  # what else a member says of its work
        self.unawaited: set[NodeId] = set()  # owe time, and do not say that they hold the chunks
        self.hiding: set[tuple[NodeId, NodeId]] = set()  # (contributor, verifier)
        self.decisions: list[ev.Decision] = []
        self.notes: list[str] = []
        self.replayed: list[NodeId] = []
        self.feed(ev.Started(1, nonce))
        self.verifiers = [NodeId(f"n{i + 1}") for i in range(verifiers)]
        self.nodes = [NodeId(f"n{i + 1 + verifiers}") for i in range(count)]
        for node in (*self.verifiers, *self.nodes):
            role, leaf = (VERIFIER if node in self.verifiers else ""), node in self.nodes[:leaves]
            key = key_of(node).public
            self.feed(ev.Joined(node, 1, str(node), f"{node}:1", "s", leaf=leaf, role=role, key=key))
            self.feed(ev.Connected(node, 1))
            self.feed(ev.LayoutReported(node, 1, CHUNKS, digest(b"layout")))
        for node in 2 * (*self.verifiers, *self.nodes):
            self.feed(ev.StateReported(node, 1, 0, digest(b"state 0")))

    def feed(self, event: ev.Event) -> None:
        self.state, effects = step(self.state, event, self.now)
        self.decisions += [e for e in effects if isinstance(e, ev.Decision)]
        self.notes += [e.sentence for e in effects if isinstance(e, ev.Note)]

    @property
    def task(self) -> Replay | None:
        return self.state.replays.tasks.get(V)

    def reduce(self) -> None:
        """Everybody trains; the first attempt opens."""
        self.now += 10.0
        r = self.state.round
        assert r.phase is Phase.INNER and r.participants.keys().isdisjoint(self.verifiers), r.reason
        for node in r.participants:
            self.feed(ev.StepsReached(node, 1, r.number))
        for node in r.participants:
            front = data.front(self.state.leases.by_node[node])
            work = ev.Contribution(STEPS, STEPS, 2.0, 1.0, front, **self.told.get(node, {}))
            self.feed(ev.ContributionReady(node, 1, r.number, work))
        assert self.state.round.phase is Phase.REDUCING

    def seal(self) -> None:
        r = self.state.round
        assert r.plan is not None
        everybody = bitmap(range(len(r.ledger.entries)), len(r.ledger.entries))
        for node in r.ledger.members:
            owned = [c for c, owner in enumerate(r.ledger.owners) if owner == node]
            self.feed(
                ev.ChunksSealed(node, 1, r.plan.fence, tuple((c, digest(b"%d" % c), everybody) for c in owned))
            )

    def hold(self) -> None:
        r = self.state.round
        assert r.plan is not None
        for node in r.ledger.members:
            if node not in self.unawaited:
                self.feed(ev.ReduceComplete(node, 1, r.plan.fence, r.ledger.root, 1, 1))
        if self.unawaited:
            self.now += 1.0
            self.feed(ev.Tick())

    def show(self, shown: bool = True) -> None:
        for verifier in self.verifiers:
            if (task := self.state.replays.tasks.get(verifier)) is not None and task.since:
                gave = shown and (task.node, verifier) not in self.hiding
                self.feed(ev.ReplayReported(verifier, 1, task.round, task.node, gave))

    def committed(self) -> None:
        k, makers = self.state.committed, self.state.makers
        for node in sorted(self.nodes, key=lambda n: n not in makers):  # first those that made the state
            if node in self.state.members.here:
                self.feed(ev.StateReported(node, 1, k, digest(b"state %d" % k)))

    def compare(self) -> None:
        k = self.state.committed
        for verifier in self.verifiers:
            if (task := self.state.replays.tasks.get(verifier)) is not None:
                self.replayed.append(task.node)
                work = self.works.get(task.node, HONEST)
                self.feed(ev.ReplayReported(verifier, 1, task.round, task.node, True, work, OTHERS))
            self.feed(ev.StateReported(verifier, 1, k, digest(b"state %d" % k)))

    def play(self, rounds: int) -> "World":
        for _ in range(rounds):
            before = self.state.committed
            for part in (self.reduce, self.seal, self.show, self.hold, self.committed, self.compare):
                part()
            assert self.state.committed == before + 1
        return self

    def view(self, node: NodeId) -> pb.View:
        return view(self.state, node)

    def charged(self, offence: Offence = Offence.FALSE_WORK) -> set[NodeId]:
        return {d.node for d in self.decisions if d.evidence.offence is offence}


def at_replay() -> World:
    """A round that is reduced, whose chunks are sealed, with a replay."""
    world = World().play(2)
    world.reduce()
    world.seal()
    assert world.task is not None and world.task.since
    return world


def test_a_verifier_neither_trains_nor_owns_nor_is_waited_for() -> None:
    world = World().play(3)
    assert V not in world.state.leases.by_node and V not in world.state.makers
    assert world.state.pending is not None and V not in world.state.pending.shares
    assert not world.view(V).HasField("train")


@pytest.mark.parametrize("lacking", ["overlap.delay=1", "outer.feedback=0.5", "security.audit=0"])
def test_what_is_compared_must_be_of_the_round_alone_and_signed(lacking: str) -> None:
    run = RunConfig(security=SecurityConfig(replay=0.5))
    check(run)
    section, key, value = re.split("[.=]", lacking, maxsplit=2)
    part = getattr(run, section)
    part = dataclasses.replace(part, **{key: type(getattr(part, key))(value)})
    with pytest.raises(ConfigError, match="security.replay"):
        check(dataclasses.replace(run, **{section: part}))


def test_the_share_of_rounds_is_that_of_the_config() -> None:
    counts = [len(World(nonce=b"%d" % i, replay=0.3).play(12).replayed) for i in range(8)]
    assert 15 <= sum(counts) <= 45  # of 88: none is drawn in a run's first round


def test_with_fewer_than_four_contributors_nobody_is_replayed() -> None:
    assert not World(count=3).play(4).replayed
    assert World(count=4).play(4).replayed


def test_a_verifier_is_kept_at_the_state_of_the_round_and_trains_the_contributors_samples() -> None:
    world = at_replay()
    task = world.task
    assert task is not None
    lease = world.state.leases.by_node[task.node]
    world.show()
    world.hold()
    world.committed()
    assert world.state.committed == 3
    found = world.view(V)
    assert (found.committed, found.state_digest, found.you) == (2, digest(b"state 2"), "synced")
    assert (found.train.round, found.train.steps, found.train.floor, found.train.ceiling) == (
        3,
        STEPS,
        STEPS,
        STEPS,
    )
    assert [(r.first, r.count) for r in found.train.lease] == [(data.front(lease), STEPS)]
    assert not found.donors and not found.HasField("plan")
    world.compare()
    assert world.view(V).committed == 3 and not world.view(V).HasField("replay")


def test_the_commit_waits_for_the_chunks_to_be_shown_but_not_for_ever() -> None:
    world = at_replay()
    before, asking = world.state, world.view(V).replay
    assert [c.chunk for c in asking.chunks] == list(world.task.chunks if world.task else ())
    world.hold()
    assert world.state.committed == 2
    world.show()
    assert world.state.committed == 3 and not world.view(V).replay.chunks
    late = World().play(2)
    late.reduce()
    late.seal()
    late.hold()
    late.now += 60.0
    late.feed(ev.Tick())
    assert late.state.committed == 3 and late.task is None and not late.decisions
    nodes = affected_nodes(before, replace(before, replays=late.state.replays))
    assert nodes is not None and V in nodes


def test_a_paused_verifier_replays_nothing_and_gives_up_what_it_replays() -> None:
    world = World().play(2)
    world.feed(ev.Paused(V, 1))
    world.reduce()
    assert world.task is None and not any("is given up" in note for note in world.notes)
    world = at_replay()
    world.show()
    world.feed(ev.Paused(V, 1))
    world.hold()
    assert world.task is None and world.state.committed == 3 and not world.decisions
    assert any(note.endswith("is given up: n1 is paused") for note in world.notes)
    world.committed()
    world.feed(ev.StateReported(V, 1, 3, digest(b"state 3")))
    world.feed(ev.Resumed(V, 1))
    assert world.play(1).replayed, "one that may go on goes on"


def test_chunks_of_a_leaf_are_shown_by_its_dialling_the_verifier() -> None:
    world = World(leaves=5).play(2)
    world.reduce()
    world.seal()
    task = world.task
    assert task is not None
    asked = {world.state.round.ledger.entries[place].node for place in task.places}
    for node in world.nodes:
        dials = {d.node_id for d in world.view(node).auditors}
        assert (V in dials) == (node in asked and world.state.members.here[node].leaf)


def test_the_plan_says_who_may_ask() -> None:
    world = at_replay()
    assert list(world.view(world.nodes[0]).plan.verifiers) == [V]


def test_that_one_verifier_was_shown_nothing_is_held_against_nobody() -> None:
    """It may say so of whom it likes, or have a bad path to it."""
    world = World()
    world.hiding = {(world.nodes[0], V)}
    world.play(40)
    assert not world.decisions and world.nodes[0] not in world.replayed
    assert any(note.endswith("of n2: n1 says that it was not shown what it is about") for note in world.notes)
    world = World(verifiers=2)
    world.hiding = {(node, V) for node in world.nodes}  # it says so of everybody
    world.play(60)
    assert not world.decisions


def test_who_does_not_show_two_verifiers_what_it_contributed_is_remembered() -> None:
    for seed in range(5):
        world = World(nonce=b"%d" % seed, verifiers=2)
        hidden = world.nodes[seed]
        world.hiding = {(hidden, V), (hidden, W)}
        world.play(40)
        assert world.charged(Offence.SILENT) == {hidden}
        first = world.decisions[0].evidence
        said_by = sorted(key_of(verifier).public.hex() for verifier in (V, W))
        assert first.by in (V, W) and first.facts == (("verifiers", " ".join(said_by)),)


def test_who_shows_its_work_to_one_of_two_verifiers_is_replayed_by_that_one() -> None:
    world = World(verifiers=2)
    hidden = world.nodes[0]
    world.hiding, world.works[hidden] = {(hidden, V)}, FALSE
    world.play(60)
    assert world.charged() == {hidden} and not world.charged(Offence.SILENT)


def test_who_sends_something_else_is_replayed_though_no_commit_waits_for_it() -> None:
    world = World()
    liar = world.nodes[1]
    world.works[liar], world.unawaited = FALSE, {liar}
    owes = {identity(world.state, liar): Strikes(liar, owes_until=1000)}
    world.state = replace(world.state, conduct=replace(world.state.conduct, strikes=owes))
    world.play(2)
    assert world.state.unawaited == {liar}
    world.play(28)
    assert world.charged() == {liar}


@pytest.mark.long
def test_who_sends_something_else_is_soon_not_taken_any_more_and_nobody_else_is_charged() -> None:
    for seed in range(20):
        world = World(nonce=b"%d" % seed)
        liar = world.nodes[seed % 6]
        world.works[liar] = FALSE
        world.play(30)
        assert world.charged() == {liar}
        assert Consequence.NO_CONTRIBUTOR in {d.consequence for d in world.decisions}
        assert liar in world.state.members.here  # it is no proof


@pytest.mark.parametrize("told", [{"skipped": 1}, {"untimely": STEPS // 2}, {"damping": 0.8}])
def test_who_sends_something_else_is_replayed_whatever_it_says_of_its_work_that_costs_it_little(
    told: dict[str, Any],
) -> None:
    world = World()
    liar = world.nodes[2]
    world.works[liar], world.told[liar] = FALSE, told
    world.play(30)
    assert world.charged() == {liar} and liar in world.replayed


@pytest.mark.long
def test_honest_members_are_never_charged_and_drawn_rarely_after_ten() -> None:
    for seed in range(5):
        world = World(nonce=b"%d" % seed).play(120)
        assert not world.decisions
        known = world.replayed[6 * MIN_VALID + WARM_UP_REPLAYS + 1 :]
        assert len(world.replayed) < 6 * MIN_VALID + WARM_UP_REPLAYS + 50 and len(known) > 5
        assert set(world.state.replays.valid.values()) == {MIN_VALID}


def test_a_replay_that_looks_false_once_costs_nothing() -> None:
    world = World().play(30)
    doubted: list[NodeId] = []
    while not doubted:
        world.reduce()
        if world.task is not None:
            doubted.append(world.task.node)
            world.works[world.task.node] = FALSE
        for part in (world.seal, world.show, world.hold, world.committed, world.compare):
            part()
    world.works.clear()
    world.play(10)
    assert not world.decisions and world.replayed[world.replayed.index(doubted[0]) :].count(doubted[0]) > 1


def test_where_most_look_false_nobody_is_charged() -> None:
    world = World()
    world.works = dict.fromkeys(world.nodes, FALSE)
    world.play(30)
    assert not world.decisions and any("as do most" in note for note in world.notes)


def test_of_a_verifiers_first_replays_nothing_follows() -> None:
    world = World()
    world.works = dict.fromkeys(world.nodes, FALSE)
    world.play(WARM_UP_REPLAYS + 1)
    assert len(world.replayed) == WARM_UP_REPLAYS and not world.state.replays.latest


def test_a_member_that_is_no_verifier_has_no_say() -> None:
    world = at_replay()
    task, before = world.task, world.state
    assert task is not None
    for node in world.nodes:
        world.feed(ev.ReplayReported(node, 1, task.round, task.node, False))
    for round_, contributor in ((task.round - 1, task.node), (task.round, V)):
        world.feed(ev.ReplayReported(V, 1, round_, contributor, False))
    world.feed(ev.ReplayReported(V, 1, task.round, task.node, True, FALSE, OTHERS))  # of what it has not got
    assert world.state == before


def ends(change: Callable[[World], None]) -> None:
    world = at_replay()
    world.show()
    assert world.task is not None
    change(world)
    world.feed(ev.Tick())
    assert world.task is None and not world.decisions


def test_a_replay_ends_with_its_verifiers_life_or_state_or_when_it_takes_too_long() -> None:
    key = key_of(V).public
    ends(lambda w: w.feed(ev.Joined(V, 2, "n1", "n1:1", "s", role=VERIFIER, key=key)))
    ends(lambda w: w.feed(ev.Leaving(V, 1, "")))
    ends(lambda w: setattr(w, "now", w.now + 601.0))


def test_a_snapshot_of_the_journal_has_the_replays() -> None:
    world = World().play(8)
    world.reduce()
    assert world.state.replays.tasks and world.state.replays.valid
    assert decode(encode(world.state), world.state.config).replays == world.state.replays
