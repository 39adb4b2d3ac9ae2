"""docs/attacks.md is what page.py makes of the trials in docs/attacks.jsonl, and has every attack."""

from attacks.__main__ import DOCS
from attacks.beginning import Beginning
from attacks.cases import ATTACKS, BEGINNINGS, HONEST_FIRST
from attacks.page import load, load_beginnings, page

TABLES = "\n## By strangers\n"
FIGURES = DOCS / "attacks.jsonl"
TRIALS = load(FIGURES)
PROCESSES = {"coordinator": 60_000_000, "ada trainer": 200_000_000}


def test_the_page_is_made_of_the_trials_that_are_kept() -> None:
    begun = load_beginnings(FIGURES)
    assert {trial.attack for trial in TRIALS} == {attack.word for attack in ATTACKS}
    assert {b.first for b in begun} == {first.word for first in BEGINNINGS}
    made, kept = page(TRIALS, begun, "some machine"), (DOCS / "attacks.md").read_text()
    assert kept.partition(TABLES)[2] == made.partition(TABLES)[2] != ""
    assert all(attack.sentence in made for attack in (*ATTACKS, *BEGINNINGS))


def test_who_is_first_is_shown_beside_an_honest_one() -> None:
    liar = BEGINNINGS[1]
    honest = [Beginning(HONEST_FIRST.word, "", seconds, PROCESSES, 0.0) for seconds in (9.0, 10.0, 12.0)]
    large = PROCESSES | {"coordinator": 160_000_000}
    slow = Beginning(liar.word, "it is out", 20.0, large, 0.0, ["ada: banned, forged_seal"])
    [_, table] = page(TRIALS, [*honest, slow], "some machine").split("\n## At the beginning\n")
    assert f"| {HONEST_FIRST.sentence} |  | 10.0 |  |" in table
    harm = "**of honest members: ada: banned, forged_seal**"
    changes = "**10.0 -> 20.0 (2.00)** | **coordinator: 60 -> 160**"
    assert f"| {liar.sentence} | it is out; {harm} | {changes} |" in table
    assert "At the beginning" not in page(TRIALS, [], "some machine")
