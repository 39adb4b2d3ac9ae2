"""Log lines say when, how grave and what; how much is logged is the command line's to say."""

import asyncio
import json
import logging
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from atoll.comm import cli, log
from atoll.comm.errors import ConfigError
from atoll.comm.terminal import visible
from atoll.coordinator import server
from atoll.coordinator.cli import coordinator
from atoll.node.cli import node
from atoll.node.daemon import daemon

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """Logging is the process's: it is put back."""
    root, ours = logging.getLogger(), logging.getLogger("atoll")
    handlers, levels = root.handlers[:], (root.level, ours.level)
    yield
    root.handlers[:] = handlers
    root.setLevel(levels[0])
    ours.setLevel(levels[1])


def lines(capsys: pytest.CaptureFixture[str], level: str) -> list[str]:
    """What three messages of ours and two of a library come to at this level."""
    log.setup(level)
    ours, other = logging.getLogger("atoll.node"), logging.getLogger("a.library")
    ours.debug("small")
    ours.info("a round", extra={"fields": {"round": 7}})
    ours.warning("trouble")
    other.debug("chatter")
    other.error("broken")
    return capsys.readouterr().err.splitlines()


def test_a_plain_line_begins_with_date_time_and_offset(capsys: pytest.CaptureFixture[str]) -> None:
    before = datetime.now().astimezone().replace(microsecond=0)
    (line,) = lines(capsys, "info")[:1]
    when, rest = line.split(" ", 1)
    assert before <= datetime.fromisoformat(when) <= datetime.now().astimezone()
    assert rest == "a round"


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        ("debug", ["debug: small", "a round", "warning: trouble", "error: broken"]),
        ("info", ["a round", "warning: trouble", "error: broken"]),
        ("warning", ["warning: trouble", "error: broken"]),
        ("error", ["error: broken"]),
    ],
)
def test_the_level_bounds_what_is_logged_and_debug_is_for_atoll_alone(
    level: str, expected: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert [line.split(" ", 1)[1] for line in lines(capsys, level)] == expected


def test_json_lines_have_the_time_the_level_and_the_fields(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATOLL_LOG", "json")
    first = json.loads(lines(capsys, "info")[0])
    assert first | {"at": 0} == {"at": 0, "level": "info", "what": "a round", "round": 7}
    assert datetime.fromtimestamp(first["at"]).year >= 2024


def test_the_level_is_an_option_of_every_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def nothing(*_: Any) -> None:
        await asyncio.sleep(0)

    monkeypatch.setattr(server, "serve", nothing)
    monkeypatch.setattr(daemon.Daemon, "run", nothing)
    start = ["start", str(ROOT / "configs/demo.yaml"), "--state-dir", str(tmp_path)]
    join = ["join", "atoll://token@127.0.0.1:4700/demo", "--state-dir", str(tmp_path)]
    for group, command in ((coordinator, start), (node, join)):
        for given, expected in (([], logging.INFO), (["--log-level", "debug"], logging.DEBUG)):
            done = CliRunner().invoke(group, [*command, *given], catch_exceptions=False)
            assert done.exit_code == 0, done.output
            assert logging.getLogger("atoll").level == expected
        assert CliRunner().invoke(group, [*command, "--log-level", "loud"]).exit_code == 2


def test_words_of_others_do_nothing_to_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    hostile = "\x1b[2J\x1b]0;title\x07\r\n\x9b1m\u202egnp"
    log.setup()
    logging.getLogger("atoll.node").info(f"the server says {hostile}")
    (line,) = capsys.readouterr().err.removesuffix("\n").split("\n")
    assert line.endswith(r"the server says \x1b[2J\x1b]0;title\x07\r\n\x9b1m\u202egnp") and line.isprintable()

    def fail(**_: Any) -> None:
        raise ConfigError(hostile)

    monkeypatch.setattr(cli, "cli", fail)
    with pytest.raises(SystemExit):
        cli.main()
    assert capsys.readouterr().err.replace("\n", "").isprintable()
    assert visible(f"a\tb\n{hostile}", keep="\t\n").startswith("a\tb\n\\x1b")
