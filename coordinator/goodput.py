"""The goodput meter: where each node's wall time went. Pure.

Buckets are exclusive and add up to the wall time since the node joined. Inner time counts as `inner` once a
commit used it; until then it is open, and it becomes `lost` when the node dies or its work is left out.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from atoll.comm.ids import NodeId

BUCKETS = ("inner", "sync", "recovering", "waiting", "down", "lost")
OF_PHASE = {"inner": "open", "sync": "sync", "recovering": "recovering", "starting": "recovering"}


@dataclass
class Account:
    since: float  # seconds; start of the current bucket
    bucket: str = "recovering"
    spent: dict[str, float] = field(default_factory=lambda: dict.fromkeys((*BUCKETS, "open"), 0.0))
    closed: bool = False  # left in order: the clock stopped

    def move(self, bucket: str, now: float) -> None:
        if not self.closed:
            self.spent[self.bucket] += max(now - self.since, 0.0)
            self.bucket, self.since = bucket, now

    def settle(self, into: str, now: float) -> None:
        """Close the inner time that was open until now."""
        self.move(self.bucket, now)
        self.spent[into] += self.spent["open"]
        self.spent["open"] = 0.0


@dataclass
class Meter:
    accounts: dict[NodeId, Account] = field(default_factory=dict)

    def phase(self, node: NodeId, phase: str, now: float) -> None:
        """The node says what it is doing."""
        account = self.accounts.setdefault(node, Account(now))
        account.move(OF_PHASE.get(phase, "waiting"), now)

    def committed(self, contributors: Iterable[NodeId], now: float) -> None:
        used = set(contributors)
        for node, account in self.accounts.items():
            if node in used:
                account.settle("inner", now)
            elif account.bucket != "open":  # its work of the round was left out
                account.settle("lost", now)

    def gone(self, node: NodeId, left: bool, now: float) -> None:
        """The node is out: by its own wish (its clock stops), or not (it is down until it returns)."""
        if (account := self.accounts.get(node)) is not None and account.bucket != "down":
            account.settle("lost", now)
            account.move("down", now)
            account.closed = left

    def returned(self, node: NodeId, now: float) -> None:
        if (account := self.accounts.get(node)) is not None:
            if account.closed:
                account.since, account.closed = now, False
            account.move("recovering", now)

    def seconds(self, now: float) -> dict[str, float]:
        """Node-seconds in each bucket; open inner time counts as inner, for it may still be committed."""
        total = dict.fromkeys(BUCKETS, 0.0)
        for account in self.accounts.values():
            account.move(account.bucket, now)
            for bucket, spent in account.spent.items():
                total["inner" if bucket == "open" else bucket] += spent
        return total

    def shares(self, now: float) -> dict[str, float]:
        """Each bucket's share of all node-seconds; they add up to 1."""
        total = self.seconds(now)
        whole = sum(total.values())
        return {bucket: spent / whole if whole else 0.0 for bucket, spent in total.items()}
