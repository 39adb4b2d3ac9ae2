"""Installs and removes a node's service: of the user's systemd, or of launchd on macOS. No root is needed."""

import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from atoll.comm.errors import ResourceError
from atoll.comm.exit_codes import ExitCode, final_codes
from atoll.comm.files import atomic_write, write_all
from atoll.comm.xdg import config_home, default_state_dir
from atoll.node.service import launchd, systemd
from atoll.node.service.detach import NotStarted
from atoll.node.service.systemd import Service

# What a service, which has nothing of a shell's environment, takes along of it: where programs and files are.
KEPT_VARIABLES = (
    *("PATH", "XDG_STATE_HOME", "XDG_CACHE_HOME", "NUMBA_CACHE_DIR", "HF_HOME", "ATOLL_LOG"),
    *("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
)
RELOAD = ("daemon-reload",)  # the first that a systemd of this user has to answer
NO_SESSION = (
    "Where you have no systemd of your own, as in a container or behind `su`, `atoll node join URL --detach` "
    "needs none; else log in anew, and give this command again"
)
COMMAND_SECONDS = 120.0  # that a manager may take to stop a node


def service_name(state_dir: Path) -> str:
    """The name of the service of the node with this state directory: atoll-node of the default one."""
    folder = state_dir.resolve()  # by whichever way it was named
    if folder == default_state_dir("node").resolve():
        return "atoll-node"
    readable = re.sub(r"[^A-Za-z0-9_]+", "-", folder.name).strip("-")[:32]
    return f"atoll-node-{readable}-{hashlib.sha256(os.fsencode(folder)).hexdigest()[:8]}"


@dataclass(frozen=True, slots=True)
class Manager:
    """The service manager of this system."""

    platform: str = sys.platform

    @property
    def _macos(self) -> bool:
        return self.platform == "darwin"

    def file(self, name: str) -> Path:
        """The file that describes the service of this name."""
        if self._macos:
            return Path("~/Library/LaunchAgents").expanduser() / f"{name}.plist"
        return config_home() / "systemd" / "user" / f"{name}.service"

    def check(self) -> None:
        """Raise `ResourceError` where this system has no such manager."""
        tool = "launchctl" if self._macos else "systemctl"
        if shutil.which(tool) is None:
            raise ResourceError(
                f"there is no {tool} here, and a service needs it: have this system's own manager start "
                "`atoll node join`, or give it --detach"
            )

    def write(self, service: Service) -> Path:
        """Write the service's file, or another one in its place. Raises `ResourceError`."""
        self.check()
        file = self.file(service.name)
        data = launchd.plist(service) if self._macos else systemd.unit_text(service, self._version()).encode()
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            with atomic_write(file, None) as out:
                write_all(out, [memoryview(data)], 0)
        except OSError as error:
            raise ResourceError(f"cannot write {file}: {error.strerror or error}") from None
        return file

    def start(self, name: str) -> None:
        """Start the service now and at each login; return when it has joined. Raises `NotStarted` with the
        code that the node ended with, and `ResourceError` where the manager does not do it."""
        if self._macos:
            self._launchctl("bootout", f"gui/{os.getuid()}/{name}", may_fail=True)
            self._launchctl("bootstrap", f"gui/{os.getuid()}", str(self.file(name)))
            return
        for words in (RELOAD, ("enable", name), ("restart", name)):
            if said := self._systemctl(*words, seconds=None):
                if words[0] == "restart" and (code := self._exit_code(name)):
                    why = next((known.summary for known in ExitCode if known == code), "not one of Atoll's")
                    again = ", and is started again after a pause" if code not in final_codes() else ""
                    raise NotStarted(
                        f"the service {name} ended with exit code {code}, {why}{again}: "
                        f"`journalctl --user -u {name}` has its sentence",
                        code,
                    )
                advice = f"; the service is written and not started. {NO_SESSION}" if words == RELOAD else ""
                raise ResourceError(f"`systemctl --user {' '.join(words)}` failed: {said}{advice}")

    def next_steps(self, name: str, started: bool) -> Iterator[str]:
        """What is left to be done, line by line."""
        if self._macos:
            if not started:
                yield f"start it, now and at each login: launchctl bootstrap gui/$(id -u) '{self.file(name)}'"
            return
        if not started:
            yield f"start it, now and at each login: systemctl --user enable --now {name}"
        yield "let it run while you are not logged in: loginctl enable-linger"
        yield f"its log: journalctl --user -u {name}"

    def remove(self, name: str) -> list[str]:
        """Stop the service and remove its files; return what was removed, or could not be done."""
        file, said = self.file(name), list[str]()
        if not file.exists():
            return said
        if self._macos:
            self._launchctl("bootout", f"gui/{os.getuid()}/{name}", may_fail=True)
        elif shutil.which("systemctl") is None:
            said.append("there is no systemctl here: nothing was stopped by it")
        elif trouble := self._systemctl("disable", "--now", name, seconds=COMMAND_SECONDS):
            said.append(f"systemctl did not stop the service: {trouble}")
        try:
            for each in (file, *file.parent.glob(f"*.wants/{file.name}")):
                each.unlink(missing_ok=True)
            shutil.rmtree(file.with_name(f"{file.name}.d"), ignore_errors=True)  # `systemctl --user edit`
        except OSError as error:
            raise ResourceError(f"cannot remove {file}: {error.strerror}") from None
        if not self._macos and shutil.which("systemctl"):
            self._systemctl("daemon-reload", seconds=COMMAND_SECONDS)
            self._systemctl("reset-failed", name, seconds=COMMAND_SECONDS)
        return [*said, f"the service {name} ({file})"]

    def _version(self) -> int:
        """systemd's; 0: not known."""
        said = subprocess.run(["systemctl", "--version"], capture_output=True, text=True, check=False).stdout
        found = re.match(r"systemd (\d+)", said)
        return int(found[1]) if found else 0

    def _exit_code(self, name: str) -> int:
        """The latest one of the service's process; 0: it has none."""
        command = ["systemctl", "--user", "show", "--property=ExecMainStatus", "--value", name]
        said = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
        return int(said) if said.isdigit() else 0

    def _systemctl(self, *words: str, seconds: float | None) -> str:
        """Run it for this user; return what it said if it failed, in one line."""
        try:
            command = ["systemctl", "--user", *words]
            done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
        except subprocess.TimeoutExpired:
            return f"it took more than {seconds:.0f} s"
        said = " ".join((done.stderr or done.stdout).split())
        return (said or f"exit code {done.returncode}") if done.returncode else ""

    def _launchctl(self, *words: str, may_fail: bool = False) -> None:
        done = subprocess.run(["launchctl", *words], capture_output=True, text=True, check=False)
        if done.returncode and not may_fail:
            said = " ".join((done.stderr or done.stdout).split())
            raise ResourceError(f"`launchctl {' '.join(words)}` failed: {said or f'exit code {done.returncode}'}")
