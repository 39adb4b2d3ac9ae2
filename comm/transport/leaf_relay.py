"""The way to the chunks of a leaf for those who cannot dial it: the leaf dials them, and answers requests on that
connection.

    a leaf              `OfferDialer` dials who needs its chunks, says OFFER, and answers what is asked there
    who was dialled     `OfferPool` keeps the connections; this node fetches over them, or passes on what others
    ask

The coordinator says whom a leaf dials: as long as no node that can be dialled has what others lack.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field

from atoll.comm.ids import NodeId, Pin
from atoll.comm.transport.connection import Link, LinkBroken

log = logging.getLogger("atoll.plane")

LINKS_PER_TARGET = 2  # connections to each node: while a chunk of one is checked, the other one's comes
MAX_LINKS_PER_LEAF = 4  # connections of one leaf that are kept
REDIAL_INTERVALS = (0.2, 0.5, 1.0, 2.0)  # seconds between tries
Target = tuple[NodeId, str, Pin]  # node, address, of its certificate


@dataclass(eq=False, slots=True)
class OfferedLink:
    """A connection on which a leaf answers; one asks at a time."""

    node: NodeId
    link: Link
    over: asyncio.Event = field(default_factory=asyncio.Event)

    def close(self) -> None:
        self.link.close()
        self.over.set()


class OfferPool:
    """The connections that leaves opened to this node, to be asked on them."""

    def __init__(self) -> None:
        self._free: list[OfferedLink] = []
        self._kept = asyncio.Event()  # set, and replaced, whenever there is one more

    async def keep(self, node: NodeId, link: Link) -> None:
        """Let this node ask `node` over the link; returns when that is of no more use."""
        mine = [offered for offered in self._free if offered.node == node]
        for old in mine[: max(len(mine) + 1 - MAX_LINKS_PER_LEAF, 0)]:  # the leaf has probably given them up
            self._free.remove(old)
            old.close()
        offered = OfferedLink(node, link)
        self._offer(offered)
        try:
            await offered.over.wait()
        finally:
            if offered in self._free:
                self._free.remove(offered)

    def drop(self, node: NodeId) -> None:
        """Close the connections of `node` that nobody uses: it is no member any more."""
        for offered in [offered for offered in self._free if offered.node == node]:
            self._free.remove(offered)
            offered.close()

    def take(self, besides: Collection[NodeId] = ()) -> OfferedLink | None:
        """A connection for the caller alone, who gives it back or closes it; None: there is none but of the nodes
        `besides`."""
        found = next((offered for offered in self._free if offered.node not in besides), None)
        if found is not None:
            self._free.remove(found)
        return found

    async def take_of(self, node: NodeId) -> OfferedLink:
        """A connection of this leaf for the caller alone, as soon as there is one."""
        while (found := next((offered for offered in self._free if offered.node == node), None)) is None:
            await self._kept.wait()
        self._free.remove(found)
        return found

    def give_back(self, offered: OfferedLink) -> None:
        """Return a connection to the pool once what was asked on it is answered: it may be taken again."""
        self._offer(offered)

    def _offer(self, offered: OfferedLink) -> None:
        self._free.append(offered)
        self._kept.set()
        self._kept = asyncio.Event()


class OfferDialer:
    """The connections that this node, a leaf, keeps open. `serve(target)` dials and answers until that breaks."""

    def __init__(self, serve: Callable[[NodeId, str, Pin], Awaitable[None]]) -> None:
        self._serve = serve
        self._tasks: dict[Target, list[asyncio.Task[None]]] = {}

    def offer_to(self, targets: Collection[Target]) -> None:
        """Keep connections to these targets from now on, and to no others."""
        for target in self._tasks.keys() - set(targets):
            for task in self._tasks.pop(target):
                task.cancel()
        for target in targets:
            if target not in self._tasks:
                self._tasks[target] = [asyncio.create_task(self._keep(target)) for _ in range(LINKS_PER_TARGET)]

    async def close(self) -> None:
        """Close all connections, and wait for those who answered on them."""
        tasks = [task for tasks in self._tasks.values() for task in tasks]
        self.offer_to(())
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _keep(self, target: Target) -> None:
        tries = 0
        while True:
            try:
                await self._serve(*target)
            except LinkBroken as broken:
                log.debug("%s does not take what is offered: %s", target[0], broken)
            except Exception:
                log.exception("nothing is offered to %s because of a fault of this node", target[0])
            await asyncio.sleep(REDIAL_INTERVALS[min(tries, len(REDIAL_INTERVALS) - 1)])
            tries += 1
