"""What a reader finds on the page of a run, in a browser."""

import json
import re

import past_runs
import pytest
from page.browsing import STORY, Opener, Served, past_run
from playwright.sync_api import Route

pytestmark = pytest.mark.long
GUS, IVY, KAI = "gus (n7)", "ivy (n9)", "kai (n11)"


def test_the_headline_says_how_the_run_is_doing_when_it_is_finished_and_why_the_last_round_took_long(
    tab: Opener,
) -> None:
    reader = tab()
    reader.go()
    figures = dict(re.findall(r"^(.+)\n(.+)$", reader.text("#figures"), re.MULTILINE))
    labels = reader.page.locator("#figures dt").all_inner_texts()
    values = reader.page.locator("#figures dd > span").all_inner_texts()
    figures = dict(zip(labels, values, strict=True))
    last = list(past_runs.records(STORY))[-1]
    assert figures["Loss"] == f"{last.val_loss:.3f}"
    assert figures["Tokens"] == f"{last.tokens / 1e6:.0f} M"
    assert figures["Round"] == "600 of 700"
    assert "599 rounds committed, 1 void" in reader.text("#figures")
    assert figures["Fleet goodput"] == "83.0 %" and "of all the nodes' time" in reader.text("#figures")
    assert figures["Compute utilisation"] == "89.3 %" and "of training and exchange alone" in reader.text(
        "#figures"
    )
    assert re.fullmatch(r"\d\.\d+ k", figures["Tokens a second"])
    assert re.fullmatch(r"in 1 h [45]0 min", figures["Finishes"])
    assert reader.text("#phase") == "Round 600: committed.", "its reason is in the sentence below"
    assert reader.text("#passage-text") == "def f(x):\n    return 600 * x"
    assert "After round 600, as ada says" in reader.text("#passage-says")
    why = reader.text("#last-round")
    assert why.startswith("Round 600 took 1 min 38 s (usually 1 min 00 s). The exchange took ")
    assert "longer than usual: ivy" in why and "times slower than the others" in why
    assert why.endswith("gus had less.")


def test_whom_a_round_waits_for_is_said_once(tab: Opener, url: str) -> None:
    reader = tab()

    def waiting(route: Route) -> None:
        run = reader.page.request.get(f"{url}api/run").json()
        run |= {"phase": "inner", "phase_reason": "waits for what ada has", "awaited": ["ada"]}
        route.fulfill(body=f"event: run\ndata: {json.dumps(run)}\n\n", content_type="text/event-stream")

    reader.page.route("**/api/stream", waiting)
    reader.go()
    assert reader.text("#phase") == "Round 600: training. Waits for what ada has."


def test_the_members_in_need_of_a_look_come_first_and_are_named_above(tab: Opener) -> None:
    reader = tab()
    page = reader.go()
    assert [page.locator("#attention-list a").nth(i).inner_text() for i in range(2)] == [GUS, IVY]
    assert "trains 2.6 times slower than the others" in reader.text("#attention-list")
    assert "kai (n11) was banned in round 300: kai sent bytes" in reader.text("#attention-list")
    names = page.locator("#members tr td:first-child a")
    assert [names.nth(i).inner_text() for i in range(3)] == [GUS, IVY, "ada (n1)"]
    assert reader.text("#counts") == "11 active"


def test_members_are_sorted_by_any_column_and_found_by_words_and_state(tab: Opener) -> None:
    reader = tab()
    page = reader.go()
    names = page.locator("#members tr td:first-child a")
    button = page.get_by_role("button", name="Tokens/s")
    head = page.locator("#members-head th", has=button)
    button.press("Enter")
    paces = [int(t.replace(",", "")) for t in page.locator("#members tr td:nth-child(7)").all_inner_texts()]
    assert paces == sorted(paces, reverse=True) and head.get_attribute("aria-sort") == "descending"
    assert "▼" in button.evaluate("e => getComputedStyle(e, '::after').content")
    button.press("Enter")
    assert names.first.inner_text() == GUS and head.get_attribute("aria-sort") == "ascending"
    button.press("Enter")
    assert head.get_attribute("aria-sort") is None and names.nth(1).inner_text() == IVY
    page.get_by_label("Find").fill("dee active")
    reader.wait("document.querySelectorAll('#members tr').length === 1")
    assert names.all_inner_texts() == ["dee (n4)"]
    page.get_by_label("Find").fill("nobody")
    reader.wait("document.querySelectorAll('#members tr').length === 0")
    assert reader.text("#members-none") == "No such member."
    page.get_by_label("Find").fill("")
    page.get_by_label("Only").select_option("trouble")
    reader.wait("document.querySelectorAll('#members tr').length === 2")
    assert names.all_inner_texts() == [GUS, IVY]


def test_the_chart_is_by_round_tokens_or_time_and_zooms_into_detail_by_hand_and_keys(tab: Opener) -> None:
    reader = tab()
    page = reader.go()
    reader.charted()
    chart, says = page.locator("#chart"), page.locator("#chart-says")
    assert chart.get_attribute("data-rounds") == "600"
    assert "train from 10." in (chart.get_attribute("aria-label") or "")
    assert page.locator("#chart canvas").count() == 1
    box = page.locator("#chart .u-over").bounding_box()
    assert box is not None
    for axis in ("tokens", "time", "round"):
        page.locator("#chart-axis").select_option(axis)
        reader.wait(f"document.getElementById('chart').getAttribute('aria-label').includes('by {axis}')")
        page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 50)
        reader.wait("document.getElementById('chart-says').textContent.includes('train ')")
        assert re.match(r"Round \d+, 2026-09-2\d \d\d:\d\d:\d\d · train \d\.\d{3}", says.inner_text())
    page.mouse.move(box["x"] + box["width"] * 0.25, box["y"] + 60)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + 60, steps=4)
    page.mouse.up()
    reader.wait("Math.abs(Number(document.getElementById('chart').dataset.rounds) - 150) < 10")
    chart.focus()
    page.keyboard.press("+")
    reader.wait("Number(document.getElementById('chart').dataset.rounds) < 100")
    before = page.evaluate("document.getElementById('chart').getAttribute('aria-label')")
    page.keyboard.press("Shift+ArrowRight")
    reader.wait(f"document.getElementById('chart').getAttribute('aria-label') !== {before!r}")
    page.keyboard.press("0")
    reader.wait("document.getElementById('chart').dataset.rounds === '600'")
    page.mouse.move(box["x"] + box["width"] * 0.7, box["y"] + 60)
    page.keyboard.press("ArrowRight")
    first = int(says.inner_text().split(",")[0].removeprefix("Round "))
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert says.inner_text().startswith(f"Round {first + 2}, ")
    page.keyboard.press("Enter")
    reader.wait(f"document.getElementById('view-title').textContent === 'Round {first + 2}'")


def test_a_page_whose_run_is_over_asks_for_nothing_more(tab: Opener) -> None:
    reader = tab()
    asked = list[str]()
    reader.page.on("request", lambda request: asked.append(request.url))
    reader.go()
    reader.charted()
    reader.page.wait_for_load_state("networkidle")
    before = len(asked)
    reader.page.wait_for_timeout(1500)
    assert asked[before:] == [] and before < 12


def test_what_happened_to_rounds_is_marked_in_the_chart_and_said_at_the_cursor(tab: Opener) -> None:
    reader = tab()
    page = reader.go()
    reader.charted()
    marks = page.locator("#marks")
    page.locator("#marks-count").click()
    assert marks.inner_text().splitlines() == [
        *["Round 300: kai is gone", "Round 301: the exchange took 3 attempts", "Round 302 is void"]
    ]
    box = page.locator("#chart .u-over").bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] * (302 - 1) / (600 - 1) + 1, box["y"] + 50)
    reader.wait("document.getElementById('chart-says').textContent.startsWith('Round 302,')")
    assert reader.text("#chart-says").endswith(" · round 302 is void")
    page.locator("#chart").focus()
    for key, number in (("Home", 1), ("End", 600), ("PageUp", 540), ("PageUp", 480), ("PageDown", 540)):
        page.keyboard.press(key)
        assert reader.text("#chart-says").startswith(f"Round {number},"), key
    page.locator("#chart-kind").select_option("time")
    reader.wait("!document.getElementById('chart-beyond').hidden")
    assert reader.text("#chart-beyond") == "Beyond the picture (▲): 1 round, up to 21 min 00 s in round 300."


def test_a_void_rounds_page_says_what_that_is_and_leads_to_its_hour(tab: Opener) -> None:
    reader = tab()
    page = reader.go("#/round/302")
    reader.wait("document.querySelectorAll('#view-body tbody tr').length === 11")
    said = reader.text("#view-body")
    assert "Round 302 is void: nobody has its state any more." in said and "nothing of it counts" in said
    assert "contributed nothing" not in said and "Same state everywhere" not in said
    page.locator("dd .when").click()
    reader.wait("document.getElementById('events-says').textContent.includes('committed')")
    assert reader.text("#events-says").startswith("2026-09-21 19:00:00") and page.url.endswith("#/")
    page.goto(page.url.replace("#/", "#/round/302"))
    reader.wait("!document.getElementById('view').hidden")
    page.keyboard.press("Escape")
    reader.wait("document.getElementById('view').hidden")


def test_a_round_says_why_it_took_long_who_was_slow_by_how_much_and_where_time_went(tab: Opener) -> None:
    reader = tab()
    page = reader.go("#/round/600")
    reader.wait("document.querySelectorAll('#view-body tbody tr').length === 11")
    said = reader.text("#view-body")
    assert "ivy (n9) receives 10." in said and "gus (n7) trained 2." in said
    assert re.search(r"usually 6\.\d s", said)
    lanes = page.locator("#view-body tbody .bar")
    assert lanes.count() == 11
    assert re.fullmatch(
        r"training \d+\.\d s, waiting \d+\.\d s, exchange \d+\.\d s", lanes.first.get_attribute("aria-label") or ""
    )
    page.get_by_role("link", name="Round before").click()
    reader.wait("document.getElementById('view-title').textContent === 'Round 599'")


def test_a_round_says_how_its_verdict_is_known_and_what_each_failure_cost(tab: Opener) -> None:
    reader = tab()
    page = reader.go("#/round/301")
    reader.wait("document.querySelectorAll('#view-body tbody .bar').length === 11")
    said = reader.text("#view-body")
    assert said.count("he path from ivy to gus lost packets") == 1
    for name, value in (
        *[("Kind", "packet loss"), ("Between", "ivy (n9) and gus (n7)"), ("Known", "two sides say the same")],
        *[("Sent again", "4.1 %"), ("Usually", "0.0 %")],
    ):
        assert f"{name}\n{value}\n" in said
    assert "Besides:\n\ncy had no room on its disk" in said
    cells = page.get_by_role("region", name="Failures of members").locator("tbody td").all_inner_texts()
    assert cells == [IVY, "silent for 5.0 s", "5.2 s", "21.0 s", "3.0 s", "1 min 24 s"]
    page.get_by_role("link", name="Round before").click()
    reader.wait("document.getElementById('view-title').textContent === 'Round 300'")
    assert "The verdict" not in reader.text("#view-body") and "To detect" not in reader.text("#view-body")


def test_of_a_verdict_no_more_seconds_are_told_than_the_round_was_slower(tab: Opener, url: str) -> None:
    reader = tab()

    def judged(route: Route) -> None:
        said = reader.page.request.get(route.request.url).json()
        said["record"]["verdict"] |= {"slower": 2.5, "seconds": 2.6}
        route.fulfill(body=json.dumps(said), content_type="application/json")

    reader.page.route("**/api/round/301", judged)
    reader.go("#/round/301")
    reader.wait("document.querySelectorAll('#view-body tbody .bar').length === 11")
    assert "Slower than usual\n2.5 s\nOf that by this\n2.5 s" in reader.text("#view-body")


def test_the_axis_of_time_has_24_hours(tab: Opener) -> None:
    reader = tab()
    reader.page.add_init_script(
        """window.written = []; const write = CanvasRenderingContext2D.prototype.fillText;
           CanvasRenderingContext2D.prototype.fillText = function (words, ...rest) {
             window.written.push(words); return write.call(this, words, ...rest); };"""
    )
    page = reader.go()
    reader.charted()
    page.locator("#chart-axis").select_option("time")
    reader.wait("window.written.includes('19:00')")
    assert not page.evaluate("window.written.some(words => /\\d[ap]m/.test(words))")


def test_a_node_says_where_its_time_went_in_figures_beside_a_bar(tab: Opener) -> None:
    reader = tab()
    page = reader.go("#/node/n11")
    reader.wait("document.getElementById('view-title').textContent === 'Node kai (n11)'")
    said = reader.text("#view-body")
    records = past_runs.records(STORY)
    spent = [r.spent[past_runs.GONE] for r in records if past_runs.GONE in r.spent]
    assert "In rounds 1 to 300, as their records have it." in said
    whole = sum(sum(of.values()) for of in spent)
    share = 100 * sum(of.get("inner", 0.0) for of in spent) / whole
    kinds = ["inner", "lost", "sync", "waiting", "down"]
    parts = page.locator("#view-body .bar span")
    assert parts.evaluate_all("all => all.map(e => e.className)") == kinds
    assert f"training, committed 4 h 19 min ({share:.1f} %)" in said and "training, lost 30.0 s (0.2 %)" in said
    assert "down 20 min 30 s (" in said and "recovering" not in said
    page.goto(page.url.replace("n11", "n7"))
    reader.wait("document.getElementById('view-body').textContent.includes('In rounds 1 to 600')")


def test_a_node_has_its_curves_what_is_held_against_it_and_what_was_said_of_it(tab: Opener) -> None:
    reader = tab()
    page = reader.go("#/node/n11")
    reader.wait("document.getElementById('view-title').textContent === 'Node kai (n11)'")
    said = reader.text("#view-body")
    assert said.startswith("State\nbanned\n") and "tokens in 299 rounds" in said
    assert "Banned for forged input in round 300: kai sent bytes" in said and "kai evicted: it sent bytes" in said
    assert "Rounds 201 to 600" in said
    page.get_by_role("button", name="Whole run").click()
    reader.wait("document.getElementById('view-body').textContent.includes('Rounds 2 to 600')")
    for kind in ("loss", "tokens a second", "bytes sent", "seconds of the exchange"):
        page.locator("#view-body select").select_option(label=kind)
        assert page.locator("#view-body canvas").count() == 1
    page.goto(page.url.replace("n11", "n99"))
    reader.wait("document.getElementById('view-title').textContent === 'Not found'")
    assert "no node 'n99' is known" in reader.text("#view-body")
    reader.wrong.clear()  # the browser says that the answer was 404


def test_a_list_of_events_that_goes_on_below_says_so_until_its_end_is_seen(tab: Opener) -> None:
    reader = tab()
    page = reader.go()
    reader.wait("document.querySelectorAll('#events li').length > 20")
    place, hint = page.locator(".tall"), page.get_by_text("The list scrolls: there is more below.")
    reader.wait("document.querySelector('.tall').classList.contains('more')")
    assert hint.is_visible()
    place.evaluate("place => place.scrollTo(0, place.scrollHeight)")
    reader.wait("!document.querySelector('.tall').classList.contains('more')")
    assert not hint.is_visible()
    page.get_by_label("Search").fill("2nd time")
    reader.wait("document.querySelectorAll('#events li').length === 1")
    assert not hint.is_visible()


def test_what_happened_at_an_hour_and_what_has_words_in_it_is_found(tab: Opener) -> None:
    reader = tab()
    page = reader.go()
    reader.wait("document.querySelectorAll('#events li').length > 20")
    page.get_by_label("An hour from").fill("2026-09-21T19:00")
    reader.wait("document.getElementById('events-says').textContent.includes('committed')")
    said, told = reader.text("#events-says"), reader.text("#events")
    assert said.startswith("2026-09-21 19:00:00 to 20:00:00: ")
    assert "39 rounds committed, 300 to 339, and 1 void; train loss " in said
    assert "round 302 is void" in told and "it was away for 20 min" in told and "575" not in told
    page.get_by_role("button", name="Hour before").click()
    reader.wait("document.getElementById('events-says').textContent.startsWith('2026-09-21 18:00:00')")
    assert "kai evicted" in reader.text("#events")
    assert (
        page.locator("#events").get_by_role("link", name="kai", exact=True).get_attribute("href") == "#/node/n11"
    )
    page.get_by_label("An hour from").fill("2026-09-21T19:20")
    reader.wait("document.getElementById('events-says').textContent.startsWith('2026-09-21 19:20:00 to 20:20:00')")
    page.get_by_label("An hour from").fill("2026-09-22T07:00")
    reader.wait("document.getElementById('events-says').textContent.includes('The run ended before')")
    page.get_by_role("button", name="Latest").click()
    reader.wait("document.querySelectorAll('#events li').length > 20")
    page.locator("#events .when").last.click()
    reader.wait("document.getElementById('events-says').textContent.includes(' to 15:00:00')")
    page.get_by_role("button", name="Last 10 minutes").click()
    reader.wait("document.getElementById('events-says').textContent.includes('592 to 600')")
    page.get_by_role("button", name="Latest").click()
    page.get_by_label("Search").fill("away COORDINATOR")
    reader.wait("document.querySelectorAll('#events li').length === 1")
    assert "2nd time" in reader.text("#events")


def test_that_rounds_close_is_shown_to_who_asks_for_it(tab: Opener) -> None:
    reader = tab()
    page = reader.go()
    reader.wait("document.querySelectorAll('#events li').length > 20")
    assert "closes" not in reader.text("#events")
    page.get_by_label("Routine too").check()
    reader.wait("document.getElementById('events').textContent.includes('round 600 closes')")
    page.get_by_label("Routine too").uncheck()
    reader.wait("!document.getElementById('events').textContent.includes('closes')")


INK = """share => {
  const canvas = document.querySelector('#view-body canvas'), over = document.querySelector('#view-body .u-over');
  const pen = document.createElement('canvas').getContext('2d'), pixel = canvas.width / canvas.clientWidth;
  pen.fillStyle = getComputedStyle(document.documentElement).getPropertyValue('--curve-0').trim();
  pen.fillRect(0, 0, 1, 1);
  const ink = pen.getImageData(0, 0, 1, 1).data;
  const left = over.getBoundingClientRect().left - canvas.getBoundingClientRect().left + over.clientWidth * share;
  const column = canvas.getContext('2d').getImageData(left * pixel, 0, 1, canvas.height).data;
  let found = 0;
  for (let i = 0; i < column.length; i += 4)
    found += [0, 1, 2].every(k => Math.abs(column[i + k] - ink[k]) < 60) && column[i + 3] > 100;
  return found;
}"""  # pixels of the curve's colour at a share of the picture's width


def test_a_nodes_curve_is_no_line_across_rounds_without_it_and_a_lone_round_is_seen(tab: Opener, url: str) -> None:
    reader = tab()

    def gone_for_a_while(route: Route) -> None:
        said = reader.page.request.get(route.request.url).json()
        last = len(said["series"]["round"]) - 1
        there = [k for k in range(last + 1) if k < 0.3 * last or k > 0.7 * last or k == last // 2]
        said["series"]["weight"] = [5.0 if k in there else None for k in range(last + 1)]
        route.fulfill(body=json.dumps(said), content_type="application/json")

    reader.page.route("**/api/node/n1", gone_for_a_while)
    page = reader.go("#/node/n1")
    reader.wait("document.querySelectorAll('#view-body canvas').length > 0")
    reader.wait(f"({INK})(0.2) > 0")
    seen = [page.evaluate(INK, share) > 0 for share in (0.2, 0.4, 199 / 399, 0.6, 0.8)]
    assert seen == [True, False, True, False, True]
    reader.wrong.clear()  # the browser says that to read pixels is slow


def test_who_contributed_most_is_said_and_owners_are_shown_as_text(tab: Opener) -> None:
    reader = tab()
    page = reader.go()
    reader.wait("document.querySelectorAll('#owners tr').length === 4")
    assert "contributed 346 M tokens in 599 rounds." in reader.text("#credit")
    assert re.search(r"Most came from .+ \(\d\d\.\d %\), and node \w+ \(9\.0 %\)", reader.text("#credit"))
    assert "<b>Kelp</b> & Co" in page.locator("#owners").inner_text() and page.locator("#owners b").count() == 0


def test_regions_and_links_are_shown_slowest_first(tab: Opener) -> None:
    reader = tab()
    page = reader.go()
    reader.wait("document.querySelectorAll('#links tr').length === 11")
    assert page.locator("#links tr:first-child td:first-child").inner_text() == IVY
    assert "2 regions" in reader.text("#links-says") and "in two levels" in reader.text("#links-says")
    between = page.locator("#between tr").all_inner_texts()
    assert len(between) == 2 and "120.0" in between[0] and "4.0" in between[0]


def test_one_looks_back_by_slider_keys_and_address_and_plays_the_run(tab: Opener) -> None:
    reader = tab()
    page = reader.go()
    reader.charted()
    page.locator("#scrub").focus()
    page.keyboard.press("Home")
    reader.wait("document.getElementById('past-text').textContent.startsWith('The run as of round 1,')")
    page.keyboard.press("ArrowRight")
    reader.wait("document.getElementById('past-text').textContent.startsWith('The run as of round 2,')")
    assert page.url.endswith("#/at/2") and "round 2 of 600" in reader.text("#scrub-at")
    page.goto(page.url.replace("#/at/2", "#/at/299"))
    reader.wait("document.getElementById('past-text').textContent.startsWith('The run as of round 299,')")
    assert reader.text("#counts") == "12 active"
    reader.wait("document.getElementById('events').textContent.includes('evaluated round 275')")
    assert "kai evicted" in reader.text("#events") and "2nd time" not in reader.text("#events")
    assert reader.text("#credit-title") == "Contributions to the whole run"
    page.get_by_label("An hour from").fill("2026-09-21T21:00")
    reader.wait("document.getElementById('events-says').textContent.includes('is after round 299')")
    page.get_by_role("button", name="Play").click()
    reader.wait("Number(document.getElementById('past-text').textContent.match(/round (\\d+)/)[1]) > 302")
    page.get_by_role("button", name="Pause").click()
    page.get_by_role("button", name="To its end").click()
    reader.wait("document.getElementById('past').hidden")
    assert reader.text("#scrub-at") == "round 600, the last"


def test_a_run_of_five_hundred_members_is_shown_in_part_and_whole_when_asked(
    tab: Opener, served: Served, tmp_path_factory: pytest.TempPathFactory
) -> None:
    story = past_runs.Story(rounds=12, members=500)
    with past_run(served, tmp_path_factory.mktemp("many"), story) as url:
        reader = tab(url)
        page = reader.go()
        rows = page.locator("#members tr")
        assert rows.count() == 50 and rows.first.locator("a").inner_text() == GUS
        page.get_by_role("button", name="Show all 499").click()
        reader.wait("document.querySelectorAll('#members tr').length === 499")
        names = page.locator("#members td:first-child a").all_inner_texts()
        assert len(set(names)) == 499 and names[0] == GUS
        page.get_by_role("button", name="Node").click()
        by_name = "[...document.querySelectorAll('#members td:first-child a')].map(a => a.textContent)"
        reader.wait(f"{by_name}.every((name, i, all) => !i || all[i - 1].toLowerCase() <= name.toLowerCase())")
        assert sorted(page.evaluate(by_name)) == sorted(names)
        page.get_by_label("Find").fill("gus-11")
        reader.wait("document.querySelectorAll('#members tr').length === 1")
        page.goto(f"{url}#/round/12")
        reader.wait("document.querySelectorAll('#view-body tbody tr').length === 60")
