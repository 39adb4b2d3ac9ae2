"""Members with a bad habit among honest ones, on the virtual clock: what it costs, and for how long."""

from itertools import pairwise

import pytest
from sim.node import Host
from sim.test_scenarios import CONFIG, committed
from sim.truth import CHUNK
from sim.world import World

from atoll.comm.config.run import RunConfig
from atoll.comm.evidence import Offence
from atoll.comm.replace import replace
from atoll.coordinator.state_machine import conduct
from atoll.coordinator.state_machine.events import CommitRecord
from atoll.coordinator.state_machine.state import Phase

MEMBERS, ROUNDS = 6, 16
QUICK: RunConfig = replace(
    CONFIG,
    rounds=replace(CONFIG.rounds, inner_steps=20, reduce_timeout=30.0),
    members=replace(CONFIG.members, start=MEMBERS),
)
HABITS = ("never seals", "never holds", "withholds", "hoards", "accuses", "turns", "slanders")
SILENT = ("never seals", "never holds", "withholds")  # of these, who leave out what others wait for


class Village:
    """Six members, one of which has a habit, for some rounds."""

    def __init__(self, habit: str, seed: int, chunks: int = 1) -> None:
        """`chunks`: of each member."""
        self.world = world = World(seed, QUICK, [1.0] * MEMBERS)
        world.numel = chunks * MEMBERS * CHUNK - 3
        self.moments = [0.0]
        try:
            assert world.until(lambda: world.durable.round.phase is Phase.INNER, 60.0)
            host: Host = world.hosts["m2"]
            host.habit = habit
            for _ in range(ROUNDS):
                committed(world, 1, 200.0)
                self.moments.append(world.engine.now)
            committed(world, 1, 200.0)
            self.liar = next(n.me for n in world.living if n.host is host)
            self.records: list[CommitRecord] = list(world.service.journal.rounds())
            self.state, self.decisions = world.durable, world.service.journal.decisions()
        finally:
            world.close()

    @property
    def seconds(self) -> list[float]:
        """Of each round after the first."""
        return [b - a for a, b in pairwise(self.moments)][1:]


@pytest.mark.parametrize(
    ("habit", "seed"),
    [
        ("never seals", 1),
        ("accuses", 1),
        *(
            pytest.param(habit, seed, marks=pytest.mark.long)
            for habit in HABITS
            for seed in (1, 2)
            if (habit, seed) not in (("never seals", 1), ("accuses", 1))
        ),
    ],
)
def test_a_bad_habit_costs_a_few_rounds_and_nobody_else(habit: str, seed: int) -> None:
    village = Village(habit, seed)
    usual = sorted(village.seconds)[len(village.seconds) // 3]
    slow = [s for s in village.seconds if s > 1.5 * usual]
    assert len(slow) <= (1 if habit in SILENT else 7), f"seconds of each round: {village.seconds}"
    others = {n for n in village.state.members.here if n != village.liar}
    assert {d.node for _, d in village.decisions} <= {village.liar}, village.decisions
    for node in others:
        assert conduct.may_own(village.state, node)
        left_out = [r.round for r in village.records if node not in r.contributors]
        assert len(left_out) <= 2, f"{node} is not in rounds {left_out}"


@pytest.mark.long
@pytest.mark.parametrize("seed", [1, 2])
def test_whose_delta_is_turned_is_left_out_after_six_strikes_and_for_longer_the_next_time(seed: int) -> None:
    village = Village("turns", seed)
    charged = [d.evidence.round for _, d in village.decisions if d.evidence.offence is Offence.OUTLIER]
    assert charged[:6] == [2, 3, 4, 5, 6, 7], charged
    counted = [r.round for r in village.records if village.liar in r.contributors]
    assert counted[:7] == [1, *charged[:6]] and len(counted) <= 8 < len(village.records) / 1.5, counted


@pytest.mark.long
@pytest.mark.parametrize("seed", [1, 2])
def test_who_sends_its_contributions_one_after_the_other_is_left_out_and_no_owner_is_blamed(seed: int) -> None:
    village = Village("drips", seed, chunks=9)
    slow = [s for s in village.seconds if s > 15.0]
    assert len(slow) <= 10, f"of a few nobody knows the links yet; seconds of each round: {village.seconds}"
    assert {d.node for _, d in village.decisions} == {village.liar}, village.decisions
    assert not conduct.may_contribute(village.state, village.liar)


@pytest.mark.long
@pytest.mark.parametrize("habit", [*SILENT, "drips"])
def test_a_bad_habit_of_who_comes_new_costs_no_round_all_the_time_that_there_is(habit: str) -> None:
    config = replace(QUICK, rounds=replace(QUICK.rounds, reduce_timeout=200.0))
    world = World(1, config, [1.0] * MEMBERS)
    world.numel = 2 * MEMBERS * CHUNK - 3
    try:
        committed(world, 4, 200.0)
        world.add_host(1.0).habit = habit
        moments = [world.engine.now]
        for _ in range(ROUNDS):
            committed(world, 1, 500.0)
            moments.append(world.engine.now)
        seconds = [b - a for a, b in pairwise(moments)]
        usual = sorted(seconds)[len(seconds) // 3]
        assert max(seconds) < usual + 60.0, f"seconds of each round: {seconds}"
        assert sum(s > 1.5 * usual for s in seconds) <= (2 if habit in SILENT else 8), seconds
        new = next(n.me for n in world.living if n.host.habit)
        assert {d.node for _, d in world.service.journal.decisions()} <= {new}
    finally:
        world.close()


@pytest.mark.long
@pytest.mark.parametrize("seed", [1, 2])
def test_who_stands_still_once_in_rounds_of_seconds_costs_one_of_them_and_counts_in_all_others(seed: int) -> None:
    """For eight seconds, at the end of a long link."""
    world = World(seed, QUICK, [1.0] * MEMBERS)
    world.numel = MEMBERS * CHUNK - 3
    try:
        assert world.until(lambda: world.durable.round.phase is Phase.INNER, 60.0)
        node = next(n for n in world.living if n.host is world.hosts["m2"])
        world.network.latency["m2"] = 0.1
        committed(world, 5, 200.0)
        assert world.until(lambda: world.durable.round.phase is Phase.REDUCING, 60.0)
        node.stop()
        world.engine.after(8.0, node.resume)
        moments = [world.engine.now]
        for _ in range(26):
            committed(world, 1, 200.0)
            moments.append(world.engine.now)
        seconds, me = [b - a for a, b in pairwise(moments)], node.me
        usual = sorted(seconds)[len(seconds) // 2]
        assert sum(s > 1.5 * usual for s in seconds) <= 1, seconds
        without = [r.round for r in world.service.journal.rounds() if me not in r.contributors]
        assert len(without) <= 4, f"it is not in rounds {without}"  # it stands still for four of them
        assert not conduct.owes_time(world.durable, me) and conduct.may_own(world.durable, me)
        assert {d.node for _, d in world.service.journal.decisions()} <= {me}
    finally:
        world.close()


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.long)])
def test_whoever_slanders_another_in_every_round_has_nobody_charged(seed: int) -> None:
    assert not Village("slanders", seed).decisions
