"""The unit file says what was meant, in systemd's own words."""

import os
import shutil
import subprocess
from configparser import RawConfigParser
from pathlib import Path

import pytest

from atoll.node.service.systemd import FIRST_WITH_STEPS, Service, quoted, unit_text

WORDS = ("/usr/bin/env", "node", 'a "quoted" word', "50% of $HOME", "back\\slash", "two\nlines", "--name=ada b")
SERVICE = Service(
    "atoll-node", WORDS, {"PATH": "/bin:/opt/100%/bin", "HF_HOME": "/a $b"}, Path("/tmp/50%"), Path("/x.log")
)


def read(text: str) -> RawConfigParser:
    parser = RawConfigParser(strict=False)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(text)
    return parser


def unquoted(word: str) -> str:
    """As systemd reads it: systemd.service(5), Command lines."""
    assert word[0] == word[-1] == '"'
    text = word[1:-1].replace("%%", "%").replace("$$", "$").replace("\\n", "\n")
    return text.replace('\\"', '"').replace("\\\\", "\\")


def test_what_is_of_no_use_is_not_tried_again_and_all_else_after_pauses_that_grow() -> None:
    service = read(unit_text(SERVICE, FIRST_WITH_STEPS))["Service"]
    assert service["Restart"] == "on-failure" and service["RestartPreventExitStatus"] == "2 5 130"
    assert int(service["RestartSec"]) < int(service["RestartMaxDelaySec"]) and int(service["RestartSteps"]) > 1
    assert read(unit_text(SERVICE, FIRST_WITH_STEPS))["Unit"]["StartLimitIntervalSec"] == "0"
    before = read(unit_text(SERVICE, FIRST_WITH_STEPS - 1))["Service"]
    assert "RestartSteps" not in before and "RestartMaxDelaySec" not in before
    assert int(before["RestartSec"]) >= 30, "as it cannot grow"


def test_it_has_joined_when_systemd_is_told_so_and_ends_by_itself_when_it_is_stopped() -> None:
    service = read(unit_text(SERVICE, 252))["Service"]
    assert (service["Type"], service["KillMode"]) == ("notify", "mixed")
    assert int(service["TimeoutStopSec"]) > 60, "a script of the volunteer's may take that"
    assert read(unit_text(SERVICE, 252))["Install"]["WantedBy"] == "default.target"


def test_every_word_comes_back_as_it_was() -> None:
    line = read(unit_text(SERVICE, 252))["Service"]["ExecStart"]
    assert line == " ".join(map(quoted, WORDS))
    assert tuple(unquoted(quoted(word)) for word in WORDS) == WORDS


def test_paths_and_variables_are_taken_literally() -> None:
    text = unit_text(SERVICE, 252)
    assert "WorkingDirectory=-/tmp/50%%\n" in text
    assert 'Environment="PATH=/bin:/opt/100%%/bin"\n' in text and 'Environment="HF_HOME=/a $b"\n' in text


@pytest.mark.parametrize("version", [252, 256])
def test_systemd_accepts_it(version: int, tmp_path: Path) -> None:
    """Where systemd is; the tests above hold it to what was meant without it."""
    unit = tmp_path / "atoll-node.service"
    unit.write_text(unit_text(SERVICE, version))
    if (verify := shutil.which("systemd-analyze")) is None:
        assert read(unit.read_text()).sections() == ["Unit", "Service", "Install"]
        return
    said = verified(verify, unit)
    lines = [line for line in said.splitlines() if "RestartSteps" not in line and "RestartMaxDelaySec" not in line]
    assert not lines, said  # an older systemd does not know the pauses that grow
    unit.write_text(unit.read_text().replace("KillMode=mixed", "KillMode=gently"))
    assert "gently" in verified(verify, unit), "it looks at what is there"


def verified(verify: str, unit: Path) -> str:
    """What systemd has against a unit."""
    command = [verify, "verify", "--user", "--man=no", str(unit)]
    environment = os.environ | {"XDG_RUNTIME_DIR": str(unit.parent)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    return done.stdout + done.stderr
