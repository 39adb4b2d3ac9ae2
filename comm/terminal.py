"""Words of others as a terminal may show them: a run's config, a server's answer or a document could else move the
cursor, write over lines, set the clipboard, or feign lines of a log."""

import os
import re
import sys
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from rich.table import Table

PIPE_COLUMNS = 1000  # that a table may have where it is in nobody's window
CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")  # ASCII's, Unicode's, and bidi


def visible(text: str, keep: str = "") -> str:
    """The text with each character that a terminal would obey, but those of `keep`, as Python writes it."""
    return CONTROL.sub(lambda c: c[0] if c[0] in keep else c[0].encode("unicode_escape").decode(), text)


def plural(noun: str, count: int) -> str:
    """The noun as it stands behind a count: record of 1, records of others."""
    return noun if count == 1 else f"{noun}s"


def say(line: str, err: bool = False) -> None:
    """Print a line in which there are words of others."""
    click.echo(visible(line), err=err)


def show_table(table: "Table") -> None:
    """Print a table: what does not fit into the terminal is cut, into a pipe or a file it goes whole."""
    from rich.console import Console

    in_a_window = sys.stdout.isatty() or "COLUMNS" in os.environ
    Console(width=None if in_a_window else PIPE_COLUMNS).print(table)
