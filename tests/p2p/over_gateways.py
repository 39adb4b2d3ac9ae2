"""A plugin of pytest's: every connection that a data plane dials goes through two real gateways.

    PYTHONPATH=tests pytest -p p2p.over_gateways tests/comm/transport ...

    data plane -- port of gateway A -- p2pd of A -- libp2p -- p2pd of B -- gateway B -- data plane

The gateways are a process of their own, as long as the tests last. One gateway leads to one data plane; so that
tests may have any number, B has a protocol of libp2p's for each port that is dialled, and behind each what a
gateway has.
"""

import asyncio
import socket
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from atoll.comm.invite import split_host_port
from atoll.comm.transport import data_plane

LISTEN = "/ip4/127.0.0.1/tcp/0"
Connect = Callable[[str, int, bool], Awaitable[socket.socket]]
# What is otherwise where a port of this machine is dialled that somebody else has opened: it takes every
# connection.
OTHERWISE = {
    # The sentence that says so is another: the connection is there, and closed.
    "test_a_peer_that_is_gone_is_lost_with_a_sentence",
    "test_the_other_side_dials_when_nothing_comes_of_the_first",
    "test_a_member_that_cannot_be_reached_is_named",
    "test_that_no_donor_answers_is_told_with_the_reasons_and_not_as_if_the_round_had_passed",
    # Bytes of a dial that was given up end in the port, and one link's fit into its buffers.
    "test_a_frame_of_a_round_to_come_waits_until_it_begins",
    "test_a_payload_in_pieces_travels_over_all_links_and_arrives_whole",
}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out = [item for item in items if item.name.partition("[")[0] in OTHERWISE]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


@pytest.fixture(scope="session")
def two_gateways() -> Iterator[str]:
    """The path of the Unix socket that answers "HOST PORT" with the address that leads there through both."""
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/asks"
        process = subprocess.Popen([sys.executable, "-P", __file__, path], stdout=subprocess.PIPE)
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        yield path
        process.terminate()
        process.wait(60)


@pytest.fixture(autouse=True)
def through_gateways(two_gateways: str, monkeypatch: pytest.MonkeyPatch) -> None:
    directly: Connect = data_plane._connect

    async def connect(host: str, port: int, private: bool) -> socket.socket:
        reader, writer = await asyncio.open_unix_connection(two_gateways)
        writer.write(f"{host} {port}\n".encode())
        address = (await reader.readline()).decode().strip()
        writer.close()
        await writer.wait_closed()
        return await directly(*split_host_port(address, "the gateway's port"), True)

    monkeypatch.setattr(data_plane, "_connect", connect)


async def serve(path: str) -> None:
    """Be the two gateways, and answer at the Unix socket."""
    from hivemind.p2p import PeerID

    from atoll.comm.errors import Unreachable
    from atoll.node.gateway.local_ports import LocalPorts
    from atoll.node.gateway.relaying import Relaying
    from atoll.node.gateway.splice import Stream
    from atoll.node.gateway.stream_header import RelayLimits, Service
    from atoll.node.gateway.swarm import FAILURES, PROTOCOL, Swarm, SwarmOptions, _caller

    ports, known, turn = LocalPorts(), set[int](), asyncio.Lock()

    async def nowhere(_: bytes) -> Stream:
        raise Unreachable("nothing is asked of this side")

    async def lead(a: Swarm, b: Swarm, host: str, port: int) -> str:
        """The address that leads to a data plane."""
        protocol = f"{PROTOCOL}/{port}"
        async with turn:
            if port not in known:
                behind = Relaying(nowhere, (), RelayLimits())
                behind.served[Service.DATA] = f"{host}:{port}"

                async def accept(info: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                    await behind.accept(_caller(info.peer_id, info.addr), Stream(reader, writer))

                await b._daemon.add_binary_stream_handler(protocol, accept)
                known.add(port)

        async def open_stream(peer: bytes) -> Stream:
            try:
                _, *both = await a._daemon.call_binary_stream_handler(PeerID(peer), protocol)
            except FAILURES as error:
                raise Unreachable(str(error)) from None
            return Stream(*both)

        asking = Relaying(open_stream, (), RelayLimits())
        return await ports.address(f"{host}:{port}", lambda: asking.reach(b.peer, Service.DATA))

    folder = Path(path).parent
    async with (
        Swarm.opened(SwarmOptions(folder / "b", [LISTEN])) as b,
        Swarm.opened(SwarmOptions(folder / "a", peers=b.multiaddrs)) as a,
    ):

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            host, port = (await reader.readline()).decode().split()
            writer.write((await lead(a, b, host, int(port))).encode() + b"\n")
            writer.close()

        server = await asyncio.start_unix_server(answer, path)
        print("ready", flush=True)
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1]))
