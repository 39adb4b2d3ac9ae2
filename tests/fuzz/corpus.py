"""Inputs that once found a fault: a line of hexadecimal digits each, in a
file for each decoder."""

from pathlib import Path

FOLDER = Path(__file__).parent / "inputs"


def inputs(name: str) -> list[bytes]:
    """The inputs that are kept for a decoder."""
    path = FOLDER / f"{name}.hex"
    return [bytes.fromhex(line) for line in path.read_text().splitlines()] if path.exists() else []
