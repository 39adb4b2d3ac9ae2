"""A round as people ask about it: where each node's time went, who was slow and by how much, and why it took long.
Pure: from the round's record, and from what rounds usually take."""

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from atoll.comm.durations import in_words
from atoll.comm.ids import NodeId
from atoll.coordinator.causes import slowness
from atoll.coordinator.causes.explanation import Kind
from atoll.coordinator.history.series import PHASES, SeriesTable
from atoll.coordinator.state_machine.events import CommitRecord

WORTH_PERCENT = 5  # longer or shorter than usual, from which on that is said
QUICK = 0.8  # times the usual, below which a round was quicker
SLOW_PACE = 1.5  # times slower than the median, from which on a node is named: training,
SLOW_LINK = 2.0  # and its link
MIN_TRAINING_SECONDS = 0.1  # from which on a pace can be told by them
# Buckets of where a node's time went (`record.spent`), by what the waterfall draws.
PARTS: dict[str, tuple[str, ...]] = {
    "inner": ("inner", "lost", "open"),
    "wait": ("waiting",),
    "exchange": ("sync",),
    "recovery": ("recovering", "starting"),
    "paused": ("paused",),
    "down": ("down",),
}
CUT_FIRST = ("down", "recovery", "paused", "wait")
WORKED = {"inner", "lost", "open", "sync", "waiting"}  # buckets of who is in a round
WORDS = {"inner": "training", "collect": "closing", "reduce": "the exchange", "commit": "the commit"}


@dataclass(frozen=True, slots=True)
class UsualTimes:
    """What the rounds before one took; 0: not known."""

    phases: Mapping[str, float]  # seconds
    wall: float  # seconds from one commit to the next
    took: float  # the same, of the round itself


@dataclass(frozen=True, slots=True)
class Slowness:
    """A node that was slower than others."""

    node: NodeId
    name: str
    what: str  # "training", "link", "left out" or "lost in the exchange"; or the kind of the verdict
    times: float  # slower than the median; 0: that is no measure of it
    sentence: str


def usual_times(series: SeriesTable, record: CommitRecord) -> UsualTimes:
    """What the rounds before this one took, and it itself: by the same rounds as the run's own verdict on it. What
    lies between a commit and the next round's beginning is a round's time, too."""
    rounds, at, *spent = series.columns("round", "committed_at", *PHASES)
    end = int(np.searchsorted(rounds, record.round))
    start = max(end - slowness.MEMORY, 0)
    seconds = np.stack([column[start:end] for column in spent], axis=1)  # (rounds, phases)
    phases = slowness.usual([slowness.RoundPace(*map(float, row)) for row in seconds])
    times = at[start:end]
    took = max(record.committed_at - float(times[-1]), 0.0) if end and times[-1] and record.committed_at else 0.0
    known = (times[1:] > 0) & (times[:-1] > 0)
    idle = np.maximum(np.diff(times) - seconds[1:].sum(axis=1), 0.0)[known]
    wall = sum(phases.values()) + float(np.median(idle)) if phases and len(idle) else 0.0
    return UsualTimes(phases or dict.fromkeys(PHASES, 0.0), wall, took)


def name_of(record: CommitRecord, node: NodeId) -> str:
    return record.names.get(node, node)


def in_round(record: CommitRecord) -> set[NodeId]:
    """Who was in the round, those with it that failed in it and were gone when it was committed."""
    failed = {
        f.node for f in record.failures if f.round == record.round and WORKED & record.spent.get(f.node, {}).keys()
    }
    return {*record.members, *record.contributors, *failed}


def waterfall(record: CommitRecord, took: float) -> list[dict[str, Any]]:
    """The seconds of each node in each part of the round, which took so many, those that trained longest first.
    `estimated`: by its tokens and its pace, because the record does not say it. What is booked in the round and
    was before it (a member that was gone for several rounds comes back) is no part of it."""
    training, closing = (record.seconds.get(phase, 0.0) for phase in ("inner", "collect"))
    exchange = record.seconds.get("reduce", 0.0) + record.seconds.get("commit", 0.0)
    rows = list[dict[str, Any]]()
    for node in dict.fromkeys((*record.members, *record.contributors, *record.spent)):
        if (of := record.spent.get(node)) is not None:
            booked = {part: sum(of.get(bucket, 0.0) for bucket in buckets) for part, buckets in PARTS.items()}
            parts = _within(booked, took)
        else:
            pace = record.figures[node].tokens_per_s if node in record.figures else 0.0
            weight = record.contributors.get(node)
            inner = training if weight is None or not pace else min(weight / pace, training + closing)
            parts = {"inner": inner, "wait": training + closing - inner, "exchange": exchange}
        rows.append(
            {
                "node_id": node,
                "name": name_of(record, node),
                "contributed": node in record.contributors,
                "estimated": of is None,
                **{part: round(seconds, 3) for part, seconds in parts.items()},
            }
        )
    return sorted(rows, key=lambda row: -row["inner"])


def _within(parts: dict[str, float], took: float) -> dict[str, float]:
    """The parts, cut so that they come to no more than the round took: what is least of its work first."""
    beyond = sum(parts.values()) - took if took else 0.0
    for part in CUT_FIRST:
        cut = min(max(parts[part], 0.0), max(beyond, 0.0))
        parts, beyond = parts | {part: parts[part] - cut}, beyond - cut
    return parts


def training_paces(record: CommitRecord) -> dict[NodeId, float]:
    """Tokens a second of each contributor: those that the round has of it over the seconds in which it trained
    them, rests between its steps too; or what its trainer told of its last steps, where these are not known."""
    told = {n: f.tokens_per_s for n, f in record.figures.items()}
    nodes = dict.fromkeys((*told, *record.contributors))
    paces = {
        n: training_pace(record.contributors.get(n, 0.0), record.spent.get(n, {}), told.get(n, 0.0)) for n in nodes
    }
    return {node: pace for node, pace in paces.items() if pace > 0}


def training_pace(tokens: float, spent: Mapping[str, float], told: float) -> float:
    """The same of one node, which brought so many tokens and `spent` seconds in each bucket; 0: not known."""
    seconds = spent.get("inner", 0.0) + spent.get("open", 0.0)
    return tokens / seconds if tokens > 0 and seconds >= MIN_TRAINING_SECONDS else told


def slow_nodes(record: CommitRecord) -> list[Slowness]:
    """The nodes that were slower than the others in this round or did not make it, the worst first."""
    found = list[Slowness]()

    def add(node: NodeId, what: str, times: float, sentence: str) -> None:
        name = name_of(record, node)
        found.append(Slowness(node, name, what, times, f"{name} {sentence}"))

    for node, own, usual in _below_median(training_paces(record), SLOW_PACE):
        waits = record.figures[node].data_wait if node in record.figures else 0.0
        data = f", and waited for data {waits:.0%} of that time" if waits > 0.1 else ""
        add(
            node,
            "training",
            usual / own,
            f"trained {usual / own:.1f} times slower than the others ({own:,.0f} of {usual:,.0f} tokens/s){data}",
        )
    for at, way in enumerate(("sends", "receives")):
        rates = {n: rate[at] for n, rate in record.rates.items() if rate[at] > 0}
        for node, own, usual in _below_median(rates, SLOW_LINK):
            add(
                node,
                "link",
                usual / own,
                f"{way} {usual / own:.1f} times slower than the others "
                f"({own / 1e6:,.1f} of {usual / 1e6:,.1f} MB/s)",
            )
    lost = {node for nodes in record.lacking.values() for node in nodes}
    for node in sorted(lost, key=str):
        chunks = sum(node in nodes for nodes in record.lacking.values())
        add(node, "lost in the exchange", 0.0, f"did not get {chunks:,} chunks of its delta to their owners")
    for node in () if record.void else record.members:  # of a void round nobody's work counts
        if node not in record.contributors and node in record.names and not _only_reduces(record, node):
            add(node, "left out", 0.0, "was in the round and contributed nothing")
    judged, named = record.verdict, {s.node for s in found}
    if judged is not None and judged.seconds and judged.culprit in record.names.keys() - named:
        found.append(Slowness(NodeId(judged.culprit), judged.name, judged.kind, 0.0, judged.sentence))
    return sorted(found, key=lambda s: -s.times)


def _only_reduces(record: CommitRecord, node: NodeId) -> bool:
    """Whether it owned chunks without having trained, as reducers do."""
    return node in record.shares and node not in record.figures


def _below_median(values: Mapping[NodeId, float], times: float) -> list[tuple[NodeId, float, float]]:
    """Who is that many times below the median: node, its value, the median."""
    usual = median(values.values()) if values else 0.0
    return [(node, own, usual) for node, own in values.items() if own * times <= usual]


def verdict_of(record: CommitRecord, usual: UsualTimes) -> str:
    """The run's own verdict on who made the round slow, or fail; empty: there is none, or it says no more than
    that nobody knows, of a round that was not long."""
    if (verdict := record.verdict) is None:
        return ""
    vague = verdict.kind is Kind.UNKNOWN and not verdict.culprit and record.attempts < 2
    return "" if vague and not _is_long(record, usual) else verdict.sentence


def seconds_of(record: CommitRecord, usual: UsualTimes) -> float:
    """Seconds that the round took, as far as they are known."""
    return usual.took or sum(record.seconds.values())


def _is_long(record: CommitRecord, usual: UsualTimes) -> bool:
    """Whether the round took longer than usual, or nobody knows what is."""
    return not usual.wall or seconds_of(record, usual) >= slowness.SLOW_TIMES * usual.wall


def why(record: CommitRecord, usual: UsualTimes) -> str:
    """Why the round took as long as it did, in a sentence or two."""
    if record.void:
        return _sentence(record.reason, record)
    if verdict := verdict_of(record, usual):
        return _sentence(verdict, record)
    return _by_phases(record, usual)


def _sentence(words: str, record: CommitRecord) -> str:
    """The words as a sentence; a name at its beginning stays as it is."""
    named = words.split(" ", 1)[0].removesuffix("'s") in record.names.values()
    return f"{words if named else words[:1].upper() + words[1:]}{'' if words.endswith('.') else '.'}"


def _by_phases(record: CommitRecord, usual: UsualTimes) -> str:
    """The same where nobody was blamed: by the phase that took longer than usual."""
    spent = {phase: record.seconds.get(phase, 0.0) for phase in PHASES}
    idle = max(usual.took - sum(spent.values()), 0.0)
    took = seconds_of(record, usual)
    if not usual.wall:
        return _sentence(record.reason, record)
    if not _is_long(record, usual):
        how = "was quicker than usual" if took < QUICK * usual.wall else "took about as long as usual"
        percent = round(100 * (took / usual.wall - 1))
        return f"It {how}{f' ({percent:+d} %)' if abs(percent) >= WORTH_PERCENT else ''}; {record.reason}."
    more = {phase: spent[phase] - usual.phases[phase] for phase in PHASES}
    more["idle"] = idle - max(usual.wall - sum(usual.phases.values()), 0.0)
    most = max(more, key=lambda phase: more[phase])
    if most == "idle":
        return f"Before it the run stood still for {in_words(idle)}; {record.reason}."
    said = f"{WORDS[most].capitalize()} took {in_words(spent[most])}, {in_words(more[most])} longer than usual"
    slow = slow_nodes(record)
    blamed = [s for s in slow if (s.what in ("training", "left out")) is (most in ("inner", "collect"))]
    because = f": {blamed[0].sentence}" if blamed else ""
    return f"{said}{because}; {record.reason}."
