"""What the tests of the page share: a browser's tab as a reader has it, and pages served beside it."""

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import past_runs
import uvicorn
from playwright.sync_api import Page
from starlette.types import ASGIApp

from atoll.coordinator.monitor import replay
from atoll.coordinator.monitor.web import web

WIDE, NARROW = {"width": 1280, "height": 900}, {"width": 390, "height": 844}
PATIENCE = 30.0  # seconds; nothing takes longer than a moment on an idle machine
STORY = past_runs.Story(rounds=600, members=12, total=700, accounted=True)


class Served:
    """A coroutine's world in a thread of its own: a loop, and pages served from it."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def do(self, what: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(what, self.loop).result(60)

    async def _end_tasks(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    @contextmanager
    def serve(self, app: ASGIApp) -> Iterator[str]:
        """The URL at which the app is."""
        server = uvicorn.Server(
            uvicorn.Config(app, port=0, log_config=None, lifespan="off", timeout_graceful_shutdown=1)
        )
        running = asyncio.run_coroutine_threadsafe(server.serve(), self.loop)
        while not server.started:
            assert not running.done(), running.result()
            threading.Event().wait(0.01)
        try:
            yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/"
        finally:
            server.should_exit = True
            running.result(30)

    def close(self) -> None:
        self.do(self._end_tasks())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(10)
        self.loop.close()


@contextmanager
def past_run(served: Served, folder: Path, story: past_runs.Story) -> Iterator[str]:
    past_runs.write(folder, story)
    with replay.opened(str(folder)) as past, served.serve(web(past)) as url:
        yield url


@dataclass
class Tab:
    """A page as a reader has it, and all that went wrong in it."""

    page: Page
    url: str
    wrong: list[str] = field(default_factory=list)

    def go(self, where: str = "#/") -> Page:
        self.page.goto(self.url + where)
        self.wait("document.querySelector('#figures dd span').textContent !== ''")
        return self.page

    def text(self, selector: str) -> str:
        return self.page.locator(selector).inner_text()

    def wait(self, condition: str) -> None:
        """Look again and again whether a condition holds: the page's policy lets nobody wait in it by words."""
        deadline = time.monotonic() + PATIENCE
        while not self.page.evaluate(condition):
            assert time.monotonic() < deadline, f"{condition} did not come true"
            self.page.wait_for_timeout(20)

    def charted(self) -> None:
        """Wait until the chart is drawn."""
        self.wait("Number(document.getElementById('chart').dataset.points) > 0")


Opener = Callable[..., Tab]
