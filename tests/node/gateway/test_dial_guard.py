"""A process under guard sends to no address that it may not, by whichever call."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from atoll.node.gateway.dial_guard import Destination, DialGuard, destination

PROGRAM = """
import socket, sys
port, tcp, udp = int(sys.argv[1]), socket.socket(), socket.socket(type=socket.SOCK_DGRAM)
other, pair = socket.socket(socket.AF_INET6), socket.socketpair()
for send in (
    lambda: tcp.connect(("127.0.0.1", port)),
    lambda: other.connect(("::1", port)),
    lambda: other.connect(("::ffff:127.0.0.1", port)),
    lambda: udp.sendto(b"x", ("127.0.0.1", port)),
    lambda: udp.sendmsg([b"x"], [], 0, ("127.0.0.1", port)),
    lambda: udp.connect(("127.0.0.1", port)),
    lambda: pair[0].sendmsg([b"x"]),
):
    try:
        send()
        print("sent")
    except OSError as error:
        print(error.strerror)
"""


@dataclass
class Machine:
    """Who listens on this machine."""

    port: int = 0
    came: list[object] = field(default_factory=list)


@asynccontextmanager
async def listening() -> AsyncIterator[Machine]:
    machine = Machine()

    def meet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        machine.came.append(writer.get_extra_info("peername"))
        writer.close()

    server = await asyncio.start_server(meet, "127.0.0.1", 0)
    machine.port = server.sockets[0].getsockname()[1]
    yield machine
    server.close()


async def said(guard: DialGuard, port: int) -> list[str]:
    command = guard.command([sys.executable, "-I", "-S", "-c", PROGRAM, str(port)])
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    async with asyncio.timeout(60):
        out, _ = await process.communicate()
    assert process.returncode == 0
    return out.decode().splitlines()


def test_outside_of_private_runs_nothing_is_sent_into_a_private_network() -> None:
    async def body() -> None:
        async with listening() as machine, DialGuard.opened(private=False) as guard:
            assert await said(guard, machine.port) == ["Network is unreachable"] * 6 + ["sent"]
            assert not machine.came
            assert guard.refused[Destination("127.0.0.1", machine.port)] == 4

    asyncio.run(body())


def test_in_a_private_run_it_is_and_the_guard_may_be_told_so_later() -> None:
    async def body() -> None:
        async with listening() as machine, DialGuard.opened(private=False) as guard:
            guard.private = True
            answers = await said(guard, machine.port)
            assert answers[0] == answers[3] == answers[4] == answers[5] == answers[6] == "sent"
            assert len(machine.came) >= 1 and not guard.refused

    asyncio.run(body())


@pytest.mark.parametrize(
    "host", ["169.254.169.254", "10.0.0.1", "::1", "::ffff:10.0.0.1", "fd00:ec2::254", "224.0.0.1"]
)
def test_no_other_network_is_taken_for_the_internet(host: str) -> None:
    guard = DialGuard.__new__(DialGuard)
    guard.private, guard._names = False, frozenset()
    assert not guard.allows(Destination(host, 80)) and guard.allows(Destination("8.8.8.8", 80))
    guard.private = True
    assert guard.allows(Destination(host, 80)) == (host in ("10.0.0.1", "::1", "::ffff:10.0.0.1"))


@pytest.mark.parametrize("address", [b"", b"\x02\x00\x00P", b"\x0a\x00\x00P" + bytes(10), b"\x01\x00/tmp/x"])
def test_what_is_no_internet_address_is_none(address: bytes) -> None:
    assert destination(address) is None
