"""Reads the state that a run begins with, where its config has `init_from`, checks it, and writes it into the flat
vectors.

    a folder with checkpoint.json        a checkpoint of a remote store (`remote_store`): anchor and momentum
    a folder of such, or of a run's      the newest of them
    snapshot-ROUND.safetensors           of a node's disk (`snapshots`): anchor and momentum
    any other .safetensors file,         weights alone, under the parameters' own names, as `atoll export` writes
    or a folder with model.safetensors   them, or under Hugging Face's for Llama; fp32, fp16 or bf16

at a path, or at any URL that fsspec knows. The first node to join does it, and all others fetch what it has made
of it, by its digest. Nothing is trusted: a header's numbers are checked before memory is taken for what they
announce, digests are compared where there are any, and values that are not finite are refused.
"""

import json
import math
import re
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from atoll.comm.chunks import Chunks
from atoll.comm.config.model import ModelConfig
from atoll.comm.digest import DIGEST_SIZE
from atoll.comm.errors import ConfigError, ResourceError
from atoll.node.checkpoint import hf_layout, snapshots
from atoll.node.checkpoint.remote_store import (
    ANCHOR,
    MANIFEST,
    MOMENTUM,
    PREFIX,
    CheckpointManifest,
    RemoteStore,
    WrittenFile,
    state_digest,
)
from atoll.node.checkpoint.snapshots import HEADER_ERRORS, MAX_DIMENSIONS, MAX_HEADER_SIZE, TensorShapes

READ_SIZE = 8 << 20  # bytes that are read at once
ELEMENT_SIZES = {"F32": 4, "F16": 2, "BF16": 2}  # bytes of an element
F32 = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class InitialState:
    """A description of the state that was read into the vectors."""

    what: str  # for people
    momentum: bool  # it was there, and wanted


class _Unusable(Exception):
    """The file is not what it should be; the text says why."""


@dataclass
class InitialStateLoader:
    """Fills the flat vectors of a model."""

    layout: TensorShapes
    model: ModelConfig | None  # the run's own, whose Hugging Face names are known; None: the volunteer's
    anchor: F32  # (n_params,)
    momentum: F32  # (n_params,)
    progress: Callable[[float], None] = lambda share: None  # told how much is done, 0 to 1
    files: bool = True  # they may be this machine's own

    def load(self, url: str, with_momentum: bool) -> InitialState:
        """Read the state at `url` into the vectors; `with_momentum`: its momentum, too, where it has one. Raises
        `ConfigError` if it is not this model's, or damaged; `ResourceError` if it cannot be read."""
        try:
            return self._load(url, with_momentum)
        except _Unusable as error:
            raise ConfigError(f"the run cannot begin with init_from={url}: {error}") from None
        except (ConfigError, ResourceError):
            raise
        except Exception as error:  # each kind of store raises its own
            said = f"{type(error).__name__}: {error}"
            raise ResourceError(
                f"init_from={url} cannot be read on this machine ({said}): the first node to join has to read it"
            ) from None

    def _load(self, url: str, with_momentum: bool) -> InitialState:
        store = RemoteStore(url, self.files)
        if url.endswith(".safetensors"):
            if store.fs.protocol in ("file", ("file", "local")):
                if (other := snapshots.other_format(Path(store.path))) is not None:
                    raise _Unusable(f"{other}: give what atoll export makes of it with the version that wrote it")
                if described := snapshots.describe(Path(store.path)):
                    return self._snapshot(Path(store.path), described, with_momentum)
            return self._weights(store, store.path)
        folder = checkpoint_in(store)
        if folder is None:
            if not store.fs.exists(f"{store.path}/{ANCHOR}"):
                raise _Unusable(f"neither {MANIFEST}, nor {PREFIX}* folders, nor {ANCHOR} are there")
            return self._weights(store, f"{store.path}/{ANCHOR}")
        return self._checkpoint(store, folder, with_momentum)

    def _checkpoint(self, store: RemoteStore, folder: str, with_momentum: bool) -> InitialState:
        try:
            manifest = store.manifest(folder.removeprefix(store.path).strip("/"))
        except snapshots.OtherFormat as other:
            raise _Unusable(f"{other}: for its weights without the momentum give {folder}/{ANCHOR}") from None
        except (ValueError, msgspec.MsgspecError) as error:
            raise _Unusable(f"{folder}/{MANIFEST} is damaged: {error}") from None
        assert manifest is not None
        vectors = {ANCHOR: self.anchor} | ({MOMENTUM: self.momentum} if with_momentum else {})
        for name, vector in vectors.items():
            if (written := manifest.files.get(name)) is None:
                raise _Unusable(f"{folder}/{MANIFEST} does not name {name}")
            order = self._read(store, f"{folder}/{name}", vector, written)
        if with_momentum:
            self._compare(manifest, order)
        what = f"the checkpoint of round {manifest.round} of run {manifest.run}"
        return InitialState(f"{what}, {'with' if with_momentum else 'without'} its momentum", with_momentum)

    def _compare(self, manifest: CheckpointManifest, order: list[str]) -> None:
        """`order`: of the parameters in its files."""
        if manifest.chunk_elements < 1:
            raise _Unusable(f"{MANIFEST} has chunks of {manifest.chunk_elements} elements")
        if order != [name for name, _ in self.layout]:
            return  # it is of other fragments; the files' digests were right
        try:
            chunks = Chunks(self.anchor.size, manifest.chunk_elements, manifest.fragment_elements)
        except ValueError as error:
            raise _Unusable(f"{MANIFEST}: {error}") from None
        found = state_digest(self.anchor, self.momentum, chunks)
        if found != manifest.state_digest:
            raise _Unusable(f"the state's digest is {found}, not {manifest.state_digest}, which {MANIFEST} has")

    def _weights(self, store: RemoteStore, path: str) -> InitialState:
        self._read(store, path, self.anchor, None)
        return InitialState(f"the weights in {path}", False)

    def _snapshot(
        self, path: Path, described: tuple[bytes, TensorShapes, Chunks], with_momentum: bool
    ) -> InitialState:
        """A file of a node's disk."""
        run, layout, chunks = described
        self._compare_tensors(dict(layout), dict(self.layout))
        snapshot = snapshots.read(path, run, layout, chunks)
        if snapshot is None:
            raise _Unusable("its header is damaged")
        if snapshot.first != snapshot.last:
            raise _Unusable(
                f"it was written while rounds {snapshot.first + 1} to {snapshot.last} were applied, and is whole "
                "only with the log beside it: give another one, or what atoll export makes of the folder"
            )
        for c in range(chunks.count):
            if (data := snapshot.chunk(c, chunks)) is None:
                raise _Unusable(f"chunk {c} is damaged")
            both, size, span = np.frombuffer(data, np.float32), chunks.size(c), chunks.span(c)
            self._check_finite(both, f"chunk {c}")
            for there, here in self._pieces(layout, span):
                self.anchor[here] = both[:size][there]
                if with_momentum:
                    self.momentum[here] = both[size:][there]
            self.progress((c + 1) / chunks.count)
        return InitialState(f"the snapshot of round {snapshot.first} in {path}", with_momentum)

    def _read(self, store: RemoteStore, path: str, vector: F32, written: WrittenFile | None) -> list[str]:
        """A safetensors file, from its beginning to its end, into its places of the vector; returns the names of
        its tensors in their order."""
        size = int(store.fs.size(path))
        if written is not None and written.size != size:
            raise _Unusable(f"{path} has {size} bytes, {written.size} were written")
        state, places = blake3(), self._places()
        with store.fs.open(path, "rb", block_size=READ_SIZE) as file:
            begin = _exactly(file, 8)
            (length,) = struct.unpack("<Q", begin)
            if not 2 <= length <= min(MAX_HEADER_SIZE, size - 8):
                raise _Unusable(f"{path} is no safetensors file: its header would have {length} bytes")
            text = _exactly(file, length)
            state.update(begin)
            state.update(text)
            tensors = tensors_of(path, text, size - 8 - length)
            names = self._named({name: shape for name, (_, shape, _) in tensors.items()})
            order = sorted(tensors.items(), key=lambda item: item[1][2])
            for name, (kind, shape, (start, _)) in order:
                into = names.get(name)
                at, end = places[into][0] if into else 0, 8 + length + start
                left = ELEMENT_SIZES[kind] * math.prod(shape)
                while left:
                    data = _exactly(file, min(left, READ_SIZE))
                    state.update(data)
                    left -= len(data)
                    if into:
                        values = as_fp32(data, kind)
                        self._check_finite(values, name)
                        vector[at : at + values.size] = values
                        at += values.size
                    end += len(data)
                self.progress(end / size)
        if written is not None and (found := state.digest(length=DIGEST_SIZE).hex()) != written.digest:
            raise _Unusable(f"the digest of {path} is {found}, not {written.digest}, which {MANIFEST} has")
        return [name for name, _ in order]

    def _places(self) -> dict[str, tuple[int, int]]:
        """Of each parameter in the flat vector."""
        places, at = {}, 0
        for name, shape in self.layout:
            places[name] = at, math.prod(shape)
            at += math.prod(shape)
        return places

    def _pieces(self, layout: TensorShapes, span: slice) -> Iterator[tuple[slice, slice]]:
        """What this stretch of a flat vector of another order has of each parameter: where in the stretch, and
        where in this one's."""
        places, start = self._places(), 0
        for name, shape in layout:
            stop = start + math.prod(shape)
            first, last = max(start, span.start), min(stop, span.stop)
            if first < last:
                here = places[name][0] + first - start
                yield slice(first - span.start, last - span.start), slice(here, here + last - first)
            start = stop

    def _named(self, found: dict[str, tuple[int, ...]]) -> dict[str, str]:
        """The parameter that each tensor is; some that a Llama has need not be any."""
        wanted = dict(self.layout)
        if self.model is not None and any(name.startswith("model.") for name in found):
            theirs = [name for name, _ in hf_layout.to_hf_names(self.layout, self.model)]
            names = dict(zip(theirs, (name for name, _ in self.layout), strict=True))
            spare = {"lm_head.weight"} - names.keys() if self.model.tied_head else set[str]()
            ours = {names.get(name, name): shape for name, shape in found.items() if name not in spare}
            self._compare_tensors(ours, wanted)
            return names
        if found.keys() - wanted.keys() and all(name.startswith(("model.", "lm_head.")) for name in found):
            raise _Unusable(
                "its tensors have Hugging Face's names, which this run's model has not; for one of torchtitan's, "
                "python -m atoll.node.engines.titan_weights from-hf makes a file to begin with"
            )
        self._compare_tensors(found, wanted)
        return {name: name for name in wanted}

    def _compare_tensors(
        self, found: Mapping[str, tuple[int, ...]], wanted: Mapping[str, tuple[int, ...]]
    ) -> None:
        if missing := sorted(wanted.keys() - found.keys()):
            raise _Unusable(f"it lacks {list_briefly(missing)} of the model's {len(wanted)} tensors")
        if extra := sorted(found.keys() - wanted.keys()):
            raise _Unusable(f"it has {list_briefly(extra)}, which the model has not")
        for name, shape in wanted.items():
            if found[name] != shape:
                raise _Unusable(f"{name} has the shape {found[name]}, the model's is {shape}")

    def _check_finite(self, values: F32, where: str) -> None:
        if not np.isfinite(values).all():
            raise _Unusable(f"{where} holds NaN or infinity")


def checkpoint_in(store: RemoteStore) -> str | None:
    """The folder of the checkpoint that the store's URL names: the URL's own folder, else the newest checkpoint in
    it, or in the only run's folder in it; None: there is none. Raises where there are several runs."""
    if store.fs.exists(f"{store.path}/{MANIFEST}"):
        return store.path
    for depth in ("", "/*"):
        paths = (str(path) for path in store.fs.glob(f"{store.path}{depth}/{PREFIX}*/{MANIFEST}"))
        matches = (re.search(rf"(?:^|([^/]+)/){PREFIX}(\d+)/{MANIFEST}$", path) for path in paths)
        found = [match for match in matches if match]
        runs = {match[1] for match in found}
        if len(runs) > 1:
            names = list_briefly(sorted(runs))
            raise _Unusable(f"it has checkpoints of {len(runs)} runs: give the folder of one of {names}")
        if found:
            newest = max(found, key=lambda match: int(match[2]))
            return newest.string.removesuffix(f"/{MANIFEST}")
    return None


def tensors_of(path: str, text: bytes, size: int) -> dict[str, tuple[str, tuple[int, ...], tuple[int, int]]]:
    """A header's tensors: kind, shape, place in the `size` bytes behind it, which they fill without a gap."""
    try:
        header = json.loads(text)
        header.pop("__metadata__", None)
        tensors = {
            str(name): (
                str(entry["dtype"]),
                tuple(int(n) for n in entry["shape"]),
                (int(entry["data_offsets"][0]), int(entry["data_offsets"][1])),
            )
            for name, entry in header.items()
        }
        if any(len(shape) > MAX_DIMENSIONS for _, shape, _ in tensors.values()):
            raise ValueError("their product alone could take hours")
    except HEADER_ERRORS:
        raise _Unusable(f"{path} is no safetensors file: its header is damaged") from None
    at = 0
    for name, (kind, shape, (start, end)) in sorted(tensors.items(), key=lambda item: item[1][2]):
        if kind not in ELEMENT_SIZES:
            raise _Unusable(f"{name} is of {kind}: {', '.join(ELEMENT_SIZES)} can be read")
        if min(shape, default=0) < 0 or start != at or end - start != ELEMENT_SIZES[kind] * math.prod(shape):
            raise _Unusable(f"{path} is no safetensors file: {name} is not where its header says")
        at = end
    if at != size:
        raise _Unusable(f"{path} has {size} bytes of tensors, its header says {at}")
    return tensors


def as_fp32(data: bytes, kind: str) -> F32:
    """Little-endian elements of a safetensors kind (`ELEMENT_SIZES`) as fp32."""
    match kind:
        case "F32":
            return np.frombuffer(data, "<f4")
        case "F16":
            return np.frombuffer(data, "<f2").astype(np.float32)
        case _:  # bf16: the upper half of an fp32
            return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)


def list_briefly(names: list[str]) -> str:
    """The first three names and how many more there are, for a sentence."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _exactly(file: Any, size: int) -> bytes:
    data = bytes(file.read(size))
    if len(data) != size:
        raise _Unusable("it ends too early")
    return data
