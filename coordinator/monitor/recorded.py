"""A run as of one of its rounds, from what was recorded of it: the same answer as `GET /api/run` gives of a living
run, so that page and terminal show either. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from atoll.comm.ids import NodeId
from atoll.coordinator.monitor.members import returned
from atoll.coordinator.service.goodput import compute_utilisation, fleet_goodput
from atoll.coordinator.state_machine.events import CommitRecord, TrainerFigures


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """What records do not say of a node."""

    role: str = "trainer"
    owner: str = ""
    version: str = ""
    name: str = ""


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """What is known of a run beside its records."""

    run: str
    rounds_total: int = 0  # 0: its end is open, or not known
    nodes: Mapping[NodeId, NodeFacts] = field(default_factory=dict)


def recorded_snapshot(run: RecordedRun, record: CommitRecord, last: int, val_loss: float | None) -> dict[str, Any]:
    """The run when this record was made; `last`: its last round, `val_loss`: the latest then (nats a token)."""
    done = bool(run.rounds_total) and record.round >= run.rounds_total
    spent = record.goodput
    whole = sum(spent.values())
    return {
        "run_id": run.run,
        "incarnation": 0,
        "epoch": record.epoch,
        "round": record.round,
        "rounds_total": run.rounds_total,
        "committed": record.round,
        "phase": "void" if record.void else "finished" if done and record.round == last else "committed",
        "phase_reason": record.reason,
        "tokens": record.tokens,
        "val_loss_first": None,
        "val_loss": val_loss,
        "goodput": {bucket: seconds / whole if whole else 0.0 for bucket, seconds in spent.items()},
        "goodput_seconds": dict(spent),
        "fleet_goodput": fleet_goodput(spent),
        "compute_utilisation": compute_utilisation(spent),
        "awaited": [],
        "draining": False,
        "members": [_member(node, record, run) for node in dict.fromkeys((*record.members, *record.contributors))],
        "members_gone": 0,
        "returned": returned(record.failures, record.committed_at, record.names),
        "events": [],
        "recorded": True,
    }


def _member(node: NodeId, record: CommitRecord, run: RecordedRun) -> dict[str, Any]:
    facts = run.nodes.get(node, NodeFacts())
    told = record.figures.get(node, TrainerFigures())
    contributed = node in record.contributors
    up, down = record.rates.get(node, (0.0, 0.0))
    return {
        "node_id": node,
        "name": record.names.get(node, node),
        "state": "active" if contributed or facts.role == "reducer" else "synced",
        "role": facts.role,
        "owner": facts.owner,
        "version": facts.version,
        "phase": "contributed" if contributed else "left out" if facts.role == "trainer" else "reduced",
        "round": record.round,
        "inner_step": 0,
        "reached": False,
        "ready": False,
        "connected": True,
        "tokens_per_s": told.tokens_per_s,
        "mfu": told.mfu or None,
        "data_wait": told.data_wait,
        "loss": record.losses.get(node),
        "gradient_norm": told.gradient_norm or None,
        "learning_rate": told.learning_rate or None,
        "device_bytes": None,
        "trainer_rss_bytes": None,
        "last_heard_s": 0.0,
        "bytes_up": record.bytes_up.get(node, 0),
        "bytes_down": record.bytes_down.get(node, 0),
        "rss_bytes": 0,
        "address": "",
        "progress": "",
        "trouble": "",
        "pause": "",
        "reason": "" if contributed or facts.role != "trainer" else "contributed nothing to this round",
        "weight": record.contributors.get(node, 0.0),
        "rate_up": up or None,
        "rate_down": down or None,
    }
