"""SECURITY.md's table of attacks names tests that exist: each is a function of a test module, or a transcript."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
PAGE = (TESTS.parent / "SECURITY.md").read_text()
ROW = re.compile(r"^\| (\d* ?)\| ([^|]+) \| ([^|]+) \| (`[^|]+`) \|$", re.MULTILINE)
TABLE = PAGE.partition("\n## Attacks\n")[2].partition("\n## ")[0]
ROWS = [(number.strip(), attack, tests.split(", ")) for number, attack, _, tests in ROW.findall(TABLE)]


@cache
def functions_of(module: Path) -> set[str]:
    """The functions of a test module that pytest collects."""
    return {s.name for s in ast.parse(module.read_text()).body if isinstance(s, ast.FunctionDef)}


@pytest.mark.parametrize(("number", "attack", "tests"), ROWS, ids=lambda value: str(value)[:40])
def test_the_tests_that_an_attack_names_exist(number: str, attack: str, tests: list[str]) -> None:
    for quoted in tests:
        path, _, name = quoted.strip("`").partition("::")
        assert (TESTS / path).is_file(), f"{attack}: there is no tests/{path}"
        if path.endswith(".py"):
            assert name.startswith("test_") and name in functions_of(TESTS / path), (
                f"{attack}: {path} has no {name}"
            )
        else:
            assert "transcripts" in Path(path).parts and not name


def test_every_attack_is_in_the_table_and_every_line_of_it_is_read() -> None:
    lines = [line for line in TABLE.splitlines() if line.startswith("|")]
    assert len(ROWS) == len(lines) - 2
    assert {int(number) for number, *_ in ROWS if number} == set(range(1, 16))
    assert sum(not number for number, *_ in ROWS) >= 9
