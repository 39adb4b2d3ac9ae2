"""One connection through the door: bytes of a client's socket to the service's, and back, as they are.

What one side does not take is not read from the other: a direction holds READ_BYTES at most. TLS, if the run has
it, goes through from end to end.
"""

import selectors
import socket
from contextlib import suppress

READ_BYTES = 1 << 16  # at a time; what one direction holds at most
STRANGER_READ_BYTES = 1 << 12  # at a time, from a stranger: its address pays for little more than it may send


class Direction:
    """One direction of a spliced connection."""

    __slots__ = ("ended", "pending", "sink", "source")

    def __init__(self, source: socket.socket, sink: socket.socket) -> None:
        self.source, self.sink = source, sink
        self.pending = b""  # read, and not taken yet
        self.ended = False  # the source has no more

    def read(self, size: int = READ_BYTES) -> int:
        """Read `size` bytes at most and pass on what the sink takes; returns how many. Raises `OSError` where it
        broke."""
        try:
            data = self.source.recv(size)
        except (BlockingIOError, InterruptedError):
            return 0
        self.ended = not data
        self.pending = data
        self.write()
        return len(data)

    def write(self) -> None:
        """Pass on what is pending, and the end after it. Raises `OSError` where it broke."""
        if self.pending:
            try:
                sent = self.sink.send(self.pending)
            except (BlockingIOError, InterruptedError):
                return
            self.pending = self.pending[sent:]
        if self.ended and not self.pending:
            with suppress(OSError):  # the other side has ended as well
                self.sink.shutdown(socket.SHUT_WR)


class Splice:
    """A client's connection and the one that the door made to the service for it."""

    __slots__ = (
        *("address", "allowance", "client", "down", "number", "owner", "paused", "port", "service", "spent"),
        "up",
    )

    def __init__(
        self, number: str, port: int, address: str, client: socket.socket, service: socket.socket
    ) -> None:
        """`number` names it to the service; `port`: which of the door's it came to; `address`: by `network_of`."""
        self.number, self.port, self.address = number, port, address
        self.client, self.service = client, service
        self.up, self.down = Direction(client, service), Direction(service, client)
        self.owner: str | None = None  # the member whose it is; None: a stranger's
        self.paused = False  # nothing is read from the client for a while
        self.spent = 0  # bytes from the client, as a stranger's
        self.allowance = 0  # bytes that the service wants from the client, and that nobody pays for

    @property
    def over(self) -> bool:
        """Whether both sides have ended, and everything was passed on."""
        return self.up.ended and self.down.ended and not self.up.pending and not self.down.pending

    def interest(self, sock: socket.socket) -> int:
        """The events (of `selectors`) to wait for at one of its two sockets; 0: none."""
        reading, writing = (self.up, self.down) if sock is self.client else (self.down, self.up)
        read = not reading.ended and not reading.pending and not (self.paused and reading is self.up)
        return selectors.EVENT_READ * read | selectors.EVENT_WRITE * bool(writing.pending)

    def close(self) -> None:
        """Close both sockets."""
        self.client.close()
        self.service.close()
