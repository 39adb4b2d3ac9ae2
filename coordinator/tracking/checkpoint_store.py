"""The checkpoints that nodes sent to the run's store, as the coordinator finds them there: it asks for names, and
for the manifests, which are small; never for a tensor.

    checkpoint.remote/RUN-12ab34cd/round-000000000012/checkpoint.json     written last, so all is there

Runs of one name may share a store: a checkpoint is this run's where its state is what the commit record says.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from glob import escape
from typing import Any

import msgspec

from atoll.comm.decode_errors import DECODE_ERRORS
from atoll.comm.errors import ResourceError

MANIFEST = "checkpoint.json"
MAX_MANIFEST_BYTES = 1 << 20


class _Manifest(msgspec.Struct):
    run: str
    round: int
    tokens: int
    state_digest: str


@dataclass(frozen=True, slots=True)
class StoredCheckpoint:
    """A checkpoint of the run in its store."""

    url: str  # of its folder
    round: int
    tokens: int
    state_digest: str  # hexadecimal


class CheckpointStore:
    """The store at a run's `checkpoint.remote`. Calls block for as long as it takes to answer."""

    def __init__(self, url: str, run: str, digest_of: Callable[[int], str]) -> None:
        """`digest_of`: the state's digest as the commit record of a round has it; empty: there is none. Raises
        ImportError and ValueError where this machine lacks what the URL needs."""
        from fsspec.core import url_to_fs

        self._fs, path = url_to_fs(url)
        name = re.sub(r"[^\w.-]+", "-", run)
        self._manifests = f"{path.rstrip('/')}/{escape(name)}-*/round-*/{MANIFEST}"
        self._run, self._digest_of = run, digest_of
        self._seen = set[str]()  # manifests that were looked at and stay what they are

    def new(self) -> list[StoredCheckpoint]:
        """The run's checkpoints that were not there at the calls before, the oldest first. Raises
        `ResourceError`."""
        try:
            self._fs.invalidate_cache()
            found = [self._look(str(manifest)) for manifest in self._fs.glob(self._manifests)]
        except Exception as error:  # each store's client has its own
            raise ResourceError(f"{self._manifests} cannot be read now: {error}") from None
        return sorted((c for c in found if c is not None), key=lambda checkpoint: checkpoint.round)

    def _look(self, manifest: str) -> StoredCheckpoint | None:
        if manifest in self._seen:
            return None
        try:
            body: bytes = self._fs.cat_file(manifest, 0, MAX_MANIFEST_BYTES)
            said: Any = msgspec.json.decode(body, type=_Manifest)
        except (FileNotFoundError, *DECODE_ERRORS):
            return None  # it is being written, or removed
        digest = self._digest_of(said.round)
        if not digest:
            return None  # of a round that this process has not heard of yet
        self._seen.add(manifest)
        if said.run != self._run or said.state_digest != digest:
            return None
        folder = self._fs.unstrip_protocol(manifest.rpartition("/")[0])
        return StoredCheckpoint(folder, said.round, said.tokens, said.state_digest)
