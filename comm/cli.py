"""The `atoll` command. Each package registers its commands as entry points; only the one called is imported.

Every option can be given by an environment variable, too: ATOLL, the command's words and the option's, as in
ATOLL_NODE_JOIN_NAME.
"""

import copy
import os
import sys
from importlib.metadata import entry_points

import click
from click.shell_completion import CompletionItem

from atoll.comm.build_info import full_version
from atoll.comm.errors import AtollError
from atoll.comm.exit_codes import SERVICE, ExitCode, final_codes
from atoll.comm.log import say_ending

PREFIX = "ATOLL"  # of the environment variables that are options


def variable(prefix: str, word: str) -> str:
    """The environment variable of an option, or what those of a command's options begin with: `prefix`, and the
    word as it is typed."""
    return f"{prefix}_{word.lstrip('-')}".upper().replace("-", "_")


def _name_variables(command: click.Command, prefix: str) -> None:
    """Have each option found under its own word, where click would take the parameter's name."""
    for option in command.params:
        word = max(option.opts, key=len)
        if isinstance(option, click.Option) and option.envvar is None and option.allow_from_autoenv:
            option.envvar = variable(prefix, word)
    if isinstance(command, click.Group):
        for name, inner in command.commands.items():
            _name_variables(inner, variable(prefix, name))


class CommandGroup(click.Group):
    """A group whose commands are found by name among the entry points of a group, and imported when called."""

    entry_points = "atoll.commands"

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(e.name for e in entry_points(group=self.entry_points))

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        for entry in entry_points(group=self.entry_points, name=cmd_name):
            command = copy.deepcopy(entry.load())  # another group may have it under another name
            assert isinstance(command, click.Command)
            _name_variables(command, variable(ctx.auto_envvar_prefix or PREFIX, cmd_name))
            return command
        return None

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """The commands by their names alone: their help would have all of them imported."""
        named = [CompletionItem(name) for name in self.list_commands(ctx) if name.startswith(incomplete)]
        return [*named, *click.Command.shell_complete(self, ctx, incomplete)]


HELP = f"""Train one language model on many machines that share nothing but the internet.

Every option can be given by an environment variable, too: --name of `atoll node join` is ATOLL_NODE_JOIN_NAME.

Exit codes: {", ".join(f"{code:d} {code.summary}" for code in ExitCode)}. docs/exit-codes.md says what to do.
"""


def _tell_version(context: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted:
        click.echo(f"atoll, version {full_version()}")
        context.exit()


@click.group(
    cls=CommandGroup,
    help=HELP,
    context_settings={"help_option_names": ["-h", "--help"], "auto_envvar_prefix": PREFIX},
)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_tell_version,
    allow_from_autoenv=False,  # ATOLL_VERSION is others'
    help="Show the version, in a clone the commit, too, and exit.",
)
def cli() -> None:
    pass


class BenchGroup(CommandGroup):
    """The benchmarks of all packages."""

    entry_points = "atoll.benches"


@click.group(cls=BenchGroup)
def bench() -> None:
    """Measure a part of atoll on this machine."""


def main() -> None:
    """Entry point: errors become a sentence on stderr and an exit code."""
    try:
        cli(prog_name="atoll", standalone_mode=False)
    except AtollError as error:
        say_ending(str(error), error.exit_code)
        _exit(error.exit_code)
    except click.ClickException as error:
        error.show()
        _exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        say_ending("interrupted", ExitCode.INTERRUPTED)
        _exit(ExitCode.INTERRUPTED)
    except click.exceptions.Exit as done:
        _exit(done.exit_code)


def _exit(code: int) -> None:
    """End the process: where 0 alone keeps it from being started again, with 0 if trying again is of no use."""
    final = os.environ.get(SERVICE) == "launchd" and code in final_codes()
    sys.exit(0 if final else int(code))


if __name__ == "__main__":
    main()
