"""Liars among real machines: what they do to a round is found by audits before its commit, and nobody else is
blamed.

A liar lies at every opportunity of its kind, from the third round on, until it is out.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
from sim.node import Host
from sim.truth import CHUNK
from sim.world import World

from atoll.comm.config.run import InnerConfig, MembersConfig, ReduceConfig, RoundsConfig, RunConfig
from atoll.comm.config.security import SecurityConfig
from atoll.comm.evidence import Consequence, Offence
from atoll.comm.replace import replace
from atoll.coordinator.state_machine.state import Phase

CONFIG = RunConfig(
    inner=InnerConfig(batch_size=4),
    rounds=RoundsConfig(inner_steps=20),
    members=MembersConfig(start=8, minimum=2),
    reduce=ReduceConfig(block=1, chunk=CHUNK),
)
CHUNKS = 24
ALL = str(CHUNKS)  # of which each is audited


class Habits(list[str]):
    """Lies that are told again and again."""

    def remove(self, what: str) -> None:
        pass


@contextmanager
def world(audit: str, seed: int = 0) -> Iterator[World]:
    world = World(seed, replace(CONFIG, security=SecurityConfig(audit=audit)), [1.0] * 8)
    world.numel = CHUNKS * CHUNK - 3
    try:
        assert world.until(lambda: world.durable.round.phase is Phase.INNER, 60.0)
        yield world
    finally:
        world.close()


def commit(world: World, rounds: int, limit: float) -> None:
    goal = world.durable.committed + rounds
    assert world.until(lambda: world.durable.committed >= goal, limit), world.ailing(goal)


def liar(world: World, name: str, *lies: str) -> Host:
    host = world.hosts[name]
    host.lies, host.liar = Habits(lies), True
    return host


def charged(world: World) -> dict[str, list[tuple[Offence, Consequence]]]:
    """What was decided, by host."""
    found: dict[str, list[tuple[Offence, Consequence]]] = {}
    for _, decision in world.service.journal.decisions():
        (name,) = (h.name for h in world.hosts.values() if h.key.hex() == decision.key)
        found.setdefault(name, []).append((decision.evidence.offence, decision.consequence))
    return found


@pytest.mark.long
def test_without_liars_rounds_commit_and_nothing_is_held_against_anybody() -> None:
    with world("3") as w:
        commit(w, 12, 300.0)
        assert not charged(w) and not w.unwell()


@pytest.mark.parametrize(("seed", "levels"), [(0, 1), pytest.param(3, 2, marks=pytest.mark.long)])
def test_an_owner_that_seals_something_else_is_banned(seed: int, levels: int) -> None:
    with world(ALL, seed) as w:
        commit(w, 4, 100.0)
        record = w.durable.pending
        assert record is not None and record.levels == levels
        (name,) = (n.host.name for n in w.living if n.me == max(record.shares, key=record.shares.__getitem__))
        liar(w, name, "seal")
        assert w.until(lambda: name in charged(w), 200.0)
        assert charged(w) == {name: [(Offence.FORGED_SEAL, Consequence.BANNED)]}
        commit(w, 3, 100.0)
        assert w.hosts[name].gone and not w.unwell()


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 2))])
@pytest.mark.parametrize("lies", [("vast",), pytest.param(("vast", "decoy"), marks=pytest.mark.long)])
def test_an_owner_that_seals_what_is_longer_than_any_delta_is_banned_in_that_round(
    lies: tuple[str, ...], seed: int
) -> None:
    """Though nothing is drawn: the others see it, and say so before they hold it. Decoys are of other chunks, and
    not what was sealed."""
    with world("0.000001", seed) as w:
        commit(w, 3, 100.0)
        liar(w, "m2", *lies)
        liar(w, "m5", *lies)
        assert w.until(lambda: {"m2", "m5"} <= charged(w).keys() or w.durable.committed >= 12, 400.0)
        assert charged(w).keys() <= {"m2", "m5"}
        assert (Offence.FORGED_SEAL, Consequence.BANNED) in sum(charged(w).values(), [])
        commit(w, 3, 200.0)
        assert w.truth.vast and not w.unwell()


@pytest.mark.chaos
@pytest.mark.long
def test_an_owner_without_receipts_owns_nothing_in_the_end() -> None:
    with world("8") as w:
        commit(w, 2, 100.0)
        liar(w, "m3", "receipt")
        assert w.until(lambda: len(charged(w).get("m3", [])) >= 3, 400.0)
        assert charged(w).keys() == {"m3"}
        commit(w, 3, 200.0)
        assert w.durable.pending is not None and len(w.durable.pending.shares) == 7


@pytest.mark.long
def test_a_contributor_that_shows_something_else_than_it_sent_is_banned() -> None:
    with world("8") as w:
        commit(w, 2, 100.0)
        liar(w, "m3", "input")
        assert w.until(lambda: "m3" in charged(w), 200.0)
        assert charged(w) == {"m3": [(Offence.FORGED_INPUT, Consequence.BANNED)]}
        commit(w, 3, 100.0)
        assert not w.unwell()


@pytest.mark.long
def test_an_auditor_that_lies_is_put_out_in_the_end() -> None:
    with world("8") as w:
        commit(w, 2, 100.0)
        liar(w, "m3", "audit")
        assert w.until(lambda: "m3" in charged(w), 200.0)
        assert charged(w)["m3"][0][0] is Offence.FALSE_AUDIT and charged(w).keys() == {"m3"}
        commit(w, 3, 200.0)


@pytest.mark.long
def test_an_auditor_that_is_mute_is_remembered_and_holds_up_one_round() -> None:
    with world(ALL) as w:
        commit(w, 2, 100.0)
        liar(w, "m3", "mute")
        assert w.until(lambda: "m3" in charged(w), 200.0)
        charges = len(charged(w)["m3"])
        commit(w, 3, 60.0)
        assert charged(w).keys() == {"m3"} and len(charged(w)["m3"]) == charges
        assert {offence for offence, _ in charged(w)["m3"]} == {Offence.SILENT} and not w.unwell()


@pytest.mark.long
@pytest.mark.parametrize("second", [("seal", "audit"), ("seal",), ("audit",), ("input",), ("receipt", "audit")])
def test_of_two_of_eight_nobody_honest_is_blamed(second: Sequence[str]) -> None:
    with world(ALL) as w:
        commit(w, 2, 100.0)
        liar(w, "m2", "seal")
        liar(w, "m3", *second)
        assert w.until(lambda: "m2" in charged(w), 200.0)
        commit(w, 3, 200.0)
        assert charged(w).keys() <= {"m2", "m3"} and not w.unwell()
        assert charged(w)["m2"][-1] == (Offence.FORGED_SEAL, Consequence.BANNED)
