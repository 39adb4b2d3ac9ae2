"""Which Atoll this is, and what it runs on: the labels of `atoll_build_info`."""

import platform
from importlib.metadata import PackageNotFoundError, version


def build_info() -> dict[str, str]:
    """Versions of Atoll and Python, and the system's name."""
    try:
        atoll = version("atoll")
    except PackageNotFoundError:
        atoll = "unknown"
    return {"version": atoll, "python": platform.python_version(), "system": platform.system()}
