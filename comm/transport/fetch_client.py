"""The asking side of a fetch: chunks of a committed round, or of the state, one by one over one connection."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from enum import Enum
from types import TracebackType
from typing import Protocol, Self

from atoll.comm.codecs import zstd
from atoll.comm.codecs.codec import Malformed
from atoll.comm.errors import PeerError
from atoll.comm.ids import NO_PIN, NodeId, Pin, Round
from atoll.comm.transport import frames
from atoll.comm.transport.connection import Link, LinkBroken, PathStats, close_dialled
from atoll.comm.transport.frames import FrameKind
from atoll.comm.transport.leaf_relay import OfferedLink, OfferPool

PART_BYTES = 1 << 18  # bytes of a state's chunk that are asked for at once, and kept if the rest does not come
MAX_AHEAD_BYTES = 1 << 20  # bytes that are asked for before they are awaited: a round trip's worth


class DonorLost(PeerError):
    """A peer, `node`, that broke the protocol or its connection; `sentence` says how."""

    def __init__(self, node: NodeId, sentence: str) -> None:
        super().__init__(f"{node}: {sentence}")
        self.node, self.sentence = node, sentence


class NotAvailable(PeerError):
    """The peer is well but does not have what was asked for: ask another, or for a newer round."""


class FetchItem(Enum):
    """A kind of thing that can be fetched of a round, by the request for it."""

    SEALED = FrameKind.GET_SEALED
    STATE = FrameKind.GET_STATE
    DIGESTS = FrameKind.GET_DIGESTS
    INPUT = FrameKind.GET_INPUT
    RECEIPT = FrameKind.GET_RECEIPT


class Dialer(Protocol):
    """Opens the connections of a `FetchClient`; `data_plane.DataPlane` is one."""

    offers: OfferPool

    async def dial(self, node: NodeId, address: str, pin: Pin) -> Link:
        """A connection to that node, which knows the run's key. Raises `LinkBroken`."""


class FetchClient:
    """One connection to `node` for many chunks, dialled at the first one, and again after a failure; where there
    is no address, one that a leaf opened, which has the chunks: any leaf, or `node` itself.

    One `fetch` at a time; use several fetchers for several chunks at once.
    """

    def __init__(
        self, plane: Dialer, node: NodeId, address: str, pin: Pin = NO_PIN, any_leaf: bool = True
    ) -> None:
        """`any_leaf`: where there is no address, any that offers it will do; else `node` is waited for."""
        self._plane, self.node, self.address, self._pin = plane, node, address, pin
        self._any_leaf = any_leaf
        self._link: Link | None = None
        self._dialling: asyncio.Task[Link] | None = None
        self._offered: OfferedLink | None = None  # whose link it is

    def dial(self) -> None:
        """Connect now, in the background. What goes wrong with that is raised by the first `fetch`."""
        if self.address and self._link is None and self._dialling is None:
            self._dialling = asyncio.create_task(self._dial())

    async def _dial(self) -> Link:
        if self.address:
            return await self._plane.dial(self.node, self.address, self._pin)
        offers = self._plane.offers
        self._offered = offers.take() if self._any_leaf else await offers.take_of(self.node)
        if self._offered is None:
            raise LinkBroken("no leaf has dialled this node yet to offer what it has")
        return self._offered.link

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._offered is not None:
            self._plane.offers.give_back(self._offered)
            self._link = self._offered = None
        self._hang_up()

    async def fetch(
        self,
        item: FetchItem,
        round: Round,
        chunk: int,
        size: int,
        deadline: float = 60.0,
        fits: Callable[[int], bool] | None = None,
    ) -> bytes:
        """Fetch `size` bytes (of digests: 16 for each chunk), or so many as `fits` says it may have, within
        `deadline` seconds. Compare their digest yourself.

        `NotAvailable` if the peer does not have them; `DonorLost` if it fails, or answers anything else.
        """
        data, missing = b"", None

        async def ask(link: Link) -> None:
            nonlocal data, missing
            await frames.send(link, frames.unfenced(item.value, round, chunk))
            try:
                data = await self._hear(link, item, round, chunk, size, fits)
            except NotAvailable as error:  # which is an answer
                missing = error

        await self._in_time(ask, f"{item.name.lower()} of round {round}, chunk {chunk}", deadline)
        if missing is not None:
            raise missing
        return data

    async def fetch_state(
        self,
        round: Round,
        chunk: int,
        parts: Callable[[], tuple[int, int] | None],
        take: Callable[[int, bytes], None],
        deadline: float = 60.0,
    ) -> None:
        """Parts of a chunk's anchor and momentum: from byte to byte as `parts` says next, until that is None; by
        calls `take(at, part)`, in the same order, as they come. Raises as `fetch` does; what was taken before is
        what it is."""

        async def ask(link: Link) -> None:
            under_way, ahead = deque[tuple[int, int]](), 0
            while True:
                while ahead < MAX_AHEAD_BYTES and (part := parts()) is not None:
                    await frames.send(link, frames.part(FrameKind.GET_STATE, round, chunk, *part))
                    under_way.append(part)
                    ahead += part[1] - part[0]
                if not under_way:
                    return
                begin, end = under_way.popleft()
                take(begin, await self._hear(link, FetchItem.STATE, round, chunk, end - begin, None))
                ahead -= end - begin

        await self._in_time(ask, f"state of round {round}, chunk {chunk}", deadline)

    async def _in_time(self, ask: Callable[[Link], Awaitable[None]], what: str, deadline: float) -> None:
        what = f"{what} from {self.address}"
        answered = False
        try:
            async with asyncio.timeout(deadline):
                if self._link is None:
                    self._dialling = self._dialling or asyncio.create_task(self._dial())
                    self._link = await self._dialling
                    self._dialling = None
                await ask(self._link)
            answered = True
        except TimeoutError:
            raise DonorLost(self.node, f"it did not answer within {deadline:g} s ({what})") from None
        except (LinkBroken, Malformed) as error:
            raise DonorLost(self.node, f"{error} ({what})") from None
        finally:
            if not answered:  # what comes next on this connection could be the rest of this answer
                self._hang_up()

    async def _hear(
        self, link: Link, item: FetchItem, round: Round, chunk: int, size: int, fits: Callable[[int], bool] | None
    ) -> bytes:
        answer = await frames.receive(link, None)
        match answer.kind:
            case FrameKind.DATA if not answer.packed and (fits(answer.length) if fits else answer.length == size):
                return await link.read(answer.length)
            case FrameKind.DATA if answer.length < size and answer.packed and item is FetchItem.STATE:
                return zstd.unpack_floats(await link.read(answer.length), size)
            case FrameKind.DATA:
                raise LinkBroken(f"it offers {answer.length} bytes where {size} were expected")
            case FrameKind.MISSING if answer.length == 0:
                raise NotAvailable(
                    f"{self.node} does not have {item.name.lower()} of round {round}, chunk {chunk}"
                )
            case FrameKind.REFUSED:
                raise LinkBroken(f"it refused: {await frames.sentence(link, answer)}")
            case _:
                raise LinkBroken(f"it answered with a frame of kind {answer.kind.name}")

    @property
    def path(self) -> PathStats | None:
        """The kernel's statistics of the connection; None while there is none, or where the system does not
        tell."""
        return self._link.path() if self._link is not None else None

    def _hang_up(self) -> None:
        if self._dialling is not None:
            self._dialling.add_done_callback(close_dialled)
            self._dialling.cancel()
            self._dialling = None
        if self._offered is not None:
            self._offered.close()
            self._offered = None
        if self._link is not None:
            self._link.close()
            self._link = None
