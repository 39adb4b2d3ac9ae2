"""Draws docs/exit-codes.md: the table of comm/exit_codes.py, and which error ends a command with which code."""

import ast
from collections.abc import Iterator
from pathlib import Path

from reference.table import row, table

from atoll.comm import errors
from atoll.comm.errors import AtollError
from atoll.comm.exit_codes import ExitCode

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = ("comm", "coordinator", "node", "outer_opt")
HEAD = """# Exit codes

Every command ends with one of these, and with a sentence on stderr that says what it was. A process that a signal
N ended has 128 + N for a shell; a node that is told to stop (SIGTERM, `atoll node leave`) leaves its run and ends
with 0. `atoll doctor` ends with the code of the first check that fails. The last column says whether a node that
is a service (`atoll node install-service`) is started again, after a pause; where the answer is no, it would come
to the same. This page is made from [comm/exit_codes.py](../comm/exit_codes.py) and the errors' classes by
`make reference`.
"""
KINDS = """
## Which error is which
"""


def kinds() -> Iterator[tuple[str, ExitCode, str]]:
    """The errors that end a command, base classes first: name, code, the first paragraph of what is said of it."""
    classes = dict[str, ast.ClassDef]()
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, ast.ClassDef):
                    classes.setdefault(node.name, node)
    codes = {"AtollError": AtollError.exit_code}
    while found := {
        name: _code(node, codes)
        for name, node in classes.items()
        if name not in codes and any(isinstance(base, ast.Name) and base.id in codes for base in node.bases)
    }:
        codes |= found
    for name, code in sorted(codes.items(), key=lambda item: (item[1], not hasattr(errors, item[0]), item[0])):
        said = ast.get_docstring(classes[name]) or ""
        yield name, code, said.partition("\n\n")[0]


def _code(node: ast.ClassDef, codes: dict[str, ExitCode]) -> ExitCode:
    """The class's own code, `exit_code = ExitCode.NAME`, or that of the first base that has one."""
    for statement in node.body:
        match statement:
            case ast.Assign(
                targets=[ast.Name(id="exit_code")],
                value=ast.Attribute(value=ast.Name(id="ExitCode"), attr=name),
            ):
                return ExitCode[name]
            case ast.Assign(targets=[ast.Name(id="exit_code")]):
                raise ValueError(f"{node.name}.exit_code is not one of ExitCode's names")
    return next(codes[base.id] for base in node.bases if isinstance(base, ast.Name) and base.id in codes)


def draw() -> str:
    """The text of the page."""
    codes = (
        row(f"{code:d}", code.summary, code.meaning, code.remedy, "yes" if code.again else "no")
        for code in ExitCode
    )
    errors_ = (row(f"`{name}`", f"{code:d}", said) for name, code, said in kinds())
    heads = table("code", "what", "meaning", "what to do", "a service tries again")
    return "\n".join([HEAD, *heads, *codes, KINDS, *table("error", "code", "meaning"), *errors_]) + "\n"
