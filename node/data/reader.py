"""Reads a data set where it lies, at any URL that fsspec knows: its manifest, and blocks by their place in a
shard.

Every byte is checked before it is given out: the manifest against a digest that the caller may have, each shard's
list of digests against the manifest, each block against its list. Reads are ranges, no larger than what was asked
for.
"""

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from atoll.comm.digest import DIGEST_SIZE, digest
from atoll.comm.errors import AtollError, ConfigError, Refused, ResourceError, Unreachable
from atoll.node.data.manifest import DIGESTS_SUFFIX, MANIFEST, MAX_MANIFEST_BYTES, TOKENS_SUFFIX, Manifest, Shard
from atoll.node.data.store import is_web


class DamagedData(AtollError):
    """A file of a data set is not the one that its manifest tells of. The exit code is 1."""


class DataSetReader:
    """One data set, by the URL or path of its folder."""

    def __init__(self, url: str) -> None:
        """Raises `ResourceError` where this machine lacks what the URL needs."""
        base, _, query = url.partition("?")
        self._query = f"?{query}" if query and is_web(url) else ""
        self.url = base.rstrip("/") if self._query else url.rstrip("/")
        self.fs, path = open_place(self.url)
        self._path = path.rstrip("/")

    def manifest_bytes(self) -> bytes:
        """The bytes of manifest.json. Raises `ConfigError` if there is none."""
        try:
            return self.file(MANIFEST, MAX_MANIFEST_BYTES)
        except FileNotFoundError:
            raise ConfigError(
                f"there is no data set at {self.url}: it has no {MANIFEST}, or its building is not finished"
            ) from None

    def manifest(self, expected: str = "") -> Manifest:
        """The manifest; `expected`: its digest, hexadecimal. Raises `ConfigError` for another one."""
        return Manifest.decode(self.manifest_bytes(), expected)

    def file(self, name: str, limit: int) -> bytes:
        """The bytes of a small file. Raises `FileNotFoundError`, and `DamagedData` if they are more than
        `limit`."""
        with store_errors(f"{self.url}/{name}"):
            if (size := self.fs.size(self._at(name)) or 0) > limit:
                raise DamagedData(f"{self.url}/{name} has {size} bytes, {limit} are the most it may have")
            data: bytes = self.fs.cat_file(self._at(name))
        return data

    def checked_file(self, name: str, expected: str, limit: int) -> bytes:
        """The bytes of a small file that has the digest `expected`, hexadecimal. Raises `DamagedData`."""
        try:
            data = self.file(name, limit)
        except FileNotFoundError:
            raise DamagedData(f"{self.url} lacks {name}") from None
        if (found := digest(data).hex()) != expected:
            raise DamagedData(f"{self.url}/{name} has the digest {found}, and the manifest has {expected}")
        return data

    def digests(self, shard: Shard) -> bytes:
        """The digests of a shard's blocks, one after the other. Raises `DamagedData`."""
        return self.checked_file(shard.name + DIGESTS_SUFFIX, shard.digest, DIGEST_SIZE * shard.blocks)

    def blocks(self, manifest: Manifest, shard: Shard, digests: bytes, first: int, count: int) -> Iterator[bytes]:
        """The blocks [first, first + count) of a shard; `digests` are all of its blocks'. Raises `DamagedData`
        with the name of the shard and the number of the block."""
        size, name = manifest.format.size, shard.name + TOKENS_SUFFIX
        try:
            data = self._range(name, size * first, size * (first + count))
        except FileNotFoundError:
            raise DamagedData(f"{self.url} lacks {name}") from None
        for i in range(count):
            block, number = data[size * i : size * (i + 1)], first + i
            if len(block) < size:
                raise DamagedData(
                    f"{self.url}/{name} is cut short: block {number} of {shard.blocks} has {len(block)} of {size} "
                    "bytes; build the data set anew or fetch it again"
                )
            if digest(block) != digests[DIGEST_SIZE * number : DIGEST_SIZE * (number + 1)]:
                raise DamagedData(
                    f"{self.url}/{name} is damaged: block {number} of {shard.blocks} has not the digest that it "
                    "was built with; build the data set anew or fetch it again"
                )
            yield block

    def _range(self, name: str, start: int, stop: int) -> bytes:
        with store_errors(f"{self.url}/{name}"):
            data: bytes = self.fs.cat_file(self._at(name), start=start, end=stop)
        if len(data) > stop - start:
            raise ResourceError(
                f"{self.url}/{name}: the server answers with the whole file where a part of it is asked for: "
                "serve it by one that knows HTTP's Range (nginx, caddy, an object store; `python -m http.server` "
                "does not)"
            )
        return data

    def check_ranges(self, shard: Shard) -> None:
        """Raise `ResourceError` if the store gives no parts of files, as nodes ask for them: what is read at once
        may be a whole file."""
        with suppress(FileNotFoundError):  # which is told when it is read
            self._range(shard.name + DIGESTS_SUFFIX, 1, 2)

    def _at(self, name: str) -> str:
        return f"{self._path}/{name}{self._query}"


def open_place(url: str) -> tuple[Any, str]:
    """The file system of a URL, as fsspec has it, and the path there. Raises `ResourceError` where this machine
    lacks what it needs."""
    from fsspec.core import url_to_fs

    try:
        fs, path = url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise ResourceError(f"{url} cannot be used: {error}") from None
    return fs, str(path)


class store_errors:
    """Turns what a store raises about `place` into errors for people: `Refused` without rights, else
    `Unreachable`. `FileNotFoundError` stays, but for what fsspec makes of a web server that did not answer."""

    def __init__(self, place: str) -> None:
        self._place = place

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        match error:
            case FileNotFoundError() if (cause := _of_web_client(error)) is not None:
                match getattr(cause, "status", None):
                    case 404 | 410:
                        return
                    case 401 | 403:
                        raise Refused(f"{self._place}: this machine has no rights to it there: {cause}") from error
                raise Unreachable(f"{self._place} cannot be had: {cause or type(cause).__name__}") from error
            case None | AtollError() | FileNotFoundError():
                return
            case PermissionError():
                raise Refused(f"{self._place}: this machine has no rights to it there: {error}") from error
            case Exception() if getattr(error, "status", None) in (401, 403):
                raise Refused(f"{self._place}: this machine has no rights to it there: {error}") from error
            case Exception():  # of as many kinds as there are stores
                raise Unreachable(f"{self._place} cannot be had: {error or type(error).__name__}") from error


def _of_web_client(error: BaseException) -> BaseException | None:
    """The error of the web client that fsspec says `FileNotFoundError` for, whatever it was; None: it is no
    such."""
    cause = error.__cause__
    return cause if cause is not None and type(cause).__module__.partition(".")[0] == "aiohttp" else None
