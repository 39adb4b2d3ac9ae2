"""Web servers that a run's URL leads a node to: asked only at addresses that may be dialled.

fsspec's http file system looks at none. Each address is looked at when it is connected to, so that neither a
redirect nor a name that changes its address leads into this machine's own network (`atoll.comm.addresses`).
"""

import errno
import socket
from typing import Any

from atoll.comm.addresses import may_dial


def web_options(private: bool) -> dict[str, Any]:
    """Options of fsspec's file system for http:// and https:// with which it connects to public addresses alone,
    or where `private` to those of private networks, too."""

    def open_socket(info: tuple[Any, ...]) -> socket.socket:
        family, kind, protocol, _, address = info
        if not may_dial(str(address[0]), private):
            sentence = f"{address[0]} is in a private network, which a run may not have a node ask"
            raise PermissionError(errno.EACCES, sentence)
        return socket.socket(family, kind, protocol)

    async def client(**options: Any) -> Any:
        import aiohttp  # by whoever asks such a server

        connector = aiohttp.TCPConnector(socket_factory=open_socket, use_dns_cache=False)
        return aiohttp.ClientSession(connector=connector, **options)

    # Else fsspec gives an instance that was made with other options for the same URL.
    return {"get_client": client, "skip_instance_cache": True}
