"""`atoll bench recovery` with real processes."""

import json

import pytest
from click.testing import CliRunner

from atoll.comm.errors import ResourceError
from atoll.comm.transport.fetch_client import MAX_AHEAD_BYTES
from atoll.node.bench.recovery import recovery
from atoll.node.recovery.recovery import MIN_STREAMS

NUMEL = 2_000_000


@pytest.mark.e2e
@pytest.mark.long
def test_the_receiver_has_the_state_and_every_byte_of_it_came_from_a_donor() -> None:
    said = CliRunner().invoke(recovery, ["--donors", "2", "--numel", str(NUMEL), "--link", "1000", "--json"])
    assert said.exit_code == 0, said.output
    figures = json.loads(said.stdout)
    assert figures["donors"] == 2 and figures["numel"] == NUMEL
    assert figures["twice"] >= 0
    assert sum(figures["per_donor"].values()) == pytest.approx(8 * NUMEL * (1 + figures["twice"]), rel=1e-9)
    assert figures["bytes_per_s"] == pytest.approx(figures["bytes"] / figures["seconds"])
    assert figures["link_share"] == pytest.approx(figures["bytes_per_s"] / 125e6)


@pytest.mark.e2e
@pytest.mark.long
@pytest.mark.parametrize("killed", ["donor", "receiver"])
def test_somebody_who_is_killed_half_way_costs_next_to_nothing(killed: str) -> None:
    numel = 8_000_000
    said = CliRunner().invoke(recovery, ["--donors", "2", "--numel", str(numel), "--kill", killed, "--json"])
    assert said.exit_code == 0, said.output
    figures, whole = json.loads(said.stdout), 8 * numel  # bytes
    assert figures["killed"] == killed
    if killed == "donor":
        assert figures["twice"] == 0, "the one who is left was asked for what had come"
        assert figures["bytes"] < 1.1 * whole
        return
    # Where a donor is silent for `LATE_AFTER` at the end, the other one is asked for what its streams are at.
    late = 2 * MIN_STREAMS * MAX_AHEAD_BYTES
    assert 0 <= figures["twice"] * whole <= late, "what had come before the death came again"
    assert figures["bytes"] < 0.53 * whole + late


def test_a_prefix_that_is_no_command_is_said() -> None:
    said = CliRunner().invoke(recovery, ["--donors", "1", "--numel", "1000", "--launch-prefix", "no-such-thing"])
    assert said.exit_code and "no-such-thing" in str(said.exception)


def test_a_host_of_another_machine_is_said() -> None:
    said = CliRunner().invoke(recovery, ["--donors", "1", "--numel", "1000", "--host", "192.0.2.{i}"])
    assert isinstance(said.exception, ResourceError) and "--host is '192.0.2.1'" in str(said.exception)
