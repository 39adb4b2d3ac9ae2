"""Cells of a page's tables."""


def cell(text: str) -> str:
    """The text in one line, without what would end a cell."""
    return " ".join(text.split()).replace("|", "\\|")


def row(*cells: str) -> str:
    """A line of a table."""
    return f"| {' | '.join(map(cell, cells))} |"


def table(*heads: str) -> list[str]:
    """The first two lines of a table."""
    return [row(*heads), "|" + "---|" * len(heads)]
