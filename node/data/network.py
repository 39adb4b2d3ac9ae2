"""The addresses that a node asks for data: a run's URL never makes it ask its own machine or network.

Whoever writes a run's config would else have every node send requests to what only that node reaches, such as a
router or a cloud's metadata service. Each address is looked at when it is connected to, so that neither a redirect
nor a name that changes its address leads there. A run whose coordinator is in this network has its data there too:
loopback and private addresses are then asked, link-local ones never. `node/data/store.py` asks by `web_opener`.
"""

import http.client
import socket
import urllib.request
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Any
from urllib.parse import urlsplit


class OwnNetwork(Exception):
    """A host is in this machine's own network, which the run may not ask."""


def is_own_network(address: str) -> bool:
    """Whether an IP address is none of the internet's: loopback, link-local, private or reserved."""
    return not _address(address).is_global


def is_local_host(host: str) -> bool:
    """Whether a host's addresses are all of this machine's own network; False: some are not, or none is known."""
    try:
        found = {str(info[4][0]) for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except OSError:
        return False
    return bool(found) and all(map(is_own_network, found))


def web_opener(lan: bool) -> urllib.request.OpenerDirector:
    """An opener of http:// and https:// whose connections raise `OwnNetwork` instead of reaching this machine's
    own network. `lan`: they reach its loopback and private addresses, but no link-local one. A proxy of the
    environment is the owner's, wherever it is."""
    proxies = {(urlsplit(proxy).hostname or "", urlsplit(proxy).port) for proxy in _proxies()}

    def connect(address: tuple[str, int], timeout: Any = None, source_address: Any = None) -> socket.socket:
        host, port = address
        if (host, port) in proxies:
            return socket.create_connection(address, timeout, source_address)
        found = [str(info[4][0]) for info in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
        for ip in found:
            if is_own_network(ip) and not (lan and not _address(ip).is_link_local):
                raise OwnNetwork(f"{host} is at {ip}")
        return _first_of(found, port, timeout, source_address)

    class PlainConnection(http.client.HTTPConnection):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self._create_connection = connect

    class SecureConnection(http.client.HTTPSConnection):
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
        urllib.request.HTTPRedirectHandler(),
        urllib.request.HTTPErrorProcessor(),
    ):
        opener.add_handler(handler)
    return opener


def _address(text: str) -> IPv4Address | IPv6Address:
    ip = ip_address(text.partition("%")[0])
    mapped = ip.ipv4_mapped if isinstance(ip, IPv6Address) else None
    return ip if mapped is None else mapped


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
