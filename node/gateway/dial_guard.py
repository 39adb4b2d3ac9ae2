"""What libp2p's process may dial: peers announce their addresses themselves, and p2pd would try whichever they
name.

So p2pd is started under a filter of the kernel's (`guarded_start`), and each call of its that sends to an internet
address waits until this side, in the gateway's process, has looked at that address: outside of private runs none
in a private network is dialled, and no link-local one ever (`addresses`). Name servers of this machine are. Where
the system has no such filter, that is said, and p2pd dials what it likes.
"""

import asyncio
import ctypes
import errno
import fcntl
import logging
import os
import socket
import struct
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from ipaddress import ip_address
from pathlib import Path
from typing import NamedTuple, Self

from atoll.comm.addresses import may_dial
from atoll.node.gateway import guarded_start
from atoll.node.gateway.guarded_start import CONNECT, SENDMMSG, SENDMSG, SENDTO

log = logging.getLogger("atoll.gateway")
MESSAGE = struct.Struct("=QIIiIQ6Q")  # struct seccomp_notif: id, pid, flags, nr, arch, instruction, arguments
ANSWER = struct.Struct("=QqiI")  # struct seccomp_notif_resp: id, value, error, flags
RECEIVE, SEND = 0xC0502100, 0xC0182101  # SECCOMP_IOCTL_NOTIF_RECV, _SEND
CONTINUE = 1  # SECCOMP_USER_NOTIF_FLAG_CONTINUE
PIDFD_GETFD = 438
DNS_PORT = 53
ADDRESS_BYTES = 28  # of the longest that is looked at, IPv6's
MAX_MESSAGES = 64  # of one call, that are looked at
START_SECONDS = 30.0


class Destination(NamedTuple):
    """Where a call sends to."""

    host: str
    port: int


def destination(address: bytes) -> Destination | None:
    """The destination in a socket address's bytes; None: it is none of the internet's."""
    if len(address) < 8:
        return None
    family, port = struct.unpack("=H", address[:2])[0], int.from_bytes(address[2:4], "big")
    if family == socket.AF_INET:
        return Destination(socket.inet_ntop(family, address[4:8]), port)
    if family == socket.AF_INET6 and len(address) >= 24:
        return Destination(socket.inet_ntop(family, address[8:24]), port)
    return None


class DialGuard:
    """Says which addresses a process may send to. `opened`, then start the process by `command`."""

    def __init__(self, path: Path, private: bool) -> None:
        self._path, self.private = path, private
        self._names = frozenset(_name_servers())
        self._listener = -1
        self.refused = dict[Destination, int]()  # how often
        self.installed = asyncio.Event()  # the process said whether it is guarded

    @classmethod
    @asynccontextmanager
    async def opened(cls, private: bool) -> AsyncIterator[Self]:
        """Look after a process while the context lasts. `private`: it may dial private networks."""
        with tempfile.TemporaryDirectory(
            prefix="atoll-", dir="/tmp"
        ) as folder:  # 104 bytes are the most of a path
            made = cls(Path(folder) / "guard", private)
            server = await asyncio.start_unix_server(made._meet, made._path)
            try:
                yield made
            finally:
                server.close()
                made._stop()

    def command(self, command: Sequence[str]) -> list[str]:
        """The command that runs this one guarded."""
        return [sys.executable, "-I", "-S", guarded_start.__file__, str(self._path), *command]

    def allows(self, to: Destination) -> bool:
        """Whether it may be dialled."""
        try:
            return may_dial(to.host, self.private) or (to.port == DNS_PORT and ip_address(to.host) in self._names)
        except ValueError:
            return False

    async def _meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(START_SECONDS):
                (found,) = struct.unpack("i", await reader.readexactly(4))
            if found >= 0 and self._listener < 0:
                self._listener = _fetched(writer.get_extra_info("socket"), found)
                asyncio.get_running_loop().add_reader(self._listener, self._answer)
        except (EOFError, OSError, TimeoutError, struct.error) as error:
            log.debug("the process could not be guarded: %s", error)
        if self._listener < 0:
            log.warning(
                "this system lets nobody see what libp2p dials: it may dial private addresses that peers name"
            )
        writer.write(b".")
        writer.close()
        self.installed.set()

    def _answer(self) -> None:
        """Let one call that waits go on, or fail."""
        message = bytearray(MESSAGE.size)
        try:
            fcntl.ioctl(self._listener, RECEIVE, message)
        except OSError as error:
            if error.errno not in (errno.EINTR, errno.ENOENT, errno.EAGAIN):
                self._stop()
            return  # the call was given up
        number, process, _, call, _, _, *arguments = MESSAGE.unpack(message)
        try:
            bad = [to for to in _destinations(process, call, arguments) if not self.allows(to)]
        except OSError:
            return
        for to in bad:
            if to not in self.refused and len(self.refused) < 1000:
                log.info(f"libp2p does not dial {to.host}: a peer has named it")
            self.refused[to] = self.refused.get(to, 0) + 1
        answer = (number, 0, -errno.ENETUNREACH, 0) if bad else (number, 0, 0, CONTINUE)
        with suppress(OSError):  # the process is gone
            fcntl.ioctl(self._listener, SEND, ANSWER.pack(*answer))

    def _stop(self) -> None:
        if self._listener >= 0:
            asyncio.get_running_loop().remove_reader(self._listener)
            os.close(self._listener)
            self._listener = -1


def _destinations(process: int, call: int, arguments: Sequence[int]) -> list[Destination]:
    """Where a call of a process that waits sends to. Raises `OSError` where it is gone."""
    with open(f"/proc/{process}/mem", "rb", buffering=0) as memory:

        def read(at: int, size: int) -> bytes:
            return os.pread(memory.fileno(), size, at) if at else b""

        def of_message(at: int) -> bytes:  # struct msghdr: name, its length, ...
            name, length = struct.unpack("=QI", read(at, 12))
            return read(name, min(length, ADDRESS_BYTES))

        match call:
            case _ if call == CONNECT:
                found = [read(arguments[1], min(arguments[2], ADDRESS_BYTES))]
            case _ if call == SENDTO:
                found = [read(arguments[4], min(arguments[5], ADDRESS_BYTES))]
            case _ if call == SENDMSG:
                found = [of_message(arguments[1])]
            case _ if call == SENDMMSG:  # struct mmsghdr: a msghdr of 56 bytes, and 8 more
                found = [of_message(arguments[1] + 64 * i) for i in range(min(arguments[2], MAX_MESSAGES))]
            case _:
                found = []
    return [to for to in map(destination, found) if to is not None]


def _fetched(sock: socket.socket, number: int) -> int:
    """A descriptor of the process at the other end of a Unix socket. Raises `OSError`."""
    if sys.platform != "linux":
        raise OSError(errno.ENOSYS, "there are no such calls")
    process, _, _ = struct.unpack("iII", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    whole = os.pidfd_open(process)
    try:
        libc: Callable[..., int] = ctypes.CDLL(None, use_errno=True).syscall
        if (found := libc(PIDFD_GETFD, whole, number, 0)) < 0:
            raise OSError(ctypes.get_errno(), "its descriptor cannot be had")
        return found
    finally:
        os.close(whole)


def _name_servers() -> list[object]:
    """The name servers that this machine asks."""
    found = list[object]()
    with suppress(OSError):
        for line in Path("/etc/resolv.conf").read_text(errors="replace").splitlines():
            match line.split():
                case ["nameserver", host, *_]:
                    with suppress(ValueError):
                        found.append(ip_address(host.partition("%")[0]))
    return found
