"""What was seen of the members beyond what the machine decides upon: where their time went, and their vitals.

It survives a restart: the kernel keeps `dump` in the journal's meta every few seconds.
"""

from dataclasses import dataclass, field

import msgspec

from atoll.comm.ids import NodeId
from atoll.coordinator.service.goodput import GoodputMeter
from atoll.coordinator.state_machine.events import CommitRecord
from atoll.coordinator.state_machine.members import MemberState
from atoll.coordinator.state_machine.state import State


@dataclass(frozen=True, slots=True)
class Vitals:
    """What a heartbeat says beyond liveness."""

    tokens_per_s: float = 0.0
    loss: float = 0.0
    bytes_up: int = 0
    bytes_down: int = 0
    rss_bytes: int = 0
    progress: str = ""  # of what it is doing
    trouble: str = ""  # what does not work


@dataclass
class Telemetry:
    meter: GoodputMeter = field(default_factory=GoodputMeter)
    vitals: dict[NodeId, Vitals] = field(default_factory=dict)

    def heard(self, node: NodeId, phase: str, vitals: Vitals, now: float) -> None:
        self.vitals[node] = vitals
        self.meter.phase(node, phase, now)

    def happened(self, before: State, after: State, records: list[CommitRecord], now: float) -> None:
        """A batch of events took the run from `before` to `after`."""
        pending = [after.pending] if after.pending is not None else []
        for record in (*records, *pending):
            if record.round > before.committed:
                self.meter.committed(record.contributors, now)
        here = after.members.here
        if after.members.changes == before.members.changes:
            return
        for node, was in before.members.here.items():
            member = here.get(node)
            if member is was:
                continue
            if member is None:
                gone = after.members.gone.get(node)
                self.meter.gone(node, gone is not None and gone.state is MemberState.LEFT, now)
            elif member.life != was.life:
                self.meter.returned(node, now)
            elif member.standing is MemberState.RECOVERING and was.standing in TRAINS:
                self.meter.diverged(node, now)
        if after.members.gone is not before.members.gone:
            for node in before.members.gone.keys() - after.members.gone.keys():
                if node in here:
                    self.meter.returned(node, now)
                else:
                    self.meter.forget(node, now)
                    self.vitals.pop(node, None)

    def dump(self) -> str:
        return msgspec.json.encode(self).decode()

    @classmethod
    def load(cls, text: str | None) -> "Telemetry":
        """Raises msgspec.MsgspecError for what `dump` did not write."""
        return msgspec.json.decode(text, type=cls) if text else cls()


TRAINS = (MemberState.SYNCED, MemberState.ACTIVE)
