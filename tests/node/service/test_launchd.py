"""The launch agent's property list, as macOS would read it. No such machine is needed, and none was there."""

import plistlib
from pathlib import Path

from atoll.node.service.launchd import plist
from atoll.node.service.systemd import Service

LOG = Path("/s/logs/node.log")


def read(*words: str) -> dict[str, object]:
    service = Service("atoll-node", ("/usr/bin/python3", *words), {"PATH": "/bin"}, Path("/tmp"), LOG)
    found: dict[str, object] = plistlib.loads(plist(service))
    return found


def test_it_is_started_at_login_and_after_whatever_does_not_end_with_0() -> None:
    found = read("join", "@/s/join-url")
    assert found["Label"] == "atoll-node" and found["RunAtLoad"] is True
    assert found["KeepAlive"] == {"SuccessfulExit": False}
    assert found["EnvironmentVariables"] == {"PATH": "/bin", "ATOLL_SERVICE": "launchd"}
    assert found["ProgramArguments"] == ["/usr/bin/python3", "join", "@/s/join-url", f"--log-file={LOG}"]


def test_the_log_files_option_stands_before_the_trainers_command_and_once() -> None:
    assert read("join", "--", "python", "train.py", "--log-file=theirs")["ProgramArguments"] == [
        *("/usr/bin/python3", "join", f"--log-file={LOG}", "--", "python", "train.py", "--log-file=theirs")
    ]
    assert read("join", "--log-file=mine")["ProgramArguments"] == ["/usr/bin/python3", "join", "--log-file=mine"]
