"""A real Prometheus with the rules of docker/: each alert fires, and none does where all is well. It needs
Debian's prometheus: apt-get install -y --no-install-recommends prometheus."""

import json
import re
import subprocess
import threading
import urllib.parse
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import exposition
import pytest
import yaml
from e2e.harness import until
from promtool import installed, promtool
from test_monitoring import DASHBOARDS, DOCKER, RULES, queries, rules

pytestmark = [pytest.mark.e2e, pytest.mark.long]
SPEED = 60  # a minute of the rules passes in a second
UNITS = {"s": 1, "m": 60, "h": 3600}
BAD = {  # series of a coordinator and a node with which nothing is well
    **dict.fromkeys(
        [
            f'atoll_alert{{kind="{kind}"}}'
            for kind in ("stall", "lost_quorum", "state_divergence", "loss_divergence", "low_goodput")
        ],
        1.0,
    ),
    "atoll_journal_writable": 0.0,
    "atoll_node_coordinator_away_seconds": 500.0,
}


class Target:
    """Something that Prometheus scrapes. What grows does so with every scrape."""

    def __init__(self, text: str) -> None:
        self.text, self.growing, self.scrapes = text, dict[str, float](), 0
        target = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                target.scrapes += 1
                self.send_response(200)
                self.send_header("Content-Type", "text/plain; version=0.0.4")
                self.end_headers()
                self.wfile.write(target.now().encode())

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server.server_port}"

    def now(self) -> str:
        return exposition.changed(self.text, **{k: rate * self.scrapes for k, rate in self.growing.items()})

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


class Prometheus:
    """The process, on loopback, with docker's rules and scrape config on the test's targets, and at its pace."""

    def __init__(self, folder: Path, targets: dict[str, list[str]]) -> None:
        config = yaml.safe_load((DOCKER / "prometheus/prometheus.yml").read_text())
        config["global"] = {"scrape_interval": "500ms", "evaluation_interval": "500ms"}
        for job in config["scrape_configs"]:
            job["static_configs"] = [{"targets": targets[job["job_name"]]}]
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        (folder / "alerts.yml").write_text(re.sub(r"\b(\d+)([smh])\b", faster, RULES.read_text()))
        self.log = folder / "prometheus.log"
        where = ("--web.listen-address=127.0.0.1:0", f"--storage.tsdb.path={folder / 'data'}")
        command = [installed("prometheus"), f"--config.file={folder / 'prometheus.yml'}", *where]
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        self.url = until("Prometheus", self._listens)

    def _listens(self) -> str:
        assert self.process.poll() is None, self.log.read_text()
        found = re.search(r'msg="Listening on" address=(\S+)', self.log.read_text())
        return f"http://{found[1]}" if found else ""

    def get(self, path: str, **query: str) -> Any:
        url = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(url, timeout=30) as answer:
            return json.load(answer)["data"]

    def alerts(self, *states: str) -> set[str]:
        return {a["labels"]["alertname"] for a in self.get("alerts")["alerts"] if a["state"] in states}

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(30)


def faster(found: re.Match[str]) -> str:
    """A duration of the rules, `SPEED` times shorter."""
    return f"{int(1000 * int(found[1]) * UNITS[found[2]] / SPEED)}ms"


@pytest.fixture
def targets(tmp_path: Path) -> Iterator[tuple[Target, Target]]:
    found = Target(exposition.of_coordinator(tmp_path / "c")), Target(exposition.of_node())
    try:
        yield found
    finally:
        for target in found:
            target.close()


@pytest.mark.chaos
def test_each_alert_fires_when_it_should_and_dashboards_are_answered(
    tmp_path: Path, targets: tuple[Target, Target]
) -> None:
    coordinator, node = targets
    healthy = {"atoll_journal_writable": 1.0}
    coordinator.text = exposition.changed(coordinator.text, **healthy)
    node.text = exposition.changed(node.text, atoll_node_coordinator_away_seconds=0.0)
    coordinator.growing = {
        'atoll_node_time_seconds{bucket="inner"}': 10.0,
        'atoll_node_time_seconds{bucket="sync"}': 1.0,
    }
    jobs = {"atoll-coordinator": [coordinator.address], "atoll-nodes": [node.address]}
    prometheus = Prometheus(tmp_path, jobs)
    try:
        until("scrapes", lambda: coordinator.scrapes > 20 and node.scrapes > 20)
        assert prometheus.alerts("pending", "firing") == set(), "all is well"

        silent = dict[str, str]()
        for dashboard in DASHBOARDS:
            source = coordinator if dashboard.stem == "run" else node
            for query in queries(dashboard):
                asked = query.replace("$instance", source.address)
                if not prometheus.get("query", query=re.sub(r"\b(\d+)([smh])\]", r"\1s]", asked))["result"]:
                    silent[query] = dashboard.stem
        # Of failures there were none since the first scrape, so of their durations there is no quantile.
        assert all("atoll_failure" in query or "NaN" in query for query in silent), silent

        fired = set[str]()

        def fires(*more: str) -> bool:
            fired.update(prometheus.alerts("firing"))
            return set(more) <= fired

        coordinator.text = exposition.changed(
            coordinator.text, **{series: value for series, value in BAD.items() if "node" not in series}
        )
        node.text = exposition.changed(node.text, atoll_node_coordinator_away_seconds=500.0)
        coordinator.growing |= {
            'atoll_node_time_seconds{bucket="sync"}': 100.0,
            'atoll_decisions_total{consequence="banned"}': 1.0,
            "atoll_void_rounds_total": 1.0,
            "atoll_failures_total": 5.0,
            'atoll_refused_calls_total{code="UNAUTHENTICATED"}': 1000.0,
        }
        every = {rule["alert"] for rule in rules()}
        down = {"AtollCoordinatorDown", "AtollNodeDown"}
        until(f"{sorted(every - down)}", lambda: fires(*(every - down)), 120)
        assert not fired & down
        coordinator.close()
        node.close()
        until(f"{sorted(down)}", lambda: fires(*down), 120)
        assert fired == every
    finally:
        prometheus.stop()


def test_promtool_finds_no_fault_in_rules_and_config() -> None:
    for what, file in (("rules", RULES), ("config", DOCKER / "prometheus/prometheus.yml")):
        checked = subprocess.run([promtool(), "check", what, str(file)], capture_output=True, text=True)
        assert checked.returncode == 0, checked.stdout + checked.stderr
        assert "SUCCESS" in checked.stdout and "FAILED" not in checked.stdout


def test_a_minute_of_the_rules_is_a_second_here() -> None:
    assert (
        re.sub(r"\b(\d+)([smh])\b", faster, "increase(x[15m]) > 3, for: 1h")
        == "increase(x[15000ms]) > 3, for: 60000ms"
    )
