"""What the operator's commands take for granted."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from atoll.comm.config.round_time import exchanged_bytes, flops_per_round
from atoll.comm.config.run import RunConfig
from atoll.comm.errors import ConfigError
from atoll.coordinator import cli
from atoll.coordinator.service.journal import Journal


def test_status_asks_the_page_where_a_coordinator_has_it_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[str]()

    def fetch(url: str) -> dict[str, Any]:
        asked.append(url)
        return {"run_id": "reef"}

    monkeypatch.setattr(cli, "fetch", fetch)
    (page,) = [option.default for option in cli.start.params if option.name == "http"]
    for arguments, expected in (
        ([], f"http://{page}/api/run"),
        (["http://reef:80/"], "http://reef:80/api/run"),
        (["reef:80"], "http://reef:80/api/run"),
    ):
        done = CliRunner().invoke(cli.status, [*arguments, "--json"], catch_exceptions=False)
        assert (done.exit_code, json.loads(done.output)) == (0, {"run_id": "reef"})
        assert asked.pop() == expected


def test_status_finds_the_page_of_a_coordinator_by_its_state_directory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = CliRunner().invoke(cli.status, ["--state-dir", str(tmp_path)])
    assert isinstance(found.exception, ConfigError) and "holds no run" in str(found.exception)
    journal = Journal(tmp_path)
    journal.set_meta("http", "http://127.0.0.1:21701")
    journal.close()
    monkeypatch.setattr(cli, "fetch", lambda url: {"asked": url})
    done = CliRunner().invoke(cli.status, ["--state-dir", str(tmp_path), "--json"], catch_exceptions=False)
    assert json.loads(done.output) == {"asked": "http://127.0.0.1:21701/api/run"}


def test_check_says_what_a_round_comes_to() -> None:
    done = CliRunner().invoke(cli.check_, ["demo", "inner.batch_size=1000", "members.start=8"])
    assert done.exit_code == 0, done.output
    assert "engine: builtin\n" in done.output, "as the config has it"
    run = RunConfig()  # whose model the demo has
    run.inner.batch_size, run.rounds.inner_steps = 1000, 36
    work, sent = flops_per_round(run), exchanged_bytes(run, 8)
    for said in (
        f"128,000 tokens a node, a round 36 steps of {work / 36:.3g} FLOP: {work / 1e15:.3g} s at 1 PFLOP/s",
        f"between 8 members is {sent / 1e6:.3g} MB out and in: {8 * sent / 1e8:.3g} s at 100 Mbit/s",
    ):
        assert said in done.output
