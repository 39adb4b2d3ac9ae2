"""What a coordinator and a node answer to a scrape, for tests of what reads it."""

import asyncio
import re
from pathlib import Path
from typing import Any

from control_nodes import coordinator, get
from long_runs import long_record
from prometheus_client import generate_latest
from prometheus_client.registry import Collector

from atoll.comm.ids import NodeId
from atoll.comm.replace import replace
from atoll.coordinator.state_machine.events import Failure
from atoll.node.daemon.metrics_page import COUNTERS, GAUGES, families, registry_of

EVERYTHING: dict[str, Any] = {
    **dict(tokens_per_s=5000.0, mfu=0.25, data_wait=0.125, gradient_norm=0.5, learning_rate=0.001),
    **dict(device_bytes=3 << 30, trainer_rss_bytes=5 << 30, rss_bytes=1 << 27, bytes_up=5, bytes_down=6),
}
STATUS: dict[str, Any] = {
    **dict.fromkeys([*GAUGES, *COUNTERS], 1.5),
    **{"node_id": "n3", "name": "ada", "run": "reef", "phase": "inner"},
    "phase_seconds": {"inner": 12.5, "waiting": 3.0},
}
FAILURE = Failure(7, NodeId("n1"), 3, "its connection broke", 1000.0, 2.0, 9.0, 30.0, 12.0)


def of_coordinator(folder: Path) -> str:
    """A coordinator with two members, in whose run something of everything has happened."""

    async def story() -> str:
        async with coordinator(folder) as c:
            ada, bo = await c.pair()
            for node in (ada, bo):
                await node.heartbeat(phase="inner", round=1, inner_step=1, **EVERYTHING)
            c.event_loop.metrics.publish(replace(long_record(3, 2), failures=(FAILURE,)))
            c.event_loop.last_train_loss = c.event_loop.last_val_loss = 3.0
            c.event_loop.metrics.refused.labels("UNAUTHENTICATED").inc()
            status, body = await get(c, "/metrics")
            assert status == 200
            return body.decode()

    return asyncio.run(story())


class Node(Collector):
    """A registry's collector of a node of which everything is known."""

    def collect(self) -> Any:
        return families(STATUS)


def of_node() -> str:
    """A node of which everything is known."""
    return generate_latest(registry_of(Node())).decode()


def names(text: str) -> set[str]:
    """The names of the series in a scrape."""
    return {re.split(r"[{ ]", line)[0] for line in text.splitlines() if line and not line.startswith("#")}


def changed(text: str, **values: float) -> str:
    """The scrape with other values of these series, by the beginnings of their lines. AssertionError for one that
    is not there."""
    for series, value in values.items():
        text, count = re.subn(rf"(?m)^({re.escape(series)}(?:\{{[^}}]*\}})?) \S+$", rf"\g<1> {value}", text)
        assert count, series
    return text
