"""The place that a data set is built in: a folder of this machine, or a store at any URL that fsspec knows.

Shards are made in a local folder: the data set's own, or one to work in, from which each goes to the store as soon
as it is finished. The manifest comes last: a data set is there as a whole, or not at all.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from atoll.comm.digest import digest
from atoll.comm.errors import ConfigError, ResourceError
from atoll.comm.files import atomic_write, make_folder, write_all
from atoll.node.data.manifest import MANIFEST, TOKENIZER, Manifest
from atoll.node.data.reader import open_place, store_errors
from atoll.node.data.shards import SUFFIXES

STATE, LOCK = "build.json", "build.lock"
WORK = "~/.cache/atoll/data"  # folders of builds for stores, by their URL's digest
PUBLIC_MODE = 0o666  # within the umask: a data set is made to be read by others


class Destination:
    """The place of one data set that is being built."""

    def __init__(self, url: str, work: str = "") -> None:
        """`work`: the folder to make shards in for a store; empty: one in the user's cache. Raises `ResourceError`
        where this machine lacks what the URL needs."""
        from fsspec.implementations.local import LocalFileSystem

        self.url = url.rstrip("/")
        self._fs, path = open_place(url)
        self._path = path.rstrip("/")
        self.local = isinstance(self._fs, LocalFileSystem)
        if self.local:
            self.folder = Path(self._path)
        else:
            self.folder = Path(work or f"{WORK}/{digest(self.url.encode()).hex()}").expanduser()

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Lock the place: while the context lasts no other build of this machine writes there. Raises
        `ConfigError` if one does, and `ResourceError` if the folder cannot be made."""
        try:
            make_folder(self.folder)
            lock = os.open(self.folder / LOCK, os.O_RDWR | os.O_CREAT, PUBLIC_MODE)
        except OSError as error:
            raise ResourceError(f"cannot write to {self.folder}: {error.strerror}") from error
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(f"another process builds {self.url} just now: wait for it, or end it") from None
            yield
        finally:
            os.close(lock)

    def manifest(self) -> bytes | None:
        """The manifest that is there already."""
        with suppress(FileNotFoundError), store_errors(f"{self.url}/{MANIFEST}"):
            self._fs.invalidate_cache()
            data: bytes = self._fs.cat_file(self._at(MANIFEST))
            return data
        return None

    def clear(self) -> None:
        """Remove the data set that is there and what a build has left, the manifest first."""
        found = self.manifest()
        names = list[str]()
        if found is not None:
            with suppress(ConfigError):  # what its manifest does not tell is overwritten or left
                manifest = Manifest.decode(found)
                names = [TOKENIZER, *manifest.tokenizer_files]
                names += [shard.name + suffix for shard in manifest.shards for suffix in SUFFIXES]
            self._remove(MANIFEST)
        (self.folder / STATE).unlink(missing_ok=True)
        for name in names:
            self._remove(name)
        self._clear_folder()

    def abandon(self) -> None:
        """Remove what a build has left here that has nothing to go on from. The lock is held."""
        (self.folder / STATE).unlink(missing_ok=True)
        self._clear_folder()
        (self.folder / LOCK).unlink(missing_ok=True)
        with suppress(OSError):  # others' files are in it
            self.folder.rmdir()

    def saved(self) -> bytes | None:
        """The state of a build that was not finished."""
        with suppress(FileNotFoundError):
            return (self.folder / STATE).read_bytes()
        return None

    def save(self, state: bytes) -> None:
        """Keep the state of the build; it is on the disk."""
        self._write(STATE, state)

    def write(self, name: str, data: bytes) -> None:
        """Write a small file of the data set."""
        self._write(name, data)
        self.send(name)

    def send(self, name: str) -> None:
        """Have a finished file where the data set is, and not here besides. Nothing to do where it is made
        there."""
        made = self.folder / name
        if self.local or not made.exists():  # or it was sent before this build was killed
            return
        with store_errors(f"{self.url}/{name}"):
            self._fs.makedirs(self._path, exist_ok=True)
            self._fs.put_file(str(made), self._at(name))
            self._fs.invalidate_cache()
            if (there := self._fs.size(self._at(name))) != (size := made.stat().st_size):
                raise OSError(f"{there} bytes of {size} arrived")
        made.unlink()

    def finish(self, manifest: bytes) -> None:
        """Write the manifest beside the files that it tells of: from now on the data set is there."""
        self.write(MANIFEST, manifest)
        for name in (STATE, LOCK):
            (self.folder / name).unlink(missing_ok=True)
        if not self.local:
            with suppress(OSError):  # others' files are in it
                self.folder.rmdir()

    def _write(self, name: str, data: bytes) -> None:
        with atomic_write(self.folder / name, None, mode=PUBLIC_MODE) as file:
            write_all(file, [memoryview(data)], 0)

    def _remove(self, name: str) -> None:
        with suppress(FileNotFoundError), store_errors(f"{self.url}/{name}"):
            self._fs.rm_file(self._at(name))

    def _clear_folder(self) -> None:
        """Remove the shards that a build has begun here."""
        for suffix in SUFFIXES:
            for file in self.folder.glob(f"*-[0-9][0-9][0-9][0-9][0-9]{suffix}"):
                file.unlink()

    def _at(self, name: str) -> str:
        return f"{self._path}/{name}"
