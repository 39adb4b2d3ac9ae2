"""The coordinator's page in a real browser: Debian's Chromium without a window, driven by playwright."""

import shutil
from collections.abc import Iterator

import pytest
from page.browsing import STORY, WIDE, Opener, Served, Tab, past_run
from playwright.sync_api import Browser, BrowserContext, sync_playwright

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
INSTALL = "apt-get install -y --no-install-recommends chromium fonts-dejavu-core"


@pytest.fixture(scope="module")  # not longer: until then its event loop runs, and other tests have their own
def browser() -> Iterator[Browser]:
    if (path := next(filter(None, map(shutil.which, BROWSERS)), None)) is None:
        pytest.fail(f"the page is tested in Chromium, which is not installed: {INSTALL} (as root)")
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        yield opened
        opened.close()


@pytest.fixture(scope="session")
def served() -> Iterator[Served]:
    world = Served()
    yield world
    world.close()


@pytest.fixture(scope="session")
def url(served: Served, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A past run's page."""
    with past_run(served, tmp_path_factory.mktemp("run"), STORY) as found:
        yield found


@pytest.fixture
def tab(browser: Browser, url: str) -> Iterator[Opener]:
    """Opens tabs; at the end none may have had an error, a refused script or a dialog."""
    contexts, tabs = list[BrowserContext](), list[Tab]()

    def open_(where: str = url, viewport: dict[str, int] = WIDE, scheme: str = "light", zone: str = "UTC") -> Tab:
        context = browser.new_context(
            viewport=viewport,  # type: ignore[arg-type]
            color_scheme=scheme,  # type: ignore[arg-type]
            timezone_id=zone,
            locale="en-GB",
            reduced_motion="reduce",
        )
        contexts.append(context)
        made = Tab(context.new_page(), where)
        tabs.append(made)
        made.page.on("pageerror", lambda error: made.wrong.append(str(error)))
        made.page.on("dialog", lambda dialog: made.wrong.append(dialog.message))
        made.page.on(
            "console", lambda said: made.wrong.append(said.text) if said.type in ("error", "warning") else None
        )
        return made

    yield open_
    for context in contexts:
        context.close()
    assert [made.wrong for made in tabs if made.wrong] == []
