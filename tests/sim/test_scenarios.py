"""Measured on the virtual clock: what the fleet gets done, and how soon it gets over a death."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

import pytest
from sim.disk import Disk
from sim.node import Node
from sim.truth import CHUNK
from sim.world import World

from atoll.comm.config.outer import OverlapConfig
from atoll.comm.config.run import (
    CheckpointConfig,
    InnerConfig,
    MembersConfig,
    ReduceConfig,
    RoundsConfig,
    RunConfig,
)
from atoll.comm.config.security import SecurityConfig
from atoll.comm.replace import replace
from atoll.coordinator.state_machine.members import MemberState
from atoll.coordinator.state_machine.state import Phase
from atoll.node.state_machine.state import Training
from atoll.node.state_machine.step import MAX_BAD_ORDERS

CONFIG = RunConfig(
    inner=InnerConfig(batch_size=4),
    rounds=RoundsConfig(inner_steps=100),
    members=MembersConfig(start=4, minimum=2),
    reduce=ReduceConfig(block=1, chunk=CHUNK),
)


@contextmanager
def world(config: RunConfig, speeds: list[float], chunks: int = 0) -> Iterator[World]:
    """A world without faults, in its first round."""
    world = World(0, config, speeds)
    world.numel = (chunks or len(speeds)) * CHUNK - 3
    try:
        assert world.until(lambda: world.durable.round.phase is Phase.INNER, 60.0)
        yield world
    finally:
        world.close()


def members(count: int, minimum: int = 2) -> RunConfig:
    return replace(CONFIG, members=replace(CONFIG.members, start=count, minimum=minimum))


def committed(world: World, rounds: int, limit: float) -> None:
    """Wait for so many rounds more."""
    goal = world.durable.committed + rounds
    assert world.until(lambda: world.durable.committed >= goal, limit), world.ailing(goal)


def middle_of_a_round(world: World) -> None:
    committed(world, 1, 30.0)
    world.until(lambda: False, 5.0)


@pytest.mark.long
def test_unequal_machines_together_do_95_percent_of_what_each_does_alone() -> None:
    speeds = [1.0, 1.0, 1.0, 0.3]
    unaudited = replace(CONFIG, security=SecurityConfig(audit="0"))  # audits take 0.1 s of so short a round
    with world(unaudited, speeds) as w:
        w.seal_time, w.encode_time, w.apply_time = 0.1, 0.05, 0.05
        w.network.latency.update(dict.fromkeys(w.network.latency, 0.005))
        committed(w, 1, 60.0)
        began, before = w.engine.now, w.durable.tokens
        committed(w, 30, 600.0)
        rate = (w.durable.tokens - before) / (w.engine.now - began)
        alone = sum(speeds) / w.step_time * CONFIG.inner.batch_size * CONFIG.model.seq_len
        assert rate >= 0.95 * alone, f"{rate / alone:.1%} of what the machines do alone"


def test_when_half_of_all_nodes_vanish_the_others_commit_the_round() -> None:
    with world(members(8), [1.0] * 8) as w:
        middle_of_a_round(w)
        for node in w.living[:4]:
            w.kill(node, silent=True)
        before = w.durable.tokens
        committed(w, 1, 30.0)
        assert w.durable.tokens - before >= 4 * CONFIG.rounds.inner_steps * CONFIG.inner.batch_size
        committed(w, 3, 60.0)


def test_below_the_minimum_the_run_waits_and_says_why_and_goes_on_when_they_are_back() -> None:
    with world(members(8, minimum=6), [1.0] * 8) as w:
        middle_of_a_round(w)
        before = w.durable.committed
        gone = w.living[:4]
        for node in gone:
            w.kill(node, silent=True)
        w.until(lambda: False, 60.0)
        assert w.durable.committed == before
        assert w.durable.round.reason.startswith("4 of the 6 members")
        for node in gone:
            w.start(node.host)
        committed(w, 3, 60.0)
        assert not w.unwell()


def test_while_the_coordinator_is_away_nodes_train_up_to_the_ceiling_and_then_commit_once() -> None:
    with world(members(4), [1.0] * 4) as w:
        middle_of_a_round(w)
        before, tokens = w.durable.committed, w.durable.tokens
        w.coordinator_dies("at once", away=600.0)
        w.until(lambda: w.service.alive, 700.0)
        ready = [n.machine.ready for n in w.living]
        assert [work.steps for work in ready if work is not None] == [CONFIG.rounds.max_steps] * 4
        committed(w, 1, 20.0)
        assert w.durable.committed == before + 1
        sample = CONFIG.inner.batch_size * CONFIG.model.seq_len
        assert w.durable.tokens - tokens == 4 * CONFIG.rounds.max_steps * sample
        assert not w.unwell()


@pytest.mark.parametrize("moment", [0.5, 5.0, 9.5])
def test_a_node_with_a_flipped_bit_is_named_repaired_and_counts_in_the_round_after(moment: float) -> None:
    with world(members(4), [1.0] * 4) as w:
        committed(w, 1, 30.0)
        w.until(lambda: False, moment)
        victim, before = w.living[1], w.durable.committed
        victim.flip = True
        moments = [w.engine.now]
        for _ in range(3):
            committed(w, 1, 30.0)
            moments.append(w.engine.now)
        assert w.until(lambda: len(list(w.service.journal.rounds())) >= before + 3, 30.0)
        found, repaired, again = [r for r in w.service.journal.rounds() if r.round > before]
        assert found.round == before + 1 and not found.digests_equal
        assert [n for n, d in found.digests.items() if d != found.state_digest] == [victim.me]
        assert victim.me not in repaired.contributors and len(repaired.contributors) == 3
        assert len(again.contributors) == 4
        assert again.contributors[victim.me] > 1.5 * min(again.contributors.values()), (
            "it counts from its repair on"
        )
        said = [note.sentence for _, note in w.service.journal.notes() if note.node == victim.me]
        assert any("differs" in sentence for sentence in said)
        rounds = [b - a for a, b in pairwise(moments)]
        assert rounds[2] < rounds[1] * 1.1
        assert not w.unwell()


def test_a_joiner_trains_at_once_and_its_first_contribution_has_all_its_own_steps() -> None:
    with world(members(3), [1.0] * 3) as w:
        middle_of_a_round(w)
        joiner, missed = w.nodes[w.add_host(1.0).name], w.durable.round.number

        def counted() -> bool:
            return w.durable.pending is not None and joiner.me in w.durable.pending.contributors

        assert w.until(counted, 40.0)
        record = w.durable.pending
        assert record is not None and record.round == missed + 1
        first = w.truth.contributed[joiner.session, record.round]
        assert list(first) == joiner.steps[: len(first)] and not joiner.lost, "steps of its own are lost"
        tokens = record.contributors[joiner.me]
        others = [weight for node, weight in record.contributors.items() if node != joiner.me]
        assert tokens == len(first) * w.config.model.seq_len
        assert tokens > 1.2 * max(others), "it has what it trained in the round that it missed"


def shares(config: RunConfig, rounds: int) -> tuple[float, float]:
    """Of three equal nodes' time in a few rounds: what they spent waiting for the exchange, by their own account,
    and what the exchange took of a round."""
    with world(config, [1.0] * 3, chunks=60) as w:
        w.seal_time = 0.5
        w.network.latency.update(dict.fromkeys(w.network.latency, 0.005))
        committed(w, 2, 120.0)
        first, phases = w.durable.committed, Counter[str]()
        while w.durable.committed < first + rounds:
            w.until(lambda: False, 0.05)
            phases.update(n.machine.phase for n in w.living)
        assert not w.unwell()
        records = [r for r in w.service.journal.rounds() if r.round > first]
        seconds = {k: sum(r.seconds[k] for r in records) for k in records[0].seconds}
        exchange = (seconds["reduce"] + seconds["commit"]) / sum(seconds.values())
        return phases["sync"] / phases.total(), exchange


@pytest.mark.long
def test_nodes_that_overlap_do_not_wait_for_an_exchange_that_takes_most_of_a_round() -> None:
    blocking = replace(CONFIG, members=replace(CONFIG.members, start=3))
    overlapped = replace(blocking, overlap=OverlapConfig(delay=80))
    sync, exchange = shares(overlapped, 6)
    assert 0.5 < exchange < 0.8
    assert sync < 0.02
    sync, exchange = shares(blocking, 3)
    assert sync > 0.9 * exchange > 0.2


def levels(world: World) -> list[int]:
    """Of the commits so far."""
    records = {record.round: record.levels for record in world.service.journal.rounds()}
    return [records[k] for k in sorted(records)]


def test_far_regions_go_in_two_levels_once_their_rates_are_known_and_a_relays_death_costs_one_attempt() -> None:
    with world(members(6), [1.0] * 6) as w:
        w.regions = 2
        committed(w, 4, 80.0)
        assert levels(w)[:3] == [1, 1, 2]
        assert w.until(lambda: w.durable.round.phase is Phase.REDUCING, 30.0)
        ledger = w.durable.round.ledger
        relay = ledger.entries[ledger.relays[1][0]].node
        before, layered = w.durable.committed, ledger.layered
        w.kill(next(n for n in w.living if n.me == relay))
        assert w.until(lambda: w.durable.round.ledger.attempt > 1 or w.durable.committed > before, 30.0)
        left = w.durable.round.ledger.layered
        assert w.durable.committed > before or left < layered
        committed(w, 1, 30.0)


def test_two_members_that_the_run_needs_both_go_on_after_one_sent_what_the_other_refused() -> None:
    """The links live, so nothing but the receiver's question brings the contribution again."""
    with world(members(2), [1.0] * 2) as w:
        committed(w, 2, 30.0)
        for node in w.living:
            node.host.lies.append("contribution")
        committed(w, 2, 60.0)
        assert not any(node.host.lies for node in w.living)


def test_a_trainer_that_miscalculates_begins_anew_and_counts_and_one_that_always_does_leaves() -> None:
    with world(members(4), [1.0] * 4) as w:
        middle_of_a_round(w)
        once, always = w.living[:2]
        once.trainer.miscalculate()
        assert once.machine.trouble and isinstance(once.machine.trainer, Training)
        before = w.durable.committed
        committed(w, 2, 60.0)  # the record is there once the digests are
        record = next(r for r in w.service.journal.rounds() if r.round == before + 1)
        counts = record.contributors
        assert 0 < counts[once.me] < counts[always.me], "what it trained since counts in the same round"
        assert not once.machine.trouble
        for _ in range(MAX_BAD_ORDERS):
            assert w.until(lambda: isinstance(always.machine.trainer, Training), 30.0)
            always.trainer.miscalculate()
        assert w.until(lambda: standing(w, always) is MemberState.LEFT, 10.0)
        committed(w, 2, 60.0)
        assert not w.unwell()


def standing(world: World, node: Node) -> MemberState:
    members = world.durable.members
    return (members.here.get(node.me) or members.departed[node.me]).state


@pytest.mark.parametrize(
    ("silent", "limit"), [(False, 3.0), (True, CONFIG.members.lease + 1.5)], ids=["broken", "silent"]
)
def test_a_dead_node_is_out_in_seconds_and_a_silent_one_within_its_lease(silent: bool, limit: float) -> None:
    with world(members(4), [1.0] * 4) as w:
        middle_of_a_round(w)
        victim = w.living[0]
        w.kill(victim, silent)
        assert w.until(lambda: standing(w, victim) is MemberState.EVICTED, limit)


def disk_of(node: Node) -> Disk:
    assert node.host.disk is not None
    return node.host.disk


def test_after_two_power_cuts_in_a_row_no_more_than_the_newest_round_is_void() -> None:
    """At the first cut one disk alone has the newest round. Its node dies soon after the others have that from it;
    they go on without it, until the power fails again."""
    config = replace(members(3), checkpoint=CheckpointConfig(every=100, patience=30.0))
    with world(config, [1.0] * 3) as w:
        for host in w.hosts.values():
            host.disk = Disk()
        committed(w, 2, 40.0)
        newest = w.durable.committed
        w.until(lambda: False, 5.0)
        for node in w.living[1:]:
            assert disk_of(node).state()[0] == newest
            del disk_of(node).log[newest]
        cut(w)
        assert w.until(lambda: all(n.machine.round == newest for n in w.living), 60.0)
        w.kill(w.living[0], silent=True)
        committed(w, 3, 60.0)
        assert not any(record.void for record in w.service.journal.rounds())
        cut(w)
        committed(w, 1, 60.0)
        assert [r.round for r in w.service.journal.rounds() if r.void] in ([], [newest + 3])


def cut(world: World) -> None:
    """Everything is gone at once but what is on disks, and starts again."""
    for node in world.living:
        world.kill(node, silent=True)
    world.coordinator_dies("with everybody", away=1.0)
    world.until(lambda: False, 2.0)
    for host in world.hosts.values():
        world.start(host)
