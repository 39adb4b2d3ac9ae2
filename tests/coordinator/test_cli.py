"""What the operator's commands take for granted."""

import json
from typing import Any

import pytest
from click.testing import CliRunner

from atoll.coordinator import cli


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
    ):
        done = CliRunner().invoke(cli.status, [*arguments, "--json"], catch_exceptions=False)
        assert (done.exit_code, json.loads(done.output)) == (0, {"run_id": "reef"})
        assert asked.pop() == expected
