"""The goodput meter: where each node's wall time went. Pure.

Buckets are exclusive and add up to the wall time since the node joined. Inner time counts as `inner` once a
commit used it; until then it is open: a node that a round leaves out brings its work to a later one. It is `lost`
when the node is gone or its state turned out to differ.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from atoll.comm.ids import NodeId

BUCKETS = ("inner", "sync", "recovering", "waiting", "paused", "down", "lost")
BUCKET_OF_PHASE = {
    "inner": "open",
    "sync": "sync",
    "recovering": "recovering",
    "starting": "recovering",
    "paused": "paused",
}


@dataclass
class NodeGoodput:
    """One node's account. Invariant: `spent` and the time since `since` add up to its wall time."""

    since: float  # seconds; start of the current bucket
    bucket: str = "recovering"
    spent: dict[str, float] = field(default_factory=lambda: dict.fromkeys((*BUCKETS, "open"), 0.0))
    closed: bool = False  # left in order: the clock stopped

    def move(self, bucket: str, now: float) -> None:
        """Book the time until `now` (seconds) and begin another bucket."""
        if not self.closed:
            spent = self.spent.get(self.bucket, 0.0)  # an account of before may lack the bucket
            self.spent[self.bucket] = spent + max(now - self.since, 0.0)
            self.bucket, self.since = bucket, now

    def settle(self, into: str, now: float) -> None:
        """Close the inner time that was open until now."""
        self.move(self.bucket, now)
        self.spent[into] += self.spent["open"]
        self.spent["open"] = 0.0


@dataclass
class GoodputMeter:
    """Every node's account, from its first heartbeat on. Times are seconds of the coordinator's clock."""

    accounts: dict[NodeId, NodeGoodput] = field(default_factory=dict)
    past: dict[str, float] = field(default_factory=lambda: dict.fromkeys(BUCKETS, 0.0))  # of forgotten nodes

    def record_phase(self, node: NodeId, phase: str, now: float) -> None:
        """Take in what the node says it is doing."""
        account = self.accounts.get(node)
        if account is None:
            account = self.accounts[node] = NodeGoodput(now)
        account.move(BUCKET_OF_PHASE.get(phase, "waiting"), now)

    def record_commit(self, contributors: Iterable[NodeId], now: float) -> None:
        """Close the open inner time of the contributors: a commit used it."""
        for node in contributors:
            if (account := self.accounts.get(node)) is not None:
                account.settle("inner", now)

    def record_divergence(self, node: NodeId, now: float) -> None:
        """Lose the node's open inner time: its state differed, and it starts again from the run's."""
        if (account := self.accounts.get(node)) is not None:
            account.settle("lost", now)

    def record_departure(self, node: NodeId, left: bool, now: float) -> None:
        """Take a node out: by its own wish (`left`; its clock stops), or not (it is down until it returns)."""
        if (account := self.accounts.get(node)) is not None and account.bucket != "down":
            account.settle("lost", now)
            account.move("down", now)
            account.closed = left

    def record_return(self, node: NodeId, now: float) -> None:
        """Take a node back in: a new process speaks for it."""
        if (account := self.accounts.get(node)) is not None:
            if account.closed:
                account.since, account.closed = now, False
            account.settle("lost", now)
            account.move("recovering", now)

    def forget(self, node: NodeId, now: float) -> None:
        """Drop a node that nobody will hear of again; its seconds stay in the totals."""
        if (account := self.accounts.pop(node, None)) is not None:
            account.settle("lost", now)
            for bucket in BUCKETS:
                self.past[bucket] = self.past.get(bucket, 0.0) + account.spent.get(bucket, 0.0)

    def seconds(self, now: float) -> dict[str, float]:
        """Node-seconds in each bucket; open inner time counts as inner, for it may still be committed."""
        total = {bucket: self.past.get(bucket, 0.0) for bucket in BUCKETS}
        for account in self.accounts.values():
            account.move(account.bucket, now)
            for bucket, spent in account.spent.items():
                total["inner" if bucket == "open" else bucket] += spent
        return total

    def shares(self, now: float) -> dict[str, float]:
        """Each bucket's share of all node-seconds; they add up to 1."""
        seconds = self.seconds(now)
        whole = sum(seconds.values())
        return {bucket: spent / whole if whole else 0.0 for bucket, spent in seconds.items()}
