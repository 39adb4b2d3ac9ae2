"""The folders in which a trainer keeps its inner optimizer's state, one for each round that was kept, and what it
has trained of the round at hand.

    FOLDER/moments-000000000012/    __RANK_0.distcp, .metadata    torch.distributed.checkpoint's own
                                    manifest.json                 what it is of, size and digest of each file
                                    readers                       a byte for each trainer that began with it and
                                                                  has not shown yet that it can go on
    FOLDER/round-000000000003/      the same, of the third copy   and position.json: of which round, and how far

A folder has its name only when everything in it is on the disk; the last two of moments stay, and the last copy of
a round. They never leave the node: torch reads them with pickle, so each file is checked against the manifest
before.
"""

import re
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import msgspec

from atoll.comm.decode_errors import DECODE_ERRORS
from atoll.comm.digest import digest, digest_of_file
from atoll.comm.faults import fault_point
from atoll.comm.files import (
    UNFINISHED_SUFFIX,
    DiskFull,
    Room,
    atomic_write,
    make_folder,
    publish,
    room,
    write_all,
)

FORMAT = "atoll moments 1"
MOMENTS, ROUND = "moments", "round"  # what the folders' names begin with
MANIFEST, POSITION, READERS = "manifest.json", "position.json", "readers"
MAX_READERS = 2  # trainers that may die of a folder before it is given up
RETAINED_CHECKPOINTS = {MOMENTS: 2, ROUND: 1}
SIZE_MARGIN = 1.05  # what is written is longer than the tensors by their names and places
Shapes = Mapping[str, tuple[int, ...]]


class UnusableMoments(Exception):
    """The moments on the disk cannot be used; the text says why."""


class OptimizerManifest(msgspec.Struct, frozen=True):
    """The `manifest.json` of one folder: what its tensors are of, and size and digest of each file."""

    format: str
    round: int  # after whose inner steps the moments were these; of a round's copies their number
    optimizer: str
    shapes: dict[str, tuple[int, ...]]  # of the model's parameters
    files: dict[str, tuple[int, str]]  # bytes, digest in hexadecimal digits
    digest: str = ""  # of the manifest as it is without it

    @property
    def content_digest(self) -> str:
        """Hexadecimal, of the manifest without its digest."""
        return digest(msgspec.json.encode(msgspec.structs.replace(self, digest=""))).hex()


class OptimizerFiles:
    """The folders of one node's moments, or of what it has trained of a round."""

    def __init__(
        self,
        folder: Path,
        limit: float = 0.0,
        room: Room = room,
        prefix: str = MOMENTS,
        expendable: "OptimizerFiles | None" = None,
    ) -> None:
        """`limit`: bytes that all in `folder` may take, of whatever prefix; 0: what the disk has. `expendable`:
        folders that are given up where there is no room."""
        self._folder, self._limit, self._room = folder, limit, room
        self._prefix, self._retained, self._expendable = prefix, RETAINED_CHECKPOINTS[prefix], expendable
        self._uncleared = True

    @property
    def rounds(self) -> list[int]:
        """Rounds of which the moments are on the disk, or numbers of copies, the newest first."""
        paths = self._folder.glob(f"{self._prefix}-*")
        found = (re.fullmatch(rf"{self._prefix}-(\d+)", path.name) for path in paths)
        return sorted((int(match[1]) for match in found if match), reverse=True)

    def path(self, round_: int) -> Path:
        """The folder of a round, whether it is there or not."""
        return self._folder / f"{self._prefix}-{round_:012d}"

    def begin(self, round_: int, size: int) -> Path:
        """An empty folder to write tensors of `size` bytes to. Raises `OSError`, `DiskFull` before anything is
        written."""
        make_folder(self._folder)
        if self._uncleared:  # later ones may be this process's, which are being written
            for left in self._folder.glob(f"{self._prefix}-*{UNFINISHED_SUFFIX}"):  # by a process that was killed
                shutil.rmtree(left, ignore_errors=True)
            self._uncleared = False
        need = needed_bytes(size)
        lacking = self._over_limit(need) or self._room(self._folder) < need
        if self._expendable is not None and lacking:
            self._expendable.clear()
        if self._over_limit(need):
            self._retain(self._retained - 1)
        if self._limit and (all_ := self._size() + need) > self._limit:
            raise DiskFull(
                f"disk= leaves {self._limit / 1e6:,.1f} MB for them, they would take {all_ / 1e6:,.1f} MB"
            )
        if (have := self._room(self._folder)) < need:
            raise DiskFull(f"they take {need / 1e6:,.1f} MB, the disk has {max(have, 0) / 1e6:,.1f} MB for them")
        new = self.unfinished_path(round_)
        new.mkdir()
        return new

    def has_room(self, size: int) -> bool:
        """Whether the folder is there and has room for tensors of `size` bytes, beside what is in it."""
        try:
            return self._room(self._folder) >= needed_bytes(size)
        except OSError:
            return False

    def finish(self, round_: int, optimizer: str, shapes: Shapes, position: bytes = b"") -> None:
        """Give the folder that `begin` made its name, with `position`, if there is one, and a manifest of what was
        written to it. Raises `OSError`."""
        new, path = self.unfinished_path(round_), self.path(round_)
        if position:
            with atomic_write(new / POSITION, len(position), self._room) as file:
                write_all(file, [memoryview(position)], 0)
        files = {file.name: (file.stat().st_size, digest_of_file(file).hex()) for file in sorted(new.iterdir())}
        manifest = OptimizerManifest(FORMAT, round_, optimizer, dict(shapes), files)
        text = msgspec.json.encode(msgspec.structs.replace(manifest, digest=manifest.content_digest))
        with atomic_write(new / MANIFEST, len(text), self._room) as file:
            write_all(file, [memoryview(text)], 0)
        fault_point(f"{self._prefix}.written")
        shutil.rmtree(path, ignore_errors=True)  # the round was trained again
        publish(new, path)
        self._retain(self._retained)

    def discard(self, round_: int) -> None:
        """Remove what was written of a round that is not finished."""
        shutil.rmtree(self.unfinished_path(round_), ignore_errors=True)

    def verify(self, round_: int, optimizer: str, shapes: Shapes) -> Path:
        """The folder of a round, after a look that every byte is as it was written, for this optimizer and
        parameters of these shapes. Raises `UnusableMoments`."""
        path = self.path(round_)
        try:
            manifest = msgspec.json.decode((path / MANIFEST).read_bytes(), type=OptimizerManifest)
        except (OSError, *DECODE_ERRORS) as error:
            raise UnusableMoments(f"damaged: {MANIFEST} cannot be read ({error})") from None
        if (manifest.format, manifest.round, manifest.digest) != (FORMAT, round_, manifest.content_digest):
            raise UnusableMoments(f"damaged: {MANIFEST} is not as it was written")
        if manifest.optimizer != optimizer:
            raise UnusableMoments(f"of another inner optimizer: {manifest.optimizer}, now {optimizer}")
        if odd := sorted(set(manifest.shapes.items()) ^ set(shapes.items())):
            raise UnusableMoments(f"of a model with other shapes: {odd[0][0]} differs")
        for name, (size, stored_digest) in manifest.files.items():
            file = path / name
            try:
                if "/" in name or file.stat().st_size != size or digest_of_file(file).hex() != stored_digest:
                    raise UnusableMoments(f"damaged: {name} is not as it was written")
            except OSError as error:
                raise UnusableMoments(f"damaged: {name} cannot be read ({error.strerror})") from None
        return path

    def unfinished_path(self, round_: int) -> Path:
        """The folder of a round while it is being written."""
        path = self.path(round_)
        return path.with_name(path.name + UNFINISHED_SUFFIX)

    def position(self, round_: int) -> bytes:
        """The position that `finish` was given. Raises `UnusableMoments`."""
        try:
            return (self.path(round_) / POSITION).read_bytes()
        except OSError as error:
            raise UnusableMoments(f"damaged: {POSITION} cannot be read ({error.strerror})") from None

    def begin_reading(self, round_: int) -> None:
        """Count a trainer that is about to begin with a round's folder. Raises `UnusableMoments` where several
        have died of it: what crashes its readers must not do so for ever."""
        file = self.path(round_) / READERS
        readers = file.stat().st_size if file.exists() else 0
        if readers >= MAX_READERS:
            raise UnusableMoments(f"what the last {readers} trainers died of that began with it")
        with suppress(OSError):  # a disk that is full: then the daemon's count of crashes ends it
            file.write_bytes(bytes(readers + 1))

    def end_reading(self, round_: int) -> None:
        """Say that a trainer which began with a round's folder can go on from it."""
        with suppress(OSError):
            (self.path(round_) / READERS).unlink(missing_ok=True)

    def delete_from(self, round_: int) -> None:
        """Remove the folders of that round and of later ones."""
        for later in (stored for stored in self.rounds if stored >= round_):
            shutil.rmtree(self.path(later), ignore_errors=True)

    def clear(self) -> None:
        """Remove all folders."""
        self._retain(0)

    def _over_limit(self, need: int) -> bool:
        """Whether so many bytes more are too many."""
        return 0 < self._limit < self._size() + need

    def _retain(self, count: int) -> None:
        for old in self.rounds[count:]:
            shutil.rmtree(self.path(old), ignore_errors=True)

    def _size(self) -> int:
        """Bytes of all files in the folder."""
        return sum(file.stat().st_size for file in self._folder.rglob("*") if file.is_file())


def needed_bytes(size: int) -> int:
    """Bytes of a folder with tensors of `size` bytes."""
    return int(size * SIZE_MARGIN)
