"""The rooms of the house: which folder may import which, as docs/architecture.md draws it, and where torch is."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("comm", "configs", "coordinator", "node", "outer_opt")
COMMANDS = (
    "comm.cli",
    "coordinator.cli",
    "coordinator.server",
    "node.cli",
)  # loose files above their package's rooms
WITH_TORCH = {"node.trainer", "node.simulate"}

# A room is a folder in a package, or what lies loose in one; outer_opt and configs are one room each.
MAY_IMPORT: dict[str, set[str]] = {
    "configs": set(),
    "outer_opt": set(),
    "comm": set(),
    "comm.proto": {"comm"},
    "comm.cli": {"comm"},
    "comm.config": {"comm", "configs"},
    "comm.codecs": {"comm", "comm.config"},
    "comm.transport": {"comm", "comm.codecs"},
    "comm.allreduce": {"comm", "comm.codecs", "comm.transport"},
    "coordinator.placement": {"comm"},
    "coordinator.state_machine": {"comm", "comm.config", "comm.transport", "coordinator.placement", "outer_opt"},
    "coordinator.service": {"comm", "comm.config", "comm.proto", "comm.transport", "coordinator.state_machine"},
    "coordinator.monitor": {"comm", "comm.config", "coordinator.service", "coordinator.state_machine"},
    "coordinator.server": {
        *("comm", "comm.config", "comm.transport"),
        *("coordinator.monitor", "coordinator.service", "coordinator.state_machine"),
    },
    "coordinator.cli": {"comm", "comm.config", "coordinator.monitor", "coordinator.server"},
    "coordinator.demo": {
        *("comm", "comm.codecs", "comm.config", "configs", "coordinator.cli", "coordinator.server"),
        *("coordinator.monitor", "coordinator.service", "coordinator.state_machine"),
    },
    "coordinator.bench": {
        *("comm", "comm.proto", "comm.transport", "configs"),
        *("coordinator.placement", "coordinator.server"),
    },
    "node": {"comm", "comm.config"},
    "node.state_machine": {"comm", "comm.proto", "node"},
    "node.control": {"comm", "comm.allreduce", "comm.proto", "comm.transport"},
    "node.outer": {"comm", "comm.allreduce", "comm.codecs", "comm.config", "outer_opt"},
    "node.checkpoint": {"comm", "comm.codecs", "comm.config", "node.outer"},
    "node.recovery": {"comm", "comm.codecs", "comm.transport", "node.outer"},
    "node.trainer": {"comm", "comm.config", "node", "node.checkpoint", "node.outer", "outer_opt"},
    "node.daemon": {
        *("comm", "comm.allreduce", "comm.codecs", "comm.config", "comm.proto", "comm.transport"),
        *("node", "node.checkpoint", "node.control", "node.outer", "node.recovery", "node.state_machine"),
    },
    "node.cli": {"comm", "comm.config", "node", "node.checkpoint", "node.daemon"},
    "node.simulate": {"comm", "comm.codecs", "comm.config", "node", "node.outer", "node.trainer", "outer_opt"},
    "node.bench": {
        *("comm", "comm.allreduce", "comm.codecs", "comm.config", "comm.proto", "comm.transport"),
        *("node", "node.daemon", "node.outer", "node.recovery", "outer_opt"),
    },
}


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for top in PACKAGES for path in (ROOT / top).rglob("*.py")}


def room_of(module: str) -> str:
    if module in COMMANDS:
        return module
    package, *inside = module.split(".")
    in_a_folder = inside and (len(inside) > 1 or (ROOT / package / inside[0]).is_dir())
    return f"{package}.{inside[0]}" if in_a_folder else package


def imports(module: str) -> Iterator[str]:
    """Every module that `module` imports, at its top or in a function; ours without the `atoll.` before it."""
    for statement in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(statement, ast.ImportFrom) and statement.module:
            for alias in statement.names:
                ours = f"{statement.module}.{alias.name}".removeprefix("atoll.")
                yield ours if ours in MODULES else statement.module.removeprefix("atoll.")
        elif isinstance(statement, ast.Import):
            yield from (alias.name.removeprefix("atoll.") for alias in statement.names)


def test_every_room_is_in_the_graph() -> None:
    assert {room_of(module) for module in MODULES if "." in module or module == "configs"} <= set(MAY_IMPORT)


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_a_room_imports_what_the_graph_says(room: str) -> None:
    found = {
        (module, other)
        for module in MODULES
        if room_of(module) == room
        for other in map(room_of, set(imports(module)) & set(MODULES))
        if other != room
    }
    assert {(module, other) for module, other in found if other not in MAY_IMPORT[room]} == set()
    assert {other for _, other in found} == MAY_IMPORT[room], "the graph allows what nobody imports any more"


def test_neither_rooms_nor_modules_go_in_circles() -> None:
    TopologicalSorter(MAY_IMPORT).prepare()
    TopologicalSorter({m: {o for o in imports(m) if o in MODULES and o != m} for m in MODULES}).prepare()


def test_torch_stays_in_its_rooms() -> None:
    with_torch = {m for m in MODULES for other in imports(m) if other.split(".")[0] == "torch"}
    assert {room_of(module) for module in with_torch} <= WITH_TORCH


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
