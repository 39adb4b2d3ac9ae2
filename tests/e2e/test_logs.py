"""Logs of a run of real processes: each JSON line says of which process, run, node and round it is; a collector
of OpenTelemetry hears the same of the processes of a node. One run for all: a coordinator, two nodes; the
second is collected from, and ends when its trainer has no memory."""

import json
import os
import re
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from e2e.harness import Run, until
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest

from atoll.comm.exit_codes import ExitCode

pytestmark = [pytest.mark.e2e, pytest.mark.long]

KEYS = {"at", "time", "level", "process", "run", "node", "round", "what"}
INSTRUMENT = (
    "opentelemetry-instrument",
    "--traces_exporter=none",
    "--metrics_exporter=none",
    "--logs_exporter=otlp",
)


@dataclass
class Logs:
    """The lines of each, and what the collector has heard of the second node, without the time."""

    coordinator: list[dict[str, Any]]
    nodes: dict[str, list[dict[str, Any]]]  # by id in the run
    trainer: list[dict[str, Any]]
    collected: list[dict[str, Any]]


class Collector(ThreadingHTTPServer):
    """Takes logs as OpenTelemetry's exporters post them."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Post)
        self.heard = list[dict[str, Any]]()


class Post(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        request = ExportLogsServiceRequest.FromString(self.rfile.read(int(self.headers["Content-Length"])))
        assert self.path == "/v1/logs"
        for resource in request.resource_logs:
            for record in (record for scope in resource.scope_logs for record in scope.log_records):
                told = {entry.key.removeprefix("atoll."): entry.value for entry in record.attributes}
                about: dict[str, Any] = {
                    key: told[key].string_value for key in ("process", "run", "node") if key in told
                }
                round_ = told["round"].int_value if "round" in told else None
                self.server.heard.append({**about, "round": round_, "what": record.body.string_value})
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Logs]:
    run, collector = Run(tmp_path_factory.mktemp("logs")), Collector()
    threading.Thread(target=collector.serve_forever).start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ATOLL_LOG", "json")
        patch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
        patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{collector.server_port}")
        patch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
        try:
            run.start("members.start=1")
            url = run.invite(2)
            run.join(url, "one")
            until("two rounds", lambda: run.committed() >= 2)
            two = run.join(url, "two", faults="trainer.step@3=memory", through=INSTRUMENT)
            assert two.wait(120) == ExitCode.RESOURCE
            ids = {name: run.member(name)["node_id"] for name in ("one", "two")}
        finally:
            run.stop()
            collector.shutdown()
            collector.server_close()
            for log in run.folder.glob("*.log"):  # shown when a test fails
                print(f"--- {log.name}\n{log.read_text()[-3000:]}")
    nodes = {node: lines(run.log(name)) for name, node in ids.items()}
    trainer = lines((run.folder / "two" / "trainer.log").read_text())
    yield Logs(lines(run.log("c")), nodes, trainer, collector.heard)


def lines(text: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in text.splitlines()]
    assert all(KEYS <= set(line) for line in found)
    return found


def test_the_coordinator_says_of_which_node_and_round_it_speaks(logs: Logs) -> None:
    said = logs.coordinator
    assert {line["process"] for line in said} == {"coordinator"} and {line["run"] for line in said} == {"demo"}
    assert {line["node"] for line in said} == {None, *logs.nodes}
    commits = [line for line in said if re.match(r"round \d+ committed", line["what"])]
    assert len(commits) > 2
    assert [line["round"] for line in commits] == [int(line["what"].split()[1]) for line in commits]


def test_a_daemon_and_its_trainer_say_of_which_run_node_and_round_they_are(logs: Logs) -> None:
    for node, said in logs.nodes.items():
        assert {line["process"] for line in said} == {"node"} and {line["run"] for line in said[1:]} == {"demo"}
        joined = next(at for at, line in enumerate(said) if line["node"])
        assert {line["node"] for line in said[joined:]} == {node}
        rounds = [line["round"] for line in said if line["round"] is not None]
        assert rounds == sorted(rounds) and rounds[-1] > 2
    assert said[-1]["exit_code"] == ExitCode.RESOURCE and "ran out of memory" in said[-1]["what"]
    (end,) = [line for line in logs.trainer if line["process"] == "trainer rank 0"]
    assert (end["level"], end["run"], end["node"]) == ("error", "demo", node)
    assert "the trainer ran out of memory" in end["what"]
    began = [line["what"] for line in said if re.match(r"round \d+: \d+ inner steps", line["what"])]
    assert began[-1].startswith(f"round {end['round']}: ")


def test_a_collector_of_opentelemetry_hears_of_a_nodes_processes_what_their_lines_say(logs: Logs) -> None:
    *_, (_, daemon) = logs.nodes.items()
    for said in (daemon, logs.trainer):
        for line in said:
            told = {key: line[key] for key in ("process", "run", "node") if line[key]}
            assert {**told, "round": line["round"], "what": line["what"]} in logs.collected
    assert {told.get("process") for told in logs.collected} >= {"node", "launcher", "trainer rank 0"}
