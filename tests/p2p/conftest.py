"""Tests in which hivemind is installed: `make p2p`."""

from collections.abc import Callable

import pytest
from e2e.conftest import run

__all__ = ["run", "tell"]


@pytest.fixture
def tell(capsys: pytest.CaptureFixture[str]) -> Callable[[str], None]:
    """Shows a measured figure, whatever becomes of the test."""

    def say(words: str) -> None:
        with capsys.disabled():
            print(f"\n    {words}", end="")

    return say
