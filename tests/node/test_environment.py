"""Every option of every command for volunteers, and every setting, by its environment variable; docs/volunteer.md
tells the rule."""

import re
from collections.abc import Iterator
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import click
import pytest
from click.core import ParameterSource

from atoll.comm.cli import PREFIX, cli
from atoll.node.config import NodeConfig
from atoll.node.settings import PREFIX as SETTINGS_PREFIX
from atoll.node.settings import load_settings

ROOT = Path(__file__).resolve().parents[2]
ARGUMENTS = {"url": "atoll://token@127.0.0.1:4700/demo", "host": "127.0.0.1:29400"}
Found = tuple[tuple[str, ...], click.Option]


def commands() -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """The words of each command that a volunteer has, and the command."""
    context = click.Context(cli)
    for name in ("doctor", "gateway", "node"):
        found = cli.get_command(context, name)
        assert found is not None
        if isinstance(found, click.Group):
            inner = click.Context(found)
            for word in found.list_commands(inner):
                command = found.get_command(inner, word)
                assert command is not None
                yield (name, word), command
        else:
            yield (name,), found


OPTIONS = [
    pytest.param(words, command, option, id=f"{' '.join(words)} --{option.name}")
    for words, command in commands()
    for option in command.params
    if isinstance(option, click.Option)
]


def variable(words: tuple[str, ...], option: click.Option) -> str:
    """By the rule: ATOLL, the command's words, and the option's."""
    return "_".join((PREFIX, *words, max(option.opts, key=len).lstrip("-"))).upper().replace("-", "_")


def sample(option: click.Option) -> tuple[str, Any]:
    """A value that is not the default one: as it is written, and as the command gets it."""
    match option.type:
        case click.Choice() as choice:
            other = next(word for word in choice.choices if word != option.default)
            return other, other
        case click.FloatRange() | click.IntRange():
            return "7", 7
        case click.Path(type=kind):
            return "/somewhere/else", Path("/somewhere/else") if kind is Path else "/somewhere/else"
        case _ if option.is_flag:
            return "1", True
        case _ if option.multiple:
            return "/ip4/203.0.113.7/tcp/4701 /ip4/203.0.113.8/tcp/4701", (
                "/ip4/203.0.113.7/tcp/4701",
                "/ip4/203.0.113.8/tcp/4701",
            )
        case _:
            return "7", 7 if isinstance(option.default, int) else "7"


def parsed(words: tuple[str, ...], command: click.Command) -> click.Context:
    arguments = [ARGUMENTS[p.name or ""] for p in command.params if isinstance(p, click.Argument) and p.required]
    prefix = "_".join((PREFIX, *words)).upper().replace("-", "_")
    return command.make_context(words[-1], arguments, auto_envvar_prefix=prefix)


@pytest.mark.parametrize(("words", "command", "option"), OPTIONS)
def test_an_option_can_be_given_by_its_variable(
    words: tuple[str, ...], command: click.Command, option: click.Option, monkeypatch: pytest.MonkeyPatch
) -> None:
    written, value = sample(option)
    monkeypatch.setenv(variable(words, option), written)
    context = parsed(words, command)
    assert context.params[option.name or ""] == value
    assert context.get_parameter_source(option.name or "") is ParameterSource.ENVIRONMENT


def test_a_service_is_not_installed_with_what_was_said_to_join(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATOLL_NODE_JOIN_NAME", "ada")
    found = dict(commands())
    assert parsed(("node", "join"), found["node", "join"]).params["name"] == "ada"
    assert parsed(("node", "install-service"), found["node", "install-service"]).params["name"] == ""


@pytest.mark.parametrize("words", [words for words, _ in commands() if words[0] in ("node", "doctor")])
def test_one_variable_is_the_state_directory_of_them_all(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATOLL_NODE_STATE_DIR", "/somewhere/else")
    command = dict(commands())[words]
    assert parsed(words, command).params["state_dir"] == Path("/somewhere/else")


SETTINGS: dict[str, str] = {
    **{
        "device": "cpu",
        "checkpointing": "full",
        "bf16": "true",
        "compile": "true",
        "rendezvous": "10.0.0.1:29400",
    },
    **{"congestion": "cubic", "data": "/texts", "model": "mine:build", "titan": "['--a.b=1']", "base": "/weights"},
    "stores": "['s3://bucket/']",
    **{"hours": "22:00-07:00", "gpu_temperature": "80", "gpu_duty": "0.5", "machines": "2", "machines_min": "1"},
    **{"durable": "false", "files": "true", "battery": "false", "metered": "false", "idle_only": "true"},
}


@pytest.mark.parametrize("name", [item.name for item in fields(NodeConfig)])
def test_a_setting_can_be_given_by_its_variable(name: str, tmp_path: Path) -> None:
    environment = {SETTINGS_PREFIX + name.upper(): SETTINGS.get(name, "7")}
    if name.startswith("machines"):  # which need a place to meet, and one of them the other
        environment |= {f"{SETTINGS_PREFIX}RENDEZVOUS": "10.0.0.1:29400", f"{SETTINGS_PREFIX}MACHINES": "2"}
    found, usual = (asdict(load_settings(tmp_path, (), variables)) for variables in (environment, {}))
    assert found[name] != usual[name]


def test_the_rule_is_on_the_volunteers_page_and_right() -> None:
    page = (ROOT / "docs" / "volunteer.md").read_text()
    named = set(re.findall(r"`(ATOLL_[A-Z_]+)[=`]", page))
    right = {
        variable(words, option)
        for words, command in commands()
        for option in command.params
        if isinstance(option, click.Option)
    }
    settings = {SETTINGS_PREFIX + item.name.upper() for item in fields(NodeConfig)}
    assert {"ATOLL_NODE_JOIN_NAME", "ATOLL_NODE_DEVICE", "ATOLL_NODE_PAUSE_FOR", "ATOLL_DOCTOR_LEAF"} <= named
    assert named <= right | settings | {"ATOLL_NODE_STATE_DIR", "ATOLL_LOG"}
