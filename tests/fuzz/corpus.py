"""Inputs that once found a fault, and one of each kind that mutation reaches (`keep`): a line of hexadecimal
digits each, in a file for each decoder."""

from collections.abc import Sequence
from pathlib import Path

FOLDER = Path(__file__).parent / "inputs"


def inputs(name: str) -> list[bytes]:
    """The inputs that are kept for a decoder."""
    path = FOLDER / f"{name}.hex"
    return [bytes.fromhex(line) for line in path.read_text().splitlines()] if path.exists() else []


def keep(name: str, inputs: Sequence[bytes]) -> None:
    """Have a decoder keep these inputs, and no others."""
    if inputs:
        (FOLDER / f"{name}.hex").write_text("".join(f"{data.hex()}\n" for data in inputs))
