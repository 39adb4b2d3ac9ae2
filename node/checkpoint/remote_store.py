"""Checkpoints in a remote store: a folder at any URL that fsspec knows, such as s3://bucket/runs or file:///mnt/nas.

    URL/RUN-12ab34cd/round-000000000012/model.safetensors     the anchor, fp32, under the parameters' own names
                                        momentum.safetensors  the outer momentum, likewise
                                        checkpoint.json       `CheckpointManifest`: written last, so all is there

`RUN-12ab34cd` is the run's name and the beginning of its mark. All nodes have the same state, so whoever writes a
round's checkpoint writes these bytes. What is read is checked: sizes before memory is taken for it, then the
digests of the files and of the state. The calls block, for as long as the store takes: they are made in threads.
Passwords and keys are the environment's (AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL and so on), never in the URL.
"""

import re
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from atoll.comm.chunks import Chunks
from atoll.comm.config.rules import SERVER_SCHEMES
from atoll.comm.decode_errors import DECODE_ERRORS
from atoll.comm.digest import DIGEST_SIZE, digest, root
from atoll.comm.errors import ResourceError
from atoll.comm.files import atomic_write, sync, write_all
from atoll.node.checkpoint.guarded_web import web_options
from atoll.node.checkpoint.snapshots import OtherFormat, TensorShapes, safetensors_header

FORMAT = "atoll checkpoint 2"
MANIFEST, ANCHOR, MOMENTUM = "checkpoint.json", "model.safetensors", "momentum.safetensors"
PREFIX = "round-"
PUBLIC_MODE = 0o666  # within the umask: a checkpoint is made to be read by others
BLOCK_SIZE = 8 << 20  # bytes that a store like S3 gets at once, at least
MAX_BLOCKS = 9_000  # S3 takes 10,000 for a file
MAX_MANIFEST_SIZE = 1 << 20  # bytes of a manifest
F32 = NDArray[np.float32]


class WrittenFile(msgspec.Struct, frozen=True):
    """A file of a checkpoint, as it was written."""

    size: int  # bytes
    digest: str  # hexadecimal digits


class _ManifestFormat(msgspec.Struct, frozen=True):
    """What every version's manifest has."""

    format: str


class CheckpointManifest(msgspec.Struct, frozen=True):
    """The manifest of a checkpoint, `checkpoint.json` in its folder."""

    format: str
    run: str
    run_id: str
    round: int
    tokens: int  # that the run had committed after round `tokens_round`, the newest that is known
    tokens_round: int
    chunk_elements: int  # of each chunk of the flat vector that the state's digest is made of
    state_digest: str  # as the round's commit record has it
    files: dict[str, WrittenFile]
    fragment_elements: tuple[int, ...] = ()  # of each fragment, if there is more than one


@dataclass(frozen=True, slots=True)
class CheckpointFacts:
    """The facts that a checkpoint's manifest states: the run, the round, the tokens, and how the state lies in the
    flat vector."""

    run: str
    run_id: str
    round: int
    tokens: int
    tokens_round: int
    chunks: Chunks
    layout: TensorShapes


class StatePiece(NamedTuple):
    """One chunk of the state, (n,) fp32 each."""

    anchor: F32
    momentum: F32
    digest: bytes  # of both


class RemoteStore:
    """The folder of one run, or of one checkpoint to read."""

    def __init__(self, url: str, files: bool = True, private: bool = True) -> None:
        """`files`: it may be in this machine's own, or at any URL that fsspec knows; else at one of
        `SERVER_SCHEMES`, and `private` says whether at a web server in a private network. Raises `ResourceError`
        where this machine lacks what the URL needs, or does not allow it."""
        from fsspec.core import url_to_fs  # 14 MB, which most nodes never need
        from fsspec.implementations.local import LocalFileSystem

        if not files and "::" in url:
            raise ResourceError(
                f"{url} is one URL within another, which may lead to this machine's own files: a run may use such "
                "ones only where the node has files=true"
            )
        scheme, separator, _ = url.partition("://")
        if not files and separator and scheme not in (*SERVER_SCHEMES, "file", "local"):
            raise ResourceError(
                f"a run may have a node ask {', '.join(SERVER_SCHEMES)}, and {scheme}:// only where the node has "
                "files=true"
            )
        guarded = not files and scheme in ("http", "https")
        try:
            self.fs, path = url_to_fs(url, **web_options(private) if guarded else {})
        except (ImportError, ValueError) as error:
            raise ResourceError(f"{url} cannot be used: {error}") from None
        self._local = isinstance(self.fs, LocalFileSystem)
        if not files and self._local:
            raise ResourceError(
                f"{url} is among this machine's own files, which a run may read and write only where the node has "
                "files=true"
            )
        self.url, self.path = url, str(path).rstrip("/")

    def rounds(self) -> list[int]:
        """The rounds of which there are whole checkpoints, the newest first. Raises what the store does."""
        self.fs.invalidate_cache()  # others write there, too
        found = (re.search(rf"{PREFIX}(\d+)/{MANIFEST}$", path) for path in self.fs.glob(self._at("*", MANIFEST)))
        whole = (int(match[1]) for match in found if match and self._has_end(match[0]))
        return sorted(whole, reverse=True)

    def _has_end(self, manifest: str) -> bool:
        """Whoever wrote it was not cut short, as many stores allow."""
        path = self._at(manifest)
        try:
            msgspec.json.decode(self.fs.cat_file(path) if self.fs.size(path) <= MAX_MANIFEST_SIZE else b"")
        except (*DECODE_ERRORS, FileNotFoundError):  # or it goes just now
            return False
        return True

    def write(
        self, facts: CheckpointFacts, pieces: Iterable[StatePiece], allow: Callable[[int], None]
    ) -> CheckpointManifest:
        """Write a checkpoint of the state, whose chunks `pieces` gives in their order; `allow(size)` returns when
        so many bytes may be sent. Raises what the store does, or `pieces`: then no checkpoint is there, but files
        may be."""
        folder = f"{PREFIX}{facts.round:012d}"
        self.fs.makedirs(self._at(folder), exist_ok=True)
        metadata = {"format": "pt", "run": facts.run, "run_id": facts.run_id, "round": str(facts.round)}
        header = safetensors_header(metadata, facts.layout)
        with ExitStack() as opened:
            size = len(header) + 4 * facts.chunks.numel
            files = {name: _File(self.fs, self._at(folder, name), size, opened) for name in (ANCHOR, MOMENTUM)}
            for file in files.values():
                file.write(header, allow)
            digests = []
            for piece in pieces:
                files[ANCHOR].write(piece.anchor.data.cast("B"), allow)
                files[MOMENTUM].write(piece.momentum.data.cast("B"), allow)
                digests.append(piece.digest)
            for file in files.values():
                file.finish()
        for name, file in files.items():
            if (there := self.fs.size(self._at(folder, name))) != file.size:
                raise OSError(f"{folder}/{name} has {there} bytes, {file.size} were written")
            if self._local:
                sync(Path(self._at(folder, name)))
        manifest = CheckpointManifest(
            FORMAT,
            facts.run,
            facts.run_id,
            facts.round,
            facts.tokens,
            facts.tokens_round,
            facts.chunks.chunk,
            root(digests).hex(),
            {name: WrittenFile(file.size, file.digest) for name, file in files.items()},
            facts.chunks.fragments,
        )
        self._end(folder, msgspec.json.format(msgspec.json.encode(manifest)))
        return manifest

    def _end(self, folder: str, manifest: bytes) -> None:
        """On a disk, too, all of it follows what it is of, though the power fails."""
        path = self._at(folder, MANIFEST)
        if not self._local:
            self.fs.pipe_file(path, manifest)
            return
        with atomic_write(Path(path), None, mode=PUBLIC_MODE) as file:
            write_all(file, [memoryview(manifest)], 0)
        with suppress(OSError):  # a share may not know what that is
            sync(Path(path).parent.parent)

    def retain(self, count: int) -> list[int]:
        """Remove all but the newest checkpoints, and what was begun before the newest; returns the rounds of
        those that went. Raises what the store does."""
        whole = self.rounds()
        found = (re.search(rf"{PREFIX}(\d+)$", str(path)) for path in self.fs.glob(self._at(PREFIX + "*")))
        begun = {int(match[1]) for match in found if match}
        going = sorted(set(whole[count:]) | {r for r in begun - set(whole) if whole and r < whole[0]})
        for round_ in going:
            folder = f"{PREFIX}{round_:012d}"
            if round_ in whole:  # first: what is left of it is no checkpoint
                self.fs.rm_file(self._at(folder, MANIFEST))
            self.fs.rm(self._at(folder), recursive=True)
        return going

    def manifest(self, folder: str = "") -> CheckpointManifest | None:
        """The manifest of the checkpoint in `folder`; None: there is none. Raises what the store does, and
        `ValueError` for one that is damaged, `OtherFormat` for one that another version of Atoll wrote."""
        path = self._at(folder, MANIFEST) if folder else self._at(MANIFEST)
        if not self.fs.exists(path):
            return None
        if (size := self.fs.size(path)) > MAX_MANIFEST_SIZE:
            raise ValueError(f"{MANIFEST} of {size} bytes")
        data = self.fs.cat_file(path)
        return read_manifest(data)

    def _at(self, *parts: str) -> str:
        return "/".join((self.path, *parts))


def read_manifest(data: bytes) -> CheckpointManifest:
    """The manifest in these bytes. Raises `ValueError`, as `RemoteStore.manifest` does."""
    try:
        if (found := msgspec.json.decode(data, type=_ManifestFormat).format) != FORMAT:
            raise OtherFormat(found, FORMAT)
        return msgspec.json.decode(data, type=CheckpointManifest)
    except RecursionError as error:
        raise ValueError(str(error)) from None


class _File:
    """One that is written from its beginning to its end, and digested on the way. If it is left unfinished, a
    store like S3 shows nothing of it."""

    def __init__(self, fs: Any, path: str, size: int, opened: ExitStack) -> None:
        """It will have `size` bytes."""
        self._file = fs.open(path, "wb", block_size=max(BLOCK_SIZE, size // MAX_BLOCKS + 1))
        opened.callback(self._discard)
        self._state, self.size, self._open = blake3(), 0, True

    def write(self, data: bytes | memoryview, allow: Callable[[int], None]) -> None:
        allow(len(data))
        self._file.write(data)
        self._state.update(data)
        self.size += len(data)

    def finish(self) -> None:
        self._open = False
        self._file.close()

    @property
    def digest(self) -> str:
        return self._state.digest(length=DIGEST_SIZE).hex()

    def _discard(self) -> None:
        if not self._open:
            return
        try:
            self._file.discard()
            self._file.closed = True  # else it is finished when nobody refers to it any more
        except Exception:  # a store without parts, or one that fails in this, too: what is there is no checkpoint
            with suppress(Exception):
                self._file.close()


def folder_of(url: str, run: str, run_id: str) -> str:
    """The URL of a run's checkpoints."""
    name = re.sub(r"[^\w.-]+", "-", run)
    return f"{url.rstrip('/')}/{name}-{run_id[:8]}"


def state_digest(anchor: F32, momentum: F32, chunks: Chunks) -> str:
    """The digest of a whole state, hexadecimal, as the round's commit record has it."""
    spans = (chunks.span(c) for c in range(chunks.count))
    return root([digest(anchor[span], momentum[span]) for span in spans]).hex()
