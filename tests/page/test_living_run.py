"""The page of a run that goes on, in a browser, before a real coordinator with nodes by hand."""

import asyncio
import re
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from control_nodes import CONFIG, Coordinator, Node, commit, coordinator, digest
from page.browsing import Opener, Served

from atoll.comm.config.run import RunConfig
from atoll.comm.ids import NodeId
from atoll.comm.proto import atoll_pb2 as pb
from atoll.coordinator.monitor import web
from atoll.coordinator.monitor.http import app

pytestmark = pytest.mark.long
HOSTILE = "<img src=x onerror=alert(1)>"


@contextmanager
def living(served: Served, folder: Path, config: RunConfig = CONFIG) -> Iterator[tuple[str, Coordinator]]:
    """The page's URL, and the coordinator behind it."""
    stack = AsyncExitStack()
    here: Coordinator = served.do(stack.enter_async_context(coordinator(folder, config)))
    try:
        with served.serve(app(here.event_loop, here.records, "reef")) as url:
            try:
                yield url, here
            finally:
                here.event_loop.stop()  # streams end
    finally:
        served.do(stack.aclose())


async def finish(*nodes: Node, number: int, last: bool = False) -> None:
    """The round is committed, and its state applied."""
    await commit(*nodes, round_=number)
    for node in nodes:
        await node.report(state_reported=pb.StateReported(round=number, digest=digest(f"state {number}")))
    for node in () if last else nodes:
        await node.sees(lambda v: v.train.round == number + 1)


def test_what_happens_is_on_the_page_at_once_and_names_are_text(
    tab: Opener, served: Served, tmp_path: Path
) -> None:
    with living(served, tmp_path) as (url, c):
        ada = c.node()
        served.do(ada.at_work(name=HOSTILE))
        reader = tab(url)
        page = reader.go()
        reader.wait("document.querySelectorAll('#members tr').length === 1")
        assert HOSTILE in reader.text("#members") and page.locator("#members img").count() == 0
        bo = c.node()
        served.do(bo.at_work(name="bo"))
        reader.wait("document.querySelectorAll('#members tr').length === 2")
        served.do(bo.heartbeat(phase="inner", tokens_per_s=1234.0, trouble="no <b>room</b> on its disk"))
        reader.wait("document.getElementById('members').textContent.includes('1,234')")
        assert "no <b>room</b> on its disk" in reader.text("#attention-list")
        served.do(finish(ada, bo, number=1))
        reader.wait("document.querySelector('#figures dd span').textContent === '2.000'")
        assert reader.text("#last-round").startswith("Round 1 took ")
        served.do(finish(ada, bo, number=2))
        reader.wait("document.getElementById('last-round').textContent.startsWith('Round 2 took ')")
        page.locator("#last-round a").click()
        reader.wait("document.querySelectorAll('#view-body .bar').length === 2")
        page.goto(f"{url}#/node/n1")
        reader.wait("document.getElementById('view-body').textContent.includes('Since it first joined.')")
        assert page.locator("#view-body .bar").count() == 1


def test_the_members_table_fits_a_window_of_1200_pixels_with_all_that_is_known_of_a_member(
    tab: Opener, served: Served, tmp_path: Path
) -> None:
    known = {"inner_step": 120, "tokens_per_s": 123456.0, "mfu": 0.432, "data_wait": 0.012, "loss": 2.345}
    known |= {"trainer_rss_bytes": 12_300_000_000, "bytes_up": 45_600_000_000, "bytes_down": 45_600_000_000}
    with living(served, tmp_path) as (url, c):
        ada = c.node()
        served.do(ada.at_work(name="ada-at-home"))
        reader = tab(url, viewport={"width": 1200, "height": 900})
        page = reader.go()
        served.do(ada.heartbeat(phase="recovering", **known))
        reader.wait("document.getElementById('members').textContent.includes('123,456')")
        for width in (1280, 1200, 1024):
            page.set_viewport_size({"width": width, "height": 900})
            reader.wait("document.querySelector('#members-title ~ .scroll .sideways').hidden")
            assert (
                page.evaluate(
                    "(e => e.scrollWidth - e.clientWidth)(document.getElementById('members').closest('.scroll'))"
                )
                == 0
            )


def test_a_column_that_was_shown_stays_between_two_rounds(tab: Opener, served: Served, tmp_path: Path) -> None:
    with living(served, tmp_path) as (url, c):
        ada, bo = c.node(), c.node()
        served.do(ada.at_work(name="ada"))
        served.do(bo.at_work(name="bo"))
        reader = tab(url)
        reader.go()
        step = "document.querySelectorAll('#members-head th')[5]"
        reader.wait(f"{step}.classList.contains('off')")
        served.do(ada.heartbeat(phase="inner", round=1, inner_step=12))
        reader.wait("document.getElementById('members').rows[0].cells[5].textContent === '12'")
        served.do(finish(ada, bo, number=1))
        reader.wait("document.getElementById('members').rows[0].cells[5].textContent === ''")
        assert not reader.page.evaluate(f"{step}.classList.contains('off')")


def test_who_failed_and_is_back_is_named_above_for_a_while(tab: Opener, served: Served, tmp_path: Path) -> None:
    with living(served, tmp_path) as (url, c):
        ada = c.node()
        served.do(ada.at_work(name="ada"))
        reader = tab(url)
        reader.go()
        reader.wait("document.querySelectorAll('#members tr').length === 1")
        assert reader.page.locator("#attention").is_hidden()

        async def fail_and_come_back() -> None:
            log, now = c.event_loop.telemetry.failures, c.event_loop.clock()
            log.noticed(NodeId("n1"), 1, "silent for 5 s", now - 42.0, now - 37.0)
            log.recovered(NodeId("n1"), now)
            await ada.heartbeat(phase="inner")

        served.do(fail_and_come_back())
        reader.wait("document.getElementById('attention-list').textContent.includes('was away')")
        time = r"\d\d:\d\d:\d\d"
        assert re.search(rf"ada \(n1\) was away {time} to {time}: silent for 5 s", reader.text("#attention-list"))


def test_a_stream_that_ends_is_taken_up_again_where_it_was(
    tab: Opener, served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web, "STREAM_SECONDS", 1.0)
    with living(served, tmp_path) as (url, c):
        ada = c.node()
        served.do(ada.at_work())
        reader = tab(url)
        asked = list[str]()
        reader.page.on("request", lambda r: asked.append(r.url) if r.url.endswith("/stream") else None)
        reader.go()
        reader.wait("document.querySelectorAll('#members tr').length === 1")
        for pace in (11.0, 22.0, 33.0):
            served.do(ada.heartbeat(phase="inner", tokens_per_s=pace))
            reader.wait(f"document.getElementById('members').textContent.includes('{pace:.0f}')")
            served.do(asyncio.sleep(1.2))
        assert len(asked) > 1 and reader.text("#trouble") == ""
        reader.page.close()  # before the coordinator goes, which it would ask again


def test_where_no_stream_is_to_be_had_the_page_asks_again_and_again(
    tab: Opener, served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web, "MAX_LISTENERS", 0)
    with living(served, tmp_path) as (url, c):
        ada = c.node()
        served.do(ada.at_work())
        reader = tab(url)
        reader.go()
        served.do(ada.heartbeat(phase="inner", tokens_per_s=77.0))
        reader.wait("document.getElementById('members').textContent.includes('77')")
        reader.wrong.clear()  # the browser says that the stream was refused


def test_when_a_finished_runs_coordinator_is_gone_the_page_says_that_the_run_is_over(
    tab: Opener, served: Served, tmp_path: Path
) -> None:
    one_round = replace(CONFIG, rounds=replace(CONFIG.rounds, total=1))
    with living(served, tmp_path, one_round) as (url, c):
        ada, bo = c.node(), c.node()
        served.do(ada.at_work(name="ada"))
        served.do(bo.at_work(name="bo"))
        reader = tab(url)
        reader.go()
        served.do(finish(ada, bo, number=1, last=True))
        reader.wait("document.querySelectorAll('#figures dt')[5].textContent === 'Finished'")
        assert reader.text("#over") == ""
    reader.wait("document.getElementById('over').textContent.startsWith('The run is over')")
    assert reader.text("#trouble") == ""
    reader.wrong.clear()  # the browser says that nobody answered
