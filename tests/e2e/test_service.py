"""A node in the background, one that was killed, and one that is uninstalled: real processes, in a home of their
own."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from e2e.harness import ATOLL, ROOT, Run, until

from atoll.node.outer.vector_folders import own_folders

pytestmark = [pytest.mark.e2e, pytest.mark.long]


class Volunteer:
    """A user with a home and a folder for temporary files, who gives commands."""

    def __init__(self, home: Path) -> None:
        self.home, self.tmp = home, home / "tmp"
        self.tmp.mkdir(parents=True)
        self.state_dir, self.cache = home / ".local/state/atoll/node", home / ".cache/atoll/node"
        xdg = {name for name in os.environ if name.startswith("XDG_")}
        kept = {name: value for name, value in os.environ.items() if name not in xdg}
        self.environment = kept | {"HOME": str(home), "TMPDIR": str(self.tmp), "ATOLL_NODE_THREADS": "1"}

    def atoll(self, *words: str, code: int = 0) -> str:
        command = [*ATOLL, "node", *words]
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=180)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    def detach(self, url: str) -> psutil.Process:
        said = self.atoll("join", url, "--detach", "--listen", "127.0.0.1:0", "--name", "ada")
        return psutil.Process(int(said.partition("(process ")[2].partition(")")[0]))

    def daemons(self) -> list[psutil.Process]:
        """Those with this state directory, and what they have started."""
        found = list[psutil.Process]()
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if f"--state-dir={self.state_dir}" in process.cmdline():
                    found += [process, *process.children(recursive=True)]
        return found

    def kill(self) -> None:
        everything = self.daemons()
        for process in everything:
            with suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(everything, 30)

    @property
    def sockets(self) -> list[Path]:
        return list(self.tmp.glob("atoll-*/*.sock"))

    @property
    def left(self) -> list[Path]:
        """Files of the node, anywhere but in memory."""
        ours = (self.state_dir, self.cache, self.home / ".local/state/atoll", self.home / ".cache/atoll")
        return [*(path for path in ours if path.exists()), *self.sockets, *self.tmp.glob("atoll-*/")]


@pytest.fixture
def volunteer(tmp_path: Path) -> Iterator[Volunteer]:
    found = Volunteer(tmp_path / "h")
    try:
        yield found
    finally:
        found.kill()
        log = found.state_dir / "logs" / "node.log"
        print(log.read_text() if log.exists() else "no log")  # shown when the test fails


def test_a_detached_node_trains_and_is_uninstalled_without_a_trace(run: Run, volunteer: Volunteer) -> None:
    run.start("members.start=1")
    url = run.invite(1)
    daemon = volunteer.detach(url)
    assert run.member("ada"), "it has joined when the command returns"
    assert os.getsid(daemon.pid) == daemon.pid != os.getsid(0)
    assert url not in " ".join(daemon.cmdline())
    until("a commit", lambda: run.committed() >= 1)
    assert "a node of yours runs already" in volunteer.atoll("join", url, "--detach", code=3)
    (photo := volunteer.state_dir / "outer" / "space.jpg").touch()
    said = volunteer.atoll("uninstall", "--yes")
    assert f"from {volunteer.state_dir}, which stays: outer/space.jpg in it is no node's" in said
    assert [path for path in volunteer.state_dir.rglob("*") if not path.is_dir()] == [photo]
    photo.unlink()
    photo.parent.rmdir()
    volunteer.state_dir.rmdir()
    until("its end", lambda: not volunteer.daemons())
    volunteer.detach(run.invite(1))
    said = volunteer.atoll("uninstall", "--yes")
    assert f"removed {volunteer.state_dir}" in said and f"removed {volunteer.cache}" in said
    assert "the daemon has left its run" in said
    until("its end", lambda: not volunteer.daemons())
    assert run.member("ada").get("reason", "") in ("", "stopped by its owner")
    assert not volunteer.left and not own_folders(volunteer.state_dir)
    assert "there is no node in" in volunteer.atoll("uninstall", "--yes", code=2)


@pytest.mark.chaos
def test_the_commands_of_the_page_on_wsl_do_what_it_says(run: Run, volunteer: Volunteer, tmp_path: Path) -> None:
    """On Linux, where a leaf takes part as well."""
    page = (ROOT / "docs" / "wsl2.md").read_text()
    commands = [
        line.removeprefix("$ ")
        for block in re.findall(r"```text\n(.*?)```", page, re.S)
        for line in block.splitlines()
        if line.startswith("$ ")
    ]
    run.start("members.start=1")
    (clone := tmp_path / "clone").mkdir()
    (clone / ".venv").symlink_to(Path(sys.prefix))
    environment = volunteer.environment | {"URL": run.invite(1)}
    said = dict[str, str]()
    for command in commands:
        done = subprocess.run(
            ["bash", "-c", command], cwd=clone, env=environment, capture_output=True, text=True, timeout=180
        )
        assert done.returncode == 0, (command, done.stdout, done.stderr)
        said[command.split(" ")[1]] = done.stdout
    assert len(commands) == 4 and "not asked (--leaf)" in said["doctor"]
    until("its end", lambda: not volunteer.daemons())


def test_what_keeps_a_detached_node_from_joining_is_said_with_its_exit_code(
    run: Run, volunteer: Volunteer
) -> None:
    run.start("members.start=1")
    url = run.invite(1)
    wrong = url.replace("atoll://", "atoll://x")
    assert "the token in the join URL is not one" in volunteer.atoll("join", wrong, "--detach", code=5)
    run.coordinator.kill()
    run.coordinator.wait()
    assert "no coordinator at" in volunteer.atoll("join", url, "--detach", "--patience", "0.1", code=4)
    assert not volunteer.daemons()


@pytest.mark.chaos
def test_what_a_killed_node_left_is_cleaned_by_the_next_and_by_uninstalling(
    run: Run, volunteer: Volunteer
) -> None:
    run.start("members.start=1")
    url = run.invite(1)
    volunteer.detach(url)
    until("a commit", lambda: run.committed() >= 1)
    (first,) = volunteer.sockets
    volunteer.kill()
    assert first.exists(), "a killed process removes nothing"
    volunteer.detach(url)
    until("its trainer", lambda: own_folders(volunteer.state_dir))
    assert not first.parent.exists() and len(volunteer.sockets) == 1
    assert len(own_folders(volunteer.state_dir)) == 1
    volunteer.kill()
    assert volunteer.sockets
    said = volunteer.atoll("uninstall", "--yes")
    assert f"removed {volunteer.state_dir}" in said and "has left" not in said
    assert not volunteer.left and not own_folders(volunteer.state_dir)
