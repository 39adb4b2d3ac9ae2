"""Ports of this machine alone, each of which leads to one place elsewhere."""

import asyncio
import logging
import socket
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from atoll.comm.errors import Unreachable
from atoll.node.gateway.splice import READ_BYTES, Stream, splice

log = logging.getLogger("atoll.gateway")
MAX_PORTS = 1024
Connect = Callable[[], Awaitable[Stream]]


@dataclass
class _Port:
    server: asyncio.Server
    tasks: set[asyncio.Task[None]] = field(default_factory=set)  # of its connections


class LocalPorts:
    """The ports that are open, by the name of the place that each leads to."""

    def __init__(self) -> None:
        self._ports: OrderedDict[str, _Port] = OrderedDict()  # the last used last

    async def address(self, place: str, connect: Connect, sock: socket.socket | None = None) -> str:
        """The "host:port" that leads to a place: each connection to it is joined to one that `connect` makes,
        which may raise `Unreachable`. `sock`: listens there already; None: at any port."""
        if place not in self._ports:
            self._make_room()
            opened = _Port(await self._open(place, connect, sock))
            if (earlier := self._ports.get(place)) is not None:  # opened meanwhile
                opened.server.close()
                opened = earlier
            self._ports[place] = opened
        self._ports.move_to_end(place)
        host, bound = self._ports[place].server.sockets[0].getsockname()[:2]
        return f"{host}:{bound}"

    def close(self) -> None:
        """Close all ports and their connections."""
        for opened in self._ports.values():
            opened.server.close()
            for task in opened.tasks:
                task.cancel()
        self._ports.clear()

    async def _open(self, place: str, connect: Connect, sock: socket.socket | None) -> asyncio.Server:
        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            opened = self._ports.get(place)
            if task is None or opened is None:
                return writer.transport.abort()
            opened.tasks.add(task)
            here = Stream(reader, writer)
            try:
                await splice(here, await connect())
            except Unreachable as error:
                log.info(f"{place}: {error}")
                here.abort()
            except asyncio.CancelledError:  # the port is closed
                here.abort()
            finally:
                opened.tasks.discard(task)

        if sock is not None:
            return await asyncio.start_server(accept, sock=sock, limit=READ_BYTES)
        return await asyncio.start_server(accept, "127.0.0.1", 0, limit=READ_BYTES)

    def _make_room(self) -> None:
        """Close the port that was not asked for the longest, of those without a connection."""
        if len(self._ports) < MAX_PORTS:
            return
        idle = next((place for place, opened in self._ports.items() if not opened.tasks), None)
        if idle is None:
            raise Unreachable(f"{MAX_PORTS} places are being reached already")
        self._ports.pop(idle).server.close()
