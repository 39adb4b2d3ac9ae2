"""A command in the trainer's place: what it starts ends with it, and with the daemon."""

import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

DEADLINE = 60.0  # seconds
# Stands in for the launcher: the grace, then the command.
LAUNCHER = """
import signal, sys
from atoll.comm.child_process import die_with_parent
from atoll.node.trainer import command
die_with_parent(signal.SIGTERM)
command.GRACE_SECONDS, command.TERMINATE_SECONDS = float(sys.argv[1]), 0.5
sys.exit(command.run_command(tuple(sys.argv[2:]), "/no/such/socket"))
"""
DAEMON = "import subprocess, sys; subprocess.run(sys.argv[1:])"
# Goes on when its parent is gone, in a session of its own, and does not heed SIGTERM.
STUBBORN = "trap '' TERM; echo $$ >> {pids}; while :; do sleep 1; done"


def launcher(grace: float, *command: str, lacking: str = "") -> tuple[str, ...]:
    return (
        sys.executable,
        "-c",
        LAUNCHER.replace("import signal, sys", f"import signal, sys; {lacking}"),
        str(grace),
        *command,
    )


def processes(pids: Path, count: int) -> list[int]:
    """A descriptor of each process that has written its id there; waits until there are so many."""
    deadline = time.monotonic() + DEADLINE
    while not pids.exists() or len(found := pids.read_text().split()) < count:
        assert time.monotonic() < deadline
        os.sched_yield()
    return [os.pidfd_open(int(pid)) for pid in found]


def ended(descriptors: list[int]) -> bool:
    return all(select.select([descriptor], [], [], DEADLINE)[0] for descriptor in descriptors)


@pytest.mark.parametrize(
    "command, code", [("exit 3", 3), ("kill -KILL $$", 128 + signal.SIGKILL), ("exec true", 0)]
)
def test_its_exit_code_is_the_commands(command: str, code: int) -> None:
    assert subprocess.run(launcher(60.0, "sh", "-c", command), timeout=DEADLINE).returncode == code


def test_a_command_that_does_not_exist_is_said() -> None:
    done = subprocess.run(launcher(60.0, "/no/such/program"), capture_output=True, text=True, timeout=DEADLINE)
    assert done.returncode == 127 and "cannot start the command /no/such/program: No such file" in done.stderr


def test_what_the_command_leaves_behind_ends_with_it(tmp_path: Path) -> None:
    """Also what has a session of its own, whose parent is gone."""
    pids = tmp_path / "pids"
    behind = f'setsid sh -c "{STUBBORN.format(pids=pids)}" & until [ -s {pids} ]; do sleep 0.1; done; exit 5'
    process = subprocess.Popen(launcher(60.0, "bash", "-c", behind))
    stubborn = processes(pids, 1)
    assert process.wait(DEADLINE) == 5 and ended(stubborn)


@pytest.mark.parametrize("lacking", ["", "del signal.sigtimedwait"], ids=["linux", "macos"])
@pytest.mark.parametrize("victim", ["daemon", "launcher"])
def test_all_of_it_ends_when_the_daemon_is_killed_or_the_launcher_is_told_to_end(
    victim: str, lacking: str, tmp_path: Path
) -> None:
    pids = tmp_path / "pids"
    inner = STUBBORN.format(pids=pids)
    command = ("bash", "-c", f'(setsid sh -c "{inner}" &); sh -c "{inner}"; true')
    grace = 0.1 if victim == "daemon" else 3600.0  # of a daemon that lives, nothing is waited for
    daemon = subprocess.Popen([sys.executable, "-c", DAEMON, *launcher(grace, *command, lacking=lacking)])
    stubborn = processes(pids, 2)
    if victim == "daemon":
        daemon.kill()
    else:
        psutil.Process(daemon.pid).children()[0].terminate()
    assert ended(stubborn) and daemon.wait(DEADLINE) == (-signal.SIGKILL if victim == "daemon" else 0)


@pytest.mark.long
def test_a_script_that_is_stuck_when_its_node_is_gone_is_ended_with_its_stacks() -> None:
    stuck = (
        "import threading, time\n"
        "from atoll.node.participant import watchdog\n"
        "watchdog.GRACE_SECONDS = 0.1\n"
        "def forever():\n"
        "    threading.Thread(target=watchdog.end_late_script, daemon=True).start()\n"
        "    while True:\n"
        "        time.sleep(0.01)\n"
        "forever()\n"
    )
    done = subprocess.run([sys.executable, "-c", stuck], capture_output=True, text=True, timeout=4 * DEADLINE)
    assert done.returncode == 1
    assert "the node is gone for 0.1 s, and this script still runs: it is ended" in done.stderr
    assert "in forever" in done.stderr
