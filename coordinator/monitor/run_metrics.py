"""The run and its members for Prometheus: figures as they stand when they are scraped.

Series of single members are of those that the page lists: they come and go with them.
"""

from collections import Counter
from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from atoll.coordinator.monitor.alerts import AlertKind, AlertRules
from atoll.coordinator.monitor.figures import last_val_loss, listed
from atoll.coordinator.service.event_loop import EventLoop
from atoll.coordinator.service.goodput import compute_utilisation, fleet_goodput
from atoll.coordinator.service.telemetry import Vitals
from atoll.coordinator.state_machine.members import Member
from atoll.coordinator.state_machine.state import Phase, State

OF_MEMBER = ["node", "name"]
# Of the vitals: the metric of each member, and what it is. A figure that is 0 is not known, but for the last.
TRAINER_FIGURES = {
    "mfu": ("mfu_ratio", "Model FLOPs utilisation of a member's devices."),
    "gradient_norm": ("gradient_norm", "Norm of a member's last gradient."),
    "learning_rate": ("learning_rate", "Inner learning rate of a member."),
    "device_bytes": ("device_memory_peak_bytes", "Memory on a member's devices, the most there was."),
    "trainer_rss_bytes": ("trainer_resident_memory_bytes", "Resident memory of a member's trainer."),
    "data_wait": ("data_wait_ratio", "Share of a member's inner steps spent waiting for data."),
}


class RunCollector(Collector):
    """The run's own figures."""

    def __init__(self, loop: EventLoop, run: str, rules: AlertRules) -> None:
        self._loop, self._run, self._rules = loop, run, rules

    def collect(self) -> Iterator[Metric]:
        """All of them, as they are now."""
        loop, state, now = self._loop, self._loop.state, self._loop.clock()
        yield _info("atoll_run", "Name and config of the run.", {"run": self._run, "config": loop.config_digest})
        yield from self._progress(state)
        yield from self._time(now)
        yield from self._alerts(state)
        yield from self._members(listed(state, now), now)

    def _progress(self, state: State) -> Iterator[Metric]:
        yield CounterMetricFamily("atoll_committed_rounds", "Committed rounds.", value=state.committed)
        yield CounterMetricFamily("atoll_committed_tokens", "Committed tokens.", value=state.tokens)
        yield CounterMetricFamily("atoll_membership_epochs", "Generations of members.", value=state.epoch)
        yield CounterMetricFamily(
            "atoll_coordinator_starts", "Starts of the coordinator.", value=state.incarnation
        )
        yield GaugeMetricFamily("atoll_round", "Round under way.", value=state.round.number)
        started = state.round.started_at
        yield GaugeMetricFamily("atoll_round_start_timestamp_seconds", "When the round began.", value=started)
        if (loss := last_val_loss(self._loop)) is not None:
            yield GaugeMetricFamily("atoll_validation_loss", "Validation loss, nats a token.", value=loss)
        if (trained := self._loop.last_train_loss) is not None:
            yield GaugeMetricFamily("atoll_train_loss", "Training loss of the last round.", value=trained)
        phases = GaugeMetricFamily("atoll_round_phase", "1 for the phase of the round.", labels=["phase"])
        for phase in Phase:
            phases.add_metric([phase], int(state.round.phase is phase))
        yield phases

    def _time(self, now: float) -> Iterator[Metric]:
        seconds = self._loop.telemetry.meter.seconds(now)
        # No counter: what is open is decided, and what a void round had is taken back.
        yield _by_label(
            "atoll_node_time_seconds", "Where the nodes' time went, in node-seconds by bucket.", "bucket", seconds
        )
        goodput = "Share of all node-seconds that went into inner steps which a commit has."
        yield GaugeMetricFamily("atoll_fleet_goodput_ratio", goodput, value=fleet_goodput(seconds))
        compute = "Inner steps over inner steps and exchange: what others call utilisation."
        yield GaugeMetricFamily("atoll_compute_utilisation_ratio", compute, value=compute_utilisation(seconds))

    def _alerts(self, state: State) -> Iterator[Metric]:
        on: dict[str, int] = {
            kind: int(kind in self._rules.on) for kind in AlertKind if kind is not AlertKind.CONVICTED
        }
        yield _by_label("atoll_alert", "1 while the coordinator's own rule for it holds.", "kind", on)
        writable = "1 while the journal takes writes: else nothing goes on."
        yield GaugeMetricFamily("atoll_journal_writable", writable, value=int(not self._loop.trouble))
        needed = state.config.members.minimum
        yield GaugeMetricFamily("atoll_members_minimum", "Members that a round needs.", value=needed)

    def _members(self, members: list[Member], now: float) -> Iterator[Metric]:
        yield _by_label(
            "atoll_members", "Members in each state.", "state", Counter(str(m.shown_state) for m in members)
        )
        telemetry = self._loop.telemetry
        pace = _gauge("tokens_per_second", "Tokens a second of a member.")
        step = _gauge("inner_step", "Inner step that a member is at.")
        memory = _gauge("resident_memory_bytes", "Resident memory of a member's daemon.")
        heard = _gauge("last_heard_timestamp_seconds", "When a member was heard last.")
        sent = CounterMetricFamily(
            "atoll_member_sent_bytes", "Bytes that a member sent to peers.", labels=OF_MEMBER
        )
        got = CounterMetricFamily(
            "atoll_member_received_bytes", "Bytes that a member got of them.", labels=OF_MEMBER
        )
        time = GaugeMetricFamily(
            "atoll_member_time_seconds", "Where a member's time went, by bucket.", labels=[*OF_MEMBER, "bucket"]
        )
        figures = {name: _gauge(metric, what) for name, (metric, what) in TRAINER_FIGURES.items()}
        for m in members:
            vitals, who = telemetry.vitals.get(m.node, Vitals()), [str(m.node), m.name]
            pace.add_metric(who, vitals.tokens_per_s)
            step.add_metric(who, m.step[1])
            memory.add_metric(who, vitals.rss_bytes)
            heard.add_metric(who, m.heard_at)
            sent.add_metric(who, vitals.bytes_up)
            got.add_metric(who, vitals.bytes_down)
            if spent := telemetry.meter.of_node(m.node, now):
                for bucket, seconds in ({"inner": 0.0} | spent).items():
                    time.add_metric([*who, bucket], seconds)
            for name, family in figures.items():
                if (value := getattr(vitals, name)) or name == "data_wait":
                    family.add_metric(who, value)
        yield from (pace, step, memory, heard, sent, got, time, *figures.values())


def _gauge(name: str, what: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"atoll_member_{name}", what, labels=OF_MEMBER)


def _by_label(name: str, what: str, label: str, values: Mapping[str, float]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, what, labels=[label])
    for key, value in values.items():
        family.add_metric([str(key)], value)
    return family


def _info(name: str, what: str, labels: dict[str, str]) -> InfoMetricFamily:
    return InfoMetricFamily(name, what, value=labels)
