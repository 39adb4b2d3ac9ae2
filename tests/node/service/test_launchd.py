"""The launch agent's property list, as macOS would read it. No such machine is needed, and none was there."""

import plistlib
import subprocess
import sys
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


# launchd.plist(5), of macOS 14: the keys that a job may have, as far as a node's could, and what kind each is of.
KEYS: dict[str, type] = {
    **{"Label": str, "ProgramArguments": list, "EnvironmentVariables": dict, "WorkingDirectory": str},
    **{"RunAtLoad": bool, "KeepAlive": dict, "ThrottleInterval": int, "ExitTimeOut": int, "Nice": int},
    **{"ProcessType": str, "StandardOutPath": str, "StandardErrorPath": str, "Program": str, "Umask": int},
    **{
        "LowPriorityIO": bool,
        "LimitLoadToSessionType": str,
        "SoftResourceLimits": dict,
        "AbandonProcessGroup": bool,
    },
}
KEEP_ALIVE = {"SuccessfulExit", "Crashed", "PathState", "OtherJobEnabled"}
PROCESS_TYPES = {"Background", "Standard", "Adaptive", "Interactive"}


def test_every_key_is_one_that_launchd_documents_and_of_its_kind() -> None:
    found = read("join", "@/s/join-url", "--name=ada <&> 50%")
    assert {key: type(value) for key, value in found.items()} == {key: KEYS[key] for key in found}
    assert set(found["KeepAlive"]) <= KEEP_ALIVE and found["ProcessType"] in PROCESS_TYPES  # type: ignore[call-overload]
    environment, words = found["EnvironmentVariables"], found["ProgramArguments"]
    assert isinstance(environment, dict) and isinstance(words, list)
    assert all(isinstance(text, str) for text in (*environment, *environment.values(), *words))
    assert "--name=ada <&> 50%" in words and -20 <= int(str(found["Nice"])) <= 20
    assert words[0].startswith("/") and str(found["WorkingDirectory"]).startswith("/"), "it has no PATH and no ~"


def test_it_is_the_xml_that_macos_reads() -> None:
    data = plist(Service("atoll-node", ("/usr/bin/python3",), {}, Path("/tmp"), LOG))
    assert data.startswith(b"<?xml") and b"-//Apple//DTD PLIST 1.0//EN" in data


def test_a_sentence_before_anything_was_done_is_in_its_log_for_it_has_no_other_place(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "node.log"
    words = [
        "-P",
        "-m",
        "atoll.comm.cli",
        "node",
        "join",
        "no-url",
        f"--state-dir={tmp_path}",
        f"--log-file={log}",
    ]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and done.stderr == "" and "atoll: " in log.read_text()
