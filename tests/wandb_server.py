"""A wandb server as small as the client of the pinned version needs: runs in memory, over HTTP on a free port.

A run is created, resumed and changed by GraphQL (`upsertBucket` and friends, told apart by the names that the
client gives its operations); its history, summary and output come line by line over `file_stream`. A line is kept
at the offset that the client names, so one that is sent twice is there once, as at wandb's own server.
"""

import gzip
import json
import re
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

ENTITY = "reefers"
KEY = "k" * 40
HISTORY, EVENTS, SUMMARY, OUTPUT = (
    *("wandb-history.jsonl", "wandb-events.jsonl"),
    *("wandb-summary.json", "output.log"),
)
# Connections to a backlog at most; one that takes so long, with a second try of the kernel's, finds it full.
MAX_FILLERS, FILLED_SECONDS = 64, 1.5
Row = dict[str, Any]


@dataclass
class ServedRun:
    """A run as the server has it."""

    name: str  # what the client calls its id
    project: str
    facts: dict[str, Any] = field(default_factory=dict)  # displayName, groupName, notes, tags, commit ...
    lines: dict[str, dict[int, str]] = field(default_factory=dict)  # of each file of the stream, by offset
    files: dict[str, bytes] = field(default_factory=dict)
    alerts: list[dict[str, Any]] = field(default_factory=list)
    artifacts: list[dict[str, Any]] = field(default_factory=list)
    exits: list[int] = field(default_factory=list)  # exit codes of its processes that said good-bye

    @property
    def history(self) -> list[Row]:
        """The rows, in order of their lines; a gap between lines is an error."""
        lines = self.lines.get(HISTORY, {})
        assert sorted(lines) == list(range(len(lines))), f"lines {sorted(lines)}"
        return [json.loads(lines[at]) for at in sorted(lines)]

    @property
    def summary(self) -> Row:
        lines = self.lines.get(SUMMARY, {})
        return dict(json.loads(lines[max(lines)])) if lines else {}

    @property
    def config(self) -> dict[str, Any]:
        said = json.loads(self.facts.get("config") or "{}")
        return {key: of["value"] for key, of in said.items() if key != "_wandb"}

    @property
    def axes(self) -> dict[str, str]:
        """The axis of each metric that was defined, by name or pattern; empty: none."""
        defined = json.loads(self.facts["config"])["_wandb"]["value"].get("m", [])
        names: list[str] = [metric.get("1") or metric.get("2") for metric in defined]
        axes = (names[metric["5"] - 1] if "5" in metric else "" for metric in defined)
        return dict(zip(names, axes, strict=True))

    @property
    def rounds(self) -> list[int]:
        """The rounds that have rows, in the order of their lines."""
        return [row["round"] for row in self.history]


@dataclass
class WandbServer:
    """What the server has, and how it behaves."""

    url: str = ""
    runs: dict[str, ServedRun] = field(default_factory=dict)
    views: dict[str, dict[str, Any]] = field(default_factory=dict)  # saved workspaces, by their ids
    answering: threading.Event = field(default_factory=threading.Event)  # clear: nobody is answered
    accepting: threading.Event = field(default_factory=threading.Event)  # clear: no connection is accepted
    asked: threading.Event = field(default_factory=threading.Event)  # a request came while nobody was answered
    changed: threading.Condition = field(default_factory=threading.Condition)
    operations: list[str] = field(default_factory=list)

    @property
    def run(self) -> ServedRun:
        """The only run."""
        (run,) = self.runs.values()
        return run

    @contextmanager
    def hanging(self) -> Iterator[None]:
        """Answer nobody while the context lasts; connections are accepted."""
        self.answering.clear()
        try:
            yield
        finally:
            self.answering.set()

    @contextmanager
    def swallowing(self) -> Iterator[None]:
        """Be as a black hole while the context lasts: nobody is answered, and the packets that would begin a
        connection are dropped, which is what Linux does with those that come to a full backlog."""
        place = urlsplit(self.url)
        with ExitStack() as stack:
            stack.enter_context(self.hanging())
            stack.callback(self.accepting.set)
            self.accepting.clear()
            for _ in range(MAX_FILLERS):
                filler = stack.enter_context(socket.socket())
                filler.settimeout(FILLED_SECONDS)
                try:
                    filler.connect((place.hostname, place.port))
                except TimeoutError:
                    break
            else:
                raise AssertionError(f"{MAX_FILLERS} connections, and one more is taken")
            yield

    def environment(self) -> dict[str, str]:
        """Environment variables with which wandb's client comes here."""
        return {"WANDB_BASE_URL": self.url, "WANDB_API_KEY": KEY, "WANDB_ERROR_REPORTING": "false"}

    def wait_for(self, holds: Any, timeout: float = 60.0) -> None:
        """Return once `holds(server)` is true; it is asked after each request."""
        with self.changed:
            assert self.changed.wait_for(lambda: holds(self), timeout), (
                f"not within {timeout} s: {self.operations}"
            )


@contextmanager
def serving() -> Iterator[WandbServer]:
    """A server while the context lasts."""
    served = WandbServer()
    served.answering.set()
    served.accepting.set()
    server = _Listener(("127.0.0.1", 0), type("Handler", (_Handler,), {"served": served}))
    server.served = served
    served.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield served
    finally:
        served.answering.set()
        served.accepting.set()
        server.shutdown()
        thread.join()
        server.server_close()


class _Listener(ThreadingHTTPServer):
    daemon_threads = True
    served: WandbServer

    def service_actions(self) -> None:
        """Between two connections: wait here while none is accepted."""
        self.served.accepting.wait()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that was killed, or gave up, is no fault."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    served: WandbServer
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self._body()
        self._take_part()
        path = urlsplit(self.path).path
        if path == "/graphql":
            self._graphql(json.loads(body))
        elif stream := re.fullmatch(r"/files/([^/]+)/([^/]+)/([^/]+)/file_stream", path):
            self._stream(self.served.runs[unquote(stream[3])], json.loads(body))
        else:
            self._answer(404, {})

    def do_PUT(self) -> None:
        body = self._body()
        self._take_part()
        _, _, kind, run, name = urlsplit(self.path).path.split("/", 4)
        of = self.served.runs[run]
        with self.served.changed:
            if kind == "manifest":
                of.artifacts[int(name)]["manifest"] = json.loads(body)
            else:
                of.files[unquote(name)] = body
            self.served.changed.notify_all()
        self._answer(200, {})

    def do_GET(self) -> None:
        self._take_part()
        self._answer(404, {})

    def _take_part(self) -> None:
        if not self.served.answering.is_set():
            self.served.asked.set()
            self.served.answering.wait()

    def _stream(self, run: ServedRun, said: dict[str, Any]) -> None:
        with self.served.changed:
            for name, part in said.get("files", {}).items():
                lines = run.lines.setdefault(name, {})
                lines.update(enumerate(part["content"], part["offset"]))
            if said.get("complete"):
                run.exits.append(said["exitcode"])
            self.served.changed.notify_all()
        self._answer(200, {"exitcode": None, "limits": {}})

    def _graphql(self, said: dict[str, Any]) -> None:
        found = re.search(r"(?:query|mutation)\s+(\w+)", said["query"])
        name, variables = (found[1] if found else ""), said.get("variables") or {}
        answer = getattr(self, f"_answer_{name}", None)
        with self.served.changed:
            self.served.operations.append(name)
            data = answer(variables) if answer is not None else None
            self.served.changed.notify_all()
        if data is None:
            self._answer(200, {"data": None, "errors": [{"message": f"there is no {name} here"}]})
        else:
            self._answer(200, {"data": data})

    def _answer_RunResumeStatus(self, asked: dict[str, Any]) -> Any:
        run = self.served.runs.get(asked["name"])
        model = {"id": "model", "name": asked["project"], "entity": {"id": "entity", "name": ENTITY}}
        return {"model": model | {"bucket": run and self._bucket(run)}}

    def _bucket(self, run: ServedRun) -> dict[str, Any]:
        tails = {}
        for key, name in (("historyTail", HISTORY), ("eventsTail", EVENTS)):
            lines = run.lines.get(name, {})
            tails[key] = json.dumps([lines[max(lines)]] if lines else [])
        counts = (("historyLineCount", HISTORY), ("eventsLineCount", EVENTS), ("logLineCount", OUTPUT))
        return {
            "id": f"storage-{run.name}",
            "name": run.name,
            "displayName": run.facts.get("displayName"),
            "description": None,
            "config": run.facts.get("config") or "{}",
            "wandbConfig": json.dumps({"t": {}}),
            "summaryMetrics": json.dumps(run.summary),
            "tags": run.facts.get("tags") or [],
            "notes": run.facts.get("notes"),
            "sweepName": None,
            "project": {"id": "project", "name": run.project, "entity": {"id": "entity", "name": ENTITY}},
            **{key: len(run.lines.get(name, {})) for key, name in counts},
            **tails,
        }

    def _answer_UpsertBucket(self, asked: dict[str, Any]) -> Any:
        inserted = asked["name"] not in self.served.runs
        run = self.served.runs.setdefault(asked["name"], ServedRun(asked["name"], asked["project"]))
        run.facts |= {key: value for key, value in asked.items() if value is not None}
        return {"upsertBucket": {"bucket": self._bucket(run), "inserted": inserted}}

    def _answer_Viewer(self, _: dict[str, Any]) -> Any:
        teams = {"edges": [{"node": {"id": "team", "name": ENTITY}}]}
        return {"viewer": {"id": "viewer", "entity": ENTITY, "username": ENTITY, "teams": teams, "flags": "{}"}}

    def _answer_GetDefaultEntity(self, _: dict[str, Any]) -> Any:
        return {"viewer": {"id": "viewer", "entity": ENTITY}}

    def _answer_ServerFeaturesQuery(self, _: dict[str, Any]) -> Any:
        return {"serverInfo": {"features": []}}

    def _answer_ServerInfo(self, _: dict[str, Any]) -> Any:
        return {"serverInfo": {"cliVersionInfo": {"max_cli_version": "99"}, "latestLocalVersionInfo": None}}

    def _answer_CreateRunFiles(self, asked: dict[str, Any]) -> Any:
        files = [
            {"name": n, "uploadUrl": f"{self.served.url}/upload/file/{asked['run']}/{n}"} for n in asked["files"]
        ]
        return {"createRunFiles": {"runID": "run", "uploadHeaders": [], "files": files}}

    def _answer_MarkRunFilesUploaded(self, _: dict[str, Any]) -> Any:
        return {"markRunFilesUploaded": {"success": True}}

    def _answer_NotifyScriptableRunAlert(self, asked: dict[str, Any]) -> Any:
        self.served.runs[asked["runName"]].alerts.append(asked)
        return {"notifyScriptableRunAlert": {"success": True}}

    def _answer_CreateArtifact(self, asked: dict[str, Any]) -> Any:
        of = asked["input"]
        made = self.served.runs[of["runName"]].artifacts
        made.append({"name": of["artifactCollectionName"], "type": of["artifactTypeName"], "said": of})
        number = f"{of['runName']}/{len(made) - 1}"
        sequence = {"latestArtifact": None}
        return {"createArtifact": {"artifact": {"id": number, "state": "PENDING", "artifactSequence": sequence}}}

    def _answer_CreateArtifactManifest(self, asked: dict[str, Any]) -> Any:
        url = f"{self.served.url}/upload/manifest/{asked['artifactID']}"
        file = {"id": "file", "uploadUrl": url, "uploadHeaders": []}
        return {"createArtifactManifest": {"artifactManifest": {"id": asked["artifactID"], "file": file}}}

    def _answer_UpdateArtifactManifest(self, asked: dict[str, Any]) -> Any:
        number = asked["artifactManifestID"]
        url = f"{self.served.url}/upload/manifest/{number}"
        file = {"id": "file", "uploadUrl": url, "uploadHeaders": []}
        return {"updateArtifactManifest": {"artifactManifest": {"id": number, "file": file}}}

    def _answer_CommitArtifact(self, asked: dict[str, Any]) -> Any:
        run, number = asked["artifactID"].split("/")
        self.served.runs[run].artifacts[int(number)]["committed"] = True
        return {"commitArtifact": {"artifact": {"id": asked["artifactID"], "digest": ""}}}

    def _answer_UpsertView2(self, asked: dict[str, Any]) -> Any:
        number = asked.get("id") or f"view{len(self.served.views) + 1}"
        inserted = number not in self.served.views
        self.served.views[number] = asked
        return {"upsertView": {"view": {"id": number, "name": asked["name"]}, "inserted": inserted}}

    def _answer_View(self, asked: dict[str, Any]) -> Any:
        found = [
            {"node": {"id": number, "displayName": view["displayName"], "spec": view["spec"]}}
            for number, view in self.served.views.items()
            if view["name"] == asked["viewName"]
        ]
        return {"project": {"allViews": {"edges": found}}}

    def _answer_RunStoppedStatus(self, _: dict[str, Any]) -> Any:
        return {"project": {"run": {"stopped": False}}}

    def _body(self) -> bytes:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        return gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body

    def _answer(self, status: int, answer: Any) -> None:
        body = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: the tests read what the server has."""
