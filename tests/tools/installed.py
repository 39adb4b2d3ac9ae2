"""What an installed wheel does, from any folder: `python installed.py base|node`, run by .ci/wheel.

Every command has its help, every run and method that comes with it is found by name, what is not installed is
named with the command that installs it, and a machine with the extra `node` trains.
"""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from sysconfig import get_path

import click

from atoll import configs
from atoll.comm.cli import cli

LARGEST_BASE = 400e6  # bytes on disk
ATOLL = Path(get_path("scripts")) / "atoll"


def atoll(*arguments: str, code: int = 0) -> str:
    """Run a command that must end with `code`; return what it said."""
    done = subprocess.run([ATOLL, *arguments], capture_output=True, text=True, timeout=300)
    said = done.stdout + done.stderr
    if done.returncode != code or "Traceback" in said:
        sys.exit(f"atoll {' '.join(arguments)} ended with exit code {done.returncode}, not {code}:\n{said}")
    return said


def commands(command: click.Command, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The words of every command."""
    yield path
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            found = command.get_command(context, name)
            assert found is not None
            yield from commands(found, (*path, name))


def helps() -> int:
    """Every command's help, in this process: a command's imports are its own."""
    every = list(commands(cli))
    for path in every:
        try:
            with redirect_stdout(StringIO()):
                cli([*path, "--help"], standalone_mode=False)
        except BaseException as error:
            sys.exit(f"atoll {' '.join(path)} --help: {error!r}")
    return len(every)


def named() -> int:
    """Every run and every method by name."""
    runs, methods = configs.names(configs.FOLDER), configs.names(configs.METHODS)
    data = ("data.url=https://example.org/set", f"data.digest={'0a' * 16}")  # of your own, where a run needs one
    for run in runs:
        atoll("coordinator", "check", run, *(data if run != "demo" else ()))
    for method in methods:
        atoll("coordinator", "check", "demo", "--method", method)
    assert "demo" in runs and "diloco" in methods
    return len(runs) + len(methods)


def base() -> None:
    """Without the extras."""
    for lacking in (
        ("demo",),
        ("simulate", "demo", "--nodes", "2", "--out", "out"),
        ("node", "join", "atoll://x"),
    ):
        expected = "torch and numba, not installed here" if lacking[0] != "node" else ""
        said = atoll(*lacking, code=2 if lacking[0] == "node" else 3)
        assert expected in said, said
    assert 'pip install ".[wandb]"' in atoll("coordinator", "start", "demo", "--state-dir", "state", code=3)
    size = sum(file.lstat().st_size for file in Path(get_path("purelib")).rglob("*") if file.is_file())
    print(f"base: {size / 1e6:.0f} MB")
    assert size < LARGEST_BASE


def node() -> None:
    """With the extra `node`: nothing else is there, and it trains."""
    said = atoll("simulate", "demo", "--nodes", "2", "--steps", "2", "--no-baseline", "--out", "simulated")
    assert 'comparison.png needs matplotlib, not installed here: pip install ".[plot]"' in said, said
    assert Path("simulated/summary.json").exists()


if __name__ == "__main__":
    print(f"{helps()} commands, {named()} runs and methods", file=sys.stderr)
    {"base": base, "node": node}[sys.argv[1]]()
