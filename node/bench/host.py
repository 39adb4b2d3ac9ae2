"""The addresses that a bench's processes listen on, tried before any is started."""

import socket
from collections.abc import Iterable

from atoll.comm.errors import ResourceError


def check_host(host: str, numbers: Iterable[int]) -> None:
    """Raise `ResourceError` if this machine cannot listen on --host, where {i} stands for each of the numbers."""
    for number in numbers:
        address = host.replace("{i}", str(number))
        try:
            with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
                probe.bind((address, 0))
        except (OSError, UnicodeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ResourceError(
                f"--host is {address!r}: nothing can listen there ({reason}), give an address of this machine"
            ) from None
