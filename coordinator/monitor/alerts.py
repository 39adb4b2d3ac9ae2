"""What an operator is woken for: rules over what a run publishes and how it stands. Pure.

    record(commit record), decide(decision)  --+
                                               +-->  look(state, now)  -->  alerts, to whoever sends them
    restored(the alerts that are on)         --+

    kind               on while                                                       off when
    stall              no round is committed for `STALL_FACTOR` times as long as      one is
                       the last ones took (though enough members are there)
    lost_quorum        fewer members can train than the run needs                     enough can
    state_divergence   members made different states of a round                       a later round
    loss_divergence    the training loss is far above what it was, or no number       it is not
    low_goodput        of the members' time less than `GOODPUT` went into steps       more than `GOOD_AGAIN` does
                       that a commit has
    convicted          (once for each member that is evicted or banned for what it did)

An alert is told when it begins and when it is over, not in between. Who sends them (`webhook`, `wandb_logger`)
keeps nothing: which ones are on is kept in the journal, so that a restart of the coordinator repeats none. Times
are seconds on the coordinator's clock, which was not running while it was away: that is no stall.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from math import isfinite
from statistics import median

import msgspec

from atoll.comm.decode_errors import DECODE_ERRORS
from atoll.comm.evidence import Consequence
from atoll.comm.ids import NodeId
from atoll.coordinator.state_machine.events import CommitRecord, Decision
from atoll.coordinator.state_machine.members import TRAINABLE_STATES
from atoll.coordinator.state_machine.state import Phase, State

RECORDS = 100  # the latest, that the rules look at
STALL_FACTOR = 4.0  # times the median of the last rounds
STALL_ROUNDS = 20  # of which the median is
MIN_STALL_SECONDS = 300.0  # a round that takes less is no stall, however short the others were
QUORUM_SECONDS = 60.0  # for which too few members are no alert: they may be about to come back
GOODPUT = 0.5  # share of the members' seconds
GOOD_AGAIN = 0.6
GOODPUT_SECONDS = 600.0  # of the last rounds that the share is of, at least
LOSS_ROUNDS = 3  # whose median is the loss now
LOSS_FACTOR = 1.1  # times the least that it was
MIN_LOSS_RISE = 0.1  # nats a token
CONVICTIONS = (Consequence.EVICTED, Consequence.BANNED)


class AlertKind(StrEnum):
    """The kinds of alerts; the table above has what each means."""

    STALL = "stall"
    LOST_QUORUM = "lost_quorum"
    STATE_DIVERGENCE = "state_divergence"
    LOSS_DIVERGENCE = "loss_divergence"
    LOW_GOODPUT = "low_goodput"
    CONVICTED = "convicted"


TITLES = {
    AlertKind.STALL: "no round is committed",
    AlertKind.LOST_QUORUM: "too few members",
    AlertKind.STATE_DIVERGENCE: "members' states differ",
    AlertKind.LOSS_DIVERGENCE: "the loss rises",
    AlertKind.LOW_GOODPUT: "low goodput",
    AlertKind.CONVICTED: "a member is out for what it did",
}


@dataclass(frozen=True, slots=True)
class Alert:
    """Something that an operator should know at once."""

    kind: AlertKind
    on: bool  # it begins; False: it is over
    sentence: str
    at: float  # seconds since 1970
    round: int  # under way
    node: NodeId | None = None  # the member that it is about
    name: str = ""  # the member's

    @property
    def title(self) -> str:
        """The kind in a few words, and whether it is over."""
        return TITLES[self.kind] if self.on else f"over: {TITLES[self.kind]}"


@dataclass(frozen=True, slots=True)
class _Round:
    """What the rules remember of a commit record: of many members it is large."""

    round: int
    void: bool
    train_loss: float
    seconds: float  # that it took
    equal: bool | None  # the states that were made of it
    odd: tuple[str, ...]  # whose state was another than the run's
    inner: float  # node-seconds that commits have
    whole: float  # node-seconds of everything

    @classmethod
    def of(cls, record: CommitRecord) -> "_Round":
        odd = (record.names.get(n, n) for n, d in record.digests.items() if "" != record.state_digest != d)
        spent = record.spent.values()
        inner, whole = sum(of.get("inner", 0.0) for of in spent), sum(sum(of.values()) for of in spent)
        seconds, equal = sum(record.seconds.values()), record.digests_equal
        return cls(record.round, record.void, record.train_loss, seconds, equal, tuple(odd), inner, whole)


class AlertRules:
    """The rules, with what they remember: of rounds and since when something holds."""

    def __init__(self, past: Iterable[CommitRecord] = ()) -> None:
        """`past`: the latest commit records of earlier processes, in their order."""
        self.on: dict[AlertKind, float] = {}  # which are on, and since when
        self._rounds = deque[_Round](maxlen=RECORDS)
        self._decided: list[Decision] = []
        self._committed = -1  # rounds, when it last looked
        self._progress_at = 0.0  # seconds; when that became so, or this process began to look
        self._few_since: float | None = None  # seconds
        for record in past:
            self.record(record)

    def record(self, record: CommitRecord) -> None:
        """Take in a commit record that was published."""
        while self._rounds and self._rounds[-1].round >= record.round:  # void rounds take the place of what was
            self._rounds.pop()
        self._rounds.append(_Round.of(record))

    def decide(self, decision: Decision) -> None:
        """Take in a decision against a member."""
        if decision.consequence in CONVICTIONS:
            self._decided.append(decision)

    def look(self, state: State, now: float) -> list[Alert]:
        """The alerts that begin or end with what is so at `now`."""
        if state.committed != self._committed:
            self._committed, self._progress_at = state.committed, now
        verdicts = {
            AlertKind.STALL: self._stall(state, now),
            AlertKind.LOST_QUORUM: self._lost_quorum(state, now),
            AlertKind.STATE_DIVERGENCE: self._state_divergence(),
            AlertKind.LOSS_DIVERGENCE: self._loss_divergence(),
            AlertKind.LOW_GOODPUT: self._low_goodput(),
        }
        round_ = state.round.number
        found = [
            Alert(AlertKind.CONVICTED, True, _conviction(d), now, d.round, d.node, d.name) for d in self._decided
        ]
        self._decided = []
        for kind, sentence in verdicts.items():
            if sentence and kind not in self.on:
                self.on[kind] = now
                found.append(Alert(kind, True, sentence, now, round_))
            elif not sentence and kind in self.on:
                lasted = now - self.on.pop(kind)
                found.append(Alert(kind, False, f"{TITLES[kind]}: over after {lasted:.0f} s", now, round_))
        return found

    def dump(self) -> str:
        """Encode which alerts are on as JSON, for `restore`."""
        return msgspec.json.encode(self.on).decode()

    def restore(self, text: str | None) -> None:
        """Take back what `dump` wrote; None, or another version's: none is on."""
        try:
            self.on = msgspec.json.decode(text, type=dict[AlertKind, float]) if text else {}
        except DECODE_ERRORS:
            self.on = {}

    def _stall(self, state: State, now: float) -> str:
        took = [r.seconds for r in self._rounds if not r.void][-STALL_ROUNDS:]
        if not took or state.round.phase is Phase.FINISHED or self._few(state):
            return ""
        limit, waited = max(STALL_FACTOR * median(took), MIN_STALL_SECONDS), now - self._progress_at
        if waited <= limit:
            return ""
        return (
            f"no round is committed since {waited:.0f} s, the last ones took {median(took):.3g} s: "
            f"round {state.round.number} is {state.round.phase} ({state.round.reason})"
        )

    def _few(self, state: State) -> bool:
        able = state.members.count(*TRAINABLE_STATES)
        return (
            0 < state.committed and state.round.phase is not Phase.FINISHED and able < state.config.members.minimum
        )

    def _lost_quorum(self, state: State, now: float) -> str:
        if not self._few(state):
            self._few_since = None
            return ""
        self._few_since = now if self._few_since is None else self._few_since
        if now - self._few_since < QUORUM_SECONDS and AlertKind.LOST_QUORUM not in self.on:
            return ""
        able = state.members.count(*TRAINABLE_STATES)
        need = state.config.members.minimum
        return f"{able} of the {need} members that the run needs (members.minimum) can train: no round goes on"

    def _state_divergence(self) -> str:
        told = next((r for r in reversed(self._rounds) if r.equal is not None), None)
        if told is None or told.equal:
            return ""
        odd = told.odd
        who = ", ".join(odd[:5]) + (f" and {len(odd) - 5} more" if len(odd) > 5 else "")
        named = f"another than the run's: {who}" if odd else "nobody can tell which is right"
        return f"the states that members made of round {told.round} differ; {named}"

    def _loss_divergence(self) -> str:
        losses = [r.train_loss for r in self._rounds if not r.void]
        if losses and not isfinite(losses[-1]):
            return f"the training loss is {losses[-1]}"
        losses = [loss for loss in losses if isfinite(loss)]
        if len(losses) < 2 * LOSS_ROUNDS:
            return ""
        usual = [median(losses[i : i + LOSS_ROUNDS]) for i in range(len(losses) - LOSS_ROUNDS + 1)]
        least, loss = min(usual), usual[-1]
        if loss <= least + max(MIN_LOSS_RISE, (LOSS_FACTOR - 1) * abs(least)):
            return ""
        return f"the training loss of the last {LOSS_ROUNDS} rounds is {loss:.3f}, it was {least:.3f} before"

    def _low_goodput(self) -> str:
        inner = whole = wall = 0.0
        rounds = 0
        for known in reversed(self._rounds):
            inner, whole, wall, rounds = inner + known.inner, whole + known.whole, wall + known.seconds, rounds + 1
            if wall >= GOODPUT_SECONDS and rounds >= LOSS_ROUNDS:
                break
        else:
            return ""
        share = inner / whole if whole > 0 else 1.0
        if share >= (GOOD_AGAIN if AlertKind.LOW_GOODPUT in self.on else GOODPUT):
            return ""
        return f"{share:.0%} of the members' time in the last {rounds} rounds went into steps that were committed"


def _conviction(decision: Decision) -> str:
    who = f"{decision.name} ({decision.node})" if decision.name else str(decision.node)
    return f"{who} is {decision.consequence}: {decision.evidence.sentence}"
