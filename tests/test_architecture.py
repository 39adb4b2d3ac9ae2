"""docs/architecture.md leads to places that exist: each stop of each path is a file and a name defined in it."""

import ast
import re
from pathlib import Path

import pytest
import rooms
from test_layers import MAY_IMPORT

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "architecture.md").read_text()
STOP = re.compile(r"^(\d+)\. \[([\w/.]+)\]\(\.\./([\w/.]+)\) `([\w.]+)`:", re.MULTILINE)
SECTIONS = {title: text for title, text in re.findall(r"^## (.+)\n((?:(?!^## ).*\n)*)", PAGE, re.MULTILINE)}


def defined(path: Path) -> set[str]:
    """The functions and classes of a module, and the methods as Class.method."""
    found = set[str]()
    for statement in ast.parse(path.read_text()).body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(statement.name)
        if isinstance(statement, ast.ClassDef):
            methods = (s for s in statement.body if isinstance(s, ast.FunctionDef | ast.AsyncFunctionDef))
            found.update(f"{statement.name}.{method.name}" for method in methods)
    return found


@pytest.mark.parametrize(
    ("title", "count"),
    [("One round in twelve stops", 12), ("A join with recovery", 10), ("A coordinator's restart", 8)],
)
def test_each_stop_of_a_path_is_there(title: str, count: int) -> None:
    stops = STOP.findall(SECTIONS[title])
    assert [int(number) for number, *_ in stops] == list(range(1, count + 1))
    for _, shown, linked, name in stops:
        assert shown == linked
        assert name in defined(ROOT / shown), f"{shown} has no {name}"


def test_every_link_of_the_page_leads_somewhere() -> None:
    for link in re.findall(r"\]\(([^)#:]+)\)", PAGE):
        assert (ROOT / "docs" / link).exists(), link


def test_the_picture_has_the_rooms_that_the_layer_test_holds() -> None:
    assert set(rooms.PLACES) | rooms.OPEN_TO_ALL == set(MAY_IMPORT)


def test_the_places_to_begin_a_change_exist() -> None:
    table = SECTIONS["Where to change what"]
    found = re.findall(r"`((?:comm|coordinator|node|outer_opt)/[\w/]+\.\w+)`", table)
    assert len(found) >= 6
    for path in found:
        assert (ROOT / path).exists(), path
