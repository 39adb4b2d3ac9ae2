"""Draws docs/config.md and docs/reference/settings.md: each key of a run's config, and each of a node's own
settings, with its default and its meaning, which is the comment at the field."""

import ast
import inspect
import io
import tokenize
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from enum import StrEnum
from functools import cache
from types import ModuleType
from typing import Any, get_args, get_type_hints

import msgspec
from reference.table import row, table

from atoll.comm.config.run import RunConfig
from atoll.node.config import NodeConfig

HEAD = """# Every key of a run's config

A run is described by one YAML file, over which go a method's and `key=value` of the command line. What neither
says is as here. `atoll coordinator check RUN` prints what a run's config comes to, and refuses what cannot be.
This page is made from the comments in [comm/config](../comm/config) by `make reference`.

Editors that know JSON Schema complete and check a run's file by `configs/run.schema.json`, with this as its first
line: `# yaml-language-server: $schema=FOLDER/run.schema.json`. Where Atoll is installed the folder is what
`python -c "from atoll import configs; print(configs.FOLDER)"` prints.
"""
SETTINGS = """# Every setting of a node

They are its owner's, of one machine, and not the run's: in `STATE_DIR/node.yaml`, over which go the environment
(`ATOLL_NODE_DEVICE=cpu`) and `key=value` behind the URL of `atoll node join`. [volunteer.md](../volunteer.md)
says what the limits do. This page is made from the comments in [node/config.py](../../node/config.py) by
`make reference`.
"""


@cache
def comments(module: ModuleType) -> dict[int, tuple[str, bool]]:
    """The comments of a module by their lines, and whether each has a line for itself."""
    found = dict[int, tuple[str, bool]]()
    for token in tokenize.generate_tokens(io.StringIO(inspect.getsource(module)).readline):
        if token.type == tokenize.COMMENT:
            alone = not token.line[: token.start[1]].strip()
            found[token.start[0]] = token.string.lstrip("# ").strip(), alone
    return found


def meanings(kind: type[Any]) -> dict[str, str]:
    """The comment of each field of a dataclass, or of each member of an enum."""
    module = inspect.getmodule(kind)
    assert module is not None
    said, found = comments(module), dict[str, str]()
    tree = ast.parse(inspect.getsource(module))
    (body,) = (node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == kind.__name__)
    for statement in body:
        match statement:
            case ast.AnnAssign(target=ast.Name(id=name)) | ast.Assign(targets=[ast.Name(id=name)]):
                first, last = statement.lineno, statement.end_lineno or statement.lineno
                parts = [said[line][0] for line in range(first, last + 1) if line in said]
                above = first - 1
                while above in said and said[above][1]:
                    parts.insert(0, said[above][0])
                    above -= 1
                found[name] = " ".join(parts)
    return found


def meaning(kind: type[Any], name: str) -> str:
    """The meaning of a dataclass's field; if it is one of some words, of each of these."""
    of, said = get_type_hints(kind)[name], meanings(kind)[name]
    if not (isinstance(of, type) and issubclass(of, StrEnum)):
        return said
    choices = meanings(of)
    words = (f"`{one}`{f': {why}' if (why := choices.get(one.name, '')) else ''}" for one in of)
    return "; ".join(filter(None, [said, *words]))


def keys(kind: type[Any], default: Any) -> Iterator[str]:
    """The rows of a section's own keys."""
    for item in fields(kind):
        if not is_dataclass(get_type_hints(kind)[item.name]):
            value = msgspec.json.encode(getattr(default, item.name)).decode()
            yield row(f"`{item.name}`", f"`{value}`", meaning(kind, item.name))


def sections(kind: type[Any], default: Any, above: str = "") -> Iterator[str]:
    """A section's table, then those of the sections in it."""
    title = above.rstrip(".") or "The run"
    text = " ".join((inspect.getdoc(kind) or "").split())
    yield "\n".join([f"\n## {title}\n", text, "", *table("key", "default", "meaning"), *keys(kind, default)])
    for item in fields(kind):
        of = get_type_hints(kind)[item.name]
        if is_dataclass(of):
            assert isinstance(of, type)
            yield from sections(of, getattr(default, item.name), f"{above}{item.name}.")
        for inner in get_args(of):
            if isinstance(inner, type) and is_dataclass(inner):
                yield from sections(inner, inner(), f"{above}{item.name}[].")


def draw() -> str:
    """The text of the page of a run's keys."""
    return HEAD + "\n".join(sections(RunConfig, RunConfig())) + "\n"


def draw_settings() -> str:
    """The text of the page of a node's settings."""
    rows = keys(NodeConfig, NodeConfig())
    return "\n".join([SETTINGS, *table("setting", "default", "meaning"), *rows]) + "\n"
