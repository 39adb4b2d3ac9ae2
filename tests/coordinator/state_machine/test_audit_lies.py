"""Whatever two of eight say and do, each round ends, and nobody honest is charged. Lies, and what the liars do
besides, are drawn by a seed."""

import os
from collections.abc import Iterator
from random import Random

import pytest
from audit_world import AuditWorld, key_of

from atoll.comm.digest import digest
from atoll.comm.ids import NodeId
from atoll.comm.replace import replace
from atoll.coordinator.state_machine import events as ev

LIES = (
    *("seal", "longer", "long", "norm", "sum", "sum told short", "sum of others", "sum untold", "late sum"),
    *("seals unsummed", "no input", "half input", "half receipt", "no receipt", "shield", "split shield"),
    *("audit", "cover", "busy", "slander", "mute", "alarm"),
)
MAX_STEPS = 400  # of one round; none came near


class Story:
    """A round with two liars, who come and go, and say of others that they are out of reach."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = Random(seed)
        self.liars = [NodeId(f"n{i}") for i in rng.sample(range(1, 9), 2)]
        lies = {liar: frozenset(rng.sample(LIES, rng.randint(0, 2))) for liar in self.liars}
        levels, audit, leaves = rng.choice((1, 2, 2)), rng.choice(("auto", "1e-9", "1000")), rng.choice((0, 0, 1))
        self.world = AuditWorld(b"%d" % seed, lies, leaves=leaves, audit=audit, levels=levels, norms=True)
        self.restless = rng.choice((0.0, 0.02, 0.1))

    def run(self) -> AuditWorld:
        world = self.world
        for _ in range(MAX_STEPS):
            events = [*world.due(), *self.again()]
            if not events:
                world.now += self.rng.choice((0.5, 1.0))
                events = [ev.Tick()]
            for event in events:
                self.feed(event)
                if self.rng.random() < self.restless:
                    for act in self.acts():
                        self.feed(act)
                if world.state.committed:
                    return world
        raise AssertionError(f"the round is not committed: {world.state.round.reason}, {world.notes[-3:]}")

    def feed(self, event: ev.Event) -> None:
        """What members say in the lives that they have by now."""
        member = self.world.state.members.here.get(getattr(event, "node", NodeId("")))
        if member is not None and hasattr(event, "life") and not isinstance(event, ev.Joined):
            event = replace(event, life=member.life)  # type: ignore[arg-type]
        if not self.world.state.committed:
            self.world.feed(event)

    def again(self) -> Iterator[ev.Event]:
        """What members say anew in each attempt: that they hold all, and which orphans."""
        r, here = self.world.state.round, self.world.state.members.here
        for node in r.ledger.members if r.plan is not None else ():
            assert r.plan is not None
            if node not in here:
                continue
            if r.ledger.orphans and node not in r.plan.orphans:
                found = tuple((c, r.ledger.sealed[c].digest) for c in r.ledger.orphans)
                yield ev.OrphansFound(node, 1, r.plan.fence, found)
            said = r.completions.get(node)
            if r.ledger.complete and said is not None and said.fence != r.plan.fence:
                yield ev.ReduceComplete(node, 1, r.plan.fence, r.ledger.root, 1, 1)

    def acts(self) -> Iterator[ev.Event]:
        """What a liar does besides."""
        here, plan = self.world.state.members.here, self.world.state.round.plan
        liar, act = self.rng.choice(self.liars), self.rng.randrange(6)
        other = self.rng.choice([n for n in here if n != liar])
        if liar not in here:
            return
        if act == 0:
            yield ev.Leaving(liar, 1, "a test says so")
        elif act == 1:
            life = here[liar].life + 1
            yield ev.Joined(liar, life, str(liar), f"{liar}:1", f"session {life}", key=key_of(liar).public)
            yield ev.Connected(liar, life)
            yield ev.LayoutReported(liar, life, self.world.chunks, digest(b"layout"))
            yield ev.StateReported(liar, life, 0, digest(b"state 0"))
        elif act == 2:
            yield ev.Disconnected(liar, 1)
        elif act == 3:
            yield ev.Connected(liar, 1)
        elif plan is not None:
            yield ev.PeerUnreachable(liar, 1, other, plan.fence, "reset")


def check(seed: int) -> None:
    story = Story(seed)
    world = story.run()
    assert world.charged().keys() <= set(story.liars), (seed, world.lies, world.charged(), world.notes)


@pytest.mark.parametrize("block", range(4))
def test_whatever_two_of_eight_do_the_round_ends_and_nobody_honest_is_charged(block: int) -> None:
    for seed in range(25 * block, 25 * block + 25):
        check(seed)


@pytest.mark.chaos
@pytest.mark.long
def test_whatever_two_of_eight_do_in_many_rounds() -> None:
    first, count = int(os.environ.get("ATOLL_LIES_FIRST", "1000")), int(os.environ.get("ATOLL_LIES_SEEDS", "300"))
    for seed in range(first, first + count):
        check(seed)
