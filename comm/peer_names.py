"""Names of peers that are reached through gateways: of libp2p's, in multiaddrs and as hosts of addresses. Pure.

A multiaddr says where a gateway listens and which peer it is: `/ip4/203.0.113.7/tcp/4701/p2p/12D3KooW...`. A
member that only its gateway reaches has an address like every other, whose host is the peer's id in base32, then
`.p2p`: no name server knows such a name, and each machine's own gateway finds the way.
"""

import base64
import re

SUFFIX = ".p2p"
PORT = 1  # in the address of who is reached through a gateway: it says nothing there
MAX_MULTIADDR = 255  # characters
_ALPHABET = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"  # of base58, as libp2p has it
_DIGITS = {letter: value for value, letter in enumerate(_ALPHABET)}
# SHA-256 of a key, or an Ed25519 key itself: the two kinds that libp2p has.
_PREFIXES = {bytes([0x12, 0x20]): 34, bytes([0x00, 0x24]): 38}
_MULTIADDR = re.compile(
    r"/(?:ip4|ip6|dns|dns4|dns6)/[0-9A-Za-z.:-]+/tcp/[0-9]{1,5}/p2p/([1-9A-HJ-NP-Za-km-z]{40,60})"
)


def is_peer(peer: bytes) -> bool:
    """Whether these bytes are the id of a peer."""
    return _PREFIXES.get(peer[:2]) == len(peer)


def host_of_peer(peer: bytes) -> str:
    """The host in the address of who is reached through this peer."""
    return base64.b32encode(peer).decode().rstrip("=").lower() + SUFFIX


def is_peer_host(host: str) -> bool:
    """Whether a host has the form of a peer's."""
    return host.endswith(SUFFIX)


def peer_of_host(host: str) -> bytes:
    """The id of the peer that a host names. Raises `ValueError` if it names none."""
    text = host.removesuffix(SUFFIX)
    try:
        peer = base64.b32decode(text.upper() + "=" * (-len(text) % 8)) if len(text) < 64 else b""
    except ValueError:
        peer = b""
    if not is_peer(peer) or host_of_peer(peer) != host:
        raise ValueError(f"{host[:80]!r} names no peer")
    return peer


def peer_of_multiaddr(multiaddr: str) -> bytes:
    """The id of the peer at a multiaddr. Raises `ValueError` if it is none with an address, a TCP port and a
    peer."""
    found = _MULTIADDR.fullmatch(multiaddr) if len(multiaddr) <= MAX_MULTIADDR else None
    peer = _base58(found[1]) if found else b""
    if not is_peer(peer):
        raise ValueError(f"{multiaddr[:80]!r} is no multiaddr of a gateway: write /ip4/ADDRESS/tcp/PORT/p2p/PEER")
    return peer


def host_and_port_of_multiaddr(multiaddr: str) -> tuple[str, int]:
    """The host, a name or an IP address, and the TCP port in a gateway's multiaddr. Raises `ValueError` where that
    is none."""
    peer_of_multiaddr(multiaddr)
    host, port = host_and_port(multiaddr)
    if not port:
        raise ValueError(f"{multiaddr[:80]!r} has no port")
    return host, port


def host_and_port(multiaddr: str) -> tuple[str, int]:
    """The host and the TCP port at the beginning of any multiaddr. Raises `ValueError`."""
    match multiaddr.split("/"):
        case ["", "ip4" | "ip6" | "dns" | "dns4" | "dns6", host, "tcp", port, *_] if port.isdecimal():
            if int(port) < 1 << 16:
                return host, int(port)
    raise ValueError(f"{multiaddr[:80]!r} is no multiaddr: write /ip4/ADDRESS/tcp/PORT")


def _base58(text: str) -> bytes:
    number = 0
    for letter in text:
        number = number * 58 + _DIGITS[letter]
    zeros = len(text) - len(text.lstrip("1"))
    return bytes(zeros) + number.to_bytes((number.bit_length() + 7) // 8, "big")
