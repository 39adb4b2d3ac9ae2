"""Addresses that a machine dials because somebody else named them: a member's, a store's, what a name stands for.

Whoever names an address could have every node send requests to what only that node reaches, such as a router or a
cloud's metadata service. So outside a private run only public addresses are dialled; and it is the address that a
name was resolved to that is looked at and dialled, for the name may lead elsewhere a moment later. The coordinator
looks at a member's when it joins, a node at each that it dials, the clients of stores at each they connect to.
"""

import asyncio
import socket
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address
from typing import Any

NAT64 = IPv6Network("64:ff9b::/96")  # of translators to the IPv4 address in the last 32 bits
METADATA = ip_address("fd00:ec2::254")  # a cloud's own service, at an address that is private, not link-local
# Threads of their own: a name server that never answers holds up nothing but other names.
_RESOLVERS = ThreadPoolExecutor(4, "resolve")
SocketAddress = tuple[Any, ...]  # as the socket module has it: host and port, and for IPv6 two more


class OwnNetwork(Exception):
    """An address is in this machine's own network, which the run may not ask."""


def is_own_network(address: str) -> bool:
    """Whether an IP address is none of the internet's: loopback, link-local, private, reserved or multicast."""
    ip = _address(address)
    return not ip.is_global or ip.is_multicast


def may_dial(address: str, private: bool) -> bool:
    """Whether an IP address may be dialled: a public one, and in a `private` run one of a private network or of
    this machine, but no link-local one, where clouds have their metadata."""
    ip = _address(address)
    machines_own = ip.is_link_local or ip == METADATA
    return not is_own_network(address) or (private and not machines_own and not ip.is_multicast)


def same_host(address: str, other: str) -> bool:
    """Whether two IP addresses are one, however they are written."""
    try:
        return _address(address) == _address(other)
    except ValueError:
        return False


def is_loopback(host: str) -> bool:
    """Whether a host, a name or an IP address, is this machine to itself."""
    try:
        return _address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_local_host(host: str) -> bool:
    """Whether a host's addresses are all of this machine's own network; False: some are not, or none is known."""
    try:
        found = {str(info[4][0]) for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except OSError:
        return False
    return bool(found) and all(map(is_own_network, found))


async def resolve(host: str, port: int, private: bool) -> list[tuple[int, SocketAddress]]:
    """Address family and socket address of each place that a host name or IP address stands for and that may be
    dialled. Raises `OwnNetwork` where there is none that may be, `OSError` where there is none at all."""
    look = partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
    found = look() if _is_numeric(host) else await asyncio.get_running_loop().run_in_executor(_RESOLVERS, look)
    able = [(int(info[0]), info[4]) for info in found if may_dial(str(info[4][0]), private)]
    if found and not able:
        raise OwnNetwork(f"{host} leads into a private network ({found[0][4][0]}), and the run is a public one")
    return able


def _is_numeric(host: str) -> bool:
    """Whether it is an IP address, for which no name server is asked."""
    try:
        ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True


def _address(text: str) -> IPv4Address | IPv6Address:
    """The address that packets go to in the end."""
    ip = ip_address(text.partition("%")[0])
    if isinstance(ip, IPv4Address):
        return ip
    if ip in NAT64:
        return IPv4Address(int(ip) & 0xFFFFFFFF)
    return ip.ipv4_mapped or ip.sixtofour or ip
