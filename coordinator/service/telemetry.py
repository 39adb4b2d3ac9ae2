"""Telemetry of the members, beyond what the state machine decides upon: where their time went, and their vitals.

Survives a restart: the event loop keeps `dump` in the journal's meta every few seconds. `monitor` shows it.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, fields

import msgspec

from atoll.comm.ids import NodeId
from atoll.comm.rounding import rounded
from atoll.coordinator.service.goodput import GoodputMeter
from atoll.coordinator.state_machine.events import CommitRecord, TrainerFigures
from atoll.coordinator.state_machine.members import TRAINABLE_STATES, MemberState
from atoll.coordinator.state_machine.state import State

FIGURES = tuple(field.name for field in fields(TrainerFigures))


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


@dataclass
class Telemetry:
    """The goodput meter, and each member's latest vitals: now, and when it last took inner steps."""

    meter: GoodputMeter = field(default_factory=GoodputMeter)
    vitals: dict[NodeId, Vitals] = field(default_factory=dict)
    at_work: dict[NodeId, Vitals] = field(default_factory=dict)

    def record_heartbeat(self, node: NodeId, phase: str, vitals: Vitals, now: float) -> None:
        """Take in what a heartbeat said, at `now` (seconds)."""
        self.vitals[node] = vitals
        if vitals.tokens_per_s > 0:
            self.at_work[node] = vitals
        self.meter.record_phase(node, phase, now)

    def record_batch(self, before: State, after: State, records: list[CommitRecord], now: float) -> None:
        """Take in a batch of events that took the run from `before` to `after`, at `now` (seconds), and published
        `records`."""
        pending = [after.pending] if after.pending is not None else []
        for record in (*records, *pending):
            if record.round > before.committed:
                self.meter.record_commit(record.contributors, now)
        here = after.members.here
        if after.members.changes == before.members.changes:
            return
        for node, was in before.members.here.items():
            member = here.get(node)
            if member is was:
                continue
            if member is None:
                gone = after.members.departed.get(node)
                self.meter.record_departure(node, gone is not None and gone.state is MemberState.LEFT, now)
            elif member.life != was.life:
                self.meter.record_return(node, now)
            elif member.state is MemberState.RECOVERING and was.state in TRAINABLE_STATES:
                self.meter.record_divergence(node, now)
        if after.members.departed is not before.members.departed:
            for node in before.members.departed.keys() - after.members.departed.keys():
                if node in here:
                    self.meter.record_return(node, now)
                else:
                    self.meter.forget(node, now)
                    self.vitals.pop(node, None)
                    self.at_work.pop(node, None)

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
