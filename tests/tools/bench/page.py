"""The page of a long run in a browser: when it is painted, how long its longest frames are, what a look costs.

    PYTHONPATH=tests:tests/tools python -m bench.page [--rounds 100000] [--members 8] [--json]

A past run of so many rounds is written, served by `atoll replay` in a process of its own, and read by Chromium
without a window. A frame is what lies between two of the browser's own (requestAnimationFrame); a task is what its
main thread does without a break, of which it tells those of 50 ms and more. Both come with what else the machine
does.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import click
import past_runs
from playwright.sync_api import Page, sync_playwright

WATCH = """
(() => {
  window.seen = { frames: [], tasks: [] };
  let before = 0;
  const frame = at => { if (before) seen.frames.push(at - before); before = at; requestAnimationFrame(frame); };
  requestAnimationFrame(frame);
  new PerformanceObserver(list => { for (const e of list.getEntries()) seen.tasks.push(e.duration); })
    .observe({ type: "longtask" });
})()
"""
FORGET = "(() => { seen.frames = []; seen.tasks = []; })()"
SEEN = "({ frame: Math.max(0, ...seen.frames), frames: seen.frames.length, task: Math.max(0, ...seen.tasks) })"
PAINTS = """
Object.fromEntries(performance.getEntriesByType("paint").map(e => [e.name, e.startTime]))
"""


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """The URL of the page of the run in a state directory."""
    command = [str(Path(sys.executable).with_name("atoll")), "replay", str(folder), "--http", "127.0.0.1:0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        try:
            yield re.findall(r"http://\S+", line)[0]
        finally:
            process.terminate()


def wait(page: Page, condition: str) -> float:
    """Milliseconds since the page's beginning when a condition was seen to hold."""
    while not page.evaluate(condition):
        page.wait_for_timeout(10)
    return float(page.evaluate("performance.now()"))


def activity(page: Page, name: str, acts: Callable[[], object]) -> dict[str, float]:
    """The longest frame and task (ms) while something is done."""
    page.wait_for_timeout(500)
    page.evaluate(FORGET)
    acts()
    page.wait_for_timeout(700)
    found = page.evaluate(SEEN)
    return {
        f"{name}_frame_ms": found["frame"],
        f"{name}_task_ms": found["task"],
        f"{name}_frames": found["frames"],
    }


def scroll(page: Page) -> None:
    page.mouse.move(640, 600)
    for by in [120] * 15 + [-120] * 15:
        page.mouse.wheel(0, by)
        page.wait_for_timeout(30)


def zoom(page: Page) -> None:
    for _ in range(8):
        page.locator("#zoom-in").click()
        page.wait_for_timeout(150)
    page.locator("#zoom-right").click()
    page.locator("#zoom-all").click()


def hover(page: Page) -> None:
    box = page.locator("#chart .u-over").bounding_box()
    assert box is not None
    for k in range(60):
        page.mouse.move(box["x"] + box["width"] * k / 60, box["y"] + 80)
        page.wait_for_timeout(10)


def sort(page: Page) -> None:
    # By its place: to look for a role and a name takes playwright 100 ms in the page's thread, with 500 rows.
    button = page.locator("#members-head button").nth(6)
    assert button.inner_text() == "Tokens/s"
    for _ in range(3):
        button.click()


def lay_out(page: Page) -> None:
    """What the browser itself takes for as many rows: a copy of the table's body in its place, three times."""
    for _ in range(3):
        page.evaluate("(body => body.replaceWith(body.cloneNode(true)))(document.getElementById('members'))")
        page.wait_for_timeout(50)


def look_back(page: Page) -> None:
    for k in (1, 5, 9, 3):
        page.evaluate(f"location.hash = '#/at/' + {k} * 1000")
        page.wait_for_timeout(400)


LOOKS: dict[str, Callable[[Page], None]] = {
    "scroll": scroll,
    "zoom": zoom,
    "hover": hover,
    "sort": sort,
    "look_back": look_back,
    "lay_out": lay_out,  # the last: what the page knows of its table is no longer in it
}


def measure(url: str) -> dict[str, float]:
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        figures = dict[str, float]()
        for visit in ("first", "second"):  # the first one has the server read all it needs
            page.goto("about:blank")
            page.goto(url)
            figures[f"{visit}_headline_ms"] = wait(
                page, "document.querySelector('#figures dd span').textContent !== ''"
            )
            figures[f"{visit}_chart_ms"] = wait(
                page, "Number(document.getElementById('chart').dataset.points) > 0"
            )
            figures[f"{visit}_paint_ms"] = page.evaluate(PAINTS)["first-contentful-paint"]
        figures["points"] = page.evaluate("Number(document.getElementById('chart').dataset.points)")
        figures["rounds"] = page.evaluate("Number(document.getElementById('chart').dataset.rounds)")
        page.wait_for_load_state("networkidle")
        page.evaluate(WATCH)
        figures |= activity(page, "idle", lambda: page.wait_for_timeout(1500))

        if page.locator("#members-more").is_visible():
            figures |= activity(page, "show_all", lambda: page.locator("#members-more").click())
        figures["members"] = page.locator("#members tr").count()
        for name, look in LOOKS.items():
            figures |= activity(page, name, partial(look, page))
        browser.close()
        return figures


@click.command()
@click.option("--rounds", default=100_000, show_default=True, type=click.IntRange(20))
@click.option("--members", default=8, show_default=True, type=click.IntRange(8))
@click.option("--keep", type=click.Path(path_type=Path), help="Where the run is written, and found the next time.")
@click.option("--json", "as_json", is_flag=True)
def main(rounds: int, members: int, keep: Path | None, as_json: bool) -> None:
    """Measure the page of a past run of ROUNDS rounds and MEMBERS members."""
    with tempfile.TemporaryDirectory() as folder:
        place = keep or Path(folder) / "run"
        if not (place / "journal.sqlite").exists():
            past_runs.write(place, past_runs.Story(rounds, members, rounds + 1000))
        began = time.monotonic()
        with served(place) as url:
            figures = {"served_s": time.monotonic() - began} | measure(url)
    figures["load_average"] = os.getloadavg()[0]
    if as_json:
        click.echo(json.dumps(figures))
        return
    for name, value in figures.items():
        click.echo(f"{name:>24}  {value:,.1f}")


if __name__ == "__main__":
    main()
