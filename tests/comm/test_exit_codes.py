"""One table of exit codes: the page, the help and a service follow it."""

import subprocess
import sys

import pytest
from click.testing import CliRunner
from reference.exit_codes import kinds

from atoll.comm.cli import cli
from atoll.comm.errors import Refused, Unreachable
from atoll.comm.exit_codes import ExitCode, final_codes

ATOLL = [sys.executable, "-P", "-m", "atoll.comm.cli"]


def test_every_code_is_explained_and_codes_are_what_scripts_know() -> None:
    assert [int(code) for code in ExitCode] == [0, 1, 2, 3, 4, 5, 6, 7, 130]
    assert all(code.summary and code.meaning and code.remedy for code in ExitCode)
    assert (Unreachable.exit_code, Refused.exit_code) == (4, 5)


def test_every_error_says_what_it_means() -> None:
    found = {name: (code, said) for name, code, said in kinds()}
    assert len(found) > 20 and all(said for _, said in found.values())
    assert found["TrainerFailed"][0] is ExitCode.RESOURCE, "its own code"
    assert found["RoundMovedOn"][0] is ExitCode.UNREACHABLE, "that of its base"


def test_the_help_lists_them() -> None:
    said = " ".join(CliRunner().invoke(cli, ["--help"]).output.split())
    assert all(f"{code:d} {code.summary}" in said for code in ExitCode)


@pytest.mark.parametrize(("service", "code"), [("", 2), ("systemd", 2), ("launchd", 0)])
def test_where_0_alone_means_no_other_try_a_command_that_should_not_be_tried_again_ends_with_it(
    service: str, code: int
) -> None:
    command = [*ATOLL, "node", "join", "no-url"]
    done = subprocess.run(command, capture_output=True, text=True, env={"ATOLL_SERVICE": service, "HOME": "/"})
    assert done.returncode == code and done.stderr.startswith("atoll: ")
    command = [*ATOLL, "node", "status", "--state-dir", "/no/such/folder"]
    tried = subprocess.run(command, capture_output=True, env={"ATOLL_SERVICE": service, "HOME": "/"})
    assert tried.returncode == ExitCode.UNREACHABLE, "this may go better"
    assert set(final_codes()) == {0, 2, 5, 130}
