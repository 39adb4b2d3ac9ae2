"""Connections between two machines behind NATs, without anybody in between: TCP's simultaneous open.

    punches  binds a port of its own, learns from the relay's observer as what the NAT shows it, and says so to the
             other side over a stream through the relay; the other side does the same; then both listen at these
             ports and connect from them to each other until one connection is there, the same for both. Each NAT
             takes the other's SYN for an answer to its own.
    observes a port of a relay that tells everybody who connects as what it sees it, and nothing else

It works where a NAT shows a port alike to all destinations, as most do at home, and drops what it does not expect.
A nonce that went through the relay tells whether it is the right machine that answered; what passes then is TLS
between members, as everywhere. libp2p's own punching needs its circuits, and four peers that have seen one's
address.
"""

import asyncio
import secrets
import socket
from collections.abc import Callable

from atoll.comm.addresses import may_dial
from atoll.comm.errors import ConfigError, Unreachable
from atoll.comm.invite import join_host_port, split_host_port
from atoll.node.gateway.splice import READ_BYTES, Stream

OBSERVE_SECONDS = 1.5  # for an observer's answer
AGREE_SECONDS = 4.0  # for the other side's address
PUNCH_SECONDS = 3.0  # for the connection
TRY_SECONDS = 1.2  # for one try to connect: the kernel sends its second SYN after one
AGAIN_SECONDS = 0.05  # between two tries
MAX_LINE_BYTES = 64
NONCE_BYTES = 16
Address = tuple[str, int]


async def observe(listen: Address) -> asyncio.Server:
    """Tell everybody who connects to this host and port from where it comes. Raises `OSError`."""

    def meet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, port = writer.get_extra_info("peername")[:2]
        writer.write(join_host_port(host.removeprefix("::ffff:"), port).encode() + b"\n")
        writer.close()

    return await asyncio.start_server(meet, *listen)


async def punch(stream: Stream, observer: Address, may: Callable[[str], bool]) -> Stream:
    """The connection to the machine at the other end of `stream`, which a relay passes on. `observer`: of that
    relay; `may`: whether an IP address may be dialled. Raises `Unreachable`."""
    try:
        async with asyncio.timeout(OBSERVE_SECONDS + AGREE_SECONDS):
            mine, seen = await _seen_by(observer)
    except (ConfigError, EOFError, OSError, TimeoutError, ValueError) as error:
        raise Unreachable(f"no observer answers ({error or type(error).__name__})") from None
    try:
        nonce = secrets.token_bytes(NONCE_BYTES)
        async with asyncio.timeout(AGREE_SECONDS):
            stream.writer.write(join_host_port(*seen).encode() + b"\n" + nonce)
            await stream.writer.drain()
            theirs = split_host_port((await _line(stream.reader)).decode("ascii"), "its address")
            expected = await stream.reader.readexactly(NONCE_BYTES)
        if not may(theirs[0]):
            raise Unreachable(f"{theirs[0]} is not dialled from here")
        async with asyncio.timeout(PUNCH_SECONDS):
            return await _met(mine, theirs, nonce, expected)
    except (ConfigError, EOFError, OSError, TimeoutError, ValueError) as error:
        raise Unreachable(f"no hole was punched ({error or type(error).__name__})") from None


def allowed(private: bool) -> Callable[[str], bool]:
    """Whether an IP address may be dialled; names may not. `private`: in a private network, too."""

    def may(host: str) -> bool:
        try:
            return may_dial(host, private)
        except ValueError:
            return False

    return may


async def _seen_by(observer: Address) -> tuple[Address, Address]:
    """A port of this machine, and as what the observer sees it."""
    family = socket.AF_INET6 if ":" in observer[0] else socket.AF_INET
    sock = _bound(family, ("", 0))
    try:
        async with asyncio.timeout(OBSERVE_SECONDS):
            await asyncio.get_running_loop().sock_connect(sock, observer)
            mine: Address = sock.getsockname()[:2]
            reader, writer = await asyncio.open_connection(sock=sock)
            seen = split_host_port((await _line(reader)).decode("ascii"), "the address")
            writer.transport.abort()  # with a reset: the port is free at once
            return mine, seen
    except BaseException:
        sock.close()
        raise


async def _line(reader: asyncio.StreamReader) -> bytes:
    line = await reader.readuntil(b"\n")
    if len(line) > MAX_LINE_BYTES:
        raise ValueError("a line that is too long")
    return line.strip()


def _bound(family: int, place: Address) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setblocking(False)
    for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
        sock.setsockopt(socket.SOL_SOCKET, option, 1)
    sock.bind(place)
    return sock


async def _met(mine: Address, theirs: Address, nonce: bytes, expected: bytes) -> Stream:
    """A connection between one's own port and theirs, over which both nonces went: whichever side's SYN comes
    through first makes it. Goes on until it is cancelled."""
    family = socket.AF_INET6 if ":" in theirs[0] else socket.AF_INET
    with _bound(family, mine) as listening:
        listening.listen(4)
        ways = [asyncio.ensure_future(way) for way in (_accepted(listening), _connected(family, mine, theirs))]
        try:
            while True:
                done, _ = await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
                for way in done:
                    if (stream := await _proven(way.result(), nonce, expected)) is not None:
                        return stream
                    again = _accepted(listening) if way is ways[0] else _connected(family, mine, theirs)
                    ways[ways.index(way)] = asyncio.ensure_future(again)
        finally:
            for way in ways:
                way.cancel()
            for came in await asyncio.gather(*ways, return_exceptions=True):
                if isinstance(came, socket.socket):
                    came.close()  # of no effect on the one that is returned: that has a descriptor of its own


async def _accepted(listening: socket.socket) -> socket.socket:
    sock, _ = await asyncio.get_running_loop().sock_accept(listening)
    return sock


async def _connected(family: int, mine: Address, theirs: Address) -> socket.socket:
    """A socket that has connected, after as many tries as that takes."""
    while True:
        sock = _bound(family, mine)
        try:
            async with asyncio.timeout(TRY_SECONDS):
                await asyncio.get_running_loop().sock_connect(sock, theirs)
            return sock
        except (OSError, TimeoutError):
            sock.close()
            await asyncio.sleep(AGAIN_SECONDS)
        except BaseException:
            sock.close()
            raise


async def _proven(sock: socket.socket, nonce: bytes, expected: bytes) -> Stream | None:
    """The stream over a socket whose other side has the nonce that it should; None: it is another machine's."""
    own = sock.dup()
    own.setblocking(False)
    own.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    stream = Stream(*await asyncio.open_connection(sock=own, limit=READ_BYTES))
    try:
        async with asyncio.timeout(TRY_SECONDS):
            stream.writer.write(nonce)
            if secrets.compare_digest(await stream.reader.readexactly(NONCE_BYTES), expected):
                return stream
    except (EOFError, OSError, TimeoutError):
        pass
    except BaseException:
        stream.abort()
        raise
    stream.abort()
    sock.close()
    return None
