"""What is made from the comments beside the config's fields says something of each."""

from reference import config


def test_every_key_has_a_meaning() -> None:
    rows = [line for line in (config.draw() + config.draw_settings()).splitlines() if line.startswith("| `")]
    assert len(rows) > 150
    assert not [row for row in rows if row.endswith("|  |")]
