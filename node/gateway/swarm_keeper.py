"""A gateway's place among libp2p's peers, taken again whenever p2pd ends: it is a process of its own, and may die
alone.

What is asked of the swarm while there is none fails as what cannot be reached does, and is asked again by whoever
wanted it.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from ipaddress import ip_address

from atoll.comm.errors import AtollError, Unreachable
from atoll.comm.peer_names import host_and_port, peer_of_multiaddr
from atoll.node.gateway.splice import Stream
from atoll.node.gateway.swarm import Handler, Swarm, SwarmOptions

log = logging.getLogger("atoll.gateway")
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.5, 30.0  # between the end of one and the next


class SwarmKeeper:
    """The swarm there is now. `run` keeps one."""

    def __init__(self, options: SwarmOptions, handler: Handler) -> None:
        """`handler`: called for each stream from a peer."""
        self._options, self._handler = options, handler
        self._known = {peer_of_multiaddr(told): told for told in options.peers}
        self._swarm: Swarm | None = None
        self.lives = 0
        self.host = ""  # this gateway's name, once there was a swarm
        self.multiaddrs: tuple[str, ...] = ()

    async def run(self, ready: Callable[[], None]) -> None:
        """Be among the peers until cancelled; call `ready` each time that this begins. Raises what `Swarm.opened`
        does, if that is at the first time."""
        pause = FIRST_PAUSE_SECONDS
        while True:
            try:
                async with Swarm.opened(self._options) as swarm:
                    for multiaddr in self._known.values():
                        swarm.know(multiaddr)
                    await swarm.serve(self._handler)
                    self._swarm, self.host, self.multiaddrs = swarm, swarm.host, swarm.multiaddrs
                    self.lives += 1
                    ready()
                    pause = FIRST_PAUSE_SECONDS
                    code = await swarm.ended()
                    log.warning(f"libp2p's process ended ({code}): it is started again")
            except AtollError as error:
                if not self.lives:
                    raise
                log.warning(str(error))
            finally:
                self._swarm = None
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)

    def know(self, multiaddrs: Sequence[str]) -> None:
        """Find these peers at their multiaddrs from now on."""
        for multiaddr in multiaddrs:
            peer = peer_of_multiaddr(multiaddr)
            self._known[peer] = multiaddr
            if self._swarm is not None:
                self._swarm.know(multiaddr)

    @property
    def is_private(self) -> bool:
        """Whether peers may be in private networks."""
        return self._swarm is not None and self._swarm.is_private

    def host_of(self, peer: bytes) -> str:
        """The IP address in the multiaddr of a peer that somebody told; empty: it has a name, or none was told."""
        try:
            host, _ = host_and_port(self._known[peer])
            ip_address(host)
        except (KeyError, ValueError):
            return ""
        return host

    async def open(self, peer: bytes) -> Stream:
        """A stream to a peer. Raises `Unreachable`."""
        if self._swarm is None:
            raise Unreachable("libp2p's process is being started")
        return await self._swarm.open(peer)

    async def publish(self, key: bytes, data: bytes, expires: int) -> bool:
        """Have a record kept, as `Swarm.publish`."""
        return self._swarm is not None and await self._swarm.publish(key, data, expires)

    async def find(self, key: bytes) -> bytes | None:
        """The record under a key, as `Swarm.find`."""
        return await self._swarm.find(key) if self._swarm is not None else None
