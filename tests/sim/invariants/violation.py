"""What a broken promise raises."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    pass


class Violation(AssertionError):
    pass


def hold(condition: bool, sentence: str) -> None:
    if not condition:
        raise Violation(sentence)
