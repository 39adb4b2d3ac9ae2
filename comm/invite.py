"""The join URL: `atoll://TOKEN:PIN@HOST:PORT/RUN`. It alone is enough to join.

PIN says which certificate the coordinator shows. A run that is not encrypted has none: `atoll://TOKEN@HOST:PORT/RUN`.
"""

from dataclasses import dataclass
from urllib.parse import quote, unquote, urlsplit

from atoll.comm.errors import ConfigError
from atoll.comm.ids import NO_PIN, Pin, is_pin


@dataclass(frozen=True, slots=True)
class Invite:
    """The parts of a join URL; `str` writes it."""

    address: str  # of the coordinator, host:port
    run: str
    token: str
    pin: Pin = NO_PIN  # of the coordinator's certificate; empty: the run is not encrypted

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
    run = unquote(parts.path.strip("/"))
    if not url.isprintable():  # nor is what a command line held that is no UTF-8
        raise ConfigError(f"{url!r} is not a join URL, it has characters that cannot be shown: {shape}")
    if parts.scheme != "atoll" or not parts.username or not parts.hostname or port is None or not run:
        raise ConfigError(f"{url!r} is not a join URL: {shape}")
    pin = (parts.password or "").lower()
    if parts.password is not None and not is_pin(pin):
        raise ConfigError(f"{url!r} is not a join URL, its pin has not 52 letters and digits: {shape}")
    return Invite(join_host_port(parts.hostname, port), run, parts.username, Pin(pin))


def split_host_port(text: str, what: str) -> tuple[str, int]:
    """Split `host:port`, with an IPv6 host in brackets. Raises `ConfigError` naming `what`."""
    host, colon, port = text.rpartition(":")
    if not colon or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise ConfigError(f"{what} is {text!r}: write HOST:PORT, for example 0.0.0.0:4700")
    return host.strip("[]"), int(port)


def join_host_port(host: str, port: int) -> str:
    """Write `host:port`, with an IPv6 host in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
