"""A node's own `/metrics` for Prometheus, where its owner asks for it (`--metrics`): off otherwise, on this
machine alone unless told.

The library's server answers in threads of its own; each scrape has the daemon's event loop say how it stands, so
nothing is read while it changes, and a scrape that comes while the loop is busy waits for it.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, cast

from atoll.comm.build_info import build_info
from atoll.comm.errors import ConfigError
from atoll.comm.invite import split_host_port

if TYPE_CHECKING:  # a daemon that serves none does without the library
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric
    from prometheus_client.registry import Collector

LOCAL = "127.0.0.1"
ANSWER_SECONDS = 5.0  # that a scrape waits for the event loop
# Of `atoll node status`: the metric of each figure and what it is. A figure that is None, or not there, has none.
GAUGES = {
    "round": ("round", "Round of the state that the node holds."),
    "inner_step": ("inner_step", "Inner step that the node is at."),
    "tokens_per_s": ("tokens_per_second", "Tokens a second of its trainer."),
    "mfu": ("mfu_ratio", "Model FLOPs utilisation of its devices."),
    "data_wait": ("data_wait_ratio", "Share of its inner steps spent waiting for data."),
    "loss": ("train_loss", "Loss of the last inner step."),
    "gradient_norm": ("gradient_norm", "Norm of the last gradient."),
    "learning_rate": ("learning_rate", "Inner learning rate."),
    "device_bytes": ("device_memory_peak_bytes", "Memory on its devices, the most there was."),
    "trainer_rss_bytes": ("trainer_resident_memory_bytes", "Resident memory of its trainer."),
    "peers": ("peers", "Peers that it has a connection with."),
    "coordinator_away_s": ("coordinator_away_seconds", "Time for which the coordinator has not answered."),
    "threads": ("threads", "Threads that its trainer has."),
}
COUNTERS = {
    "bytes_up": ("sent_bytes", "Bytes sent to peers."),
    "bytes_down": ("received_bytes", "Bytes received from peers."),
    "rounds_reduced": ("reduced_rounds", "Rounds whose chunks it added up."),
}
Figures = dict[str, Any]


def metrics_address(text: str) -> tuple[str, int]:
    """Host and port of `PORT`, on this machine alone, or of `HOST:PORT`. Raises `ConfigError`."""
    return split_host_port(text if ":" in text else f"{LOCAL}:{text}", "--metrics")


@contextlib.contextmanager
def metrics_page(address: str, status: Callable[[], Figures]) -> Iterator[None]:
    """Answer scrapes at this address while the context lasts; not at all where it is empty. `status`: what `atoll
    node status` shows, with `phase_seconds`; it is called in this event loop. Raises `ConfigError` where nobody
    can listen there."""
    if not address:
        yield
        return
    from prometheus_client.exposition import start_http_server

    host, port = metrics_address(address)
    collector = cast("Collector", NodeCollector(status, asyncio.get_running_loop()))
    try:
        server, _ = start_http_server(port, host, registry_of(collector))
    except OSError as error:
        raise ConfigError(f"--metrics: cannot listen at {address} ({error.strerror}): give another port") from None
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()


def registry_of(node: "Collector") -> "CollectorRegistry":
    """All that a scrape answers: the node's figures, its process's, and which Atoll it is."""
    from prometheus_client import CollectorRegistry, Info, ProcessCollector, disable_created_metrics

    disable_created_metrics()  # type: ignore[no-untyped-call]  # a second series for each counter
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    Info("atoll_build", "Version of Atoll and of Python.", registry=registry).info(build_info())
    registry.register(node)
    return registry


class NodeCollector:
    """The node's figures as they stand."""

    def __init__(self, status: Callable[[], Figures], loop: asyncio.AbstractEventLoop) -> None:
        self._status, self._loop = status, loop

    def collect(self) -> Iterator["Metric"]:
        """All of them; called in a thread of the server's."""

        async def ask() -> Figures:
            return self._status()

        yield from families(asyncio.run_coroutine_threadsafe(ask(), self._loop).result(ANSWER_SECONDS))


def families(figures: Figures) -> Iterator["Metric"]:
    """What `status` says, as metrics."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily

    who = {"node": figures["node_id"], "name": figures["name"], "run": figures["run"]}
    yield InfoMetricFamily("atoll_node", "Which node of which run this is.", value=who)
    spent = CounterMetricFamily("atoll_node_phase_seconds", "Time spent, by phase.", labels=["phase"])
    phase = GaugeMetricFamily("atoll_node_phase", "1 for the phase that the node is in.", labels=["phase"])
    for name, seconds in figures.get("phase_seconds", {}).items():
        spent.add_metric([name], seconds)
        phase.add_metric([name], int(name == figures["phase"]))
    yield from (spent, phase)
    for key, (name, what) in GAUGES.items():
        if figures.get(key) is not None:
            yield GaugeMetricFamily(f"atoll_node_{name}", what, value=figures[key])
    for key, (name, what) in COUNTERS.items():
        if key in figures:
            yield CounterMetricFamily(f"atoll_node_{name}", what, value=figures[key])
