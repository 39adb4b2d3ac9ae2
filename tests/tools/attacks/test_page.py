"""docs/attacks.md is what page.py makes of the trials in docs/attacks.jsonl, and has every attack."""

from attacks.__main__ import DOCS
from attacks.cases import ATTACKS
from attacks.page import load, page

TABLES = "\n## By strangers\n"


def test_the_page_is_made_of_the_trials_that_are_kept() -> None:
    trials = load(DOCS / "attacks.jsonl")
    assert {trial.attack for trial in trials} == {attack.word for attack in ATTACKS}
    made, kept = page(trials, "some machine"), (DOCS / "attacks.md").read_text()
    assert kept.partition(TABLES)[2] == made.partition(TABLES)[2] != ""
