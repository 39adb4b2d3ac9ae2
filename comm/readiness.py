"""A process says to whoever started it that it is up: a datagram READY=1 to the unix socket that NOTIFY_SOCKET
names, as sd_notify(3) has it. So systemd knows it (Type=notify), and `atoll node join --detach`."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

VARIABLE = "NOTIFY_SOCKET"
MAX_BYTES = 4096


def say_ready(status: str = "") -> None:
    """Say it once, with a line for `systemctl status`; nobody may be listening. The variable is taken out of the
    environment: children have nothing to say there."""
    if not (address := os.environ.pop(VARIABLE, "")):
        return
    if address.startswith("@"):  # an abstract one
        address = "\0" + address[1:]
    said = f"READY=1\nSTATUS={status}\n".encode()[:MAX_BYTES]
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as way:
        way.sendto(said, address)


class ReadySocket:
    """The other end: `address` goes into the environment of a process that is started."""

    def __init__(self, listening: socket.socket, address: str) -> None:
        self._listening, self.address = listening, address

    def wait(self, seconds: float) -> bool:
        """Whether somebody has said so, within that time."""
        self._listening.settimeout(seconds)
        try:
            return "READY=1" in self._listening.recv(MAX_BYTES).decode(errors="replace").splitlines()
        except TimeoutError:
            return False


@contextmanager
def ready_socket() -> Iterator[ReadySocket]:
    """A socket that only this user's processes reach, while the context lasts."""
    with TemporaryDirectory(prefix="atoll-") as folder, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as way:
        address = str(Path(folder, "ready.sock"))
        way.bind(address)
        yield ReadySocket(way, address)
