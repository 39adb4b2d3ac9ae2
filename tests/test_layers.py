"""The import graph of the packages is the one the README draws, and torch stays in the trainer."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MAY_IMPORT: dict[str, set[str]] = {
    "comm": set(),
    "outer_opt": set(),
    "coordinator": {"comm"},
    "node": {"comm", "outer_opt"},
}


def cross_imports(package: str) -> set[tuple[str, str]]:
    """(file, other package) for every import of another package of ours."""
    found = set()
    for path in (ROOT / package).rglob("*.py"):
        for statement in ast.walk(ast.parse(path.read_text())):
            names = [statement.module or ""] if isinstance(statement, ast.ImportFrom) else []
            names += [a.name for a in statement.names] if isinstance(statement, ast.Import) else []
            for name in names:
                if name.startswith("atoll.") and (other := name.split(".")[1]) != package:
                    found.add((str(path.relative_to(ROOT)), other))
    return found


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_imports_point_down(package: str) -> None:
    wrong = {(file, other) for file, other in cross_imports(package) if other not in MAY_IMPORT[package]}
    assert not wrong


@pytest.mark.parametrize(
    "module",
    [
        "atoll.coordinator.server",
        "atoll.coordinator.demo.command",
        "atoll.node.daemon.daemon",
        "atoll.node.checkpoint.export",
        "atoll.node.outer.method",
        "atoll.node.simulate.cli",
        "atoll.outer_opt.merge",
    ],
)
def test_service_and_daemon_and_commands_start_without_torch(module: str) -> None:
    probe = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-P", "-c", probe], timeout=60).returncode == 0
