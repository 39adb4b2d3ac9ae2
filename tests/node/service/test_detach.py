"""Who starts a node in the background hears that it has joined, or why not."""

import sys
from pathlib import Path

import psutil
import pytest

from atoll.comm.exit_codes import ExitCode
from atoll.node.service.detach import NotStarted, start_detached

READY = "from atoll.comm.readiness import say_ready; say_ready()\n"
LOG = "from atoll.comm import log; import sys; log.setup(log.LogSetup('node', file=sys.argv[1]))\n"
END = "from atoll.comm.log import say_ending; say_ending('no such run:\\nask', 5); raise SystemExit(5)\n"


def start(program: str, log: Path, **environment: str) -> int:
    return start_detached([sys.executable, "-P", "-c", program, str(log)], log, environment)


def test_it_lives_on_in_a_session_of_its_own_without_the_joins_variables(tmp_path: Path) -> None:
    told = tmp_path / "told"
    program = (
        "import os, time\n"
        f"open({str(told)!r}, 'w').write(f'{{os.getsid(0)}} {{sorted(os.environ)}}')\n{READY}time.sleep(60)"
    )
    process = psutil.Process(start(program, tmp_path / "log", ATOLL_NODE_JOIN_DETACH="1", ATOLL_LOG="json"))
    try:
        session, _, names = told.read_text().partition(" ")
        assert int(session) == process.pid and process.is_running()
        assert "ATOLL_LOG" in names and "ATOLL_NODE_JOIN_DETACH" not in names
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("lines", ["plain", "json"])
@pytest.mark.parametrize("logs", ["", LOG], ids=["before it has a log", "in its log"])
def test_what_ended_it_is_its_starters_to_say_with_the_same_code(logs: str, lines: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("atoll: the sentence of another day\n")
    with pytest.raises(NotStarted, match="^no such run:\nask$") as failed:
        start(f"{logs}{END}", log, ATOLL_LOG=lines)
    assert failed.value.exit_code is ExitCode.REFUSED


def test_one_that_dies_without_a_word_is_told_of_too(tmp_path: Path) -> None:
    with pytest.raises(NotStarted, match="the node was ended by signal 9") as failed:
        start("import os; os.kill(os.getpid(), 9)", tmp_path / "log")
    assert failed.value.exit_code is ExitCode.FAILED
    with pytest.raises(NotStarted, match="ended with exit code 1; it last said: ZeroDivisionError"):
        start("1 / 0", tmp_path / "log")
    with pytest.raises(
        NotStarted, match="ended with exit code 1; it last said: ZeroDivisionError: division by zero"
    ):
        start(f"{LOG}1 / 0", tmp_path / "log", ATOLL_LOG="json")
