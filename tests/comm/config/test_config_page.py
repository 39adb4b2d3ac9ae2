"""docs/config.md is what the comments beside the config's fields say, and says something of each."""

from config_page import PAGE, draw


def test_the_page_is_of_the_fields_as_they_are() -> None:
    assert PAGE.read_text() == draw(), "make it anew: PYTHONPATH=tests python tests/tools/config_page.py"


def test_every_key_has_a_meaning() -> None:
    rows = [line for line in draw().splitlines() if line.startswith("| `")]
    assert len(rows) > 110
    assert not [row for row in rows if row.endswith("|  |")]
