"""Tests in which hivemind is installed: `make p2p`."""

from e2e.conftest import run

__all__ = ["run"]
