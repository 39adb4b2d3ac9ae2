"""The Makefile's targets miss no test."""

import re
from pathlib import Path

TESTS = Path(__file__).parent
ELSEWHERE = {"p2p", "tools/attacks"}  # `make p2p`, `make chaos`


def test_real_processes_are_run_by_tests_in_the_folders_that_are_looked_in() -> None:
    found = re.search(r"^E2E := ([^#\n]+)", (TESTS.parent / "Makefile").read_text(), re.MULTILINE)
    assert found is not None
    folders = {folder.removeprefix("tests/") for folder in found[1].split()}
    marked = {path for path in TESTS.rglob("test_*.py") if "pytest.mark.e2e" in path.read_text()}
    where = {path.parent.relative_to(TESTS).as_posix() for path in marked - {Path(__file__)}}
    assert where == folders | ELSEWHERE
