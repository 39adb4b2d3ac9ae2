"""The coordinator's own counters and latencies, for Prometheus, and what it saw of rounds.

Of the run as it stands, and of its members, `atoll.coordinator.monitor.run_metrics` adds the figures. Names are by
Prometheus's conventions: base units, `_total` for what only grows, no series for what has no end.
"""

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Info,
    ProcessCollector,
    disable_created_metrics,
)

from atoll.comm.build_info import build_info
from atoll.coordinator.state_machine.events import CommitRecord, Decision

LATENCY_BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)
PHASE_BUCKETS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 14_400)  # seconds
PHASES = ("inner", "collect", "reduce", "commit")  # of a round


class Metrics:
    """The counters, in a registry of their own."""

    def __init__(self) -> None:
        # A second series for each counter, that nobody asks for.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        r = self.registry = CollectorRegistry()
        ProcessCollector(registry=r)
        Info("atoll_build", "Version of Atoll and of Python.", registry=r).info(build_info())
        self.heartbeats = Counter("atoll_heartbeats", "Heartbeats served.", registry=r)
        self.reports = Counter("atoll_reports", "Reports served, by kind.", ["kind"], registry=r)
        self.refused = Counter("atoll_refused_calls", "Calls refused, by gRPC's code.", ["code"], registry=r)
        self.views = Counter("atoll_views_sent", "Views sent to nodes.", registry=r)
        self.writes = Histogram(
            "atoll_journal_write_seconds", "Duration of a journal write.", buckets=LATENCY_BUCKETS, registry=r
        )
        self.dispatches = Histogram(
            "atoll_view_dispatch_seconds",
            "Duration of making and handing out views.",
            buckets=LATENCY_BUCKETS,
            registry=r,
        )
        self.streams = Gauge("atoll_open_streams", "Nodes with an open stream of views.", registry=r)
        self.events_since_snapshot = Gauge(
            "atoll_journal_replay_events", "Events that a restart would replay.", registry=r
        )
        self._phases = Histogram(
            "atoll_round_phase_seconds",
            "Duration of the phases of committed rounds.",
            ["phase"],
            buckets=PHASE_BUCKETS,
            registry=r,
        )
        for phase in PHASES:
            self._phases.labels(phase)
        self._attempts = Counter(
            "atoll_reduce_attempts", "Attempts of the reduces of committed rounds.", registry=r
        )
        self._diverged = Counter(
            "atoll_diverged_rounds", "Rounds of which members made different states.", registry=r
        )
        self._void = Counter("atoll_void_rounds", "Rounds lost with all who held their state.", registry=r)
        self._decisions = Counter(
            "atoll_decisions", "Decisions against members, by consequence.", ["consequence"], registry=r
        )
        for consequence in ("evicted", "banned"):
            self._decisions.labels(consequence)
        self._failures = Counter("atoll_failures", "Failures of members.", registry=r)
        self._detected = Histogram(
            "atoll_failure_detection_seconds",
            "Time from a failure until the run noticed.",
            buckets=PHASE_BUCKETS,
            registry=r,
        )
        self._recovered = Histogram(
            "atoll_failure_recovery_seconds",
            "Time from a failure until the member trained again.",
            buckets=PHASE_BUCKETS,
            registry=r,
        )
        self._lost = Counter(
            "atoll_failure_lost_seconds", "Inner steps that failed members lost, in node-seconds.", registry=r
        )
        self._waited = Counter(
            "atoll_failure_waited_seconds",
            "Waiting and exchange beyond the usual, of the others while one failed, in node-seconds.",
            registry=r,
        )
        self._told: dict[int, tuple[float, float]] = {}  # of failures: what they had cost when they were told

    def publish(self, record: CommitRecord) -> None:
        """Count a commit record that is kept."""
        if record.void:
            self._void.inc()
            return
        for phase in PHASES:
            self._phases.labels(phase).observe(record.seconds.get(phase, 0.0))
        self._attempts.inc(record.attempts)
        self._diverged.inc(record.digests_equal is False)
        for failure in record.failures:
            known = self._told.get(failure.number)
            if known is None:
                self._failures.inc()
                self._detected.observe(failure.detected)
            if failure.recovered is not None:
                self._recovered.observe(failure.recovered)
            lost, waited = known or (0.0, 0.0)
            self._lost.inc(max(failure.lost - lost, 0.0))
            self._waited.inc(max(failure.waited - waited, 0.0))
            self._told[failure.number] = failure.lost, failure.waited
        while len(self._told) > 1000:
            del self._told[next(iter(self._told))]

    def decide(self, decision: Decision) -> None:
        """Count a decision against a member."""
        self._decisions.labels(decision.consequence.replace(" ", "_")).inc()
