"""What is known of one round when somebody asks why it was slow, or failed: by the coordinator's own clock and
eyes, and by what its members say (`account`). Values only; `verdict` judges them.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import median

from atoll.comm.ids import NodeId
from atoll.coordinator.causes.account import Account

PHASES = ("inner", "collect", "reduce", "commit")


class Standing(StrEnum):
    """Where a participant of the round was at its end, as the coordinator saw it."""

    HERE = "here"
    BROKE = "broke"  # its connection broke
    SILENT = "silent"  # nothing was heard of it, over a connection that did not break
    AWAY = "away"  # it could not be heard at the round's end, and is heard again
    STALLED = "stalled"  # it lived, and its trainer was given up
    LEFT = "left"  # it said good-bye
    SAVING = "saving"  # it said that it exchanges nothing for now, when an attempt counted on it
    DIFFERED = "differed"  # its state was not the run's
    PUT_OUT = "put out"  # for what it did (`conduct`)
    DOUBTED = "doubted"  # its work was left out, as one alone tells of it what nobody else can see


GONE = (Standing.BROKE, Standing.SILENT)


@dataclass(frozen=True, slots=True)
class MemberSeen:
    """What the coordinator saw of a participant. Times are seconds of its own clock; None: that did not happen."""

    name: str
    standing: Standing = Standing.HERE
    life: int = 1  # of the node, in the round
    back: bool = False  # it was gone, and is here again in another life
    reached: float | None = None  # after the round began: it had its inner steps
    contributed: float | None = None  # after the round closed: it had handed over
    sealed: float | None = None  # after the reduce was planned: its last chunk
    complete: float | None = None  # after the reduce was planned: it had all
    counted: bool = True  # its work is in the commit
    steps: int = 0  # inner steps, as it told
    pace: float = 0.0  # inner steps a second; 0: not known
    usual: float = 0.0  # the same, in the rounds before
    still: float = 0.0  # at the round's end, since its heartbeats last told of progress
    incidents: int = 0  # of the round, that it told when it left: bits, as `atoll.comm.incidents.mask` has them
    rests: bool = False  # no round waits for its steps, or it has no trainer


@dataclass(frozen=True, slots=True)
class Observations:
    """One round, as far as it is known."""

    round: int
    seconds: dict[str, float]  # of each of PHASES
    usual: dict[str, float] = field(default_factory=dict)  # the same, in the rounds before; empty: not known
    predicted: float = 0.0  # seconds of the reduce, by its plan; 0: not known
    attempts: int = 1
    story: str = ""  # why the latest attempt that failed did
    members: dict[NodeId, MemberSeen] = field(default_factory=dict)  # that took part, those that went too
    broken: tuple[tuple[NodeId, NodeId], ...] = ()  # who said that it could not reach whom
    # who said that whose sealed bytes were other than the ledger's
    forged: tuple[tuple[NodeId, NodeId], ...] = ()
    late: frozenset[NodeId] = frozenset()  # who did not finish an attempt in its time
    differed: frozenset[NodeId] = frozenset()  # whose state after the round was not the run's
    # members whose state changed in memory by itself, as they told at once: so many chunks
    changed: dict[NodeId, int] = field(default_factory=dict)
    restarts: int = 0  # of the coordinator, in the round
    stalled: float = 0.0  # seconds in which the coordinator's own disk took no writes
    accounts: dict[NodeId, Account] = field(default_factory=dict)

    @property
    def total(self) -> float:
        """Seconds of the whole round."""
        return sum(self.seconds.values())

    @property
    def usual_total(self) -> float:
        """Seconds that rounds before took; 0: not known."""
        return sum(self.usual.values())

    @property
    def excess(self) -> float:
        """Seconds that the round took longer than usual; all of them where that is not known."""
        return max(self.total - self.usual_total, 0.0)

    @property
    def exchange(self) -> float:
        """Seconds from the plan to the commit."""
        return self.seconds.get("reduce", 0.0) + self.seconds.get("commit", 0.0)

    @property
    def usual_exchange(self) -> float:
        """The same in the rounds before; 0: not known."""
        return self.usual.get("reduce", 0.0) + self.usual.get("commit", 0.0)

    @property
    def exchange_excess(self) -> float:
        """Seconds that the exchange took longer: than usual, and than by the plan where it had more."""
        return max(self.exchange - max(self.usual_exchange, self.predicted), 0.0)

    def name(self, node: NodeId | None) -> str:
        """The node's name; its id where it took no part."""
        if node is None:
            return ""
        return self.members[node].name if node in self.members else str(node)

    def names(self, nodes: Iterable[NodeId]) -> str:
        """Names of a few nodes, in the order in which they joined."""
        found = [self.name(n) for n in sorted(nodes, key=lambda n: int(n[1:]))]
        return found[0] if len(found) == 1 else f"{', '.join(found[:-1])} and {found[-1]}" if found else "nobody"

    def account(self, node: NodeId) -> Account:
        """What the node says of the round; an empty account where it says nothing."""
        return self.accounts.get(node, SILENCE)


SILENCE = Account()


def lateness(seen: Observations) -> dict[NodeId, float]:
    """Seconds that the round waited for each participant before the reduce, beyond what it usually waits, and
    beyond what it waited for the one in the middle: for its steps, then for its work. Those for whom it did not
    are not in it."""
    found: dict[NodeId, float] = {}
    steps = {n: _until(m.reached, seen.seconds.get("inner", 0.0)) for n, m in seen.members.items()}
    work = {n: _until(m.contributed, seen.seconds.get("collect", 0.0)) for n, m in seen.members.items()}
    for until, phase in ((steps, "inner"), (work, "collect")):
        for node, seconds in until.items():
            others = [s for n, s in until.items() if n != node]
            typical = max(seen.usual.get(phase, 0.0), median(others) if others else 0.0)
            if seconds > typical and not seen.members[node].rests:
                found[node] = found.get(node, 0.0) + seconds - typical
    return found


def _until(at: float | None, end: float) -> float:
    return end if at is None else min(at, end)
