"""Log lines say when, how grave, what, and of which process, run, node and round; how much is logged, and where
to, is the command line's to say. Who collects logs by OpenTelemetry gets them, too."""

import asyncio
import json
import logging
import sys
import threading
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from opentelemetry.instrumentation.logging.handler import LoggingHandler
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import InMemoryLogRecordExporter, SimpleLogRecordProcessor

from atoll.comm import cli, log
from atoll.comm.errors import ConfigError, ResourceError
from atoll.comm.log_lines import ending_in, sentence_of
from atoll.comm.terminal import visible
from atoll.coordinator import server
from atoll.coordinator.cli import coordinator
from atoll.node.cli import node
from atoll.node.daemon import daemon

ROOT = Path(__file__).resolve().parents[2]


def lines(capsys: pytest.CaptureFixture[str], level: str) -> list[str]:
    """What three messages of ours and two of a library come to at this level."""
    log.setup(log.LogSetup("node", level))
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


def test_json_lines_say_what_the_process_knows_and_null_for_the_rest(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATOLL_LOG", "json")
    before = datetime.now().astimezone()
    first, second, third = map(json.loads, lines(capsys, "info"))
    when = datetime.fromisoformat(first["time"])
    assert abs(when.timestamp() - first["at"]) < 0.002 and when.utcoffset() == before.utcoffset()
    assert before.timestamp() - 0.002 <= first["at"] <= datetime.now().timestamp()
    known = {"process": "node", "run": None, "node": None, "round": None}
    assert first == {key: first[key] for key in ("at", "time")} | {"level": "info", "what": "a round"} | known | {
        "round": 7
    }
    assert (second["what"], third["level"]) == ("trouble", "error") and second | known == second


def test_what_a_line_is_about_is_the_processs_unless_the_line_says_otherwise(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATOLL_LOG", "json")
    log.setup(log.LogSetup("coordinator", "debug"))
    ours = logging.getLogger("atoll.coordinator")
    log.about(run="deep")
    log.about(round=3)
    ours.info("of the run")
    ours.info("of a node", extra={"fields": {"node": "n07", "round": None}})
    logging.getLogger("a.library").warning("of a \udce9 name")
    found = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    about = [tuple(line[key] for key in log.SUBJECT) for line in found]
    assert about == [
        ("coordinator", "deep", None, 3),
        ("coordinator", "deep", "n07", 3),
        ("coordinator", "deep", None, 3),
    ]
    log.about(node="n01")
    assert log.beside("door") == log.LogSetup("door", "debug", "", "deep", "n01"), (
        "its rounds it has to hear of itself"
    )


@pytest.mark.parametrize("as_json", [False, True], ids=["plain", "json"])
def test_what_was_logged_can_be_read_again(
    as_json: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATOLL_LOG", "json" if as_json else "")
    log.setup(log.LogSetup("trainer rank 0"))
    ours = logging.getLogger("atoll.trainer")
    ours.info("a step")
    ours.error("no: such thing")
    print("{of a library}", file=sys.stderr)
    thread = threading.Thread(target=dict[str, int]().__getitem__, args=("nothing",))
    thread.start()
    thread.join()
    said = capsys.readouterr().err.splitlines()
    sentences = [sentence_of(line) for line in said]
    assert sentences[:3] == ["a step", "no: such thing", "{of a library}"]
    assert sentences[-1] == "KeyError: 'nothing'", "what ends a thread is logged, too"
    assert len(sentences) == 4 if as_json else "a fault of the program" in sentences
    assert ending_in(said) is None
    log.say_ending("the disk is full:\nmake room", 3)
    said += capsys.readouterr().err.splitlines()
    assert ending_in(said) == "the disk is full:\nmake room"


def test_opentelemetrys_handler_stays_and_gets_the_same_as_attributes() -> None:
    sent, root = InMemoryLogRecordExporter(), logging.getLogger()  # type: ignore[no-untyped-call]
    provider = LoggerProvider()
    provider.add_log_record_processor(SimpleLogRecordProcessor(sent))
    collector, former = LoggingHandler(logger_provider=provider), logging.StreamHandler()
    root.addHandler(former)
    root.addHandler(collector)
    log.setup(log.LogSetup("node", run="deep"))
    log.setup(log.LogSetup("node", run="deep", node="n07"))
    assert collector in root.handlers and former not in root.handlers and len(root.handlers) == 2
    logging.getLogger("atoll.node").warning("late", extra={"fields": {"round": 7}})
    (record,) = (data.log_record for data in sent.get_finished_logs())
    attributes = {"atoll.process": "node", "atoll.run": "deep", "atoll.node": "n07", "atoll.round": 7}
    assert (record.body, record.severity_text, record.attributes) == ("late", "WARN", attributes)


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


@pytest.mark.parametrize(
    "words",
    [
        ["coordinator", "start", "demo"],
        ["node", "join", "atoll://token@127.0.0.1:4700/demo"],
        ["node", "worker", "127.0.0.1:4703"],
        ["gateway"],
    ],
    ids=" ".join,
)
def test_every_long_command_takes_a_log_file_from_the_environment_too(words: list[str], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    path = tmp_path / "file" / "log"
    command = [word for word in words if word.isalpha() and word != "demo"]
    name = "_".join(["ATOLL", *command, "LOG_FILE"]).upper()
    done = CliRunner().invoke(cli.cli, [*words, "--state-dir", str(tmp_path)], env={name: str(path)})
    assert isinstance(done.exception, ResourceError) and f"cannot write the log {path}" in str(done.exception)


def test_words_of_others_do_nothing_to_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    hostile = "\x1b[2J\x1b]0;title\x07\r\n\x9b1m\u202egnp"
    log.setup(log.LogSetup("node"))
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
