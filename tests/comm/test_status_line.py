"""The status line of a terminal stays below the log; where there is no terminal there is none."""

import io
import logging

import pytest
from terminals import Terminal

from atoll.comm import log
from atoll.comm.status_line import StatusLine, bar


@pytest.fixture(autouse=True)
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "60")


def test_lines_of_the_log_go_above_it_and_it_is_taken_away_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", terminal := Terminal())
    log.setup(log.LogSetup("node"))
    assert log.status_line.show("1 of 2")
    logging.getLogger("atoll.node").info("a line")
    log.status_line.show("2 of 2")
    above, below = terminal.screen
    assert above.endswith("a line") and below == "2 of 2"
    log.status_line.show("")
    logging.getLogger("atoll.node").info("another")
    assert [line[-7:] for line in terminal.screen] == [" a line", "another", ""]


def test_it_is_cut_to_the_terminal_and_what_a_terminal_would_obey_is_shown() -> None:
    line = StatusLine()
    line.use(terminal := Terminal())
    line.show("\x1b[2J" + "x" * 100)
    assert terminal.screen[-1] == "\\x1b[2J" + "x" * 52


@pytest.mark.parametrize(("stream", "term"), [(io.StringIO(), "xterm"), (Terminal(), "dumb"), (None, "xterm")])
def test_without_a_terminal_there_is_none(
    stream: io.StringIO | None, term: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", term)
    line = StatusLine()
    line.use(stream)
    assert not line.show("1 of 2")
    with line.hidden():
        pass
    assert stream is None or stream.getvalue() == ""


def test_a_bar_is_as_full_as_what_it_shows() -> None:
    assert [bar(share, 4) for share in (0, 0.25, 0.99, 1, 7)] == [
        *("[....]   0 %", "[#...]  25 %", "[###.]  99 %", "[####] 100 %", "[####] 100 %"),
    ]
