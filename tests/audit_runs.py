"""Many runs of the audits' world, each with other draws: how soon who lies is caught, and whether anybody honest
ever is."""

from dataclasses import dataclass
from statistics import median

from audit_world import AuditWorld, Lies, liar, nonces

SEALS, COLLUDE = liar(3, "seal"), liar(2, "seal") | liar(3, "cover", "audit")
MOST = 20  # rounds


def rounds_until_caught(lies: Lies, run: int, most: int = MOST) -> int | None:
    """The round in which somebody is charged, of runs whose every round is drawn anew. Only liars may be."""
    for round_ in range(most):
        world = AuditWorld(b"%d %d" % (run, round_), lies).run()
        assert world.charged().keys() <= lies.keys(), world.notes
        if world.convicted():
            assert not world.wrong()
            return round_
    return None


def long_run(run: int, lies: Lies, rounds: int = MOST) -> AuditWorld:
    """A run of so many rounds, in which what is held against members adds up. Only liars may be charged."""
    world = AuditWorld(b"run %d" % run, lies).run()
    for _ in range(rounds - 1):
        world.go_on().run()
        assert world.charged().keys() <= lies.keys(), world.notes
    return world


@dataclass(frozen=True)
class Caught:
    """How soon an owner that forges was caught."""

    runs: int
    rounds: tuple[int, ...]  # in which it was, of those runs in which it was; the first is 1

    def __str__(self) -> str:
        last = f"the median in round {median(self.rounds):g}, the last in round {max(self.rounds)}"
        return f"{len(self.rounds)} of {self.runs}, {last}"


def caught(lies: Lies, first: int, runs: int) -> Caught:
    found = [rounds_until_caught(lies, run) for run in range(first, first + runs)]
    return Caught(runs, tuple(sorted(1 + round_ for round_ in found if round_ is not None)))


def honest_convicted(runs: int, first: int = 20_000) -> int:
    """Of so many rounds of honest members, those in which anything was decided against one."""
    return sum(bool(AuditWorld(nonce).run().decisions) for nonce in nonces(first, runs))
