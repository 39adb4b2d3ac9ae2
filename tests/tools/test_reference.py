"""The pages and files that are made from the code are what the code says."""

import click
import pytest
from reference import commands, files, metrics, wire

from atoll.comm.cli import cli


@pytest.mark.parametrize("name", files.MADE)
def test_it_is_what_the_code_says(name: str) -> None:
    assert not files.outdated(name), "run make reference"


@pytest.mark.long
def test_what_differs_from_the_code_is_out_of_date(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "docs/exit-codes.md"
    text = files.MADE[name]()
    monkeypatch.setitem(files.MADE, name, lambda: text + "more\n")
    assert files.outdated(name)
    monkeypatch.setitem(files.MADE, "docs/no-such-page.md", lambda: text)
    assert files.outdated("docs/no-such-page.md")


def test_every_command_is_there_with_its_options_and_their_variables() -> None:
    page = commands.draw()
    assert "\n## atoll node join\n" in page and "\n## atoll bench codec\n" in page
    assert "| `--name TEXT` | The node's name, shown to everybody. |" in page and "`ATOLL_NODE_JOIN_NAME`" in page
    assert "--entrance" not in page, "hidden options are for Atoll itself"


def test_every_option_says_what_it_is_for() -> None:
    top = click.Context(cli, info_name="atoll")
    options = [
        p for _, command in commands.commands(cli, top) for p in command.params if isinstance(p, click.Option)
    ]
    assert len(options) > 100 and not [p.opts for p in options if not p.help and not p.hidden]


def test_every_metric_says_what_it_is() -> None:
    rows = [line for line in metrics.draw().splitlines() if line.startswith("| `")]
    assert len(rows) > 60 and not [row for row in rows if row.endswith("|  |")]


def test_every_message_of_the_protobufs_is_there_under_a_heading_of_its_own() -> None:
    page = wire.draw()
    names = [message.name for proto in wire.protos() for message in proto.file.message_type]
    assert len(names) > 40 and len(set(names)) == len(names)
    assert all(page.count(f"\n### {name}\n") == 1 for name in names)
