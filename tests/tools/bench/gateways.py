"""How much a stream carries by each way between two gateways, beside plain TCP, and what a gateway takes of
memory: `PYTHONPATH=tests:tests/tools .p2p-venv/bin/python -m bench.gateways`.

Real processes on loopback: a node's side asks its gateway for a port and sends into it, what is behind the other
gateway reads. Every byte is copied by as many processes as on the internet; what a link or a router takes is not
here.
"""

import argparse
import asyncio
import json
import socket
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import psutil
from e2e.harness import ATOLL, until

from atoll.comm.invite import split_host_port
from atoll.node.gateway.client import GatewayProcess, RelayOffer

MEBIBYTE = 1 << 20
PIECE = bytes(1 << 18)
WAYS = ("direct", "punched", "relayed")
CHOOSE_SECONDS = 5.0  # by then the way is chosen


@contextmanager
def sink() -> Iterator[str]:
    """The "host:port" of who reads as many bytes as the first 8 say, and then says so with a byte."""
    server = socket.create_server(("127.0.0.1", 0))

    def read(sock: socket.socket) -> None:
        with sock:
            left = int.from_bytes(sock.recv(8, socket.MSG_WAITALL), "big")
            while left and (data := sock.recv(1 << 18)):
                left -= len(data)
            sock.sendall(b".")

    def serve() -> None:
        while True:
            try:
                sock, _ = server.accept()
            except OSError:
                return
            threading.Thread(target=read, args=(sock,), daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    yield f"127.0.0.1:{server.getsockname()[1]}"
    server.close()


def rate(address: str, size: int) -> float:
    """MiB a second of `size` bytes sent to "host:port", until the other side has them all."""
    with socket.create_connection(split_host_port(address, "the address"), 60) as sock:
        sock.sendall(size.to_bytes(8, "big"))
        time.sleep(CHOOSE_SECONDS)
        began = time.monotonic()
        for _ in range(size // len(PIECE)):
            sock.sendall(PIECE)
        assert sock.recv(1) == b"."
        return size / MEBIBYTE / (time.monotonic() - began)


@contextmanager
def relay(folder: Path, observer: int) -> Iterator[str]:
    """The multiaddr of a relay."""
    place = folder / "multiaddr"
    command = [*ATOLL, "gateway", "--state-dir", str(folder), "--listen", "/ip4/127.0.0.1/tcp/0", "--relay"]
    process = subprocess.Popen([*command, "--observer", str(observer)], stderr=subprocess.DEVNULL)
    until("the relay", lambda: place.exists() and place.read_text().strip())
    try:
        yield place.read_text().strip()
    finally:
        process.terminate()
        process.wait()


@asynccontextmanager
async def port(folder: Path, way: str, place: str, address: str) -> AsyncIterator[str]:
    """The "host:port" that leads to `address` this way."""
    offer = None
    if way == "direct":
        with socket.create_server(("127.0.0.1", 0)) as free:
            offer = RelayOffer("127.0.0.1", free.getsockname()[1])
    async with (
        GatewayProcess.opened(folder / "served", [place], offer) as served,
        GatewayProcess.opened(folder / "asking", [place]) as asking,
    ):
        host = await served.serve_data(address)
        for gateway in (served, asking):
            await gateway.await_place(60)
        yield "{}:{}".format(*await asking.reach(host))


async def measured(way: str, size: int) -> float:
    with tempfile.TemporaryDirectory() as name, sink() as address:
        folder = Path(name)
        if way == "tcp":
            return await asyncio.to_thread(rate, address, size)
        with relay(folder / "relay", 0 if way == "punched" else -1) as place:
            async with port(folder, way, place, address) as entrance:
                return await asyncio.to_thread(rate, entrance, size)


def memory() -> dict[str, float]:
    """MB of a gateway and its p2pd, a while after its start."""
    with tempfile.TemporaryDirectory() as name, relay(Path(name), 0):
        (gateway,) = [p for p in psutil.Process().children() if "gateway" in p.cmdline()]
        (child,) = gateway.children()
        return {"gateway": gateway.memory_info().rss / 1e6, "p2pd": child.memory_info().rss / 1e6}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mebibytes", type=int, default=256)
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    size = asked.mebibytes * MEBIBYTE
    found = dict[str, object]()
    for way in ("tcp", *WAYS):
        rates = [asyncio.run(measured(way, size)) for _ in range(asked.times)]
        found[way] = statistics.median(rates)
        if not asked.json:
            print(f"| {way} | {found[way]:,.0f} MiB/s | {min(rates):,.0f} to {max(rates):,.0f} |", flush=True)
    found["memory_mb"] = memory()
    if asked.json:
        print(json.dumps(found))
        return
    for what, megabytes in memory().items():
        print(f"| {what} | {megabytes:.0f} MB |")


if __name__ == "__main__":
    main()
