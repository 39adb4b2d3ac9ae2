"""Honest members with bad luck among others, on the virtual clock: none of them is kept out or said to have lied,
and the others' rounds take hardly longer.

A round has 20 s of inner steps, or 60 s. The times of links and reduces are a third of a run's here (`sim.links`,
`sim.reduce`): so are those of the misfortunes.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from statistics import mean

import pytest
from sim.engine import Process
from sim.node import Host, Node
from sim.test_scenarios import CONFIG
from sim.truth import CHUNK
from sim.world import World

from atoll.comm.config.run import RunConfig
from atoll.comm.evidence import Consequence
from atoll.comm.strikes import FALSE_STATEMENTS, PROVEN
from atoll.coordinator.state_machine.events import CommitRecord, Decision
from atoll.coordinator.state_machine.state import Phase
from atoll.node.state_machine import events as node_ev

MEMBERS, CHUNKS, ROUNDS = 6, 24, 14
QUIET: RunConfig = replace(
    CONFIG,
    rounds=replace(CONFIG.rounds, inner_steps=200, reduce_timeout=200.0),
    members=replace(CONFIG.members, start=MEMBERS, lease=7.0, reconnect=1.0),
)
STEP = 0.1  # seconds, of the virtual clock, between two looks at a world


@dataclass
class Village:
    """Six members, one of which has bad luck, for some rounds."""

    world: World
    host: Host
    began: float = 0.0  # seconds
    moments: list[float] = field(default_factory=list)  # seconds; of the commits
    records: list[CommitRecord] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)

    @property
    def node(self) -> Node:
        return self.world.nodes[self.host.name]

    def every(self, seconds: float, what: Callable[["Village"], None], first: float = 0.0) -> None:
        """Have it happen again and again."""

        def happen() -> None:
            what(self)
            self.world.engine.after(seconds, happen)

        self.world.engine.after(first or seconds, happen)

    def run(self, look: Callable[["Village"], None] = lambda village: None) -> None:
        """For so many rounds; `look` at every moment."""
        world = self.world
        first, self.began = world.durable.committed, world.engine.now
        while world.durable.committed < first + ROUNDS:
            before = world.durable.committed
            assert world.engine.now < self.began + 200.0 * ROUNDS, world.ailing(first + ROUNDS)
            world.until(lambda: False, STEP)
            look(self)
            if world.durable.committed > before:
                self.moments.append(world.engine.now)
        journal = world.service.journal
        self.records = [r for r in journal.rounds() if r.round > first]
        self.decisions = [decision for _, decision in journal.decisions()]

    @property
    def round_seconds(self) -> float:
        return (self.moments[-1] - self.began) / ROUNDS

    @property
    def counted(self) -> float:
        """The share of the records in which it is a contributor."""
        return mean(self.node.me in record.contributors for record in self.records)


@contextmanager
def village(steps: int = QUIET.rounds.inner_steps) -> Iterator[Village]:
    """`steps`: inner steps of a round, each of 0.1 s."""
    config = replace(QUIET, rounds=replace(QUIET.rounds, inner_steps=steps))
    world = World(1, config, [1.0] * MEMBERS)
    world.numel = CHUNKS * CHUNK - 3
    try:
        assert world.until(lambda: world.durable.round.phase is Phase.INNER, 60.0)
        yield Village(world, world.hosts["m2"])
    finally:
        world.close()


@cache
def usual(steps: int = QUIET.rounds.inner_steps) -> float:
    """Seconds of a round without bad luck."""
    with village(steps) as quiet:
        quiet.run()
        assert not quiet.decisions
        return quiet.round_seconds


def held_against_nobody(village: Village) -> None:
    """Strikes there may be, but nobody is kept out of rounds, put out, banned, or said to have lied."""
    kept_out = (Consequence.NO_CONTRIBUTOR, Consequence.EVICTED, Consequence.BANNED)
    for decision in village.decisions:
        assert decision.consequence not in kept_out, decision
        assert decision.evidence.offence not in FALSE_STATEMENTS | PROVEN, decision


# What happens to it


def lose_connections(village: Village) -> None:
    """Its NAT forgets them all."""
    node, world = village.node, village.world
    for peer in node.plane.peers.values():
        for link in list(peer.links):
            link.snap()
    if node.control.stream:
        world.network.send(node, world.service, world.service.closed, node.control.stream, *node.session)
        node.control.broke(node.control.stream)


def pause(village: Village) -> None:
    village.node.wish(node_ev.PauseChanged(True))
    village.world.engine.after(6.0, village.node.wish, node_ev.PauseChanged(False))


class SlowUplink:
    """What a node sends to others goes out one after the other."""

    def __init__(self, village: Village, seconds: float) -> None:
        """`seconds`: that one chunk takes."""
        self._village, self._seconds, self._free_at = village, seconds, 0.0
        self._usual = village.world.network.delay
        village.world.network.delay = self.delay  # type: ignore[method-assign]

    def delay(self, source: Process, to: Process) -> float:
        world, usual = self._village.world, self._usual(source, to)
        if source.place != self._village.host.name or to is world.service:
            return usual
        self._free_at = max(self._free_at, world.engine.now) + self._seconds
        return self._free_at - world.engine.now + usual


@pytest.mark.chaos
@pytest.mark.long
def test_a_laptop_that_falls_asleep_in_every_other_reduce_is_not_kept_out() -> None:
    asleep = set[int]()

    def look(village: Village) -> None:
        round_ = village.world.durable.round
        if round_.phase is Phase.REDUCING and round_.number % 2 == 0 and round_.number not in asleep:
            asleep.add(round_.number)
            village.node.stop()
            village.world.engine.after(13.0, village.node.resume)

    with village(600) as unlucky:
        unlucky.run(look)
        held_against_nobody(unlucky)
        # It is too late for the rounds after; of those in which it falls asleep, what it had sent counts. That is
        # luck: 0.15 to 0.39 of the rounds in the worlds 1 to 6.
        assert len(asleep) == ROUNDS // 2 and unlucky.counted > 0.1
        assert unlucky.round_seconds < 1.1 * usual(600)


@pytest.mark.long
def test_a_node_whose_nat_forgets_its_connections_is_not_kept_out() -> None:
    with village() as unlucky:
        unlucky.every(33.0, lose_connections, 5.0)
        unlucky.run()
        held_against_nobody(unlucky)
        assert unlucky.counted > 0.9
        assert unlucky.round_seconds < 1.1 * usual()


@pytest.mark.long
def test_a_node_with_a_slow_uplink_is_not_kept_out() -> None:
    with village() as unlucky:
        SlowUplink(unlucky, 0.04)
        unlucky.run()
        held_against_nobody(unlucky)
        assert unlucky.counted > 0.9
        assert unlucky.round_seconds < 1.1 * usual()


@pytest.mark.long
def test_a_node_that_pauses_in_every_round_is_not_kept_out() -> None:
    with village() as unlucky:
        unlucky.every(19.0, pause, 3.0)
        unlucky.run()
        held_against_nobody(unlucky)
        assert unlucky.counted > 0.9
        assert unlucky.round_seconds < 1.1 * usual()


@pytest.mark.long
@pytest.mark.parametrize("away", [0.5, 12.0])
def test_a_coordinator_that_dies_in_the_middle_of_audits_has_nobody_charged(away: float) -> None:
    died = set[int]()

    def look(village: Village) -> None:
        state = village.world.durable
        if state.round.audits and state.round.number not in died and state.round.number % 2 == 0:
            died.add(state.round.number)
            village.world.coordinator_dies("at once", away=away)

    with village() as unlucky:
        unlucky.run(look)
        assert len(died) > ROUNDS // 6 and not unlucky.decisions


@pytest.mark.long
def test_a_coordinator_that_stands_still_in_reduces_has_nobody_charged() -> None:
    stopped = set[int]()

    def look(village: Village) -> None:
        world = village.world
        if world.durable.round.phase is Phase.REDUCING and world.durable.round.number not in stopped:
            stopped.add(world.durable.round.number)
            world.service.stop()
            world.engine.after(40.0, world.service.resume)

    with village() as unlucky:
        unlucky.run(look)
        assert len(stopped) > ROUNDS // 2 and not unlucky.decisions


@pytest.mark.long
@pytest.mark.parametrize("away", [12.0, 40.0])
def test_a_coordinator_that_dies_in_reduces_has_nobody_charged(away: float) -> None:
    died = set[int]()

    def look(village: Village) -> None:
        round_ = village.world.durable.round
        if round_.phase is Phase.REDUCING and round_.number not in died:
            died.add(round_.number)
            village.world.coordinator_dies("at once", away=away)

    with village() as unlucky:
        unlucky.run(look)
        assert len(died) > ROUNDS // 2 and not unlucky.decisions
