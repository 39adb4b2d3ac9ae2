"""The addresses that a node asks for data: a run's URL never makes it ask its own machine or network.

Whoever writes a run's config would else have every node send requests to what only that node reaches, such as a
router or a cloud's metadata service. Each address is looked at when it is connected to, so that neither a redirect
nor a name that changes its address leads there. A run whose coordinator is in this network has its data there too:
loopback and private addresses are then asked, link-local ones and a cloud's metadata never. A server is not
trusted either: whatever it sends, and however slowly, an answer ends. `node/data/store.py` asks by `web_opener`.
"""

import http.client
import io
import socket
import time
import urllib.request
from typing import Any
from urllib.parse import urlsplit

from atoll.comm.addresses import OwnNetwork, may_dial

ANSWER_SECONDS = 120.0  # that an answer may take as a whole, its header included


def web_opener(lan: bool, anywhere: bool = False) -> urllib.request.OpenerDirector:
    """An opener of http:// and https:// whose connections raise `OwnNetwork` instead of reaching this machine's
    own network. `lan`: they reach its loopback and private addresses, but no link-local one; `anywhere`: every
    address. A proxy of the environment is the owner's, wherever it is."""
    proxies = {(urlsplit(proxy).hostname or "", urlsplit(proxy).port) for proxy in _proxies()}

    def connect(address: tuple[str, int], timeout: Any = None, source_address: Any = None) -> socket.socket:
        host, port = address
        if anywhere or (host, port) in proxies:
            return socket.create_connection(address, timeout, source_address)
        found = [str(info[4][0]) for info in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
        for ip in found:
            if not may_dial(ip, private=lan):
                raise OwnNetwork(f"{host} is at {ip}")
        return _first_of(found, port, timeout, source_address)

    class PlainConnection(http.client.HTTPConnection):
        response_class = _Answer

        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self._create_connection = connect

    class SecureConnection(http.client.HTTPSConnection):
        response_class = _Answer

        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self._create_connection = connect

    class PlainHandler(urllib.request.HTTPHandler):
        def http_open(self, request: urllib.request.Request) -> Any:
            return self.do_open(PlainConnection, request)

    class SecureHandler(urllib.request.HTTPSHandler):
        def https_open(self, request: urllib.request.Request) -> Any:
            return self.do_open(SecureConnection, request)

    opener = urllib.request.OpenerDirector()  # without ftp://, which a redirect may name
    for handler in (
        urllib.request.ProxyHandler(),
        PlainHandler(),
        SecureHandler(),
        urllib.request.UnknownHandler(),
        urllib.request.HTTPDefaultErrorHandler(),
        _RedirectHandler(),
        urllib.request.HTTPErrorProcessor(),
    ):
        opener.add_handler(handler)
    return opener


class _RedirectHandler(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, req: Any, fp: Any, *arguments: Any) -> Any:
        """Close the answer that redirects: all of its body would be read else, which may have no end."""
        fp.close()
        return super().redirect_request(req, fp, *arguments)


class _Answer(http.client.HTTPResponse):
    """An answer that raises `TimeoutError` when it has taken `ANSWER_SECONDS`, in whatever part of it. A socket's
    own timeout is for each of its bytes."""

    def __init__(self, sock: socket.socket, *arguments: Any, **options: Any) -> None:
        super().__init__(sock, *arguments, **options)
        self.fp: Any = io.BufferedReader(_TimedReader(self.fp.detach(), time.monotonic() + ANSWER_SECONDS))


class _TimedReader(io.RawIOBase):
    def __init__(self, raw: Any, deadline: float) -> None:
        self._raw, self._deadline = raw, deadline

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if time.monotonic() > self._deadline:
            raise TimeoutError(f"it took more than {ANSWER_SECONDS:g} s")
        return int(self._raw.readinto(buffer))

    def close(self) -> None:
        self._raw.close()
        super().close()


def _proxies() -> list[str]:
    return [proxy if "://" in proxy else f"http://{proxy}" for proxy in urllib.request.getproxies().values()]


def _first_of(addresses: list[str], port: int, timeout: Any, source_address: Any) -> socket.socket:
    """A connection to the first address that answers: to these, not to what the name says a moment later."""
    for ip in addresses[:-1]:
        try:
            return socket.create_connection((ip, port), timeout, source_address)
        except OSError:
            continue
    return socket.create_connection((addresses[-1], port), timeout, source_address)
