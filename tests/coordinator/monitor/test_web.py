"""The web face as a browser meets it: what is cached, compressed, streamed, refused."""

import asyncio
import gzip
import json
from pathlib import Path
from typing import Any

import past_runs
import pytest
from control_nodes import coordinator
from starlette.applications import Starlette
from starlette.types import Message

from atoll.coordinator.monitor import replay, run_answers, web
from atoll.coordinator.monitor.http import app
from atoll.coordinator.monitor.page_file import page_file

STORY = past_runs.Story(rounds=40, total=50)


@pytest.fixture(scope="module")
def state_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("state")
    past_runs.write(folder, STORY)
    return folder


class Answer:
    def __init__(self) -> None:
        self.status, self.headers, self.body = 0, dict[str, str](), b""

    @property
    def json(self) -> Any:
        return json.loads(self.body)


async def ask(site: Starlette, path: str, *, until: bytes | None = None, **headers: str) -> Answer:
    """GET, without a socket; a stream is left when `until` was in it."""
    answer, left = Answer(), asyncio.Event()
    sent = [{"type": "http.request", "body": b"", "more_body": False}]

    async def receive() -> Message:
        if sent:
            return sent.pop()
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            answer.status = message["status"]
            answer.headers = {name.decode(): value.decode() for name, value in message["headers"]}
        answer.body += message.get("body", b"")
        if until is not None and until in answer.body:
            left.set()

    path, _, query = path.partition("?")
    scope = {
        **{"type": "http", "method": "GET", "path": path, "query_string": query.encode()},
        "headers": [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()],
    }
    async with asyncio.timeout(60):
        await site(scope, receive, send)
    return answer


def test_the_page_is_one_small_answer_that_is_fetched_once_and_runs_nothing_else(state_dir: Path) -> None:
    async def story() -> None:
        with replay.opened(str(state_dir)) as past:
            site = web.web(past)
            whole, packed = await ask(site, "/"), await ask(site, "/", accept_encoding="gzip, br")
            assert whole.body == gzip.decompress(packed.body) and len(packed.body) < 60_000
            assert "Content-Encoding" not in whole.headers and packed.headers["content-encoding"] == "gzip"
            assert (await ask(site, "/", if_none_match=whole.headers["etag"])).status == 304
            policy = whole.headers["content-security-policy"]
            assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
            assert b"innerHTML" not in whole.body.split(b"</script>")[1]

    asyncio.run(story())


def test_an_answer_waits_while_members_do_but_not_for_ever(
    state_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        with replay.opened(str(state_dir)) as past:
            looks = [True] * 3
            monkeypatch.setattr(past, "crowded", lambda: bool(looks and looks.pop()))
            site = web.web(past)
            for path in ("/api/run", "/api/rounds?limit=3"):
                looks[:] = [True] * 3
                assert (await ask(site, path)).status == 200 and not looks
            monkeypatch.setattr(past, "crowded", lambda: True)
            for place in (web, run_answers):
                monkeypatch.setattr(place, "MAX_CALM_WAIT", 0.05)
            assert len((await ask(site, "/api/rounds?limit=3")).json) == 3

    asyncio.run(story())


def test_every_file_of_the_page_is_in_it() -> None:
    folder = Path(web.__file__).with_name("page")
    for file in folder.rglob("*.*"):
        if file.name not in ("index.html", "uPlot-LICENSE.txt"):
            assert file.read_text().encode() in page_file().body, file


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/api/run?round=9", 200),
        ("/api/run?round=x", 400),
        ("/api/run?round=0", 404),
        ("/api/round/7", 200),
        ("/api/round/0", 404),
        ("/api/round/41", 404),
        ("/api/round/1e3", 400),
        ("/api/round/" + "9" * 30, 400),
        ("/api/series", 200),
        ("/api/series?names=", 200),
        ("/api/series?names=__class__", 400),
        ("/api/series?x=loss", 400),
        ("/api/series?from=nan", 400),
        ("/api/series?from=a", 400),
        ("/api/series?points=1000000", 400),
        ("/api/series?from=1e308&to=-1e308", 200),
        ("/api/node/n3", 200),
        ("/api/node/n3?from=9&to=3", 200),
        ("/api/node/n3?points=" + "9" * 18, 200),
        ("/api/node/n99", 404),
        ("/api/node/%00", 404),
        ("/api/events?before=1e12&limit=" + "9" * 18, 200),
        ("/api/events?before=x", 400),
        ("/api/events?search=" + "a%20" * 1000, 200),
        ("/api/links", 200),
        ("/api/links?round=7", 200),
        ("/api/links?round=99", 404),
        ("/api/contributions?limit=-1", 400),
        ("/api/contributions?limit=1&offset=2", 200),
        ("/api/events?hour=2", 400),
        ("/api/run?rounds=9", 400),
        ("/api/round/7?round=8", 400),
        ("/api/links?limit=7", 400),
        ("/api/blame?about=" + "a" * 200, 200),
        ("/api/blame?about=" + "a" * 201, 400),
        ("/api/blame?about=1&about=2", 400),
        ("/api/blame?" + "about=1&" * 10_000, 400),
        ("/api/blame?" + "".join(f"a{k}=&" for k in range(2_000)), 400),
        ("/api/blame/1", 404),
        ("/?from=a%20link", 200),
        ("/api/nothing", 404),
    ],
)
def test_a_question_is_answered_or_refused_with_a_sentence(state_dir: Path, path: str, status: int) -> None:
    async def story() -> None:
        with replay.opened(str(state_dir)) as past:
            answer = await ask(web.web(past), path)
            assert answer.status == status, answer.body
            if status == 200 and path.startswith("/api"):
                assert answer.json
            elif status == 200:
                assert answer.body == page_file().body
            elif path not in ("/api/nothing", "/api/blame/1"):
                assert answer.body.endswith(b"\n") and len(answer.body) < 300

    asyncio.run(story())


def test_blame_is_told_of_a_node_a_round_or_all(state_dir: Path) -> None:
    async def story() -> None:
        with replay.opened(str(state_dir)) as past:
            site = web.web(past)

            async def blamed(about: str) -> Any:
                return (await ask(site, f"/api/blame?about={about}")).json

            [record] = (await ask(site, "/api/rounds?since=6&limit=1")).json
            banned, seconds = str(STORY.middle), sum(record["seconds"].values())
            for about in ("", "n11", banned):
                said = await blamed(about)
                assert [d["node"] for _, d in said["decisions"]] == ["n11"], about
            assert (await blamed("n1"))["decisions"] == [] and (await blamed("n1"))["seconds"] is None
            assert (await blamed("7"))["seconds"] == pytest.approx(seconds)
            for unknown in ("99", "\u00b2"):  # a digit that is no number
                assert (await blamed(unknown))["seconds"] is None

    asyncio.run(story())


def test_a_question_with_an_unknown_name_is_told_the_known_ones(state_dir: Path) -> None:
    async def story() -> None:
        with replay.opened(str(state_dir)) as past:
            said = (await ask(web.web(past), "/api/events?limit=2&hour=2")).body.decode()
            assert said == "/api/events knows no 'hour': give search, after, before, limit, routine\n"
            said = (await ask(web.web(past), "/api/stream?x=1")).body.decode()
            assert said == "/api/stream knows no 'x': give nothing\n"

    asyncio.run(story())


def test_an_answer_is_compressed_for_who_takes_that_and_not_sent_to_who_has_it(state_dir: Path) -> None:
    async def story() -> None:
        with replay.opened(str(state_dir)) as past:
            site = web.web(past)
            plain = await ask(site, "/api/round/40")
            packed = await ask(site, "/api/round/40", accept_encoding="gzip")
            assert gzip.decompress(packed.body) == plain.body and len(packed.body) < len(plain.body) / 2
            assert (await ask(site, "/api/round/40", if_none_match=plain.headers["etag"])).status == 304

    asyncio.run(story())


def test_a_stream_tells_the_run_then_its_changes_and_ends_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web, "STREAM_INTERVAL", 0.02)

    async def story() -> None:
        async with coordinator(tmp_path) as c:
            site = app(c.event_loop, c.records, "reef")
            ada = c.node()
            await ada.at_work()
            first = await ask(site, "/api/stream", until=b"event: run")
            assert first.headers["content-type"].startswith("text/event-stream")
            assert first.headers["connection"] == "close", "else the door cuts the next one on it"
            assert first.body.startswith(b"retry: 500\n\nid: ") and b'"name":"ada"' in first.body
            seen = first.body.split(b"id: ")[1].split(b"\n")[0].decode()
            later = asyncio.create_task(ask(site, "/api/stream", until=b"4321", last_event_id=seen))
            await ada.heartbeat(phase="inner", tokens_per_s=4321.0)
            changes = (await later).body
            assert b"event: change" in changes and b"event: run" not in changes and b'"name"' not in changes
            monkeypatch.setattr(web, "STREAM_SECONDS", 0.3)
            packed = await ask(site, "/api/stream", accept_encoding="gzip")
            assert b"event: run" in gzip.decompress(packed.body)

    asyncio.run(story())


def test_a_run_that_is_long_to_look_at_is_looked_at_less_often() -> None:
    assert web.stream_interval(0.0) == web.stream_interval(0.001) == web.STREAM_INTERVAL
    assert web.stream_interval(0.01) == pytest.approx(2.0), "half a hundredth of a core"
    assert web.stream_interval(1.0) == web.MAX_STREAM_INTERVAL


def test_streams_are_few_and_end_with_the_coordinator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "MAX_LISTENERS", 2)

    async def story() -> None:
        async with coordinator(tmp_path) as c:
            site = app(c.event_loop, c.records, "reef")
            open_ = [asyncio.create_task(ask(site, "/api/stream")) for _ in range(2)]
            while not await refused(site):
                await asyncio.sleep(0.01)
            c.event_loop.stop()
            for stream in open_:
                assert (await stream).status == 200
            assert not await refused(site)

    async def refused(site: Starlette) -> bool:
        answer = await ask(site, "/api/stream", until=b"retry")
        assert answer.status == 200 or b"2 pages follow the run already" in answer.body
        return answer.status == 503

    asyncio.run(story())


def test_a_living_run_can_be_looked_back_at_and_its_last_round_is_told_before_its_record_is_complete(
    tmp_path: Path,
) -> None:
    async def story() -> None:
        async with coordinator(tmp_path) as c:
            site = app(c.event_loop, c.records, "reef")
            assert (await ask(site, "/api/run?round=1")).status == 404
            empty = (await ask(site, "/api/run")).json
            assert empty["last_round"] is None and empty["live"] and empty["pace"]["round_s"] is None
            c.journal.append([], list(past_runs.records(STORY)))
            for record in past_runs.records(STORY):
                c.records.add(record)
            past = (await ask(site, "/api/run?round=33")).json
            assert past["round"] == 33 and past["recorded"] and past["live"]
            assert past["members"][0]["slow"] is None and past["members"][6]["slow"].startswith("trains 2.")

    asyncio.run(story())
