"""Who is in the run. Pure.

joining --layout--> recovering --state_k--> synced --round boundary--> active
   |                    ^                      |                         |
   |                    +------ differs -------+-------------------------+
   +------------- leaves, breaks off, falls silent, hangs: left or evicted
"""

from collections.abc import Container
from dataclasses import dataclass, field, replace
from enum import StrEnum

from atoll.comm.config import MembersConfig
from atoll.comm.ids import NodeId


class MemberState(StrEnum):
    JOINING = "joining"  # its trainer is starting
    RECOVERING = "recovering"  # fetches the live state from its peers
    SYNCED = "synced"  # has the state; enters at the next round boundary
    ACTIVE = "active"  # counted in the round
    LEFT = "left"
    EVICTED = "evicted"


@dataclass(frozen=True, slots=True)
class Member:
    node: NodeId
    name: str
    address: str
    session: str
    state: MemberState
    heard_at: float  # seconds
    moved_at: float  # seconds; when its inner step last advanced
    connected: bool = True
    lost_at: float = 0.0  # seconds; when its connection broke
    state_round: int = -1  # the state it holds, -1: none
    state_digest: bytes = b""
    phase: str = "starting"  # what its heartbeat says it is doing
    step: tuple[int, int] = (0, 0)  # (round, inner step) of its last heartbeat
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Members:
    here: dict[NodeId, Member] = field(default_factory=dict)
    gone: dict[NodeId, Member] = field(default_factory=dict)
    next_id: int = 1

    def of(self, *states: MemberState) -> tuple[NodeId, ...]:
        return tuple(n for n, m in self.here.items() if m.state in states)

    @property
    def active(self) -> tuple[NodeId, ...]:
        return self.of(MemberState.ACTIVE)


def join(members: Members, node: NodeId, name: str, address: str, session: str, now: float) -> Members:
    """Admit a new node, or one that returns under its old id."""
    member = Member(node, name, address, session, MemberState.JOINING, now, now, reason="starting its trainer")
    gone = {n: m for n, m in members.gone.items() if n != node}
    next_id = max(members.next_id, int(node[1:]) + 1)
    return Members(members.here | {node: member}, gone, next_id)


def update(members: Members, node: NodeId, **changes: object) -> Members:
    member = replace(members.here[node], **changes)  # type: ignore[arg-type]
    return replace(members, here=members.here | {node: member})


def remove(members: Members, node: NodeId, state: MemberState, reason: str) -> Members:
    member = replace(members.here[node], state=state, reason=reason, connected=False)
    here = {n: m for n, m in members.here.items() if n != node}
    return replace(members, here=here, gone=members.gone | {node: member})


def heard(members: Members, node: NodeId, phase: str, step: tuple[int, int], now: float) -> Members:
    member = members.here[node]
    moved = step != member.step or phase != member.phase
    return update(members, node, heard_at=now, phase=phase, step=step, moved_at=now if moved else member.moved_at)


def overdue(
    members: Members, limits: MembersConfig, awaited: Container[NodeId], now: float
) -> list[tuple[NodeId, str]]:
    """Members that are out by the clock, each with the reason; `awaited`: the run waits for their trainers."""
    out = []
    for node, m in members.here.items():
        if not m.connected and now - m.lost_at > limits.reconnect:
            out.append((node, f"its connection broke and did not come back within {limits.reconnect:g} s"))
        elif now - m.heard_at > limits.lease:
            out.append((node, f"silent for more than {limits.lease:g} s"))
        elif node in awaited and now - m.moved_at > limits.stall:
            out.append((node, f"its trainer made no progress for more than {limits.stall:g} s"))
    return out
