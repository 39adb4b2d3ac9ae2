"""The run's failures, and what each costs. Pure.

    noticed --commit of the round--> told --trains again--> told once more
                                       +--says good-bye, or is forgotten: nothing more is said

A failure of a member is a suspicion, a way out that it did not choose, another process in its place, or the end of
its trainer; one at a time of each. Its seconds count from the moment at which all was well for the last time, as
far as the coordinator can tell: `detected` until the run noticed, `recovered` until the member trained again, or
was heard again where nothing but its connection had failed. `lost` is its own work. `waited` is what the others
lost: what they waited and exchanged, in the round in which it was noticed, beyond what is usual for a round in
which nothing is noticed, or beyond what the round's plan foretold where there was none yet. Failures of one round
share that.
"""

from collections.abc import Iterator
from statistics import median

import msgspec

from atoll.comm.ids import NodeId
from atoll.comm.replace import replace
from atoll.coordinator.state_machine.events import Failure

MAX_QUIET = 8  # rounds without a failure that tell what is usual
MAX_OPEN = 1000  # failures that are not over
BACK_SECONDS, MAX_BACK = 600.0, 100  # for which those that are over are remembered, and how many


class FailureLog(msgspec.Struct):
    """The failures that are not over, and what the next commit record says of others."""

    count: int = 0
    open: dict[NodeId, Failure] = {}  # the latest of each member that does not train again yet
    over: list[Failure] = []  # since the last commit
    back: list[Failure] = []  # that were over in the last minutes, with what is known of them now
    quiet: list[float] = []  # seconds that a member waited and exchanged, mean of each of the latest quiet rounds

    def noticed(self, node: NodeId, round_: int, reason: str, at: float, now: float) -> None:
        """A member fails: all was well until `at`. What it fails of beside that is of the same failure."""
        if (known := self.open.get(node)) is not None:
            self.open[node] = replace(known, reason=reason)
            return
        self.count += 1
        self.open[node] = Failure(self.count, node, round_, reason, at, max(now - at, 0.0))
        if len(self.open) > MAX_OPEN:
            del self.open[next(iter(self.open))]

    def lost(self, node: NodeId, seconds: float) -> None:
        """Inner seconds of a member that fails are lost."""
        if seconds and (known := self.open.get(node)) is not None:
            self.open[node] = replace(known, lost=known.lost + seconds)

    def recovered(self, node: NodeId, now: float) -> None:
        """A member trains again, or is heard again."""
        if (known := self.open.pop(node, None)) is not None:
            over = replace(known, recovered=max(now - known.at, 0.0))
            self.over.append(over)
            self.back = [*(f for f in self.back if ended_at(f) > now - BACK_SECONDS), over][-MAX_BACK:]

    def latest(self) -> list[Failure]:
        """Those that are not over, and those that were over in the last minutes."""
        return [*self.back, *self.open.values()]

    def closed(self, node: NodeId) -> None:
        """Nothing more will come of a member's failure."""
        if (known := self.open.pop(node, None)) is not None:
            self.over.append(known)

    def committed(self, round_: int, waited: float, survivors: int, predicted: float) -> tuple[Failure, ...]:
        """The round is committed, in which its `survivors` waited and exchanged for so many node-seconds, and its
        plan foretold `predicted` seconds of exchange. Returns the failures that its record tells of."""
        fresh = [f for f in (*self.over, *self.open.values()) if f.round == round_]
        if not fresh and survivors:
            self.quiet = [*self.quiet, waited / survivors][-MAX_QUIET:]
        usual = median(self.quiet) if self.quiet else predicted
        each = max(waited - usual * survivors, 0.0) / max(len(fresh), 1)
        numbers = {f.number for f in fresh}

        def shared(f: Failure) -> Failure:
            return replace(f, waited=f.waited + each) if f.number in numbers else f

        self.open = {n: shared(f) for n, f in self.open.items()}
        told = [*map(shared, self.over), *(f for f in self.open.values() if f.number in numbers)]
        self.over, self.back = [], [*map(shared, self.back)]
        return tuple(sorted(told, key=lambda f: f.number))


def ended_at(failure: Failure) -> float:
    """Seconds since 1970; when the member was back. Of one that is not, when all was well."""
    return failure.at + (failure.recovered or 0.0)


def sentences(
    failures: tuple[Failure, ...], names: dict[NodeId, str], round_: int
) -> Iterator[tuple[Failure, str]]:
    """What the failures that the commit record of a round tells of cost, for people: nothing of those that cost
    nothing worth a word, and of those that were told before no more than that they are over."""
    for f in failures:
        if f.recovered is None or f.lost >= 1 or f.waited >= 1:
            yield f, _sentence(f, names.get(f.node, f.node), f.round < round_)


def _sentence(f: Failure, who: str, told: bool) -> str:
    lost = f"; {seconds(f.lost)} of its inner steps are lost" if f.lost >= 0.05 else ""
    if told and f.recovered is not None:
        return f"{who} is at work again, {seconds(f.recovered)} after it was last well in round {f.round}{lost}"
    back = "" if f.recovered is None else f", it was back {seconds(f.recovered)} after that"
    others = f"; the others waited {seconds(f.waited)} of their time more than usual" if f.waited else ""
    return (
        f"{who} failed in round {f.round} ({f.reason}): noticed {seconds(f.detected)} after it was last well"
        f"{back}{lost}{others}"
    )


def seconds(value: float) -> str:
    """Two digits of a short time, whole seconds of a longer one."""
    return f"{value:.2g} s" if value < 10 else f"{value:.0f} s"
