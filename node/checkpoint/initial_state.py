"""Reads the state that a run begins with, where its config has `init_from`, checks it, and writes it into the flat
vectors.

    a folder with checkpoint.json        a checkpoint of a remote store (`remote_store`): anchor and momentum
    a folder of such, or of a run's      the newest of them
    snapshot-ROUND.safetensors           of a node's disk (`snapshots`): anchor and momentum
    any other .safetensors file,         weights alone, under the parameters' own names, as `atoll export` writes
    or a folder with model.safetensors,  them, or under Hugging Face's; fp32, fp16 or bf16
    or with shards and their index
    a folder of peft's                   LoRA adapters, of a run that trains these (`hf_beginning`)

at a path, or at any URL that fsspec knows, such as hf://org/name. The first node to join does it, and all others
fetch what it has made of it, by its digest. Nothing is trusted: a header's numbers are checked before memory is
taken for what they announce, digests are compared where there are any, and values that are not finite are refused.
A config.json beside weights must be of the run's model: the same tensors compute something else under another.
"""

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from atoll.comm.chunks import Chunks
from atoll.comm.config.engine import Engine
from atoll.comm.config.hf import HfConfig
from atoll.comm.config.hf_config import CONFIG, read_model
from atoll.comm.config.model import ModelConfig, differences
from atoll.comm.config.model_source import HUB, MAX_CONFIG_SIZE
from atoll.comm.digest import DIGEST_SIZE
from atoll.comm.errors import ConfigError, ResourceError
from atoll.comm.extras import demand
from atoll.node.checkpoint import hf_adapters, hf_beginning, hf_layout, snapshots
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
from atoll.node.checkpoint.snapshots import TensorShapes
from atoll.node.checkpoint.weights_file import Unusable, WeightsFile, shard_names

INDEX, ADAPTERS = "model.safetensors.index.json", f"{hf_adapters.STEM}.safetensors"
MAX_INDEX_SIZE = 64 << 20  # bytes
F32 = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class InitialState:
    """A description of the state that was read into the vectors."""

    what: str  # for people
    momentum: bool  # it was there, and wanted


@dataclass
class InitialStateLoader:
    """Fills the flat vectors of a model."""

    layout: TensorShapes
    model: ModelConfig | None  # the run's own, whose Hugging Face names are known; None: the volunteer's
    anchor: F32  # (n_params,)
    momentum: F32  # (n_params,)
    progress: Callable[[float], None] = lambda share: None  # told how much is done, 0 to 1
    files: bool = True  # they may be this machine's own
    private: bool = True  # or at a server in a private network
    hf: HfConfig | None = None  # the run's model, where transformers builds it

    def load(self, url: str, with_momentum: bool) -> InitialState:
        """Read the state at `url` into the vectors; `with_momentum`: its momentum, too, where it has one. Raises
        `ConfigError` if it is not this model's, or damaged; `ResourceError` if it cannot be read."""
        if url.startswith(HUB):
            demand(f"init_from={url}", "huggingface_hub")
        try:
            return self._load(url, with_momentum)
        except Unusable as error:
            raise ConfigError(f"the run cannot begin with init_from={url}: {error}") from None
        except (ConfigError, ResourceError):
            raise
        except Exception as error:  # each kind of store raises its own
            said = f"{type(error).__name__}: {error}"
            raise ResourceError(
                f"init_from={url} cannot be read on this machine ({said}): the first node to join has to read it"
            ) from None

    def _load(self, url: str, with_momentum: bool) -> InitialState:
        store = RemoteStore(url, self.files, self.private)
        if url.endswith(".safetensors"):
            if store.fs.protocol in ("file", ("file", "local")):
                if (other := snapshots.other_format(Path(store.path))) is not None:
                    raise Unusable(f"{other}: give what atoll export makes of it with the version that wrote it")
                if described := snapshots.describe(Path(store.path)):
                    return self._snapshot(Path(store.path), described, with_momentum)
            return self._weights(store, store.path.rpartition("/")[0], store.path)
        if url.startswith(HUB):
            store.fs.ls(store.path)  # raises where there is none, or none for this machine
        if (folder := checkpoint_in(store)) is not None:
            return self._checkpoint(store, folder, with_momentum)
        names = (ANCHOR, INDEX, *([ADAPTERS] if self.hf is not None else []))
        found = [name for name in names if store.fs.exists(f"{store.path}/{name}")]
        if not found:
            raise Unusable(f"neither {MANIFEST}, nor {PREFIX}* folders, nor {', nor '.join(names)} are there")
        return self._weights(store, store.path, f"{store.path}/{found[0]}")

    def _checkpoint(self, store: RemoteStore, folder: str, with_momentum: bool) -> InitialState:
        try:
            manifest = store.manifest(folder.removeprefix(store.path).strip("/"))
        except snapshots.OtherFormat as other:
            raise Unusable(f"{other}: for its weights without the momentum give {folder}/{ANCHOR}") from None
        except (ValueError, msgspec.MsgspecError) as error:
            raise Unusable(f"{folder}/{MANIFEST} is damaged: {error}") from None
        assert manifest is not None
        vectors = {ANCHOR: self.anchor} | ({MOMENTUM: self.momentum} if with_momentum else {})
        for name, vector in vectors.items():
            if (written := manifest.files.get(name)) is None:
                raise Unusable(f"{folder}/{MANIFEST} does not name {name}")
            path = f"{folder}/{name}"
            if (size := int(store.fs.size(path))) != written.size:
                raise Unusable(f"{path} has {size} bytes, {written.size} were written")
            order = self._read(store, [WeightsFile.opened(store.fs, path)], vector, written)
        if with_momentum:
            self._compare(manifest, order)
        what = f"the checkpoint of round {manifest.round} of run {manifest.run}"
        return InitialState(f"{what}, {'with' if with_momentum else 'without'} its momentum", with_momentum)

    def _compare(self, manifest: CheckpointManifest, order: list[str]) -> None:
        """`order`: of the parameters in its files."""
        if manifest.chunk_elements < 1:
            raise Unusable(f"{MANIFEST} has chunks of {manifest.chunk_elements} elements")
        if order != [name for name, _ in self.layout]:
            return  # it is of other fragments; the files' digests were right
        try:
            chunks = Chunks(self.anchor.size, manifest.chunk_elements, manifest.fragment_elements)
        except ValueError as error:
            raise Unusable(f"{MANIFEST}: {error}") from None
        found = state_digest(self.anchor, self.momentum, chunks)
        if found != manifest.state_digest:
            raise Unusable(f"the state's digest is {found}, not {manifest.state_digest}, which {MANIFEST} has")

    def _weights(self, store: RemoteStore, folder: str, path: str) -> InitialState:
        """Weights alone: a file, or the shards that an index in the folder names."""
        paths = [path]
        if path.endswith(INDEX):
            try:
                paths = [f"{folder}/{name}" for name in shard_names(_text(store, path, MAX_INDEX_SIZE))]
            except Unusable as error:
                raise Unusable(f"{path} is no index: {error}") from None
        files = [WeightsFile.opened(store.fs, one) for one in paths]
        if self.hf is not None:
            self._compare_hf(store, folder, path, files, self.hf)
        config = _config_of(store, folder, path)
        described = self.model is None or store.fs.exists(config)
        if self.model is not None and described:
            self._compare_config(_text(store, config, MAX_CONFIG_SIZE), config, folder)
        if not described and any(map(is_hf_name, files[0].tensors)):
            raise Unusable(
                f"its tensors have Hugging Face's names, and without a {CONFIG} beside it nothing says what model "
                "they are of: put it there"
            )
        self._read(store, files, self.anchor, None)
        return InitialState(f"the weights in {path}", False)

    def _compare_hf(
        self, store: RemoteStore, folder: str, path: str, files: list[WeightsFile], hf: HfConfig
    ) -> None:
        """Refuse weights whose config beside them is of another model than the run's, of transformers'."""
        adapters = any(hf_beginning.are_adapters(file.tensors) for file in files)
        if adapters != bool(hf.lora.rank):
            return  # which the names of its tensors say
        config = f"{folder}/{hf_adapters.CONFIG}" if adapters else _config_of(store, folder, path)
        if store.fs.exists(config):
            check = hf_beginning.check_adapters if adapters else hf_beginning.check_model
            check(_text(store, config, MAX_CONFIG_SIZE), config, hf)
        elif adapters:
            raise Unusable(
                f"without {hf_adapters.CONFIG} beside them nothing says what adapters add: put it there"
            )

    def _compare_config(self, text: bytes, path: str, folder: str) -> None:
        """Refuse weights whose config.json, Hugging Face's or that of `atoll export`, is of another model."""
        assert self.model is not None
        if (theirs := _described_model(text, path)) is None:
            return
        for name in differences(theirs, self.model):
            place = folder if "://" not in folder else "FOLDER"
            raise Unusable(
                f"{path} says {name}={getattr(theirs, name)}, and the run's model.{name} is "
                f"{getattr(self.model, name)}: give the coordinator model={place}, which reads all of them there"
            )

    def _snapshot(
        self, path: Path, described: tuple[bytes, TensorShapes, Chunks], with_momentum: bool
    ) -> InitialState:
        """A file of a node's disk."""
        run, layout, chunks = described
        self._compare_tensors(dict(layout), dict(self.layout))
        snapshot = snapshots.read(path, run, layout, chunks)
        if snapshot is None:
            raise Unusable("its header is damaged")
        if snapshot.first != snapshot.last:
            raise Unusable(
                f"it was written while rounds {snapshot.first + 1} to {snapshot.last} were applied, and is whole "
                "only with the log beside it: give another one, or what atoll export makes of the folder"
            )
        for c in range(chunks.count):
            if (data := snapshot.chunk(c, chunks)) is None:
                raise Unusable(f"chunk {c} is damaged")
            both, size, span = np.frombuffer(data, np.float32), chunks.size(c), chunks.span(c)
            self._check_finite(both, f"chunk {c}")
            for there, here in self._pieces(layout, span):
                self.anchor[here] = both[:size][there]
                if with_momentum:
                    self.momentum[here] = both[size:][there]
            self.progress((c + 1) / chunks.count)
        return InitialState(f"the snapshot of round {snapshot.first} in {path}", with_momentum)

    def _read(
        self, store: RemoteStore, files: list[WeightsFile], vector: F32, written: WrittenFile | None
    ) -> list[str]:
        """Safetensors files that have the model together, from beginning to end, into their places of the vector;
        returns the names of their tensors in their order. `written`: what the only one must be."""
        shapes: dict[str, tuple[int, ...]] = {}
        for file in files:
            if twice := sorted(shapes.keys() & file.tensors.keys()):
                raise Unusable(f"{file.path} has {list_briefly(twice)}, which another file has as well")
            shapes |= {name: entry.shape for name, entry in file.tensors.items()}
        names, places = self._named(shapes), self._places()
        done, total = 0, sum(file.size for file in files)
        for file in files:
            state, at = blake3(file.head), {name: places[into][0] for name, into in names.items()}
            done += len(file.head)
            for name, values in file.elements(store.fs, state.update):
                if (start := at.get(name)) is not None:
                    self._check_finite(values, name)
                    vector[start : start + values.size] = values
                    at[name] = start + values.size
                done += values.size * (file.tensors[name].element_size)
                self.progress(done / total)
            if written is not None and (found := state.digest(length=DIGEST_SIZE).hex()) != written.digest:
                raise Unusable(f"the digest of {file.path} is {found}, not {written.digest}, which {MANIFEST} has")
        return [name for file in files for name, _ in file.in_order()]

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
        """The parameter that each tensor is; some that Hugging Face's files have need not be any."""
        wanted = dict(self.layout)
        if self.hf is not None:
            names = hf_beginning.run_names(found, wanted, self.hf)
            self._compare_tensors({name: found[theirs] for theirs, name in names.items()}, wanted)
            return names
        if self.model is not None and any(map(is_hf_name, found)):
            theirs = dict(hf_layout.to_hf_names(self.layout, self.model))
            spare = {name for name in found.keys() - theirs.keys() if hf_layout.is_spare(name, self.model)}
            self._compare_tensors({name: found[name] for name in found.keys() - spare}, theirs)
            return dict(zip(theirs, wanted, strict=True))
        if found.keys() - wanted.keys() and all(name.startswith(("model.", "lm_head.")) for name in found):
            raise Unusable(
                "its tensors have Hugging Face's names, which this run's model has not; for one of torchtitan's, "
                "python -m atoll.node.engines.titan_weights from-hf makes a file to begin with"
            )
        self._compare_tensors(found, wanted)
        return {name: name for name in wanted}

    def _compare_tensors(
        self, found: Mapping[str, tuple[int, ...]], wanted: Mapping[str, tuple[int, ...]]
    ) -> None:
        if missing := sorted(wanted.keys() - found.keys()):
            raise Unusable(f"it lacks {list_briefly(missing)} of the model's {len(wanted)} tensors")
        if extra := sorted(found.keys() - wanted.keys()):
            raise Unusable(f"it has {list_briefly(extra)}, which the model has not")
        for name, shape in wanted.items():
            if found[name] != shape:
                raise Unusable(f"{name} has the shape {found[name]}, the model's is {shape}")

    def _check_finite(self, values: F32, where: str) -> None:
        if not np.isfinite(values).all():
            raise Unusable(f"{where} holds NaN or infinity")


def _config_of(store: RemoteStore, folder: str, path: str) -> str:
    """The config beside weights: that of a file's own name, as `atoll export` writes it, else config.json."""
    own = f"{folder}/{hf_layout.config_beside(path.rpartition('/')[2])}"
    return own if path.endswith(".safetensors") and store.fs.exists(own) else f"{folder}/{CONFIG}"


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
            raise Unusable(f"it has checkpoints of {len(runs)} runs: give the folder of one of {names}")
        if found:
            newest = max(found, key=lambda match: int(match[2]))
            return newest.string.removesuffix(f"/{MANIFEST}")
    return None


def is_hf_name(name: str) -> bool:
    """Whether a tensor has one of Hugging Face's names of a language model's."""
    return name.startswith("model.")


def _described_model(text: bytes, path: str) -> ModelConfig | None:
    """The decoder that a config.json is of, Hugging Face's or `atoll export`'s; None: it is of none that has a
    description."""
    try:
        found = json.loads(text)
        if not isinstance(found, dict) or "model_type" in found or "engine" not in found:
            return read_model(text, path)
        if found["engine"] != Engine.BUILTIN or found.get("build"):
            return None
        return msgspec.convert(found["model"], ModelConfig)
    except (ValueError, KeyError, RecursionError, msgspec.ValidationError) as error:
        raise Unusable(f"{path} is damaged: {error}") from None


def _text(store: RemoteStore, path: str, limit: int) -> bytes:
    """The contents of a small file."""
    if (size := int(store.fs.size(path))) > limit:
        raise Unusable(f"{path} has {size} bytes, more than any that is read")
    return bytes(store.fs.cat_file(path))


def list_briefly(names: list[str]) -> str:
    """The first three names and how many more there are, for a sentence."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
