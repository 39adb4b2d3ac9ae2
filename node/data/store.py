"""The files of a data set, wherever they are: at a URL of one of `SERVER_SCHEMES`, or in a local folder.

A store reads ranges of files and nothing else: never more bytes than it was asked for, and of a web server never
for longer than `network.ANSWER_SECONDS`. Keys and tokens are the environment's (AWS_ACCESS_KEY_ID, HF_TOKEN and so
on), never in the URL. Calls block: they are made in threads. What goes wrong is a `StoreError`, with a sentence;
to try again is the caller's.
"""

import errno
import http.client
import re
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote, urlsplit

from atoll.comm.addresses import OwnNetwork
from atoll.comm.config.rules import SERVER_SCHEMES, ambiguous
from atoll.comm.errors import ConfigError, ResourceError
from atoll.comm.extras import demand
from atoll.node.data.network import web_opener

SOCKET_SECONDS = 30.0  # that a store may say nothing
LOCAL_SCHEMES = ("file", "local")
PACKAGES = {"s3": "s3fs", "s3a": "s3fs", "hf": "huggingface_hub"}  # that a URL of this scheme needs
PIECE_BYTES = 1 << 18  # of a body that are read at once
S3_OPTIONS = {"connect_timeout": SOCKET_SECONDS, "read_timeout": SOCKET_SECONDS, "retries": {"max_attempts": 1}}


class StoreError(Exception):
    """A range could not be read; the sentence says of which file, and why. It may go better later."""


class StoreRefused(StoreError):
    """The store has no such file, or does not give it to this node."""


class RangesUnknown(StoreRefused):
    """A server answers with a whole file where a part of it was asked for."""


class CutShort(StoreError):
    """The file ends before the range does."""


class Store(Protocol):
    """The files of one folder."""

    url: str
    is_local: bool  # its files are on this machine: no copies of them are kept
    private: tuple[str, ...]  # parts of its sentences that are this machine's own affair: see `public`

    def read(self, name: str, start: int, size: int) -> bytes:
        """Bytes [start, start + size) of a file: exactly so many. Raises `StoreError`."""

    def read_whole(self, name: str, limit: int) -> bytes:
        """A small file, which has no more than `limit` bytes. Raises `StoreError`."""


def public(sentence: str, store: Store) -> str:
    """The sentence about a store as others may read it: without folders of this machine, and without the query of
    a URL, which may be a signature."""
    for part in store.private:
        sentence = sentence.replace(part, "")
    return re.sub(r"(\w://[^\s?]+)\?\S*?(?=[:;,]?(?:\s|$))", r"\1", sentence)


def is_web(url: str) -> bool:
    """Whether the URL is a web server's: what stands behind its '?' belongs to every file of the folder."""
    return url.startswith(("http://", "https://"))


def check_store(url: str, files: bool) -> None:
    """Raise `ResourceError` where `open_store` would, as far as it shows without loading what the URL needs."""
    scheme, separator, _ = url.partition("://")
    if not files and (not separator or scheme in LOCAL_SCHEMES or "::" in url):
        raise ResourceError(
            f"{url} is among this machine's own files, which a run may read only where the node has files=true: "
            "set that, or give the folder of this node's own copy, data=FOLDER"
        )
    if separator and scheme not in (*SERVER_SCHEMES, *LOCAL_SCHEMES) and "::" not in scheme:
        raise ResourceError(
            f"a node reads no data set at {scheme}://: put it on a server of {', '.join(SERVER_SCHEMES)}, or "
            "give its folder on this machine, data=FOLDER"
        )
    if found := ambiguous(url):
        raise ResourceError(
            f"the URL of the run's data set has a {found!r} in it, which may hide where it leads: a node asks no "
            "such URL; a store's credentials are in the environment"
        )
    if is_web(url):
        try:
            urlsplit(url)
        except ValueError as error:
            raise ResourceError(f"{url} is no URL ({error}): the run's config has to name another") from None
    if needed := PACKAGES.get(scheme):
        demand(f"a data set at {scheme}://", needed)


def open_store(url: str, files: bool, lan: bool = True) -> Store:
    """The store at the URL of a folder. `files`: it may be in this machine's own files;
    `lan`: or at a server in its own network (`atoll.node.data.network`). Raises `ResourceError`
    where that is not so, and where this machine lacks what the URL needs; `ConfigError` where its file system
    cannot be used."""
    check_store(url, files)
    scheme, separator, rest = url.partition("://")
    if not separator or scheme in LOCAL_SCHEMES:
        return FolderStore(url, Path(rest if separator else url).expanduser())
    if is_web(url):
        return HttpStore(url, web_opener(lan, anywhere=files))
    return FsspecStore(url)


class FolderStore:
    """A folder of this machine."""

    is_local = True

    def __init__(self, url: str, folder: Path) -> None:
        self.url, self._folder = url, folder
        self.private: tuple[str, ...] = (f"{url}/", f"{folder}/", url, str(folder))

    def read(self, name: str, start: int, size: int) -> bytes:
        """Bytes [start, start + size) of a file. Raises `StoreError`."""
        data = self._read(name, start, size)
        if len(data) < size:
            raise CutShort(f"{self._folder / name} ends at byte {start + len(data)}, before {start + size}")
        return data

    def read_whole(self, name: str, limit: int) -> bytes:
        """A file of up to `limit` bytes. Raises `StoreError`."""
        return _bounded(self._read(name, 0, limit + 1), self._folder / name, limit)

    def _read(self, name: str, start: int, size: int) -> bytes:
        path = self._folder / name
        try:
            with path.open("rb", buffering=0) as file:
                file.seek(start)
                return file.read(size)
        except (FileNotFoundError, NotADirectoryError, PermissionError) as error:
            raise StoreRefused(f"{path}: {error.strerror}") from None
        except OSError as error:
            raise StoreError(f"{path}: {error.strerror or error}") from None


class HttpStore:
    """A folder on a web server that serves ranges of files."""

    is_local = False

    def __init__(self, url: str, opener: urllib.request.OpenerDirector) -> None:
        """`opener`: bounds whom it asks, and for how long."""
        self.url, self._opener = url, opener
        self._base, _, query = url.partition("?")
        self._query = f"?{query}" if query else ""
        self.private: tuple[str, ...] = (self._query,) if query else ()

    def read(self, name: str, start: int, size: int) -> bytes:
        """Bytes [start, start + size) of a file. Raises `StoreError`."""
        at, end = self._at(name), start + size
        with self._get(at, f"bytes={start}-{end - 1}") as answer:
            if answer.status == 206:
                span = answer.headers.get("Content-Range", "")
                found = re.match(r"bytes (\d{1,18})-(\d{1,18})/", span, re.ASCII)
                if found is None or int(found[1]) != start:
                    raise StoreError(f"{at} answered with another range than the one asked for")
                if int(found[2]) + 1 < end:
                    raise CutShort(f"{at} ends at byte {int(found[2]) + 1}, before {end}")
            elif start:
                raise RangesUnknown(
                    f"{at} is on a server that does not serve ranges of files: put it on one that does (nginx, "
                    "caddy, an object store; `python -m http.server` does not)"
                )
            return self._body(answer, at, size)

    def read_whole(self, name: str, limit: int) -> bytes:
        """A file of up to `limit` bytes. Raises `StoreError`."""
        at = self._at(name)
        with self._get(at, None) as answer:
            size = None if answer.length is None else min(answer.length, limit + 1)
            return _bounded(self._body(answer, at, size, limit), at, limit)

    def _at(self, name: str) -> str:
        return f"{self._base.rstrip('/')}/{quote(name)}{self._query}"

    def _get(self, at: str, span: str | None) -> Any:
        request = urllib.request.Request(at, headers={"User-Agent": "atoll", **({"Range": span} if span else {})})
        try:
            return self._opener.open(request, timeout=SOCKET_SECONDS)
        except OwnNetwork as error:
            raise StoreRefused(
                f"{urlsplit(at).netloc} leads into this node's own network ({error}), which a run may ask only "
                "where the node has files=true, or where the run's coordinator is there too"
            ) from None
        except urllib.error.HTTPError as error:
            error.close()
            sentence = f"{at}: the server says {error.code} {error.reason}"
            if error.code == 416:
                raise CutShort(f"{at} ends before {span}: the server says 416") from None
            raise (StoreRefused if error.code in (401, 403, 404, 410) else StoreError)(sentence) from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise StoreError(f"{urlsplit(at).netloc}: {getattr(error, 'reason', None) or error}") from None

    def _body(self, answer: Any, at: str, size: int | None, limit: int = 0) -> bytes:
        """`size` bytes of the answer; None: all there are, and about one piece beyond `limit` at most."""
        pieces, left = list[bytes](), limit + 1 if size is None else size
        try:
            while left > 0 and (piece := answer.read1(min(left, PIECE_BYTES))):
                pieces.append(piece)
                left -= len(piece)  # below 0: http.client takes the length of a chunk from the server
        except (OSError, http.client.HTTPException) as error:
            raise StoreError(f"{at}: the connection broke: {error}") from None
        if size is not None and left:
            amount = f"{left} bytes too early" if left > 0 else f"{-left} bytes too late"
            raise StoreError(f"{at}: the connection ended {amount}")
        return b"".join(pieces)


class FsspecStore:
    """A folder in any store that fsspec knows."""

    is_local = False
    private: tuple[str, ...] = ()

    def __init__(self, url: str) -> None:
        from fsspec.core import url_to_fs  # 14 MB, which most nodes never need

        options = {"config_kwargs": S3_OPTIONS} if url.startswith(("s3:", "s3a:")) else {}
        try:
            self._fs, path = url_to_fs(url, **options)
        except Exception as error:  # a file system may raise anything, such as that it lacks credentials
            raise ConfigError(
                f"{url} cannot be used: {type(error).__name__}: {error}; see that the credentials of that store "
                "are in this node's environment, or give the data set's folder, data=FOLDER"
            ) from None
        self.url, self._path = url, str(path).rstrip("/")

    def read(self, name: str, start: int, size: int) -> bytes:
        """Bytes [start, start + size) of a file. Raises `StoreError`."""
        data = self._read(name, start, start + size)
        if len(data) < size:
            raise CutShort(f"{self.url}/{name} ends at byte {start + len(data)}, before {start + size}")
        return data

    def read_whole(self, name: str, limit: int) -> bytes:
        """A file of up to `limit` bytes. Raises `StoreError`."""
        return _bounded(self._read(name, 0, limit + 1), f"{self.url}/{name}", limit)

    def _read(self, name: str, start: int, end: int) -> bytes:
        path = f"{self._path}/{name}"
        try:
            if self._fs.async_impl:
                data: bytes = self._fs.cat_file(path, start=start, end=end)
                return data
            # Other file systems would read ahead.
            with self._fs.open(path, "rb", cache_type="none") as file:
                file.seek(start)
                return b"".join(iter(lambda: file.read(end - file.tell()), b""))
        except (FileNotFoundError, PermissionError) as error:
            raise StoreRefused(
                f"{self.url}/{name}: {error.args[-1] if error.args else 'it is not there'}"
            ) from None
        except Exception as error:  # a store may raise anything
            if isinstance(error, OSError) and error.errno == errno.EINVAL:  # s3fs, for a range that is not there
                raise CutShort(f"{self.url}/{name} ends before byte {start}") from None
            raise StoreError(f"{self.url}/{name}: {type(error).__name__}: {error}") from None


def _bounded(data: bytes, at: object, limit: int) -> bytes:
    if len(data) > limit:
        raise StoreRefused(f"{at} has more than {limit} bytes: it is not what it is taken for")
    return data
