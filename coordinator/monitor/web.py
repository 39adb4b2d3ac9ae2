"""The read-only web face of a run, living or recorded: the page for people, JSON for scripts and for the page.

    GET /                     the page
    GET /api/run[?round=K]    the run now, or when round K was committed
    GET /api/stream           the same as it changes, as server-sent events (`snapshot_feed`)
    GET /api/rounds           commit records
    GET /api/round/K          one, with where its time went and why it took long
    GET /api/series           curves over all rounds, for a picture
    GET /api/node/ID          a node, its curves, and what is held against it
    GET /api/events           what was noted, by time and words
    GET /api/blame            verdicts on rounds, and what was held against members
    GET /api/links            regions, rates and round trips
    GET /api/contributions    who contributed how much

Nothing here changes the run. Every answer is bounded in bytes and in work; one is put together at a time, in one
thread, because writes of the journal need a core, too. What is asked too much of is refused with a sentence.
"""

import asyncio
import gzip
import secrets
import time
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Route

from atoll.comm.errors import AtollError
from atoll.coordinator.monitor.page_file import page_file
from atoll.coordinator.monitor.run_answers import CALM_POLL, MAX_CALM_WAIT, NotThere, Query, RunAnswers
from atoll.coordinator.monitor.run_source import Answer, RunSource
from atoll.coordinator.monitor.snapshot_feed import SnapshotFeed

# Seconds that an answer of /api/run is good for, or, where that is longer, so many times what it took to make.
SNAPSHOT_TTL, SNAPSHOT_TTL_OF_COST = 0.2, 10.0
STREAM_INTERVAL = 1.0  # seconds between two changes of a stream, at least
# ... or, where that is longer, so many times what it takes to look at the run, which with hundreds of members is
# long.
STREAM_INTERVAL_OF_COST, MAX_STREAM_INTERVAL = 200.0, 3.0
STREAM_SECONDS = 45.0  # of a stream; then the page comes again: the door ends a connection after 60
QUIET_SECONDS = 15.0  # without a word on a stream, after which one says that it is still there
RECONNECT_MS = 500  # after which a page comes again
MAX_LISTENERS = 24  # of the stream at a time; the door has 64 places
PACK_FROM = 1400  # bytes of an answer, from which on it is compressed for who takes that
PACK_LEVEL = 4
# Of a stream's compressor: a window of 8 kB and 72 kB of memory in all; changes become hardly shorter with more.
PACK_WINDOW, PACK_MEMORY = 13, 6
MAX_QUESTION = 8_000  # bytes of a question; more is not looked at
Endpoint = Callable[[Request], Awaitable[Response]]


class RunWeb:
    """The answers of one run."""

    def __init__(self, source: RunSource) -> None:
        self._source, self._answers = source, RunAnswers(source)
        self._reading = asyncio.Semaphore()
        self._snapshot: tuple[float, Answer, bytes] | None = None  # until when it is good
        self._snapshotting = asyncio.Lock()
        self._cost = 0.0  # seconds that the latest took to make
        self._feed = SnapshotFeed(secrets.token_hex(4))
        self._fed = asyncio.Event()  # replaced at each change
        self._feeding: asyncio.Task[None] | None = None
        self._listeners = 0
        self._look_back = self._in_thread(self._answers.look_back)

    def routes(self) -> list[Route]:
        """The routes of the page and its JSON."""
        ask, answers = self._in_thread, self._answers
        # Of each path the names that a question may have.
        found: dict[str, tuple[Endpoint, tuple[str, ...]]] = {
            "/api/run": (self._run, ("round",)),
            "/api/stream": (self._stream, ()),
            "/api/rounds": (ask(answers.rounds), ("since", "limit", "fields")),
            "/api/round/{round}": (self._round, ()),
            "/api/series": (ask(answers.series), ("x", "names", "from", "to", "points")),
            "/api/node/{node}": (ask(answers.node), ("from", "to", "points")),
            "/api/events": (ask(answers.events), ("search", "after", "before", "limit", "routine")),
            "/api/blame": (ask(answers.blame), ("about",)),
            "/api/links": (ask(answers.links), ("round",)),
            "/api/contributions": (ask(answers.contributions), ("limit", "offset")),
        }
        routes = [Route(path, _in_sentences(_known(path, *asked))) for path, asked in found.items()]
        return [Route("/", _in_sentences(self._page)), *routes]

    # The page

    async def _page(self, request: Request) -> Response:
        page = page_file()
        headers = {
            **{"ETag": page.etag, "Cache-Control": "no-cache", "Vary": "Accept-Encoding"},
            **{"Content-Security-Policy": page.policy, "X-Content-Type-Options": "nosniff"},
            "Referrer-Policy": "no-referrer",
        }
        if request.headers.get("if-none-match") == page.etag:
            return Response(status_code=304, headers=headers)
        if _takes_gzip(request):
            headers["Content-Encoding"] = "gzip"
        return Response(page.packed if _takes_gzip(request) else page.body, 200, headers, "text/html")

    # The run now

    async def _run(self, request: Request) -> Response:
        if "round" in request.query_params:
            return await self._look_back(request)
        _, body = await self._current()
        return await _json(request, body)

    async def _current(self) -> tuple[Answer, bytes]:
        """The run now, and its JSON: made once for all who ask."""
        loop = asyncio.get_running_loop()
        async with self._snapshotting:
            if self._snapshot is None or loop.time() > self._snapshot[0]:
                async with self._reading:
                    await calm(self._source.crowded)
                    began = loop.time()
                    said, at_work = self._source.snapshot(), dict(self._source.at_work())
                    answer = await asyncio.to_thread(self._answers.current, said, at_work)
                    body = await asyncio.to_thread(msgspec.json.encode, answer)
                made = loop.time()
                self._cost = made - began
                good = max(SNAPSHOT_TTL, SNAPSHOT_TTL_OF_COST * self._cost)
                self._snapshot = made + min(good, STREAM_INTERVAL), answer, body
            return self._snapshot[1:]

    async def _round(self, request: Request) -> Response:
        failures = self._source.failures()
        return await self._in_thread(partial(self._answers.round, failures=failures))(request)

    # The stream

    async def _stream(self, request: Request) -> Response:
        if self._listeners >= MAX_LISTENERS:
            return PlainTextResponse(f"{MAX_LISTENERS} pages follow the run already: ask /api/run\n", 503)
        packed = _takes_gzip(request)
        # Its connection ends with it: the next stream on the same one would be cut in its midst.
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no", "Connection": "close"}
        headers |= _packed_headers(packed)
        events = self._events(request.headers.get("last-event-id", ""), packed)
        return StreamingResponse(events, media_type="text/event-stream", headers=headers)

    async def _events(self, seen: str, packed: bool) -> AsyncIterator[bytes]:
        """The stream's bytes. One compressor each: a change of the run is like the one before."""
        pack = stream_packer() if packed else None

        def out(data: bytes) -> bytes:
            return pack.compress(data) + pack.flush(zlib.Z_SYNC_FLUSH) if pack is not None else data

        loop = asyncio.get_running_loop()
        until, quiet_until = loop.time() + STREAM_SECONDS, loop.time() + QUIET_SECONDS
        self._listeners += 1
        if self._feeding is None or self._feeding.done():
            self._feeding = asyncio.create_task(self._feed_on())
        try:
            yield out(f"retry: {RECONNECT_MS}\n\n".encode())
            while loop.time() < until and not self._source.over() and not self._feeding.done():
                changed = self._fed
                if self._feed.id and (events := self._feed.since(seen)):
                    seen, quiet_until = self._feed.id, loop.time() + QUIET_SECONDS
                    yield out(events)
                elif loop.time() > quiet_until:
                    quiet_until = loop.time() + QUIET_SECONDS
                    yield out(b": still here\n\n")
                try:
                    async with asyncio.timeout(STREAM_INTERVAL):
                        await changed.wait()
                except TimeoutError:
                    pass  # to look whether it is over
            yield pack.flush() if pack is not None else b""
        finally:
            self._listeners -= 1

    async def _feed_on(self) -> None:
        """Look at the run now and then, while anybody listens."""
        while self._listeners:
            answer, _ = await self._current()
            if await asyncio.to_thread(self._feed.take, answer):
                self._fed.set()
                self._fed = asyncio.Event()
            await asyncio.sleep(stream_interval(self._cost))

    # Questions that are answered in the thread

    def _in_thread(self, answer: Callable[[Query], Answer | bytes]) -> Endpoint:
        """An endpoint that answers in JSON what `answer` finds, in a thread, one at a time."""

        def body(request: Request) -> bytes:
            found = answer({**request.query_params, **request.path_params})
            return found if isinstance(found, bytes) else msgspec.json.encode(found)

        async def endpoint(request: Request) -> Response:
            async with self._reading:
                await calm(self._source.crowded)
                said = await asyncio.to_thread(body, request)
            return await _json(request, said)

        return endpoint


def stream_interval(cost: float) -> float:
    """Seconds between two changes of a stream, where to look at the run takes so many seconds."""
    return max(min(STREAM_INTERVAL_OF_COST * cost, MAX_STREAM_INTERVAL), STREAM_INTERVAL)


def stream_packer() -> "zlib._Compress":
    """The compressor of one stream."""
    return zlib.compressobj(PACK_LEVEL, wbits=16 + PACK_WINDOW, memLevel=PACK_MEMORY)  # 16: as gzip


async def calm(crowded: Callable[[], bool]) -> None:
    """Wait while members wait to be served, for a few seconds at most."""
    deadline = time.monotonic() + MAX_CALM_WAIT
    while crowded() and time.monotonic() < deadline:
        await asyncio.sleep(CALM_POLL)


def web(source: RunSource, more: Sequence[BaseRoute] = ()) -> Starlette:
    """The run as an ASGI application, with more routes beside its own."""
    return Starlette(routes=[*RunWeb(source).routes(), *more])


def _known(path: str, endpoint: Endpoint, names: tuple[str, ...]) -> Endpoint:
    """The endpoint, which refuses a question with another name than these, or with one twice: what is not looked
    at might be taken for obeyed."""

    async def answered(request: Request) -> Response:
        if (size := len(request.scope["query_string"])) > MAX_QUESTION:
            raise ValueError(f"the question is {size:,} bytes long: {MAX_QUESTION:,} at most")
        if odd := [name for name in request.query_params if name not in names]:
            raise ValueError(f"{path} knows no {odd[0][:40]!r}: give {', '.join(names) or 'nothing'}")
        if len(request.query_params.multi_items()) > len(request.query_params):
            raise ValueError(f"{path} is asked for the same twice: give each of {', '.join(names)} once")
        return await endpoint(request)

    return answered


def _in_sentences(endpoint: Endpoint) -> Endpoint:
    async def answered(request: Request) -> Response:
        try:
            return await endpoint(request)
        except ValueError as error:
            return PlainTextResponse(f"{error}\n", status_code=400)
        except NotThere as error:
            return PlainTextResponse(f"{error}\n", status_code=404)
        except AtollError as error:
            return PlainTextResponse(f"{error}\n", status_code=503)

    return answered


async def _json(request: Request, body: bytes) -> Response:
    """The body, compressed for who takes that, or that it is as the asker knows it."""
    etag = f'"{zlib.crc32(body):08x}{len(body):x}"'
    headers = {"ETag": etag, "Cache-Control": "no-cache", "Vary": "Accept-Encoding"}
    if request.headers.get("if-none-match") == etag:
        return Response(status_code=304, headers=headers)
    packed = len(body) >= PACK_FROM and _takes_gzip(request)
    if packed:
        body = await asyncio.to_thread(gzip.compress, body, PACK_LEVEL)
    return Response(body, 200, headers | _packed_headers(packed), "application/json")


def _takes_gzip(request: Request) -> bool:
    return "gzip" in request.headers.get("accept-encoding", "")


def _packed_headers(packed: bool) -> dict[str, str]:
    return {"Content-Encoding": "gzip", "Vary": "Accept-Encoding"} if packed else {}
