"""The place of a run's segments: a folder of this machine, or one in a store at any URL that fsspec knows.

    PLACE/run.json                                     `RunFacts`: the run's name, and its configs by their digests
          rounds-000000000001-000000000128.records     segments (`segment`)

Calls block, for as long as disk or store take: they are made in threads. Keys of a store are the environment's.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

import msgspec

from atoll.comm.decode_errors import DECODE_ERRORS
from atoll.comm.errors import ConfigError, ResourceError
from atoll.comm.files import atomic_write, make_folder, write_all
from atoll.comm.ids import NodeId
from atoll.coordinator.history.segment import rounds_of

FACTS = "run.json"
MAX_FACTS_BYTES = 16 << 20
MODE = 0o600


class RunFacts(msgspec.Struct):
    """What is known of a run besides its rounds."""

    run: str
    configs: dict[str, msgspec.Raw] = {}  # by the digest that commit records name them by
    owners: dict[NodeId, str] = {}  # of nodes that contributed: whose invite each came with last

    def encode(self) -> bytes:
        return msgspec.json.encode(self)


class RecordStore(Protocol):
    """Named files in one place."""

    place: str  # for people

    def names(self) -> list[str]:
        """The segments' names, in the order of their rounds. Raises `ResourceError`."""
        ...

    def read(self, name: str, start: int = 0, end: int | None = None) -> bytes:
        """Bytes of a file. Raises `FileNotFoundError` and `ResourceError`."""
        ...

    def write(self, name: str, data: bytes) -> None:
        """Write a whole file. Raises `ResourceError`."""
        ...

    def remove(self, name: str) -> None:
        """Remove a file, if it is there. Raises `ResourceError`."""
        ...

    def size(self, name: str) -> int:
        """Bytes of a file; 0: it is not there. Raises `ResourceError`."""
        ...


def facts_of(store: RecordStore) -> RunFacts | None:
    """What the place says of the run; None: nothing. Raises `ConfigError` for what cannot be understood."""
    try:
        data = store.read(FACTS, 0, MAX_FACTS_BYTES)
    except FileNotFoundError:
        return None
    try:
        return msgspec.json.decode(data, type=RunFacts)
    except DECODE_ERRORS as error:
        raise ConfigError(f"{store.place}/{FACTS} is spoiled ({error}): put a copy of it back") from None


class LocalStore:
    """A folder of this machine; what was written is on the disk."""

    def __init__(self, folder: Path) -> None:
        self.place, self._folder = str(folder), folder

    def names(self) -> list[str]:
        with _in_sentences(self.place), suppress(FileNotFoundError):
            return sorted(path.name for path in self._folder.iterdir() if rounds_of(path.name))
        return []

    def read(self, name: str, start: int = 0, end: int | None = None) -> bytes:
        with _in_sentences(self.place), open(self._folder / name, "rb") as file:
            file.seek(start)
            return file.read(-1 if end is None else end - start)

    def write(self, name: str, data: bytes) -> None:
        with _in_sentences(self.place):
            make_folder(self._folder)
            with atomic_write(self._folder / name, len(data), mode=MODE) as out:
                write_all(out, [memoryview(data)], 0)

    def remove(self, name: str) -> None:
        with _in_sentences(self.place):
            (self._folder / name).unlink(missing_ok=True)

    def size(self, name: str) -> int:
        with _in_sentences(self.place), suppress(FileNotFoundError):
            return (self._folder / name).stat().st_size
        return 0


class RemoteStore:
    """A folder in a store."""

    def __init__(self, url: str) -> None:
        """Raises `ConfigError` where this machine lacks what the URL needs."""
        from fsspec.core import url_to_fs  # 14 MB, which few need

        self.place = url.rstrip("/")
        try:
            self._fs, path = url_to_fs(self.place)
        except (ImportError, ValueError) as error:
            raise ConfigError(f"{url} cannot be used: {error}") from None
        self._path = path.rstrip("/")

    def names(self) -> list[str]:
        def found() -> list[str]:
            self._fs.invalidate_cache()
            return [str(path).rsplit("/", 1)[-1] for path in self._fs.ls(self._path, detail=False)]

        with suppress(FileNotFoundError):
            return sorted(name for name in self._call(found) if rounds_of(name))
        return []

    def read(self, name: str, start: int = 0, end: int | None = None) -> bytes:
        data: bytes = self._call(lambda: self._fs.cat_file(f"{self._path}/{name}", start, end))
        return data

    def write(self, name: str, data: bytes) -> None:
        def put() -> None:
            self._fs.makedirs(self._path, exist_ok=True)
            self._fs.pipe_file(f"{self._path}/{name}", data)

        self._call(put)

    def remove(self, name: str) -> None:
        with suppress(FileNotFoundError):
            self._call(lambda: self._fs.rm_file(f"{self._path}/{name}"))

    def size(self, name: str) -> int:
        def found() -> int:
            self._fs.invalidate_cache()
            return int(self._fs.info(f"{self._path}/{name}")["size"] or 0)

        with suppress(FileNotFoundError):
            return int(self._call(found))
        return 0

    def _call(self, what: Callable[[], Any]) -> Any:
        with _in_sentences(self.place):
            try:
                return what()
            except OSError:
                raise
            except Exception as error:  # each store's client has its own
                raise ResourceError(f"{self.place} cannot be used now: {error}") from None


def opened(place: str) -> RecordStore:
    """The store at a path or URL. Raises `ConfigError`."""
    return RemoteStore(place) if "://" in place else LocalStore(Path(place))


@contextmanager
def _in_sentences(place: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ResourceError(f"{place} cannot be used now: {error}") from None
