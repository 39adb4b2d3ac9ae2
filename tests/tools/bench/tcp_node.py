"""One node of `tcp`: it sends to the given hosts as fast as it can, and throws away what it gets.

    tcp_node.py HOST STREAMS [TARGET ...]

For each line of its input it prints how many bytes it got so far. At the first it listens; at the second it sends.
"""

import selectors
import socket
import sys
from collections.abc import Sequence

PORT = 5201
PIECE = bytes(1 << 18)


def run(host: str, streams: int, targets: Sequence[str]) -> None:
    """One thread for all sockets, until the input ends."""
    buffer, got, lines = bytearray(1 << 20), 0, 0
    with selectors.DefaultSelector() as selector, socket.create_server((host, PORT), backlog=256) as server:
        selector.register(server, selectors.EVENT_READ)
        selector.register(sys.stdin, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is server:
                    selector.register(server.accept()[0], selectors.EVENT_READ)
                elif key.fd == sys.stdin.fileno():
                    if not sys.stdin.readline():
                        return
                    print(got, flush=True)
                    lines += 1
                    for target in [*targets] * streams if lines == 2 else []:
                        out = socket.create_connection((target, PORT), timeout=10)
                        out.setblocking(False)
                        selector.register(out, selectors.EVENT_WRITE)
                elif isinstance(sock := key.fileobj, socket.socket):
                    if key.events & selectors.EVENT_WRITE:
                        sock.send(PIECE)
                    elif more := sock.recv_into(buffer, len(buffer), socket.MSG_TRUNC):  # counted, not copied
                        got += more
                    else:
                        selector.unregister(sock)
                        sock.close()


if __name__ == "__main__":
    run(sys.argv[1], int(sys.argv[2]), sys.argv[3:])
