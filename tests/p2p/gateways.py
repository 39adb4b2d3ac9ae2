"""Gateways of tests: in this process, and as processes beside a run's."""

import subprocess
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from e2e.harness import ATOLL, Run, until

from atoll.comm.peer_names import peer_of_multiaddr
from atoll.node.gateway.relaying import Relaying
from atoll.node.gateway.stream_header import RelayLimits
from atoll.node.gateway.swarm import Swarm, SwarmOptions

LISTEN = "/ip4/127.0.0.1/tcp/0"


@dataclass(frozen=True)
class Peer:
    """A gateway in this process."""

    swarm: Swarm
    relaying: Relaying

    @property
    def multiaddr(self) -> str:
        return self.swarm.multiaddrs[0]


@asynccontextmanager
async def gateway(
    folder: Path, name: str, peers: Sequence[Peer] = (), public: bool = False, limits: RelayLimits | None = None
) -> AsyncIterator[Peer]:
    known = [peer.multiaddr for peer in peers]
    where = SwarmOptions(folder / name, [LISTEN] if public else [], peers=known)
    async with Swarm.opened(where) as swarm:
        relaying = Relaying(swarm.open, [*map(peer_of_multiaddr, known)], limits or RelayLimits())
        await swarm.serve(relaying.accept)
        yield Peer(swarm, relaying)


def start(run: Run, name: str, *options: str, through: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    """A gateway's process beside a run's."""
    folder = ("--state-dir", str(run.folder / name))
    return run.spawn(f"{name}.log", [*through, *ATOLL, "gateway", *folder, *options])


def multiaddr(run: Run, name: str) -> str:
    """The first one under which others know a gateway that listens."""
    file = run.folder / name / "multiaddr"
    until(f"the gateway {name}", lambda: file.exists() and file.read_text().strip())
    return file.read_text().split()[0]
