"""The server of what peers may fetch of this node: the state of its round, and sealed bytes of rounds before.

A round is committed before every member has applied it. Who is asked for its state meanwhile does not send the
asker away, but answers when it is there: a run whose rounds are short could else never be joined.
"""

import asyncio
from collections.abc import Sequence
from contextlib import suppress

from atoll.comm.byte_view import Octets
from atoll.comm.ids import Round
from atoll.node.checkpoint.checkpointer import Checkpointer
from atoll.node.outer.state import OuterState

APPLY_SECONDS = 1.0  # seconds in which a node should have applied what was committed


class StateServer:
    """The node's `atoll.comm.transport.data_plane.StateSource`; it has nothing until it is filled."""

    def __init__(self) -> None:
        self._outer: OuterState | None = None
        self._durable: Checkpointer | None = None
        self._settled = asyncio.Event()  # set, and replaced, when the state stands still again

    def fill(self, outer: OuterState, durable: Checkpointer | None = None) -> None:
        """Serve this state from now on. `durable`: what is on the disk, where anything is."""
        self._outer, self._durable = outer, durable

    def settled(self) -> None:
        """Answer those who wait for the state, which stands still again."""
        self._settled.set()
        self._settled = asyncio.Event()

    async def sealed(self, round: Round, chunk: int) -> Octets | None:
        return None if self._durable is None else await self._durable.sealed(round, chunk)

    async def state(self, round: Round, chunk: int) -> Octets | None:
        outer = await self._at(round)
        return None if outer is None else outer.final_chunk(round, chunk)

    async def digests(self, round: Round) -> Sequence[bytes] | None:
        outer = await self._at(round)
        return None if outer is None else outer.final_digests(round)

    async def _at(self, round: Round) -> OuterState | None:
        """The outer state; where it is about to be that of `round`, once it is."""
        outer = self._outer
        if outer is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(APPLY_SECONDS):
                    while outer.final_digests(round) is None and outer.newest in (round - 1, round):
                        await self._settled.wait()
        return outer
