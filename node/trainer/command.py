"""The volunteer's own command in the place of the built-in trainer: starts it, waits for it, leaves nothing of it.

This process becomes the parent of whatever outlives what had started it below (a child subreaper, prctl(2)): a
shell's children, torchrun's ranks. All of them end with the command, and with the daemon, on whose death the
kernel sends this process a SIGTERM. A script whose channel is closed ends by itself, in `GRACE_SECONDS` at most.
"""

import ctypes
import logging
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress

import psutil

from atoll.comm.child_process import GRACE_SECONDS, die_with_parent
from atoll.node.trainer_channel import Failed, TrainerEnd

log = logging.getLogger("atoll.trainer")
PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
TERMINATE_SECONDS = 5.0  # from SIGTERM to SIGKILL
POLL_SECONDS = 0.05  # between two looks whether a signal came, where they cannot be waited for
NOT_FOUND = 127  # exit code, as a shell's
WATCHED = {signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP}


def run_command(command: tuple[str, ...], channel: str) -> int:
    """Run the command until it ends, and end whatever it has left; return its exit code, or 128 + N where signal N
    has ended it. One that cannot be started is told to the daemon behind `channel`, as `Failed`."""
    daemon, launcher = os.getppid(), os.getpid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)

    def begin() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        die_with_parent(signal.SIGKILL, launcher)

    try:
        # In a group of its own: who interrupts the daemon at a terminal has it tell the script.
        process = subprocess.Popen(command, preexec_fn=begin, process_group=0)
    except OSError as error:
        return _refuse(channel, f"cannot start the command {command[0]}: {error.strerror}")
    try:
        return _wait(process.pid, daemon)
    finally:
        process.returncode = 0  # it is reaped, or will be by init
        _end_children()


def _refuse(channel: str, sentence: str) -> int:
    log.error(sentence)
    with suppress(OSError):  # the daemon is gone
        end = TrainerEnd(channel)
        end.send(Failed(sentence))
        end.next_command()  # it hangs up when it has heard
    return NOT_FOUND


def _wait(command: int, daemon: int) -> int:
    """Reap processes until the command has ended, or its time is up once this process was told to end."""
    deadline: float | None = None
    while deadline is None or (left := deadline - time.monotonic()) > 0:
        if _next_signal(None if deadline is None else left) == signal.SIGTERM:
            grace = GRACE_SECONDS if os.getppid() != daemon else 0.0
            deadline = min(deadline or time.monotonic() + grace, time.monotonic() + grace)
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == command:
                    code = os.waitstatus_to_exitcode(ended[1])
                    return code if code >= 0 else 128 - code
    return 128 + signal.SIGTERM


def _next_signal(seconds: float | None) -> int | None:
    """The number of the next signal of those watched; None: none came in `seconds`, if that is not None."""
    if seconds is None:
        return signal.sigwait(WATCHED)
    if hasattr(signal, "sigtimedwait"):
        told = signal.sigtimedwait(WATCHED, seconds)
        return None if told is None else told.si_signo
    until = time.monotonic() + seconds  # macOS has no such call
    while not (signal.sigpending() & WATCHED):
        if time.monotonic() >= until:
            return None
        time.sleep(POLL_SECONDS)
    return signal.sigwait(WATCHED)


def _end_children() -> None:
    """End every process that descends from this one."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        children = psutil.Process().children(recursive=True)
        for child in children:
            with suppress(psutil.Error):
                child.send_signal(sign)
        psutil.wait_procs(children, TERMINATE_SECONDS)
