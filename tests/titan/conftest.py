"""Tests in which torchtitan is installed: `make titan`."""

from pathlib import Path

import pytest
from e2e.conftest import run

__all__ = ["run"]

HERE = Path(__file__).parent
MODULE = "titan=[--module=titan_on_cpu]"


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every process finds `titan_on_cpu`."""
    monkeypatch.setenv("PYTHONPATH", str(HERE))
