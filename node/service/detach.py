"""`atoll node join --detach`: the node runs on in a session of its own, without a terminal; who started it waits
until it has joined, or hears why not."""

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

from atoll.comm.errors import AtollError
from atoll.comm.exit_codes import ExitCode
from atoll.comm.log_lines import ending_in, sentence_of
from atoll.comm.readiness import VARIABLE, ready_socket

LOG_FILE = Path("logs", "node.log")  # in the state directory
LOOK_SECONDS = 0.2  # between two looks at whether the node has ended
TAIL_BYTES = 64 << 10  # of the log, in which that is


class NotStarted(AtollError):
    """The node ended before it had joined; the exit code is its own."""

    def __init__(self, sentence: str, code: int) -> None:
        super().__init__(sentence)
        self.exit_code = next((known for known in ExitCode if known == code), ExitCode.FAILED)


def start_detached(words: list[str], log: Path, environment: Mapping[str, str]) -> int:
    """Start a node with this command line, which has it log to `log`; return its process id once it has joined.
    Raises `NotStarted`. A node that is waited for ends with whoever waits."""
    begin = log.stat().st_size if log.exists() else 0
    # What the environment says of options is in `words`: above all, not to detach again.
    inherited = {name: value for name, value in environment.items() if not name.startswith("ATOLL_NODE_")}
    with ready_socket() as ready:
        node = subprocess.Popen(
            words,
            env=inherited | {VARIABLE: ready.address},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,  # until it has its log file
            start_new_session=True,
        )
        try:
            while not ready.wait(LOOK_SECONDS):
                if node.poll() is not None:
                    assert node.stderr is not None
                    early = node.stderr.read().decode(errors="replace")
                    raise NotStarted(_last_sentence(early or _read(log, begin), node.returncode), node.returncode)
        except BaseException:
            if node.poll() is None:
                node.terminate()
            raise
    return node.pid


def _last_sentence(said: str, code: int) -> str:
    lines = said.splitlines()
    if (sentence := ending_in(lines)) is not None:
        return sentence
    how = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
    return f"the node {how}" + (f"; it last said: {sentence_of(lines[-1])}" if lines else "")


def _read(log: Path, begin: int) -> str:
    """What was written to the log since it had `begin` bytes; all of it if it is another file by now."""
    try:
        with open(log, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(begin if begin <= size else 0, size - TAIL_BYTES))
            return file.read(TAIL_BYTES).decode(errors="replace")
    except OSError:
        return ""
