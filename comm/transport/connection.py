"""One TCP connection of the data plane: buffers out, buffers in, nothing copied on the way.

    out     a vector of buffers goes to the kernel in one call, however often it takes a part of it
    in      bytes land where the caller wants them
    caps    a `RateLimiter` shared by all links of a node bounds what they send, or take in, together: so many
            bytes a second, and none beyond an amount
    TLS     the same calls over a TLS session, where the run wants it

At most one task sends and one receives. A broken connection and an expired deadline are `LinkBroken`, with a
sentence; nothing here knows what the bytes mean.
"""

import asyncio
import math
import os
import socket
import ssl
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

from atoll.comm.errors import PeerError
from atoll.comm.transport.stream_policy import LONG_PATH_RTT

STALL_TIMEOUT = 60.0  # seconds without a byte in the middle of something
# Longer than a receiver may leave a window closed: Linux counts that against it too.
UNACKED_TIMEOUT = 45.0  # seconds that sent bytes may stay unacknowledged
LINGER_TIMEOUT = 1.0  # seconds for which last bytes may be on their way before the connection is reset
MIN_CAPPED_PIECE_BYTES, CAPPED_PIECE_BYTES = 1 << 14, 1 << 18  # bytes that a capped link moves at once
CAPPED_PIECE_SECONDS = 0.05  # of the cap's rate, that are moved at once: what passes is even over seconds
CAP_POLL_INTERVAL = 0.25  # seconds after which who waits for a cap looks whether it has changed
MIN_UNSENT_BYTES, MAX_UNSENT_BYTES = 1 << 15, 1 << 18  # bytes that wait in the kernel of a long path's sender
MAX_WAKE_BYTES = 1 << 17  # bytes that a waiting receiver is woken for at most: each time costs it 50 microseconds
TLS_READ_BYTES = 1 << 17  # bytes read from the network at once under TLS
TLS_RECORD_BYTES = 1 << 14  # bytes in one record at most
TLS_PIECE_BYTES = 1 << 15  # bytes encrypted at once: each link keeps memory for them


class LinkBroken(PeerError):
    """A connection that is of no more use; the text says why."""


class LinkReset(LinkBroken):
    """A connection that the other side, or something in between, broke off."""


class LinkSpoiled(LinkBroken):
    """A connection that carried what its other side cannot have sent."""


class LinkClosed(LinkBroken):
    """A connection that the other side closed between two messages."""


@dataclass
class ByteCounter:
    """Bytes through all links of a plane, headers and handshakes included."""

    up: int = 0
    down: int = 0


class RateLimiter:
    """A limit of `rate` bytes a second on all that passes through it; 0: no limit. `burst`: seconds' worth of
    bytes that may pass at once. What passes has to pass through `within`, too."""

    def __init__(self, rate: float, burst: float = 0.25, within: "RateLimiter | None" = None) -> None:
        self.rate, self._burst, self._within = rate, burst, within
        self._free_at = 0.0  # seconds; when what was let through will have passed at the rate
        self.room: Callable[[], float] | None = None  # bytes that may pass yet, whatever the rate; None: no end
        self._changes = 0

    def change(self, rate: float) -> None:
        """Let `rate` bytes a second through from now on; what waits already is soon let through."""
        self.rate, self._free_at = rate, 0.0
        self._changes += 1

    def adjust(self, rate: float) -> None:
        """Let `rate` bytes a second through from now on; what waits already waits as long as it would have."""
        self.rate = rate

    @property
    def limits(self) -> bool:
        """Whether anything may have to wait."""
        return self.rate > 0 or self.room is not None or (self._within is not None and self._within.limits)

    @property
    def piece(self) -> int:
        """Bytes that are best moved at once."""
        outer = self._within.piece if self._within is not None else CAPPED_PIECE_BYTES
        even = int(CAPPED_PIECE_SECONDS * self.rate) if self.rate else CAPPED_PIECE_BYTES
        return min(max(even, MIN_CAPPED_PIECE_BYTES), outer)

    async def some_room(self) -> int:
        """Wait until anything may pass; returns how many bytes may at most, until the next task has its turn."""
        while (room := self._left()) < 1:
            await asyncio.sleep(CAP_POLL_INTERVAL)
        return int(min(room, CAPPED_PIECE_BYTES))

    def _left(self) -> float:
        outer = self._within._left() if self._within is not None else math.inf
        return min(outer, self.room()) if self.room is not None else outer

    async def take(self, size: int) -> None:
        """Wait until `size` bytes may pass at the rate, and anything may pass at all."""
        if self._within is not None:
            await self._within.take(size)
        if self.room is not None:
            await self.some_room()
        if not (rate := self.rate):
            return
        clock = asyncio.get_running_loop().time
        free_at = self._free_at = max(self._free_at, clock() - self._burst) + size / rate
        changes = self._changes
        while self._changes == changes and (rest := free_at - clock()) > 0:
            await asyncio.sleep(min(rest, CAP_POLL_INTERVAL))


class PathStats(NamedTuple):
    """The kernel's statistics of one connection."""

    rtt: float  # seconds, the smallest of late: a receiver that is busy makes others longer
    smoothed: float  # seconds, as it is now
    acked: int  # bytes that have reached the other side
    received: int  # bytes that have come from there, without a gap, read or not
    quiet: float  # seconds since data last came in
    sent: int  # segments
    resent: int  # segments, of these
    burst: float  # bytes a second that it carried of late, while there was something to carry
    heard: int = 0  # segments that came in
    busy: float = 0.0  # seconds in which there was something to carry, and room for it on the other side
    flying: bool = False  # bytes are on their way, or wait to be


class Link:
    """A connection to one peer, used by one task that sends and one that receives; `close` it."""

    def __init__(
        self,
        sock: socket.socket,
        meter: ByteCounter,
        up: RateLimiter | None = None,
        down: RateLimiter | None = None,
    ) -> None:
        """`sock` is connected and does not block."""
        self._sock, self._meter = sock, meter
        self._up, self._down = up or RateLimiter(0), down or RateLimiter(0)
        self._tls: _Tls | None = None
        self._loop = asyncio.get_running_loop()
        self._waiting: set[asyncio.Future[None]] = set()
        self._closed = False
        self._inet = sock.family in (socket.AF_INET, socket.AF_INET6)
        self._low = 1  # bytes that must be here to wake who waits for them
        self._read_at = self._loop.time()  # seconds
        self.moved = 0  # bytes, both ways
        self.fresh_at = self._read_at  # seconds; since then what the kernel knows of the path counts
        set_options(sock)

    # Out

    async def write(self, *buffers: bytes | memoryview) -> None:
        """Hand the buffers to the kernel, in order; they must not change meanwhile."""
        views = [memoryview(b).cast("B") for b in buffers]
        await (self.push(views) if self._tls is None else self._tls.write(views))

    async def push(self, rest: list[memoryview]) -> None:
        """Send these bytes as they are."""
        may = 0  # bytes of the first buffer: the cap has let them through, and the kernel has not taken them yet
        while rest:
            if (capped := self._up.limits) and not may:
                rest = [piece for b in rest for piece in _pieces(b, self._up.piece)]
                may = len(rest[0])
                await self._up.take(may)
            now = [rest[0][: await self._up.some_room()]] if capped else rest
            try:
                sent = self._sock.sendmsg(now)
            except (BlockingIOError, InterruptedError):
                await self._until(self._loop.add_writer, self._loop.remove_writer, STALL_TIMEOUT, "took no byte")
                continue
            except OSError as error:
                raise LinkReset(f"the connection broke while sending: {os_reason(error)}") from None
            self._meter.up += sent
            self.moved += sent
            may = max(may - sent, 0)
            while rest and sent >= len(rest[0]):
                sent -= len(rest.pop(0))
            if sent:
                rest[0] = rest[0][sent:]

    # In

    async def read(self, size: int, timeout: float | None = STALL_TIMEOUT) -> bytes:
        """Exactly `size` bytes, which the caller has found to be what was expected."""
        data = bytearray(size)
        await self.read_into(memoryview(data), timeout)
        return bytes(data)

    async def read_into(self, place: memoryview, timeout: float | None = STALL_TIMEOUT) -> None:
        """Fill `place`; `timeout` runs from each byte to the next. `LinkClosed` if not even one comes."""
        size = len(place)
        filled = 0
        while filled < size:
            if self._tls is not None:
                got = await self._tls.read_some(place[filled:], timeout)
            else:
                got = await self.pull(place[filled:], timeout)
            if not got:
                ended = LinkBroken("the connection ended in mid-frame")
                raise ended if filled else LinkClosed("the connection was closed")
            filled += got

    async def pull(self, place: memoryview, timeout: float | None, enough: int = 0) -> int:
        """Read some bytes as they come from the network into `place`, and return how many; 0: the other side has
        ended. To be woken for less than `enough` would be of no use; 0: than all of `place`."""
        if self._down.limits:
            place = place[: self._down.piece]
        while True:
            some = place[: await self._down.some_room()] if self._down.limits else place
            try:
                got = self._sock.recv_into(some)
            except (BlockingIOError, InterruptedError):
                self._wake_at(min(enough or len(place), len(place), MAX_WAKE_BYTES))
                await self._until(self._loop.add_reader, self._loop.remove_reader, timeout, "sent nothing")
                continue
            except OSError as error:
                raise LinkReset(f"the connection broke: {os_reason(error)}") from None
            self._meter.down += got
            self.moved += got
            self._read_at = self._loop.time()
            await self._down.take(got)
            return got

    def _wake_at(self, size: int) -> None:
        """Be woken when so many bytes are here, not at every segment."""
        if size != self._low and self._inet:
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, size)
            self._low = size

    async def drain(self) -> None:
        """End this side's bytes, and read away what still arrives for a moment: a reset would overtake ours."""
        with suppress(LinkBroken, OSError, TimeoutError):
            async with asyncio.timeout(LINGER_TIMEOUT):
                self._sock.shutdown(socket.SHUT_WR)
                scratch = memoryview(bytearray(CAPPED_PIECE_BYTES))
                while await self.pull(scratch, None):
                    pass

    # Both

    async def secure(self, context: ssl.SSLContext, server: bool, timeout: float) -> bytes:
        """Go over to TLS within `timeout` seconds; returns the other side's certificate (DER; empty: it showed
        none), which the caller compares."""
        tls = _Tls(self, context, server)
        await tls.shake(timeout)
        self._tls = tls
        return tls.certificate()

    @property
    def encrypted(self) -> bool:
        """Whether it has gone over to TLS."""
        return self._tls is not None

    def path(self) -> PathStats | None:
        """The kernel's statistics of the connection; None where it does not tell."""
        return tcp_info(self._sock)

    @property
    def heard(self) -> float:
        """The time at which bytes last came in, in the loop's seconds."""
        path = self.path()
        return max(self._read_at, self._loop.time() - path.quiet) if path is not None else self._read_at

    def limit_sending(self, up: RateLimiter) -> None:
        """Send through this limiter from now on."""
        self._up = up

    def suit_path(self) -> None:
        """Keep little waiting in the kernel on a long path: what is urgent cannot overtake it. A short one stays
        as it is: the fewer calls the better."""
        path = self.path()
        if path is not None and path.rtt > LONG_PATH_RTT:
            self.limit_unsent(MIN_UNSENT_BYTES)

    def limit_unsent(self, size: int) -> None:
        """Let about `size` bytes, within bounds, wait in the kernel: half of them are sent from one wake-up to the
        next."""
        if self._inet and hasattr(socket, "TCP_NOTSENT_LOWAT"):
            with suppress(OSError):
                size = min(max(size, MIN_UNSENT_BYTES), MAX_UNSENT_BYTES)
                self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, size)

    def use_congestion_control(self, name: str) -> None:
        """Choose the congestion control of this name, where the kernel offers it; else the one in use stays."""
        if self._inet and hasattr(socket, "TCP_CONGESTION"):
            with suppress(OSError):
                self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name.encode())

    @property
    def congestion_control(self) -> str:
        """The name of the congestion control in use; empty where the system does not tell."""
        if not self._inet or not hasattr(socket, "TCP_CONGESTION"):
            return ""
        with suppress(OSError):
            return self._sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0").decode()
        return ""

    def refresh(self, congestion_control: str) -> None:
        """Go on where the last transfer ended: with its window, and without what is out of date. Linux forgets the
        window of an idle connection unless it is BBR's; and BBR takes the shortest round trip for out of date
        after 10 s, and would stop for 0.2 s in the middle of a transfer to measure it."""
        self.fresh_at = self._loop.time()
        before = self.congestion_control
        self.use_congestion_control("reno")
        self.use_congestion_control(congestion_control)
        if self.congestion_control != congestion_control:  # the kernel does not offer it
            self.use_congestion_control(before)

    def close(self) -> None:
        """Close the socket; who waits on this link has `LinkBroken`."""
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self._sock.fileno())
        self._loop.remove_writer(self._sock.fileno())
        for waiting in self._waiting:
            if not waiting.done():
                waiting.set_exception(LinkBroken("the connection was closed on this side"))
        self._sock.close()

    async def _until(self, add, remove, timeout: float | None, what: str) -> None:  # type: ignore[no-untyped-def]
        """Wait until the socket can be read or written again."""
        if self._closed:
            raise LinkBroken("the connection was closed on this side")
        ready: asyncio.Future[None] = self._loop.create_future()
        self._waiting.add(ready)
        file = self._sock.fileno()  # not the socket: selectors write it out as text each time
        add(file, _done, ready)
        late = self._loop.call_later(timeout, _late, ready, f"it {what} for {timeout:g} s") if timeout else None
        try:
            await ready
        finally:
            self._waiting.discard(ready)
            if late is not None:
                late.cancel()
            if not self._closed:
                remove(file)


class _Tls:
    """A TLS session whose records a link carries."""

    def __init__(self, link: Link, context: ssl.SSLContext, server: bool) -> None:
        self._link = link
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._session = context.wrap_bio(self._in, self._out, server_side=server)
        self._scratch = memoryview(bytearray(TLS_READ_BYTES))

    async def shake(self, timeout: float) -> None:
        try:
            async with asyncio.timeout(timeout):
                await self._shake()
        except TimeoutError:
            raise LinkBroken(f"no TLS session within {timeout:g} s") from None
        except ssl.SSLError as error:
            raise LinkBroken(f"no TLS session: {_said(error)}") from None

    async def _shake(self) -> None:
        while True:
            try:
                self._session.do_handshake()
                break
            except ssl.SSLWantReadError:
                await self._flush()
                if not await self._fill(None, 1):
                    raise LinkClosed("the connection was closed in the TLS handshake") from None
            except ssl.SSLError:
                with suppress(LinkBroken):
                    await self._flush()  # tells the other side why
                raise
        await self._flush()

    def certificate(self) -> bytes:
        return self._session.getpeercert(binary_form=True) or b""

    async def write(self, views: list[memoryview]) -> None:
        for piece in (piece for view in views for piece in _pieces(view, TLS_PIECE_BYTES)):
            try:
                self._session.write(piece)
            except ssl.SSLError as error:  # the read that broke it was the first to say so
                raise LinkBroken(f"the TLS session broke: {_said(error)}") from None
            if self._out.pending >= TLS_PIECE_BYTES:
                await self._flush()
        await self._flush()

    async def read_some(self, place: memoryview, timeout: float | None) -> int:
        """What is here of `place`, a byte at least; 0: the other side has ended."""
        filled = 0
        while filled < len(place):
            try:
                got: int = self._session.read(len(place) - filled, place[filled:])  # type: ignore[assignment]
                filled += got
                if not got:  # it said that nothing follows
                    break
            except ssl.SSLWantReadError:
                # What a read has to say, a change of keys, goes out with the next write: if it had to wait for the
                # write under way, two sides with full buffers would wait for each other.
                if filled or not await self._fill(timeout, len(place) - TLS_RECORD_BYTES):
                    break
            except ssl.SSLZeroReturnError:
                break
            except ssl.SSLError as error:
                # An alert is what the other side says of the bytes that it got; anything else is what came here.
                kind = LinkBroken if "ALERT" in (error.reason or "") else LinkSpoiled
                raise kind(f"the TLS session broke: {_said(error)}") from None
        return filled

    async def _fill(self, timeout: float | None, enough: int) -> int:
        """Some more records, `enough` bytes of them at best; the session itself may hold a part of one."""
        got = await self._link.pull(self._scratch, timeout, max(enough, 1))
        self._in.write(self._scratch[:got])
        return got

    async def _flush(self) -> None:
        while data := self._out.read():
            await self._link.push([memoryview(data)])


def set_options(sock: socket.socket) -> None:
    """Set a TCP socket's options: no waiting to fill segments; a dead or vanished host is noticed. Buffers stay
    the kernel's to size."""
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in [
        ("TCP_KEEPIDLE", 10),
        ("TCP_KEEPINTVL", 5),
        ("TCP_KEEPCNT", 3),
        ("TCP_USER_TIMEOUT", int(UNACKED_TIMEOUT * 1000)),
    ]:
        if hasattr(socket, name):  # Linux has them all, others some
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


# struct tcp_info of linux/tcp.h: tcpi_snd_mss, tcpi_unacked, tcpi_sacked (segments), tcpi_last_data_recv (ms),
# tcpi_rtt (microseconds), tcpi_total_retrans, tcpi_bytes_acked, tcpi_bytes_received, tcpi_segs_out, tcpi_segs_in,
# tcpi_notsent_bytes, tcpi_min_rtt (microseconds), tcpi_delivery_rate, tcpi_busy_time and tcpi_rwnd_limited
# (microseconds)
_INFO = struct.Struct("16xI4xII20xI12xI28xI16xQQIIII8xQQQ")
_OLDEST_INFO = 168  # bytes: those before Linux 4.10 had no more


def tcp_info(sock: socket.socket) -> PathStats | None:
    """Read Linux's TCP_INFO of a connected socket; None where the system does not tell it."""
    if not hasattr(socket, "TCP_INFO"):
        return None
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size)
    except OSError:
        return None
    if len(info) < _OLDEST_INFO:
        return None
    mss, unacked, apart, quiet, smoothed, resent, acked, received, *rest = _INFO.unpack(
        info.ljust(_INFO.size, b"\0")
    )
    sent, heard, unsent, smallest, rate, busy, no_room = rest
    rtt, there = min(smoothed, smallest) / 1e6, acked + apart * mss
    known = rtt, smoothed / 1e6, there, received, quiet / 1e3, sent, resent, float(rate)
    return PathStats(*known, heard, max(busy - no_room, 0) / 1e6, unacked + unsent > 0)


def close_dialled(dialled: "asyncio.Future[Link]") -> None:
    """Close a connection that is, or will be, dialled in vain: nobody wants it any more."""
    if not dialled.cancelled() and dialled.exception() is None:
        dialled.result().close()


def os_reason(error: OSError) -> str:
    """The system's text for an error, in lower case, without its number."""
    if error.errno is not None and error.errno > 0:  # asyncio puts addresses into strerror
        return os.strerror(error.errno).lower()
    return str(error.strerror or error or type(error).__name__).lower()


def _said(error: ssl.SSLError) -> str:
    """OpenSSL's reason, in words."""
    return (error.reason or str(error)).lower().replace("_", " ")


def _pieces(buffer: memoryview, size: int) -> Sequence[memoryview]:
    return [buffer[i : i + size] for i in range(0, len(buffer), size)] if len(buffer) > size else [buffer]


def _done(ready: "asyncio.Future[None]") -> None:
    if not ready.done():
        ready.set_result(None)


def _late(ready: "asyncio.Future[None]", sentence: str) -> None:
    if not ready.done():
        ready.set_exception(LinkBroken(sentence))
