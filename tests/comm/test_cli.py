"""Options by environment variables, and the shell's completion."""

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from atoll.comm import extras
from atoll.comm.cli import PREFIX, cli
from atoll.node import settings
from atoll.node.config import NodeConfig

ROOT = Path(__file__).resolve().parents[2]
# Read by the code itself, or by tests: none may be an option's.
TAKEN = {
    *("ATOLL_LOG", "ATOLL_FAULTS", "ATOLL_STREAMS", "ATOLL_TRAINER", "ATOLL_LAUNCHER", "ATOLL_DEMO"),
    *("ATOLL_SERVICE", "ATOLL_REWRITE", "ATOLL_SIM_FIRST", "ATOLL_SIM_SEEDS", "ATOLL_SIM_TRACE", "ATOLL_VERSION"),
}
# Completing with the shell's help of one option would import these; a command's own names need none of them.
HEAVY = ("torch", "numpy", "numba", "grpc", "omegaconf", "cryptography", "psutil", "atoll.node.daemon.daemon")


def options(command: click.Command, words: tuple[str, ...] = ()) -> Iterator[tuple[str, str]]:
    """The environment variable of each option of each command, and whose it is."""
    for option in command.params:
        if isinstance(option, click.Option) and option.allow_from_autoenv:
            name = "_".join((PREFIX, *words, max(option.opts, key=len).lstrip("-"))).upper().replace("-", "_")
            yield name, f"{' '.join(words)} --{option.name}"
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            found = command.get_command(context, name)
            assert found is not None
            yield from options(found, (*words, name))


def test_no_variable_has_two_meanings() -> None:
    found = list(options(cli))
    names = [name for name, _ in found]
    of_settings = [settings.PREFIX + item.name.upper() for item in fields(NodeConfig)]
    assert len(names) > 100 and {"ATOLL_NODE_JOIN_NAME", "ATOLL_BENCH_ALLREDUCE_PEERS"} <= set(names)
    everything = [*names, *of_settings, "ATOLL_NODE_STATE_DIR"]
    assert len(set(everything)) == len(everything)
    assert not set(everything) & TAKEN


def test_no_option_has_a_variable_that_the_code_reads_itself() -> None:
    tracked = subprocess.run(
        ["git", "-C", str(ROOT), "grep", "-hoE", 'environ(\\.get|\\.pop)?[[(]"ATOLL_[A-Z_]+"', "--", "*.py"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    read = {line.split('"')[1] for line in tracked.splitlines()}
    assert "ATOLL_LOG" in read
    assert not {name for name, _ in options(cli)} & read


def test_an_option_can_be_given_by_its_variable_and_the_command_line_is_over_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(extras, "lacking", lambda *_: "")
    variables = {"ATOLL_NODE_JOIN_LISTEN": "nonsense"}
    join = ["node", "join", "atoll://token@127.0.0.1:4700/demo"]
    refused = CliRunner().invoke(cli, join, env=variables)
    assert "--listen" in str(refused.exception) and "nonsense" in str(refused.exception)
    other = CliRunner().invoke(cli, [*join, "--listen", "rubbish"], env=variables)
    assert "rubbish" in str(other.exception)


def test_one_variable_names_the_state_directory_for_all_commands_of_a_node(tmp_path: Path) -> None:
    for command in ("status", "leave", "uninstall"):
        asked = CliRunner().invoke(cli, ["node", command], env={"ATOLL_NODE_STATE_DIR": str(tmp_path / "ada")})
        assert f"{tmp_path}/ada" in str(asked.exception)


def test_variables_of_others_change_nothing() -> None:
    said = CliRunner().invoke(cli, ["node", "--help"], env={"ATOLL_VERSION": "1.2", "ATOLL_LOG": "json"})
    assert said.exit_code == 0 and "Commands:" in said.output


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_shell_gets_a_script(shell: str) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "atoll.comm.cli"],
        env=os.environ | {"_ATOLL_COMPLETE": f"{shell}_source"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "_ATOLL_COMPLETE" in done.stdout and "atoll" in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("atoll ", {"node", "coordinator", "doctor", "export"}),
        ("atoll no", {"node"}),
        ("atoll node ", {"join", "status", "leave", "worker", "install-service", "uninstall"}),
        ("atoll node un", {"uninstall"}),
        ("atoll node join --de", {"--detach"}),
    ],
)
def test_completion_lists_what_there_is_and_imports_little(words: str, expected: set[str]) -> None:
    probe = (
        "import sys, atoll.comm.cli as c\n"
        "try: c.main()\n"
        f"finally: print([m for m in {HEAVY} if m in sys.modules], file=sys.stderr)"
    )
    typed = words.split(" ")
    done = subprocess.run(
        [sys.executable, "-P", "-c", probe],
        env=os.environ
        | {"_ATOLL_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(len(typed) - 1)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    found = {line.split(",")[1] for line in done.stdout.split()}
    assert expected <= found and all(name.startswith(typed[-1]) for name in found)
    assert done.stderr == "[]\n"


@pytest.mark.parametrize(
    ("words", "expected"), [("atoll node inst", "install-service"), ("atoll node join --rol", "--role")]
)
def test_zsh_and_fish_get_what_their_scripts_ask_for(words: str, expected: str) -> None:
    """The answers that the scripts of `test_the_shell_gets_a_script` read: for zsh three lines each, type, value
    and help; for fish type, value, and behind a tab the help. Zsh counts words, fish says the last one."""
    *_, last = typed = words.split(" ")
    answers = dict[str, str]()
    for shell, position in (("zsh", str(len(typed) - 1)), ("fish", last)):
        asked = {"_ATOLL_COMPLETE": f"{shell}_complete", "COMP_WORDS": words, "COMP_CWORD": position}
        command = [sys.executable, "-P", "-m", "atoll.comm.cli"]
        done = subprocess.run(command, env=os.environ | asked, capture_output=True, text=True, timeout=60)
        answers[shell] = done.stdout
    kind, value, _ = answers["zsh"].splitlines()
    assert (kind, value) == ("plain", expected)
    assert answers["fish"].startswith(f"plain,{expected}\t") and answers["fish"].count("\n") == 1


def test_bash_completes_with_the_guides_line(tmp_path: Path) -> None:
    (line,) = [
        text.partition("   ")[0]
        for text in map(str.strip, (ROOT / "docs/node.md").read_text().splitlines())
        if "_ATOLL_COMPLETE=bash_source" in text
    ]
    (tmp_path / "atoll").write_text(f'#!/bin/sh\nexec {sys.executable} -P -m atoll.comm.cli "$@"\n')
    (tmp_path / "atoll").chmod(0o755)
    asked = (
        f"{line}\nCOMP_WORDS=(atoll node inst); COMP_CWORD=2\n"
        '"$(complete -p atoll | sed "s/.*-F \\([^ ]*\\).*/\\1/")" atoll inst node\n'
        'echo "${COMPREPLY[@]}"'
    )
    done = subprocess.run(
        ["bash", "--norc", "-c", asked],
        env=os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout == "install-service\n", done.stderr
