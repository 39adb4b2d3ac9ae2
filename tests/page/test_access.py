"""The page for everybody: on a telephone, in light and dark, with a keyboard alone, with a screen reader."""

from importlib.resources import files
from typing import Any

import pytest
from page.browsing import NARROW, WIDE, Opener, Tab

pytestmark = pytest.mark.long
AXE = files("axe_playwright_python").joinpath("axe.min.js").read_text()
RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"]
VIEWS = {"run": "#/", "round": "#/round/600", "verdict": "#/round/301", "node": "#/node/n7", "past": "#/at/301"}


def opened(tab: Tab, view: str) -> Tab:
    page = tab.go(VIEWS[view])
    if view in ("round", "verdict", "node"):
        tab.wait("document.querySelectorAll('#view-body .bar, #view-body canvas').length > 0")
    else:
        tab.charted()
        tab.wait("document.querySelectorAll('#owners tr, #links tr, #events li').length > 20")
    if view == "past":
        tab.wait("!document.getElementById('past').hidden")
    page.wait_for_load_state("networkidle") if view in ("round", "verdict", "node") else None
    return tab


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("view", VIEWS)
def test_no_rule_of_wcag_aa_is_broken(tab: Opener, view: str, scheme: str) -> None:
    reader = opened(tab(scheme=scheme), view)
    reader.page.evaluate(AXE)
    found: dict[str, Any] = reader.page.evaluate(
        "rules => axe.run(document, {runOnly: {type: 'tag', values: rules}})", RULES
    )
    broken = [(v["id"], [n["html"][:120] for n in v["nodes"]][:3]) for v in found["violations"]]
    assert broken == [] and len(found["passes"]) > 15


@pytest.mark.parametrize("view", VIEWS)
def test_nothing_overflows_a_telephone(tab: Opener, view: str) -> None:
    reader = opened(tab(viewport=NARROW), view)
    width, inside = reader.page.evaluate("[innerWidth, document.documentElement.scrollWidth]")
    assert inside <= width == NARROW["width"]
    beyond = reader.page.evaluate(
        """[...document.querySelectorAll('body *')].filter(e => !e.closest('.scroll, .chart, .skip') &&
           e.getBoundingClientRect().right > innerWidth + 1).map(e => e.outerHTML.slice(0, 80))"""
    )
    assert beyond == []
    reader.wait(
        """[...document.querySelectorAll('.scroll > table')].every(({ parentElement: place }) =>
           place.querySelector('.sideways').hidden === (place.scrollWidth <= place.clientWidth))"""
    )


def test_everything_that_can_be_used_is_reached_by_the_tab_key_and_seen_to_be(tab: Opener) -> None:
    reader = opened(tab(viewport=WIDE), "run")
    page = reader.page
    wanted = page.evaluate(
        """[...document.querySelectorAll('a[href], button, input, select, summary, [tabindex="0"]')]
           .filter(e => e.checkVisibility()).map((e, i) => (e.dataset.place = i, i))"""
    )
    reached, outlined = set[int](), True
    for _ in range(len(wanted) + 40):  # a date's field has several stops
        page.keyboard.press("Tab")
        at = page.evaluate(
            """(() => { const e = document.activeElement;
               return [e.dataset.place, getComputedStyle(e).outlineStyle, e.type] })()"""
        )
        if at[0] is not None:
            reached.add(int(at[0]))
            outlined = outlined and (at[1] != "none" or at[2] == "datetime-local")
    assert set(wanted) <= reached and outlined


def test_a_view_that_opens_has_the_focus_at_its_title(tab: Opener) -> None:
    reader = tab()
    page = reader.go()
    page.locator("#members a").first.press("Enter")
    reader.wait("document.activeElement.id === 'view-title'")
    page.get_by_role("link", name="Back to the run").press("Enter")
    reader.wait("document.activeElement.id === 'main' && !document.getElementById('overview').hidden")
