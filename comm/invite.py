"""The join URL: `atoll://TOKEN:PIN@HOST:PORT/RUN`. It alone is enough to join.

PIN says which certificate the coordinator shows. A run that is not encrypted has none: `atoll://TOKEN@HOST:PORT/RUN`.
`atoll://TOKEN:PIN@dht/MULTIADDR/RUN` names a gateway in the coordinator's place, which finds it wherever it moves:
MULTIADDR is such as `ip4/203.0.113.7/tcp/4701/p2p/PEER`; there may be several, with commas between them.
"""

from dataclasses import dataclass
from urllib.parse import quote, unquote, urlsplit

from atoll.comm.errors import ConfigError
from atoll.comm.ids import NO_PIN, Pin, is_pin
from atoll.comm.peer_names import peer_of_multiaddr

DHT = "dht"  # in the place of the coordinator's host: it is to be found through a gateway


@dataclass(frozen=True, slots=True)
class Invite:
    """The parts of a join URL; `str` writes it."""

    address: str  # of the coordinator, host:port; or of gateways that find it, dht/MULTIADDR,/MULTIADDR
    run: str
    token: str
    pin: Pin = NO_PIN  # of the coordinator's certificate; empty: the run is not encrypted

    @property
    def rendezvous(self) -> tuple[str, ...]:
        """The multiaddrs of gateways that find the coordinator; none: the URL has the coordinator's address."""
        return tuple(self.address.removeprefix(DHT).split(",")) if self.address.startswith(f"{DHT}/") else ()

    @property
    def whose(self) -> str:
        """The run as it is told from others: by its name and the pin, wherever the coordinator is; without a pin,
        by the address."""
        return f"{self.pin or self.address} {self.run}"

    def __str__(self) -> str:
        secret = f"{self.token}:{self.pin}" if self.pin else self.token
        return f"atoll://{secret}@{self.address}/{quote(self.run, safe='')}"


def parse(url: str) -> Invite:
    """Read a join URL. Raises `ConfigError` naming what is missing."""
    shape = "a join URL looks like atoll://TOKEN:PIN@HOST:PORT/RUN (made by `atoll invite`)"
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"{url!r} is not a join URL ({error}): {shape}") from None
    path, address = parts.path.strip("/"), ""
    if parts.hostname == DHT and port is None:
        place, _, path = path.rpartition("/")
        address = f"{DHT}/{place}"
    elif parts.hostname and port is not None:
        address = join_host_port(parts.hostname, port)
    run = unquote(path)
    if not url.isprintable():  # nor is what a command line held that is no UTF-8
        raise ConfigError(f"{url!r} is not a join URL, it has characters that cannot be shown: {shape}")
    if parts.scheme != "atoll" or not parts.username or not address or not run:
        raise ConfigError(f"{url!r} is not a join URL: {shape}")
    pin = (parts.password or "").lower()
    if parts.password is not None and not is_pin(pin):
        raise ConfigError(f"{url!r} is not a join URL, its pin has not 52 letters and digits: {shape}")
    invite = Invite(address, run, parts.username, Pin(pin))
    if invite.rendezvous:
        _check_rendezvous(url, invite, shape)
    return invite


def _check_rendezvous(url: str, invite: Invite, shape: str) -> None:
    try:
        for multiaddr in invite.rendezvous:
            peer_of_multiaddr(multiaddr)
    except ValueError as error:
        raise ConfigError(f"{url!r} is not a join URL ({error}): {shape}") from None
    if not invite.pin:
        raise ConfigError(f"{url!r} is not a join URL, it has no pin, by which its run is found: {shape}")


def split_host_port(text: str, what: str) -> tuple[str, int]:
    """Split `host:port`, with an IPv6 host in brackets. Raises `ConfigError` naming `what`."""
    host, colon, port = text.rpartition(":")
    if not colon or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise ConfigError(f"{what} is {text!r}: write HOST:PORT, for example 0.0.0.0:4700")
    return host.strip("[]"), int(port)


def join_host_port(host: str, port: int) -> str:
    """Write `host:port`, with an IPv6 host in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
