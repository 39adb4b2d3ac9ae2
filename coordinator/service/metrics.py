"""The control plane's own counters and latencies, for Prometheus."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

LATENCY_BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)


class Metrics:
    """The counters, in a registry of their own; `atoll.coordinator.monitor.http` adds the run's and members'
    figures."""

    def __init__(self) -> None:
        r = self.registry = CollectorRegistry()
        self.heartbeats = Counter("atoll_heartbeats", "heartbeats served", registry=r)
        self.reports = Counter("atoll_reports", "reports served", ["kind"], registry=r)
        self.refused = Counter("atoll_refused", "calls refused", ["code"], registry=r)
        self.views = Counter("atoll_views_sent", "views sent to nodes", registry=r)
        self.writes = Histogram(
            "atoll_journal_write_seconds", "one journal write", buckets=LATENCY_BUCKETS, registry=r
        )
        self.dispatches = Histogram(
            "atoll_dispatch_seconds", "one round of views", buckets=LATENCY_BUCKETS, registry=r
        )
        self.streams = Gauge("atoll_streams", "nodes with an open stream of views", registry=r)
        self.events_since_snapshot = Gauge(
            "atoll_events_since_snapshot", "events that a restart would replay", registry=r
        )
