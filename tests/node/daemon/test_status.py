"""What `atoll node status` shows of what the daemon says."""

import pytest
from click.testing import CliRunner

from atoll.node import cli
from atoll.node.daemon import control_socket

SAID = {"name": "ada", "phase": "waiting", "round": 2, "disk_round": -1, "recovery_trouble": "", "loss": 1.5}


@pytest.mark.parametrize("away", [0.0, 34.4])
def test_it_tells_that_the_coordinator_is_away_and_nothing_that_is_not_known(
    away: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_socket, "ask", lambda folder, what: SAID | {"coordinator_away_s": away})
    shown = CliRunner().invoke(cli.node, ["status"], catch_exceptions=False).output
    assert ("the coordinator has not answered for 34 s" in shown) == (away > 0)
    assert "state of round  2" in shown and "1.50" in shown and "-1" not in shown and "trouble" not in shown
