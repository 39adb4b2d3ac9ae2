"""The command that joins a run as this one was to, for another process: behind a terminal that is gone, or a
service's. Nothing of it depends on this shell, and no secret shows in it."""

import sys
from collections.abc import Mapping
from pathlib import Path

import click
from click.core import ParameterSource

from atoll.comm.errors import ResourceError
from atoll.comm.files import atomic_write, make_folder, write_all
from atoll.node.settings import settings_of

URL_FILE = "join-url"  # in the state directory; the join URL has a token
PYTHON = (sys.executable, "-P", "-m", "atoll.comm.cli", "node", "join")


def keep_url(state_dir: Path, url: str) -> Path:
    """Write the join URL to a file that only its owner reads, and return that. Raises `ResourceError`."""
    file = state_dir / URL_FILE
    try:
        make_folder(state_dir)
        with atomic_write(file, None) as out:
            write_all(out, [memoryview(f"{url}\n".encode())], 0)
    except OSError as error:
        raise ResourceError(f"cannot write {file}: {error.strerror or error}") from None
    return file


def join_words(
    context: click.Context,
    url_file: Path,
    state_dir: Path,
    command: tuple[str, ...],
    environment: Mapping[str, str],
    without: frozenset[str] = frozenset(),
) -> list[str]:
    """The words of the command line that joins as `context` says, whose options came from the command line or the
    environment. `command`: the trainer's; `without`: names of options that are this process's alone."""
    words = [f"@{url_file}", f"--state-dir={state_dir}"]
    for option in context.command.params:
        name = option.name or ""
        if not isinstance(option, click.Option) or name in without | {"state_dir"}:
            continue
        if context.get_parameter_source(name) in (None, ParameterSource.DEFAULT):
            continue
        value, flag = context.params[name], max(option.opts, key=len)
        if not option.is_flag:
            words.append(f"{flag}={value}")
        elif value:
            words.append(flag)
    settings = [*settings_of(environment), *context.params["overrides"]]
    return [*PYTHON, *words, *settings, *(["--", *command] if command else [])]
