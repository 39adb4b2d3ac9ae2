"""The `atoll` command. Each package registers its commands as entry points; only the one called is imported."""

import sys
from importlib.metadata import entry_points, version

import click

from atoll.comm.errors import AtollError
from atoll.comm.terminal import visible


class CommandGroup(click.Group):
    """A group whose commands are found by name among the entry points of a group, and imported when called."""

    entry_points = "atoll.commands"

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(e.name for e in entry_points(group=self.entry_points))

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        for entry in entry_points(group=self.entry_points, name=cmd_name):
            command = entry.load()
            assert isinstance(command, click.Command)
            return command
        return None


@click.group(cls=CommandGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(version("atoll"), prog_name="atoll")
def cli() -> None:
    """Train one language model on many machines that share nothing but the internet.

    \b
    Exit codes: 0 done, 1 failed, 2 wrong config or usage, 3 this machine lacks something
    (port, memory, data), 4 unreachable, 5 refused by the other side, 6 a peer's fault.
    """


class BenchGroup(CommandGroup):
    """The benchmarks of all packages."""

    entry_points = "atoll.benches"


@click.group(cls=BenchGroup)
def bench() -> None:
    """Measure a part of atoll on this machine."""


def main() -> None:
    """Entry point: errors become a sentence on stderr and an exit code."""
    try:
        cli(standalone_mode=False)
    except AtollError as error:
        click.echo(visible(f"atoll: {error}", keep="\n"), err=True)
        sys.exit(error.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        print("atoll: interrupted", file=sys.stderr)
        sys.exit(130)
    except click.exceptions.Exit as done:
        sys.exit(done.exit_code)


if __name__ == "__main__":
    main()
