"""The folders in which a trainer keeps its inner optimizer's state, one for each round that was kept.

    FOLDER/moments-000000000012/    __RANK_0.distcp, .metadata    torch.distributed.checkpoint's own
                                    manifest.json                 what it is of, size and digest of each file

A folder has its name only when everything in it is on the disk, and the last two stay. They never leave the node:
torch reads them with pickle, so each file is checked against the manifest before.
"""

import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

import msgspec

from atoll.comm.digest import digest, digest_of_file
from atoll.comm.faults import fault_point
from atoll.comm.files import UNFINISHED_SUFFIX, DiskFull, Room, atomic_write, make_folder, room, sync, write_all

FORMAT = "atoll moments 1"
PREFIX, MANIFEST = "moments-", "manifest.json"
KEPT = 2
SLACK = 1.05  # what is written is longer than the tensors by their names and places
Shapes = Mapping[str, tuple[int, ...]]


class UnusableMoments(Exception):
    """What is there cannot be used; the text says why."""


class OptimizerManifest(msgspec.Struct, frozen=True):
    format: str
    round: int  # after whose inner steps the moments were these
    optimizer: str
    shapes: dict[str, tuple[int, ...]]  # of the model's parameters
    files: dict[str, tuple[int, str]]  # bytes, digest in hexadecimal digits
    digest: str = ""  # of the manifest as it is without it

    @property
    def sum(self) -> str:
        return digest(msgspec.json.encode(msgspec.structs.replace(self, digest=""))).hex()


class OptimizerFiles:
    def __init__(self, folder: Path, limit: float = 0.0, room: Room = room) -> None:
        """`limit`: bytes that all of them may take; 0: what the disk has."""
        self._folder, self._limit, self._room = folder, limit, room

    @property
    def rounds(self) -> list[int]:
        """Those that are kept, the newest first."""
        found = (re.fullmatch(rf"{PREFIX}(\d+)", path.name) for path in self._folder.glob(f"{PREFIX}*"))
        return sorted((int(match[1]) for match in found if match), reverse=True)

    def path(self, round_: int) -> Path:
        return self._folder / f"{PREFIX}{round_:012d}"

    def begin(self, round_: int, size: int) -> Path:
        """An empty folder to write tensors of `size` bytes to. Raises `OSError`, `DiskFull` before anything is
        written."""
        make_folder(self._folder)
        for left in self._folder.glob(f"{PREFIX}*{UNFINISHED_SUFFIX}"):  # by a process that was killed
            shutil.rmtree(left, ignore_errors=True)
        need = int(size * SLACK)
        if self._limit and self._size() + need > self._limit:
            self._keep(1)
        if self._limit and (all_ := self._size() + need) > self._limit:
            raise DiskFull(
                f"disk= leaves {self._limit / 1e6:,.1f} MB for them, they would take {all_ / 1e6:,.1f} MB"
            )
        if (have := self._room(self._folder)) < need:
            raise DiskFull(f"they take {need / 1e6:,.1f} MB, the disk has {max(have, 0) / 1e6:,.1f} MB for them")
        new = self.unfinished(round_)
        new.mkdir()
        return new

    def finish(self, round_: int, optimizer: str, shapes: Shapes) -> None:
        """What was written to the folder that `begin` gave is kept. Raises `OSError`."""
        new, path = self.unfinished(round_), self.path(round_)
        files = {file.name: (file.stat().st_size, digest_of_file(file).hex()) for file in sorted(new.iterdir())}
        manifest = OptimizerManifest(FORMAT, round_, optimizer, dict(shapes), files)
        text = msgspec.json.encode(msgspec.structs.replace(manifest, digest=manifest.sum))
        with atomic_write(new / MANIFEST, len(text), self._room) as file:
            write_all(file, [memoryview(text)], 0)
        fault_point("moments.written")
        shutil.rmtree(path, ignore_errors=True)  # the round was trained again
        os.replace(new, path)
        sync(self._folder)
        self._keep(KEPT)

    def drop(self, round_: int) -> None:
        """What was written is of no use."""
        shutil.rmtree(self.unfinished(round_), ignore_errors=True)

    def check(self, round_: int, optimizer: str, shapes: Shapes) -> Path:
        """The folder of a round, whose bytes are as they were written. Raises `UnusableMoments`."""
        path = self.path(round_)
        try:
            manifest = msgspec.json.decode((path / MANIFEST).read_bytes(), type=OptimizerManifest)
        except (OSError, msgspec.MsgspecError) as error:
            raise UnusableMoments(f"damaged: {MANIFEST} cannot be read ({error})") from None
        if (manifest.format, manifest.round, manifest.digest) != (FORMAT, round_, manifest.sum):
            raise UnusableMoments(f"damaged: {MANIFEST} is not as it was written")
        if manifest.optimizer != optimizer:
            raise UnusableMoments(f"of another inner optimizer: {manifest.optimizer}, now {optimizer}")
        if odd := sorted(set(manifest.shapes.items()) ^ set(shapes.items())):
            raise UnusableMoments(f"of a model with other shapes: {odd[0][0]} differs")
        for name, (size, sum_) in manifest.files.items():
            file = path / name
            try:
                if "/" in name or file.stat().st_size != size or digest_of_file(file).hex() != sum_:
                    raise UnusableMoments(f"damaged: {name} is not as it was written")
            except OSError as error:
                raise UnusableMoments(f"damaged: {name} cannot be read ({error.strerror})") from None
        return path

    def unfinished(self, round_: int) -> Path:
        path = self.path(round_)
        return path.with_name(path.name + UNFINISHED_SUFFIX)

    def _keep(self, count: int) -> None:
        for old in self.rounds[count:]:
            shutil.rmtree(self.path(old), ignore_errors=True)

    def _size(self) -> int:
        """Bytes of all files."""
        return sum(file.stat().st_size for file in self._folder.rglob("*") if file.is_file())
