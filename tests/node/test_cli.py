"""`atoll node join`: what is behind `--`."""

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from atoll.comm.errors import ConfigError
from atoll.comm.invite import Invite
from atoll.node import cli
from atoll.node.config import NodeConfig
from atoll.node.daemon import daemon
from atoll.node.daemon.state_dir import JoinOptions

URL = "atoll://127.0.0.1:7/reef?token=abc"


class Joined(Exception):
    """A daemon would have started."""


def join(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[NodeConfig, JoinOptions]:
    """What the daemon is started with."""

    def start(invite: Any, config: NodeConfig, options: JoinOptions) -> None:
        raise Joined(config, options)

    monkeypatch.setattr(daemon, "Daemon", start)
    monkeypatch.setattr(cli, "parse", lambda url: Invite("127.0.0.1:7", "reef", "abc"))
    with pytest.raises(Joined) as joined:
        CliRunner().invoke(cli.node, ["join", URL, *arguments], catch_exceptions=False)
    config, options = joined.value.args
    return config, options


def test_everything_behind_the_dashes_is_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config, options = join(
        monkeypatch,
        "threads=3",
        "--state-dir",
        "here",
        *("--", "sh", "train.sh", "--name", "x", "threads=7", "--", "-h"),
    )
    assert options.command == ("sh", "train.sh", "--name", "x", "threads=7", "--", "-h")
    assert config.threads == 3 and options.name != "x"
    assert options.state_dir == tmp_path / "here", "a script may go elsewhere"
    assert join(monkeypatch, "--name", "y")[1].command == ()


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["--"], "there is no command behind --"),
        (["machines=2", "rendezvous=a:1", "--", "sh"], "machines is 2 and there is a command behind --"),
        (["device=cuda", "--", "sh"], "`device=mps` and `ranks` are of the built-in trainer"),
        (["ranks=4", "--", "sh"], "`device=mps` and `ranks` are of the built-in trainer"),
        (["--role", "reducer", "--", "sh"], "--role reducer has no trainer, and a command behind -- is one"),
        (
            ["--", "no-such-program"],
            "cannot start the command no-such-program: there is none in the folders of PATH",
        ),
        (
            ["--", "./train.sh"],
            "cannot start the command ./train.sh: there is no such file, or it cannot be executed",
        ),
    ],
)
def test_a_command_that_cannot_be_one_is_refused_before_anything_is_started(
    arguments: list[str], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli, "parse", lambda url: None)
    (tmp_path / "train.sh").write_text("exit")  # not executable
    with pytest.raises(ConfigError) as refused:
        CliRunner().invoke(cli.node, ["join", URL, *arguments], catch_exceptions=False)
    assert sentence in str(refused.value)


def test_the_usage_tells_of_the_command() -> None:
    assert "[-- COMMAND ...]" in CliRunner().invoke(cli.node, ["join", "--help"]).output


def test_the_help_lists_every_setting_of_the_node_and_no_other() -> None:
    """Between `OVERRIDES:` and the sentence on the command behind the dashes; figures in brackets are units and
    what holds without the setting."""
    text = " ".join(CliRunner().invoke(cli.node, ["join", "--help"]).output.split())
    listed = text.partition("key=value OVERRIDES: ")[2].partition(". A command behind --")[0]
    names = [name for name in re.split(r"[,; ]+", re.sub(r"\(.*?\)", "", listed)) if name]
    assert sorted(names) == sorted(field.name for field in fields(NodeConfig))
