"""`atoll node top` over a real control socket, in a terminal of 80 columns and 24 rows."""

import asyncio
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from textual.pilot import Pilot
from textual.widgets import Static

from atoll.comm import extras
from atoll.comm.errors import ConfigError
from atoll.node import cli
from atoll.node.daemon import control_socket
from atoll.node.top import Top

LONG = "the coordinator says in many words why it waits for each of the members that are not there yet, " * 4
STATUS: dict[str, Any] = {
    **{"node_id": "n17", "name": "a machine in the basement " * 2, "run": "150m-of-the-institute"},
    **{"state": "inner", "reason": LONG, "command": "", "phase": "inner", "round": 41, "inner_step": 123},
    **{"tokens_per_s": 123456.7, "mfu": 0.41, "data_wait": 0.01, "loss": 2.345, "gradient_norm": 0.5},
    **{"learning_rate": 4e-4, "device_bytes": 80 << 30, "trainer_rss_bytes": 9 << 30, "recovering": ""},
    **{"recovery": {"chunks": 3, "of": 90}, "recovery_trouble": LONG, "coordinator_away_s": 31.0},
    **{"penalty": LONG, "run_phase": "collecting", "run_reason": "other words " + LONG, "peers": 7},
    **{"bytes_up": 123_456_789_012, "bytes_down": 1 << 44, "trouble": LONG, "threads": 8},
    **{"limits": {"upload": 20.0, "download": 50.0, "disk": 40.0}, "threads_reason": "", "disk_round": 41},
    **{"disk_bytes": 5, "disk_trouble": "", "remote_round": -1, "remote_trouble": "", "training_round": 42},
    **{"steps": 200, "steps_at_most": 400, "committed": 41, "run_tokens": 10**12, "members": 1000},
    **{"exchange": {"chunks": 12, "of": 40}, "credited_tokens": 10**11, "credited_rounds": 40},
}
DEADLINE = 60.0  # seconds


async def until(pilot: Pilot[None], so: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE):
        while not so():
            await pilot.pause(0.01)


def screen(app: Top) -> list[str]:
    """The rows of the terminal, as they are drawn."""
    return [strip.text.rstrip() for strip in app.screen._compositor.render_strips()]


def test_at_80_by_24_everything_is_seen_and_nothing_is_cut(tmp_path: Path) -> None:
    async def story() -> None:
        app = Top(lambda: control_socket.ask(tmp_path, "status"), every=0.01)
        async with control_socket.serve(tmp_path, lambda: STATUS, lambda: None):
            async with app.run_test(size=(80, 24)) as pilot:
                await until(pilot, lambda: "traffic" in (text := "\n".join(screen(app))) and "quit" in text)
                rows = screen(app)
                panel = str(app.query_one("#panel", Static).content).splitlines()
                assert len(rows) == 24 and panel == rows[: len(panel)], "each line of the panel is a row"
                assert app.query_one("#body").max_scroll_y == 0, "nothing is below the last row"
                labels = [line.split()[0] for line in panel if line[11] != " "]
                for label in ("step", "loss", "speed", "round", "members", "exchange", "traffic", "limits"):
                    assert label in labels
                assert "committed" in labels and "123 of 200" in "\n".join(rows)
                assert rows[-1].split() == ["q", "quit"]
                await pilot.press("q")
        assert app.return_code == 0

    asyncio.run(story())


def test_a_daemon_that_is_gone_is_asked_on_and_its_last_figures_stay(tmp_path: Path) -> None:
    said = STATUS | {"loss": 2.5}

    async def story() -> None:
        app = Top(lambda: control_socket.ask(tmp_path, "status"), every=0.01)
        async with app.run_test(size=(80, 24)) as pilot:
            await until(pilot, lambda: "no node runs" in " ".join(screen(app)))
            for loss in ("2.5000", "1.2500"):
                async with control_socket.serve(tmp_path, lambda: said, lambda: None):
                    await until(pilot, lambda: f"{said['loss']:.4f}" in " ".join(screen(app)))
                    assert "no node runs" not in " ".join(screen(app))
                await until(pilot, lambda: "no node runs" in " ".join(screen(app)))
                words = " ".join(" ".join(screen(app)).split())
                assert "asked on" in words and "what it said" in words and loss in words
                said["loss"] = 1.25
            await pilot.press("q")

    asyncio.run(story())


@pytest.mark.long
def test_in_another_terminal_the_lines_are_made_anew(tmp_path: Path) -> None:
    async def story() -> None:
        app = Top(lambda: control_socket.ask(tmp_path, "status"), every=0.01)
        async with control_socket.serve(tmp_path, lambda: STATUS, lambda: None):
            async with app.run_test(size=(80, 24)) as pilot:
                for width in (40, 120):
                    await pilot.resize_terminal(width, 24)
                    await until(pilot, lambda: "traffic" in str(app.query_one("#panel", Static).content))
                    lines = str(app.query_one("#panel", Static).content).splitlines()
                    assert max(map(len, lines)) in (width - 1, width - 2)
                await pilot.press("q")

    asyncio.run(story())


def test_where_its_library_is_not_installed_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "installed", lambda package: package != "textual")
    error = CliRunner().invoke(cli.node, ["top"]).exception
    assert isinstance(error, extras.MissingPackage)
    assert str(error).startswith("atoll node top needs textual") and "[top]" in str(error)


def test_without_a_terminal_nothing_is_drawn() -> None:
    error = CliRunner().invoke(cli.node, ["top"]).exception
    assert isinstance(error, ConfigError) and "needs a terminal" in str(error)


def test_the_daemon_does_not_import_its_library() -> None:
    code = "import sys; import atoll.node.cli, atoll.node.daemon.daemon; sys.exit('textual' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
