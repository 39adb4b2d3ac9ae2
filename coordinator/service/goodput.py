"""The goodput meter: where each node's wall time went. Pure.

Every second of a node that trains is in one bucket, from its first join on:

    inner       inner steps that a commit has
    lost        inner steps that no commit will have
    open        inner steps that may yet be either
    sync        the exchange, while the trainer stands still for it
    waiting     for others, for samples, or for a trainer that makes no progress
    recovering  it fetches the run's state
    starting    its process, or its trainer, comes up
    paused      as its owner wants
    down        it is gone, and did not say good-bye; until it is back, for `MAX_DOWN_SECONDS` at most

How long is the coordinator's clock's to say alone, so no node can make seconds. Which bucket is the node's own
word: its phase, told whenever that changes; and, after a while in which the coordinator did not answer, how it
spent that. Nobody is believed anything for it: goodput decides nothing.

Time is booked once it is known what it was. Of a node that is silent that is so when it is heard again, or is out:
it was down since it was last heard. A trainer that takes no step for far longer than its steps took before stands
still since the latest; one that has just come up may compile.

Inner steps are `open` until a commit decides. A contribution offers what is open to its round; the steps that come
after it are another round's. A node that is left out brings them to a later one. They are lost when the node is
out, or its state is found to be another, or its trainer begins the round again: as many as it takes once more.
"""

from collections.abc import Container, Iterator, Mapping
from math import inf

import msgspec

from atoll.comm.ids import NodeId

BUCKETS = ("inner", "lost", "open", "sync", "waiting", "recovering", "starting", "paused", "down")
PHASES = ("inner", "sync", "waiting", "recovering", "starting", "paused")  # that a node may say it is in
MAX_DOWN_SECONDS = 86_400.0  # who is gone for longer has left without a word: its clock stops
RECENT_SECONDS = 6.0  # two heartbeats; who was heard so recently is still at what it said it does
STUCK_SECONDS = 10.0  # without a step, beyond
STUCK_STEPS = 5.0  # times as long as the steps took before: the trainer stood still
PACE_WEIGHT = 0.3  # of the newest steps
MAX_TAKEN = 8  # rounds whose commits can be taken back, that an account remembers


class NodeAccount(msgspec.Struct, omit_defaults=True):
    """One node's account. Invariant: its buckets add up to the seconds from its first join to `since`, less those
    for which it was closed."""

    since: float  # seconds on the coordinator's clock; all before is booked
    bucket: str = "starting"  # what it does since
    spent: dict[str, float] = {}  # seconds; all buckets but what is open
    closed: bool = False  # it left, or was down for so long as if: its clock stands still
    down_since: float = 0.0
    # Inner steps, in seconds; together they are `open`.
    work: dict[int, float] = {}  # by the round that they were taken in
    offered: float = 0.0  # in the contribution to `offered_round`, which is not decided
    offered_round: int = 0
    # The round at hand, by heartbeats.
    round: int = 0
    step: int = 0  # the latest
    moved: float = 0.0  # `at_hand` when it was taken
    broken: float = 0.0  # `at_hand` when the trainer or the process ended; 0: it goes on
    pace: float = 0.0  # seconds a step; 0: not known
    recent: tuple[float, int] = 0.0, 0  # seconds, number: the newest steps, which are not in the pace
    stood: float = 0.0  # seconds; the trainer stands still since the latest step
    forfeited: float = 0.0  # of `lost`: what was open when it went, and it may yet bring
    forfeited_steps: float = 0.0  # that it was; 0: not known
    taken: list[tuple[int, float]] = []  # what commits took: round, seconds
    reported: dict[str, float] = {}  # what `cut` has told so far

    def __post_init__(self) -> None:
        if earlier := self.spent.pop("open", 0.0):  # as an earlier version kept it
            self.work[0] = self.work.get(0, 0.0) + earlier

    @property
    def open(self) -> float:
        return sum(self.work.values()) + self.offered

    @property
    def at_hand(self) -> float:
        return self.work.get(self.round, 0.0)

    @property
    def latest(self) -> float:
        """Seconds of inner steps since the latest step, or since its trainer ended."""
        return self.at_hand - (self.broken or self.moved)

    @property
    def end(self) -> float:
        """Seconds; when its clock stops where nothing is heard of it any more."""
        if self.closed:
            return self.since
        return self.down_since + MAX_DOWN_SECONDS if self.bucket == "down" else inf

    def buckets(self) -> dict[str, float]:
        """Seconds in each bucket that has some, as far as they are booked."""
        return {k: s for k, s in (*self.spent.items(), ("open", self.open)) if s}

    def book(self, bucket: str, seconds: float) -> None:
        """Enter seconds; of `inner`, as steps of the round at hand."""
        if bucket == "inner":
            self.work[self.round] = self.at_hand + seconds
        else:
            self.spent[bucket] = self.spent.get(bucket, 0.0) + seconds

    def hear(self, now: float, bucket: str, shares: Mapping[str, float] | None = None) -> None:
        """Book the time until `now`, and go on in another bucket. `shares`: how the node has divided it."""
        gap = max(min(now, self.end) - self.since, 0.0)
        if shares and (whole := sum(shares.values())) > 0:
            told = {phase: gap * share / whole for phase, share in shares.items()}
            if self.offered and not self.step and not self.at_hand:  # the contribution was heard first
                self.offered += told.pop("inner", 0.0)
            for phase, seconds in told.items():
                self.book(phase, seconds)
        else:
            self.book(self.bucket, gap)
        self.since, self.bucket = max(now, self.since), bucket

    def lose(self) -> float:
        """All that is open and not offered is lost. Returns how much, seconds."""
        gone = sum(self.work.values())
        self.book("lost", gone)
        self.work = {}
        self._begin(self.round)
        return gone

    def go_down(self) -> float:
        """It died: what is open is lost, but for what it may yet bring. Returns how much, seconds."""
        of_round, steps = self.at_hand, self.step
        gone = self.lose()
        self.forfeited += gone
        if of_round:  # those of earlier rounds took as long
            self.forfeited_steps += steps * gone / of_round
        return gone

    def break_off(self) -> None:
        """Its trainer ended, or its process. The pace is not known any more: the next first step may compile."""
        self.broken, self.pace, self.recent, self.stood = self.at_hand, 0.0, (0.0, 0), 0.0

    def _begin(self, round_: int) -> None:
        """Its steps are another round's from now on."""
        self._settle()
        self.round = round_
        self._reach(0)

    def _reach(self, step: int) -> None:
        self.step, self.moved, self.broken, self.stood = step, self.at_hand, 0.0, 0.0

    def progress(self, round_: int, step: int) -> float:
        """Take in how far it is; returns the seconds of steps that it takes once more."""
        if round_ > self.round:  # a round is told with its first step: what went by since the latest is that one's
            first = self.latest
            self.work[self.round] = self.at_hand - first
            self._begin(round_)
            self.work[round_] = first
            self._reach(step)
        elif round_ < self.round or step == 0 or step >= self.step:
            self._advance(step if round_ == self.round and step else self.step)
        else:
            again = (self.broken or self.moved) - self.moved * (step - 1) / self.step
            self.work[round_] = self.at_hand - again
            self.book("lost", again)
            self._settle()
            self._reach(step)
            return again
        return 0.0

    def _advance(self, step: int) -> None:
        """It is at this step of the round at hand: the same, or a later one. Since the latest it took as long as
        usual, or it stood still, and then what the steps just before took beyond the usual was the beginning. Who
        stands still again and again takes such steps: that becomes usual."""
        if not self.pace:
            self._settle()
        ahead, took = step - self.step, self.latest
        usual = max(ahead, 1) * self.pace
        if self.pace and (self.stood or took > STUCK_SECONDS + STUCK_STEPS * usual):
            before, steps = self.recent
            still = max(took - usual, 0.0) + max(before - steps * self.pace, 0.0)
            self.work[self.round] = self.at_hand - still
            self.book("waiting", still)
            took = min(took, usual)
            self.stood, self.recent, self.moved = self.stood + still, (0.0, 0), self.at_hand - took
        if ahead:
            self._settle()
            if self.step:
                self.recent = self.stood + took, ahead
            if self.stood:
                self._settle()
            self._reach(step)

    def _settle(self) -> None:
        """The newest steps were nothing but steps."""
        took, steps = self.recent
        if steps:
            self.pace += (PACE_WEIGHT if self.pace else 1.0) * (took / steps - self.pace)
        self.recent = 0.0, 0

    def offer(self, round_: int, steps: int, carries: bool, carried: float) -> None:
        """It contributes its steps of a round; `carries`: with those of rounds before, so many steps. Of what was
        lost when it went it may have fewer: those until its latest copy."""
        if round_ == self.round and steps > self.step:
            self._advance(steps)
        if self.offered:  # to an earlier one, or to the same before it began anew
            self.work[self.offered_round] = self.work.get(self.offered_round, 0.0) + self.offered
        if carries and self.forfeited:
            spared = self.forfeited * min(carried / max(self.forfeited_steps, 1), 1.0)
            self.book("lost", -spared)
            self.work[0] = self.work.get(0, 0.0) + spared
        earlier = sum(self.work.pop(k) for k in [*self.work] if k < round_)
        self.offered, self.offered_round = self.work.pop(round_, 0.0), round_
        if carries:
            self.offered += earlier
        else:
            self.book("lost", earlier)
        self.forfeited = self.forfeited_steps = 0.0
        if self.round <= round_:
            self._begin(round_ + 1)

    def decide(self, round_: int, part: float) -> None:
        """A round was committed, with this part of what it offered."""
        if not self.offered or self.offered_round > round_:
            return
        used = self.offered * part if self.offered_round == round_ else 0.0
        rest, self.offered = self.offered - used, 0.0
        if used:
            self.spent["inner"] = self.spent.get("inner", 0.0) + used
            self.taken = [*self.taken, (round_, used)][-MAX_TAKEN:]
        if used or self.closed or self.bucket == "down":
            self.book("lost", rest)
            self.forfeited += rest if self.bucket == "down" and not used and not self.closed else 0.0
        else:
            self.work[self.offered_round] = self.work.get(self.offered_round, 0.0) + rest

    def void(self, rounds: Container[int]) -> None:
        """What these rounds' commits took is lost."""
        gone = sum(used for round_, used in self.taken if round_ in rounds)
        self.taken = [(round_, used) for round_, used in self.taken if round_ not in rounds]
        if gone:
            self.spent["inner"] -= gone
            self.book("lost", gone)


class GoodputMeter(msgspec.Struct):
    """Every node's account. Times are seconds of the coordinator's clock."""

    accounts: dict[NodeId, NodeAccount] = {}
    past: dict[str, float] = {}  # of forgotten nodes

    def enter(self, node: NodeId, now: float) -> None:
        """Take a node in, for the first time or again: a new process, or a new session, speaks for it. Until then
        it was down, if it had not left."""
        account = self.accounts.get(node)
        if account is None:
            self.accounts[node] = NodeAccount(now)
            return
        if account.closed:
            account.since, account.closed = now, False
        if account.bucket != "down":
            account.bucket, account.down_since = "down", account.since
        account.hear(now, "starting")
        account.break_off()

    def record_phase(
        self, node: NodeId, phase: str, now: float, shares: Mapping[str, float] | None = None
    ) -> None:
        """Take in what the node says it is doing, and how it spent the time in which it was not answered."""
        account = self.accounts.get(node)
        if account is not None and not account.closed:
            if phase == "starting" and account.bucket != "starting":
                account.hear(now, phase, shares)
                account.break_off()
            else:
                account.hear(now, phase if phase in PHASES else "waiting", shares)

    def record_progress(self, node: NodeId, round_: int, step: int) -> float:
        """Take in the inner step that the node is at; returns the seconds of steps that are lost by it."""
        account = self.accounts.get(node)
        return account.progress(round_, step) if account is not None else 0.0

    def record_sign(self, node: NodeId, now: float) -> None:
        """The node was heard, but not what it does: the same, unless it was silent for long."""
        account = self.accounts.get(node)
        if account is not None and not account.closed and now - account.since <= RECENT_SECONDS:
            account.hear(now, account.bucket)

    def record_contribution(
        self,
        node: NodeId,
        round_: int,
        carries: bool,
        goes_on: bool = False,
        carried: float = inf,
        steps: int = 0,
    ) -> None:
        """The node contributes to the round what it has trained, so many inner steps; `carries`: with what earlier
        rounds left out, which is so many more; `goes_on`: its trainer takes the steps that follow, and does not
        wait."""
        if (account := self.accounts.get(node)) is not None:
            account.offer(round_, steps, carries, carried)
            if account.bucket == "inner" and not goes_on:
                account.bucket = "waiting"

    def record_commit(self, round_: int, parts: Mapping[NodeId, float], now: float) -> None:
        """The round has these parts, 0 to 1, of what its contributors offered."""
        for node, account in self.accounts.items():
            account.decide(round_, parts.get(node, 0.0))
            if now > account.end and not account.closed:
                account.hear(account.end, "down")
                account.closed = True

    def record_void(self, rounds: Container[int]) -> None:
        """The state of these rounds was lost with all who held it."""
        for account in self.accounts.values():
            account.void(rounds)

    def record_divergence(self, node: NodeId) -> float:
        """Lose the node's open inner time: its state differed, and it starts again from the run's. Returns how
        much."""
        account = self.accounts.get(node)
        return account.lose() if account is not None else 0.0

    def record_departure(self, node: NodeId, left: bool, now: float) -> float:
        """Take a node out: by its own wish (`left`; its clock stops), or not (it is down until it returns, since
        it was last heard). Returns the inner seconds that are lost by it."""
        account = self.accounts.get(node)
        if account is None or account.bucket == "down":
            return 0.0
        if left:
            account.hear(now, "down")
            account.closed = True
            return account.lose()
        account.down_since, account.bucket = account.since, "down"
        account.hear(now, "down")
        return account.go_down()

    def forget(self, node: NodeId, now: float) -> None:
        """Drop a node that nobody will hear of again; its seconds stay in the totals."""
        if (account := self.accounts.pop(node, None)) is not None:
            if not account.closed:
                account.hear(now, "down")
            account.closed = True
            account.decide(account.offered_round, 0.0)
            account.lose()
            for bucket, spent in account.spent.items():
                self.past[bucket] = self.past.get(bucket, 0.0) + spent

    def of_node(self, node: NodeId, now: float) -> dict[str, float]:
        """The node's seconds in each bucket that has some: with those until now that are not booked, in the bucket
        that they seem to belong to. Empty: it has no account."""
        account = self.accounts.get(node)
        if account is None:
            return {}
        spent, bucket = account.buckets(), "open" if account.bucket == "inner" else account.bucket
        spent[bucket] = spent.get(bucket, 0.0) + max(min(now, account.end) - account.since, 0.0)
        return spent

    def seconds(self, now: float) -> dict[str, float]:
        """Node-seconds in each bucket, of all nodes that ever were."""
        total = {bucket: self.past.get(bucket, 0.0) for bucket in BUCKETS}
        for node in self.accounts:
            for bucket, spent in self.of_node(node, now).items():
                total[bucket] += spent
        return total

    def shares(self, now: float) -> dict[str, float]:
        """Each bucket's share of all node-seconds; they add up to 1."""
        seconds = self.seconds(now)
        whole = sum(seconds.values())
        return {bucket: spent / whole if whole else 0.0 for bucket, spent in seconds.items()}

    def cut(self) -> dict[NodeId, dict[str, float]]:
        """What was booked since the last cut: of each node, seconds in each bucket, rounded so that nothing is
        lost from one cut to the next. Where time of before has moved from one bucket to another, one has less than
        nothing."""
        found = dict(self._since_cut())
        longest = max((abs(s) for spent in found.values() for s in spent.values()), default=0.0)
        digits = 3 if longest < 60 else 1
        told: dict[NodeId, dict[str, float]] = {}
        for node, spent in found.items():
            reported = self.accounts[node].reported
            if few := {bucket: r for bucket, s in spent.items() if (r := round(s, digits))}:
                told[node] = few
                for bucket, seconds in few.items():
                    reported[bucket] = reported.get(bucket, 0.0) + seconds
        return told

    def _since_cut(self) -> Iterator[tuple[NodeId, dict[str, float]]]:
        for node, account in self.accounts.items():
            booked, reported = account.buckets(), account.reported
            yield node, {k: booked.get(k, 0.0) - reported.get(k, 0.0) for k in booked.keys() | reported.keys()}


def fleet_goodput(seconds: Mapping[str, float]) -> float:
    """Share of all the nodes' seconds that went into inner steps which a commit has."""
    whole = sum(seconds.values())
    return seconds.get("inner", 0.0) / whole if whole else 0.0


def compute_utilisation(seconds: Mapping[str, float]) -> float:
    """Inner steps, whatever became of them, over inner steps and the exchange: what others call their utilisation
    (INTELLECT-1, arXiv:2412.01152, section 4). Nothing else that a node's time goes into counts here, so it is not
    below the goodput."""
    compute = sum(seconds.get(bucket, 0.0) for bucket in ("inner", "lost", "open"))
    whole = compute + seconds.get("sync", 0.0)
    return compute / whole if whole else 0.0
