"""Draws docs/reference/commands.md: each command with its help, arguments and options, as click has them."""

import inspect
from collections.abc import Iterator

import click
from reference.table import cell, row, table

from atoll.comm.cli import PREFIX, cli

HEAD = """# Commands

`atoll COMMAND --help` says the same. Each option can be given by the environment variable beside it, too; the
command line goes before it. [exit-codes.md](../exit-codes.md) has how commands end. This page is made from the
commands themselves by `make reference`.
"""


def commands(group: click.Group, above: click.Context) -> Iterator[tuple[click.Context, click.Command]]:
    """Each command that is no group, in the order of its words."""
    for name in group.list_commands(above):
        command = group.get_command(above, name)
        assert command is not None, name
        context = click.Context(command, info_name=name, parent=above)
        if isinstance(command, click.Group):
            yield from commands(command, context)
        elif not command.hidden:
            yield context, command


def _default(option: click.Option) -> str:
    """The value of an option that is not given, as the help has it."""
    if isinstance(option.show_default, str):
        return option.show_default
    if option.is_flag or not option.show_default:
        return ""
    return f"`{option.default}`"


def _name(option: click.Option, context: click.Context) -> str:
    """The option as it is typed, with what its value is."""
    value = "" if option.is_flag else f" {option.make_metavar(context)}"
    names = ", ".join(f"`{name}{value}`" for name in (*option.opts, *option.secondary_opts))
    return f"{names}, required" if option.required else names


def section(context: click.Context, command: click.Command) -> Iterator[str]:
    """The lines of one command."""
    usage = " ".join(command.collect_usage_pieces(context))
    yield f"\n## {context.command_path}\n"
    yield f"```text\n{context.command_path} {usage}\n```\n"
    # \b keeps the lines of a paragraph as they are
    for paragraph in inspect.cleandoc(command.help or "").split("\n\n"):
        kept = paragraph.startswith("\b\n")
        yield f"```text\n{paragraph[2:]}\n```\n" if kept else f"{cell(paragraph)}\n"
    options = [p for p in command.params if isinstance(p, click.Option) and not p.hidden]
    if options:
        yield from table("option", "meaning", "if it is not given", "variable")
        for option in options:
            variable = f"`{option.envvar}`" if option.envvar else ""
            yield row(_name(option, context), option.help or "", _default(option), variable)


def draw() -> str:
    """The text of the page."""
    top = click.Context(cli, info_name="atoll", auto_envvar_prefix=PREFIX)
    return HEAD + "\n".join(line for found in commands(cli, top) for line in section(*found)) + "\n"
