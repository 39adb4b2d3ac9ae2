"""The record of another node of the run, as a node's links know it."""

import asyncio

from atoll.comm.ids import NO_PIN, NodeId
from atoll.comm.transport import link_policy
from atoll.comm.transport.connection import Link, RateLimiter
from atoll.comm.transport.link_policy import LinkPolicy
from atoll.comm.transport.pacing import PeerPacer
from atoll.comm.transport.send_queue import SendQueue


class Peer:
    """One other node: where it is, its links, and what waits to be sent over them."""

    def __init__(self, node: NodeId) -> None:
        self.node, self.address, self.pin = node, "", NO_PIN
        self.queue = SendQueue()
        self.links: set[Link] = set()
        self.policy = LinkPolicy(link_policy.LINK_TIMES)
        self.rate_down = 0.0  # bytes a second that its link carries; 0: not known
        self.segments = self.resent = 0  # sent over links that are closed, and sent again
        self.limiter = RateLimiter(0, burst=0.05)
        self.pacer: PeerPacer | None = None  # of its link, which sets the limiter's rate; None: no limit
        self.links_changed = asyncio.Event()
        self.dialling: asyncio.Task[None] | None = None  # has links opened, as long as the reduce lasts

    @property
    def long_path(self) -> bool:
        """Whether the path to this peer is a long one, over which payloads go in pieces."""
        return self.queue.piece_size > 0
