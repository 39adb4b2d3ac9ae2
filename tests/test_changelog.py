"""CHANGELOG.md keeps its rules: what is to come stands on top, then each version with its date, newest first."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
KINDS = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def test_versions_are_in_order_and_the_projects_own_is_among_them() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    first, *titles = re.findall(r"^## (.+)$", text, re.MULTILINE)
    assert first == "Unreleased"
    versions = [re.fullmatch(r"(\d+)\.(\d+)\.(\d+) - \d{4}-\d\d-\d\d", title) for title in titles]
    assert all(versions), titles
    numbers = [tuple(map(int, found.groups())) for found in versions if found]
    assert numbers == sorted(numbers, reverse=True)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    own = tuple(map(int, project.split(".")))
    assert own in numbers or f"`pyproject.toml` has {project}, of which there is no tag yet" in text
    assert set(re.findall(r"^### (.+)$", text, re.MULTILINE)) <= KINDS
