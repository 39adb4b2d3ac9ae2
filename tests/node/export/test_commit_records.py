"""The coordinator's page is read to its end, and what is no such page is said."""

import json
import math
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from atoll.comm.errors import ConfigError, Unreachable
from atoll.node.export import commit_records
from atoll.node.export.commit_records import CommitRecord, fetch, is_finished

RECORDS = [
    {"round": r, "contributors": {"n1": 10.0, "n2": 1.0 * r}, "tokens": 20 * r, "state_digest": f"{r:032x}"}
    for r in range(1, 8)
]
RUN = {"phase": "finished", "committed": 7, "members": [{"node_id": "n2", "name": "otter"}]}


class Page(BaseHTTPRequestHandler):
    run: Any = RUN

    def do_GET(self) -> None:
        asked = urlsplit(self.path)
        if asked.path == "/api/run":
            found: Any = self.run
        else:
            query = parse_qs(asked.query)
            since, limit = int(query["since"][0]), int(query["limit"][0])
            wanted = query["fields"][0].split(",")
            later = [r for r in RECORDS if isinstance(r["round"], int) and r["round"] > since]
            found = [{k: v for k, v in r.items() if k in wanted} for r in later[:limit]]
        data = json.dumps(found).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def page() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Page)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}/"
    server.shutdown()
    thread.join()
    server.server_close()


def test_all_rounds_are_fetched_an_answer_at_a_time(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commit_records, "PAGE_RECORDS", 3)
    found = fetch(page)
    assert sorted(found.rounds) == list(range(1, 8))
    assert found.rounds[7] == CommitRecord(7, {"n1": 10.0, "n2": 7.0}, 140, f"{7:032x}")
    assert found.contributors(5) == [("n1", 50), ("otter", 15)]
    assert found.contributors(7) == [("n1", 70), ("otter", 28)]


def test_a_run_is_finished_when_its_page_says_so_and_no_round_is_missing(page: str) -> None:
    assert is_finished(page, 7) and not is_finished(page, 6)


def test_what_is_no_coordinators_page_is_said(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Page, "run", {"hello": "world"})
    with pytest.raises(Unreachable, match="does not answer as a coordinator's page"):
        fetch(page)
    with pytest.raises(Unreachable, match="does not answer as a coordinator's page"):
        is_finished(page, 1)
    for tokens in (math.inf, math.nan, -1.0):
        monkeypatch.setitem(RECORDS[0], "contributors", {"n1": tokens})
        with pytest.raises(Unreachable, match="does not answer as a coordinator's page"):
            fetch(page)
    with pytest.raises(Unreachable, match="is it running"):
        fetch("http://127.0.0.1:9")
    with pytest.raises(ConfigError, match="not an http:// URL"):
        fetch("rounds.jsonl")
