"""A commit record as one row of figures, under the names that people read in charts. Pure.

    round tokens                 the axes; `committed_at` is seconds since 1970
    loss/train loss/val          nats a token
    train/...                    of the contributors' trainers together: learning_rate, gradient_norm, delta_norm
    speed/...                    tokens a second of the run (of its wall time) and of its trainers, MFU, data_wait
    seconds/PHASE                of the round; `round` is their sum
    exchange/...                 seconds as the plan predicted them, and as they were; attempts, levels, bytes
    members/...                  active, contributors, epoch
    goodput/BUCKET               share of all node-seconds since the run began
    fleet/goodput                the share of `inner` among them
    fleet/compute_utilisation    inner steps, whatever became of them, over them and the exchange
    failures/...                 of members: noticed in the round; the most seconds to detect one, and to recover
                                 from one that is over; survivors' node-seconds lost to those noticed
    node/NAME/FIGURE             of each contributor, up to `MAX_NODES` of them
    nodes/FIGURE/least ...       least, median and most of the contributors, however many there are

Everything is of the record alone, so a row is the same whenever it is made.
"""

import re
from collections.abc import Iterable, Mapping
from statistics import fmean, median

from atoll.comm.ids import NodeId
from atoll.coordinator.service.goodput import compute_utilisation, fleet_goodput
from atoll.coordinator.state_machine.events import CommitRecord

Row = dict[str, float]
MAX_NODES = 64  # contributors of a round that have charts of their own
MAX_NUMBER = 1000  # of a node's id: in a run that strangers join and leave there is some end to the charts
MAX_NAME = 32  # characters
AXES = ("round", "tokens", "committed_at")
MEANS = {  # charts of the contributors' mean, by their figure
    "gradient_norm": "train/gradient_norm",
    "delta_norm": "train/delta_norm",
    "mfu": "speed/mfu",
    "data_wait": "speed/data_wait",
}


def row(record: CommitRecord) -> Row:
    """The figures of a record. What is not known is left out, and of a void round all but its axes."""
    out: Row = {
        "round": record.round,
        "tokens": record.tokens,
        "committed_at": record.committed_at,
        "members/epoch": record.epoch,
    }
    if record.void:
        return out | {"void": 1}
    out["loss/train"] = record.train_loss
    if record.val_loss is not None:
        out["loss/val"] = record.val_loss
    out["members/active"] = len(record.members)
    out["members/contributors"] = len(record.contributors)
    whole = sum(record.seconds.values())
    out |= {f"seconds/{phase}": seconds for phase, seconds in record.seconds.items()}
    out["seconds/round"] = whole
    out |= _exchange(record)
    if spent := sum(record.goodput.values()):
        out |= {f"goodput/{bucket}": seconds / spent for bucket, seconds in record.goodput.items()}
        out["fleet/goodput"] = fleet_goodput(record.goodput)
        out["fleet/compute_utilisation"] = compute_utilisation(record.goodput)
    out |= _failures(record)
    of_nodes = _of_nodes(record)
    if whole > 0:
        out["speed/run_tokens_per_s"] = sum(record.contributors.values()) / whole
    if paces := of_nodes["tokens_per_s"]:
        out["speed/trainers_tokens_per_s"] = sum(paces.values())
    out |= {name: fmean(of.values()) for figure, name in MEANS.items() if (of := of_nodes[figure])}
    told = (record.figures[n].learning_rate for n in record.contributors if n in record.figures)
    if rates := [rate for rate in told if rate]:
        out["train/learning_rate"] = fmean(rates)
    return out | _each(record, of_nodes) | _spread(of_nodes)


def _exchange(record: CommitRecord) -> Row:
    out: Row = {
        "exchange/attempts": record.attempts,
        "exchange/levels": record.levels,
        "exchange/bytes_up": sum(record.bytes_up.values()),
        "exchange/bytes_down": sum(record.bytes_down.values()),
    }
    if record.predicted:
        out["exchange/predicted_s"] = record.predicted
    if "reduce" in record.seconds:
        out["exchange/measured_s"] = record.seconds["reduce"]
    if record.digests_equal is not None:
        out["exchange/states_equal"] = int(record.digests_equal)
    return out


def _failures(record: CommitRecord) -> Row:
    """Each failure counts once: when it is noticed, and its recovery when that is told."""
    noticed = [f for f in record.failures if f.round == record.round]
    out: Row = {"failures/noticed": len(noticed)}
    if noticed:
        out["failures/detect_s"] = max(f.detected for f in noticed)
        out["failures/survivors_lost_s"] = sum(f.waited for f in noticed)
    if recovered := [f.recovered for f in record.failures if f.recovered is not None]:
        out["failures/recover_s"] = max(recovered)
    return out


def _of_nodes(record: CommitRecord) -> dict[str, dict[NodeId, float]]:
    """What is known of single contributors, by figure."""
    who, figures = record.contributors, record.figures
    told = {
        name: {n: float(value) for n in who if n in figures and (value := getattr(figures[n], name))}
        for name in ("tokens_per_s", "mfu", "gradient_norm")
    }
    return {
        "loss": _known(record.losses, who),
        "tokens": dict(who),
        **told,
        "data_wait": {n: figures[n].data_wait for n in who if n in figures},
        "delta_norm": _known(record.norms, who),
        "exchange_s": _known(record.exchange, who),
        "bytes_up": _known(record.bytes_up, who),
        "bytes_down": _known(record.bytes_down, who),
    }


def _known(values: Mapping[NodeId, float], who: Iterable[NodeId]) -> dict[NodeId, float]:
    return {n: values[n] for n in who if n in values}


def _each(record: CommitRecord, of_nodes: Mapping[str, Mapping[NodeId, float]]) -> Row:
    if len(record.contributors) > MAX_NODES:
        return {}
    names = chart_names(record)
    return {
        f"node/{names[node]}/{figure}": value
        for figure, values in of_nodes.items()
        for node, value in values.items()
        if node in names
    }


def _spread(of_nodes: Mapping[str, Mapping[NodeId, float]]) -> Row:
    out: Row = {}
    for figure, of in of_nodes.items():
        if values := list(of.values()):
            spread = {"least": min(values), "median": median(values), "most": max(values)}
            out |= {f"nodes/{figure}/{which}": value for which, value in spread.items()}
    return out


def chart_names(record: CommitRecord) -> dict[NodeId, str]:
    """The contributors by the names that their charts have: letters, digits, `_` and `-`, each once in a round.
    Nodes that joined after `MAX_NUMBER` others have none."""
    plain = {
        node: re.sub(r"[^A-Za-z0-9_-]+", "_", record.names.get(node, ""))[:MAX_NAME] or str(node)
        for node in record.contributors
        if int(node[1:]) <= MAX_NUMBER
    }
    taken = list(plain.values())
    return {node: name if taken.count(name) == 1 else f"{name}-{node}" for node, name in plain.items()}
