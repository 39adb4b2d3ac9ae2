"""Bring the outer state to the committed round with the peers' help.

A chunk that lags some rounds is brought forward with their sealed bytes (about 1 byte a parameter and round) where
these are fewer than those of the whole chunk (8 bytes a parameter). A donor that has moved on to the next round
answers that it does not have the old one; whatever was fetched by then is kept and brought forward. Every chunk is
checked against the donors' digest list, and the list against the digest that the coordinator recorded.
"""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import TypeVar

from atoll.comm.certificates import NO_PIN, Pin
from atoll.comm.codec import Codec, Malformed
from atoll.comm.digest import SIZE, root
from atoll.comm.errors import Unreachable
from atoll.comm.ids import NodeId, Round
from atoll.comm.plane import DataPlane, Fetcher, Item, Missing, PeerLost
from atoll.node.outer import OuterState

T = TypeVar("T")
log = logging.getLogger("atoll.node")
STREAMS = 4  # chunks fetched at the same time
DEADLINE = 120.0  # seconds for one chunk


class MovedOn(Unreachable):
    """No donor holds the round any more, or none answers; a newer view tells what to fetch."""


@dataclass(frozen=True, slots=True)
class Donor:
    node: NodeId
    address: str
    pin: Pin = NO_PIN  # of its certificate


@dataclass(frozen=True, slots=True)
class Target:
    round: Round
    digest: bytes  # of the state after the round, from the coordinator
    donors: tuple[Donor, ...]


async def recover(
    plane: DataPlane,
    outer: OuterState,
    codec: Codec,
    target: Target,
    worker: Executor,
    on_progress: Callable[[int, int], None],
) -> None:
    """Make `outer` the state of `target.round`; `on_progress(chunks done, of all)`. Raises `MovedOn`.

    `worker` is the one thread that may touch `outer`'s arithmetic.
    """
    if not target.donors:
        raise MovedOn(f"no member holds the state of round {target.round}")
    wanted, donors = await _digest_list(plane, outer, target)
    todo = asyncio.Queue[int]()
    for c in range(outer.chunks.count):
        todo.put_nowait(c)
    done = 0

    async def stream(i: int) -> None:
        nonlocal done
        for k in range(len(donors)):
            donor = donors[(i + k) % len(donors)]
            try:
                async with Fetcher(plane, donor.node, donor.address, donor.pin) as fetcher:
                    while not todo.empty():
                        c = todo.get_nowait()
                        try:
                            await _bring(fetcher, outer, codec, c, target.round, wanted[c], worker)
                        except BaseException:
                            todo.put_nowait(c)
                            raise
                        done += 1
                        on_progress(done, outer.chunks.count)
                return
            except (PeerLost, Missing) as error:
                log.warning(f"recovering: {error}")

    async with asyncio.TaskGroup() as streams:
        for i in range(min(STREAMS, max(outer.chunks.count, 1))):
            streams.create_task(stream(i))
    if not todo.empty():
        raise MovedOn(f"{todo.qsize()} of {outer.chunks.count} chunks of round {target.round} could not be had")


async def _digest_list(plane: DataPlane, outer: OuterState, target: Target) -> tuple[list[bytes], list[Donor]]:
    """The chunks' digests as the run's digest proves them, and the donors, the one that gave them first."""
    for i, donor in enumerate(target.donors):
        try:
            size = SIZE * outer.chunks.count
            packed = await plane.fetch(
                donor.node, donor.address, Item.DIGESTS, target.round, 0, size, pin=donor.pin
            )
        except (PeerLost, Missing) as error:
            log.warning(f"recovering: {error}")
            continue
        digests = [packed[k : k + SIZE] for k in range(0, size, SIZE)]
        if root(digests) == target.digest:
            return digests, [*target.donors[i:], *target.donors[:i]]
        log.warning(f"recovering: the state of {donor.node} is not the run's")
    raise MovedOn(f"no donor has the state of round {target.round}")


async def _bring(
    fetcher: Fetcher, outer: OuterState, codec: Codec, c: int, round_: Round, digest: bytes, worker: Executor
) -> None:
    """Bring chunk `c` to `round_`; `Missing` or `PeerLost` if this donor cannot help."""

    async def compute(work: Callable[..., T], *args: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(worker, lambda: work(*args))

    if outer.at[c] == round_ and await compute(outer.chunk_digest, c) == digest:
        return
    sealed, whole = codec.size(outer.chunks.size(c)), 8 * outer.chunks.size(c)  # bytes
    if 0 < (round_ - outer.at[c]) * sealed < whole and outer.at[c] >= 0:
        try:
            for k in range(outer.at[c] + 1, round_ + 1):
                payload = await fetcher.fetch(Item.SEALED, Round(k), c, sealed, DEADLINE)
                await compute(outer.apply, c, payload)
            if await compute(outer.chunk_digest, c) == digest:
                return
        except (Missing, Malformed):
            pass  # the donor keeps fewer rounds, or the bytes are bad: the whole chunk follows
    data = await fetcher.fetch(Item.STATE, round_, c, whole, DEADLINE)
    await compute(outer.put, c, round_, data)
    if await compute(outer.chunk_digest, c) != digest:
        outer.at[c] = -1
        raise PeerLost(fetcher.node, f"chunk {c} of round {round_} is not what the run's digest says")
