import asyncio
from pathlib import Path

from atoll.comm.ids import Round
from atoll.comm.invite import Invite
from atoll.node.config import NodeConfig
from atoll.node.daemon.session import CoordinatorSession
from atoll.node.daemon.state_dir import JoinOptions


class Nothing:
    async def sealed(self, round: Round, chunk: int) -> None: ...
    async def state(self, round: Round, chunk: int) -> None: ...
    async def digests(self, round: Round) -> None: ...


def test_a_nodes_limits_are_those_of_its_data_plane(tmp_path: Path) -> None:
    async def body() -> None:
        config = NodeConfig(upload=16.0, download=8.0, streams=3, congestion="reno")  # Mbit/s
        options = JoinOptions(tmp_path, "127.0.0.1:0", "", "ada", 1.0)
        async with CoordinatorSession.opened(
            Invite("127.0.0.1:1", "run", "token"), config, options, Nothing()
        ) as member:
            plane = member.plane
            assert (plane._up.rate, plane._down.rate) == (2e6, 1e6)
            assert (plane.peers.fixed_streams, plane._congestion) == (3, "reno")

    asyncio.run(body())
