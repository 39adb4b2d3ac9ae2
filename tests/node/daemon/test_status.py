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


def test_figures_are_told_in_units_for_people_and_an_unknown_utilisation_as_such() -> None:
    said = {
        "tokens_per_s": 1234.5,
        "mfu": None,
        "data_wait": 0.012,
        "learning_rate": 0.0004,
        "limits": {"disk": 1},
    }
    assert dict(cli.status_lines(said)) == {
        "tokens per s": "1,234.50",
        "mfu": "unknown",
        "data wait": "1.2 %",
        "learning rate": "0.0004",
    }
    assert dict(cli.status_lines({"tokens_per_s": 9.0, "mfu": 0.4123}))["mfu"] == "41.2 %"
    limits = {"hours": "22:00-07:00", "battery": False, "metered": True, "upload": 20.0, "threads": 0, "disk": 9.0}
    assert dict(cli.status_lines({"limits": limits})) == {"limits": "hours=22:00-07:00 battery=false upload=20"}
    assert "mfu" not in dict(cli.status_lines({"tokens_per_s": 0.0, "mfu": None})), "it takes no steps"
