"""Every folder that holds Python is listed in pyproject.toml, so that the wheel has it."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_every_package_is_listed() -> None:
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    listed = set(pyproject["tool"]["setuptools"]["packages"])
    on_disk = {
        "atoll." + ".".join(init.parent.relative_to(ROOT).parts)
        for top in ("node", "coordinator", "outer_opt", "comm", "configs")
        for init in (ROOT / top).rglob("__init__.py")
    }
    assert on_disk == listed
