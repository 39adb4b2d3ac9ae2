"""Telemetry of the members, beyond what the state machine decides upon: where their time went, what failed, and
their vitals. Decides nothing.

Survives a restart: the event loop keeps `dump` in the journal's meta every few seconds, and a restart replays what
the journal has had since (`until`). `monitor` shows it. Heartbeats say what a node does; of the events it takes
what the coordinator knows better: who came and went, which steps a contribution offers, which of them a commit
has.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from atoll.comm.ids import NodeId
from atoll.comm.replace import replace
from atoll.comm.rounding import rounded
from atoll.coordinator.service.failures import FailureLog
from atoll.coordinator.service.goodput import GoodputMeter
from atoll.coordinator.state_machine import events as ev
from atoll.coordinator.state_machine.events import CommitRecord, Event, Failure, Heartbeat, TrainerFigures
from atoll.coordinator.state_machine.members import REDUCER, TRAINABLE_STATES, VERIFIER, Member, MemberState
from atoll.coordinator.state_machine.state import State

FIGURES = TrainerFigures.__struct_fields__
CUTS_KEPT = 2  # the last round's, whose record may yet be void, and the one's before it
# Events that carry a node's id, and are no sign of its life: the clock's verdicts, and what others did.
NO_SIGNS = (
    *(ev.Joined, ev.Suspected, ev.SuspicionCleared, ev.Stepped, ev.Paused, ev.Resumed, ev.Expired, ev.Banned),
    *(ev.Pardoned, ev.HeardNobody, ev.Started, ev.Tick, ev.TrainersSeen, ev.WritesResumed),
)


@dataclass(frozen=True, slots=True)
class Vitals:
    """A heartbeat's figures beyond liveness: speed, loss, traffic, memory, and words for people. Of the trainer's
    figures 0 is what is not known."""

    tokens_per_s: float = 0.0
    loss: float = 0.0
    bytes_up: int = 0
    bytes_down: int = 0
    rss_bytes: int = 0
    progress: str = ""  # how far it is with what it is doing
    trouble: str = ""  # what does not work
    mfu: float = 0.0  # model FLOPs utilisation of its devices
    data_wait: float = 0.0  # share of its inner steps' time spent waiting for data
    gradient_norm: float = 0.0  # of the last inner step
    learning_rate: float = 0.0  # of the last inner step
    device_bytes: int = 0  # memory on its devices, the most there was at a time
    trainer_rss_bytes: int = 0  # of the trainer's processes; `rss_bytes` is the daemon's
    pause: str = ""  # why it takes no inner steps for now, as its owner wants


@dataclass(frozen=True, slots=True)
class Cut:
    """What the record of a round says of the time that went by until its commit."""

    spent: dict[NodeId, dict[str, float]]  # seconds in each bucket since the commit before
    goodput: dict[str, float]  # node-seconds in each bucket, since the run began
    failures: tuple[Failure, ...]


@dataclass
class Telemetry:
    """The goodput meter, the run's failures, and each member's latest vitals: now, and when it last took steps."""

    meter: GoodputMeter = field(default_factory=GoodputMeter)
    failures: FailureLog = field(default_factory=FailureLog)
    vitals: dict[NodeId, Vitals] = field(default_factory=dict)
    at_work: dict[NodeId, Vitals] = field(default_factory=dict)
    cuts: dict[int, Cut] = field(default_factory=dict)  # by round
    until: float = 0.0  # seconds; of the last batch that was taken in
    round: int = 0  # under way

    def record_heartbeat(
        self, beat: Heartbeat, vitals: Vitals, unanswered: Mapping[str, float], now: float
    ) -> None:
        """Take in what a heartbeat said, at `now` (seconds). `unanswered`: seconds in each phase since the node
        was last answered; empty: it always was."""
        node, meter = beat.node, self.meter
        self.vitals[node] = vitals
        if vitals.tokens_per_s > 0:
            self.at_work[node] = vitals
        account = meter.accounts.get(node)
        if beat.phase == "starting" and account is not None and account.bucket not in ("starting", "down"):
            self.failures.noticed(node, self.round, "its trainer ended", account.since, now)
        meter.record_phase(node, beat.phase, now, unanswered)
        if again := meter.record_progress(node, beat.round, beat.inner_step):
            self.failures.lost(node, again)
        if beat.phase == "inner" and beat.inner_step and node in self.failures.open:
            self.failures.recovered(node, now)

    def record_batch(
        self, before: State, after: State, events: Sequence[Event], records: list[CommitRecord], now: float
    ) -> None:
        """Take in a batch of events that took the run from `before` to `after`, at `now` (seconds), and published
        `records`."""
        self.until, self.round = now, after.round.number
        for event in events:
            if not isinstance(event, NO_SIGNS):
                self.meter.record_sign(event.node, now)
            if isinstance(event, ev.ContributionReady) and _entered(event, before, after):
                work, config = event.contribution, after.config
                carried = work.samples / config.inner.batch_size - work.steps  # steps of earlier rounds
                goes_on = config.delay(event.round) > 0
                self.meter.record_contribution(event.node, event.round, carried > 0, goes_on, carried, work.steps)
        if after.committed > before.committed:
            self._commit(before, after, records, now)
        if void := {record.round for record in records if record.void}:
            self.meter.record_void(void)
        if after.members.changes != before.members.changes:
            stalled = {event.node for event in events if isinstance(event, ev.Expired) and event.stalled}
            for node, member in after.members.here.items():
                if (was := before.members.here.get(node)) is None or was.life != member.life:
                    self._came(member, was, now)
            for node, former in before.members.here.items():
                if (here := after.members.here.get(node)) is not former:
                    self._changed(former, here, after.members.departed.get(node), node in stalled, now)
        if after.members.departed is not before.members.departed:
            gone = before.members.departed.keys() - after.members.departed.keys()
            for node in gone - after.members.here.keys():
                self.meter.forget(node, now)
                self.failures.closed(node)
                self.vitals.pop(node, None)
                self.at_work.pop(node, None)

    def _came(self, member: Member, was: Member | None, now: float) -> None:
        if was is not None:
            self.failures.noticed(
                member.node, self.round, "it came back in another process or session", self._heard(was), now
            )
        if trains(member):
            self.meter.enter(member.node, now)
        else:
            self.failures.recovered(member.node, now)

    def _changed(self, was: Member, member: Member | None, gone: Member | None, stalled: bool, now: float) -> None:
        node, failures = was.node, self.failures
        if member is None:
            left, at = gone is not None and gone.state is MemberState.LEFT, self._heard(was)
            lost = self.meter.record_departure(node, left, now)
            if left or gone is None:
                failures.closed(node)
            else:
                failures.noticed(node, self.round, gone.reason, was.moved_at if stalled else at, now)
                failures.lost(node, lost)
        elif member.life == was.life:
            if member.suspected is not None and was.suspected is None:
                failures.noticed(node, self.round, member.suspected, self._heard(was), now)
            elif member.suspected is None and was.suspected is not None:
                failures.recovered(node, now)
            if member.state is MemberState.RECOVERING and was.state in TRAINABLE_STATES:
                self.meter.record_divergence(node)

    def _heard(self, member: Member) -> float:
        """Seconds; when the member was heard last."""
        account = self.meter.accounts.get(member.node)
        return member.heard_at if account is None else max(account.since, member.heard_at)

    def _commit(self, before: State, after: State, records: list[CommitRecord], now: float) -> None:
        pending = [after.pending] if after.pending is not None else []
        record = next((r for r in (*pending, *records) if r.round == after.committed and not r.void), None)
        if record is None:
            return
        self.meter.record_commit(record.round, parts(record, len(before.round.ledger.owners)), now)
        spent, failing = self.meter.cut(), {f.node for f in (*self.failures.over, *self.failures.open.values())}
        survivors = [spent[n] for n in record.members if n in spent and n not in failing]
        waited = sum(of.get("sync", 0.0) + of.get("waiting", 0.0) for of in survivors)
        failures = self.failures.committed(record.round, waited, len(survivors), record.predicted)
        goodput = {bucket: rounded(seconds, 16) for bucket, seconds in self.meter.seconds(now).items()}
        cuts = self.cuts | {record.round: Cut(spent, goodput, failures)}
        self.cuts = {k: cuts[k] for k in sorted(cuts)[-CUTS_KEPT:]}

    def reconcile(self, state: State, now: float) -> None:
        """Begin an account of each member that has none: what an earlier process knew of it is gone."""
        self.round = state.round.number
        for member in state.members.here.values():
            if trains(member) and member.node not in self.meter.accounts:
                self.meter.enter(member.node, now)

    def complete(self, record: CommitRecord) -> CommitRecord:
        """The record with what is known of its round here."""
        cut = self.cuts.get(record.round, Cut({}, {}, ()))
        figures = self.figures(record.contributors)
        return replace(
            record,
            figures=figures,
            goodput=cut.goodput,
            spent=cut.spent,
            failures=() if record.void else cut.failures,
        )

    def figures(self, nodes: Iterable[NodeId]) -> dict[NodeId, TrainerFigures]:
        """What the trainers of these nodes told of their work, in few digits; who told nothing is not in it."""
        known = ((node, self.at_work[node]) for node in nodes if node in self.at_work)
        return {n: TrainerFigures(*(rounded(getattr(of, name), 8) for name in FIGURES)) for n, of in known}

    def dump(self) -> str:
        """Encode the telemetry as JSON, for `load`."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def load(cls, text: str | None) -> "Telemetry":
        """Decode the JSON that `dump` wrote; None or empty: begin anew. Raises `DECODE_ERRORS` for anything
        else."""
        return msgspec.json.decode(text, type=cls) if text else cls()


def trains(member: Member) -> bool:
    """Whether goodput is counted of the member: it is there to take inner steps that a commit has."""
    return member.role not in (REDUCER, VERIFIER)


def parts(record: CommitRecord, chunks: int) -> dict[NodeId, float]:
    """Of each contributor of the record, the part of its delta that is in the commit."""
    lacking: dict[NodeId, int] = {}
    for nodes in record.lacking.values():
        for node in nodes:
            lacking[node] = lacking.get(node, 0) + 1
    return {n: 1 - lacking.get(n, 0) / max(chunks, 1) for n in record.contributors}


def _entered(event: ev.ContributionReady, before: State, after: State) -> bool:
    """Whether the contribution is in the round's ledger since this event."""
    r, old = after.round, before.round
    known = old.number == r.number and event.node in old.ledger.contributions
    return event.round == r.number and event.node in r.ledger.contributions and not known
