"""Frozen weights of a run that trains LoRA adapters: where a node has them, whether they are the run's, and how
they come into the model.

    python -m atoll.node.engines.hf_weights digest FOLDER|hf://org/name

prints what the run's config has as `hf.digest`. It is of the tensors, by name, type, shape and bytes, not of the
files: the same weights in one file or in several have one digest. Nothing is read but safetensors files.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from atoll.comm.config.hf import HUB, HfConfig
from atoll.comm.digest import digest, root
from atoll.comm.errors import AtollError, ConfigError, ResourceError
from atoll.comm.extras import demand
from atoll.node.config import NodeConfig
from atoll.node.participant.flat_vector import local_block, local_tensor

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
SPARE = ".rotary_emb.inv_freq"  # in some files: computed, not read


def main(arguments: list[str]) -> None:
    """Print a digest, as the command line says. Raises `AtollError`."""
    parser = argparse.ArgumentParser(prog="atoll.node.engines.hf_weights")
    parser.add_argument("what", choices=["digest"])
    parser.add_argument("source", help="a folder, or hf://org/name")
    source = parser.parse_args(arguments).source
    demand("a digest of a model's weights", "safetensors")
    print(BaseWeights.open(fetched(source) if source.startswith(HUB) else Path(source).expanduser()).digest())


def locate(hf: HfConfig, node: NodeConfig) -> Path:
    """The folder with the run's frozen weights on this machine; those of the hub are fetched. Raises `ConfigError`
    where the volunteer has to say it, `ResourceError` where they cannot be fetched."""
    if node.base:
        return Path(node.base).expanduser()
    if hf.base.startswith(HUB):
        return fetched(hf.base)
    if not node.files:
        raise ConfigError(
            f"the run's frozen weights are in the folder {hf.base} of each machine: say where this one has them, "
            "base=FOLDER, or let the run say it, files=true"
        )
    return Path(hf.base).expanduser()


def fetched(url: str) -> Path:
    """The folder of hf://org/name[@revision] in this machine's cache of the hub; what it lacks is fetched, where
    it was broken off. Raises `ResourceError`."""
    demand(f"a node of a run with hf.base={url}", "huggingface_hub")
    from huggingface_hub import snapshot_download

    name, _, revision = url.removeprefix(HUB).partition("@")
    try:
        patterns = [WEIGHTS, INDEX, "model-*.safetensors"]
        return Path(snapshot_download(name, revision=revision or None, allow_patterns=patterns))
    except Exception as error:  # the hub's client raises its own, and those of two HTTP libraries
        said = str(error).strip().partition("\n")[0]
        raise ResourceError(
            f"cannot fetch the run's frozen weights {url}: {said}; or give a folder that has them, base=FOLDER"
        ) from None


@dataclass(frozen=True)
class BaseWeights:
    """The tensors of a model's folder."""

    folder: Path
    files: Mapping[str, Path]  # by tensor

    @classmethod
    def open(cls, folder: Path) -> "BaseWeights":
        """The tensors of `model.safetensors`, or of the files that its index names. Raises `ConfigError` where
        they are not there, or damaged."""
        names = [WEIGHTS]
        if (folder / INDEX).exists():
            try:
                names = sorted(set(json.loads((folder / INDEX).read_text())["weight_map"].values()))
            except (OSError, ValueError, KeyError, AttributeError, TypeError):
                raise ConfigError(f"{folder / INDEX} is damaged") from None
        files: dict[str, Path] = {}
        for name in names:
            path = folder / Path(name).name
            with _opened(path) as file:
                files.update(dict.fromkeys(file.keys(), path))
        return cls(folder, files)

    def digest(self) -> str:
        """The digest of all tensors, hexadecimal. One tensor at a time is in memory."""
        return root([_digest(name, tensor) for name, tensor in self._tensors()]).hex()

    def check(self, expected: str) -> None:
        """Raise `ConfigError` where the tensors are not the run's."""
        if (found := self.digest()) != expected:
            raise ConfigError(
                f"the weights in {self.folder} are not those of this run: their digest is {found}, the run's "
                f"hf.digest {expected}: get the run's own, or leave base= to have them fetched"
            )

    @torch.no_grad()
    def read(self, wanted: Mapping[str, Tensor], tied: Set[str] = frozenset()) -> None:
        """Copy this rank's blocks of tensors, by their names in the files, into parameters of any placement and
        type. `tied`: other names of them, which some files have as well, and are not read. Raises `ConfigError`
        where the files have other tensors, or of other shapes."""
        if missing := sorted(wanted.keys() - self.files.keys()):
            raise ConfigError(f"{self.folder} lacks {_briefly(missing)} of the model's {len(wanted)} tensors")
        spare = {name for name in self.files if name.endswith(SPARE)} | tied
        if extra := sorted(self.files.keys() - wanted.keys() - spare):
            raise ConfigError(f"{self.folder} has {_briefly(extra)}, which hf.config's model has not")
        for path in sorted(set(self.files.values())):
            with _opened(path) as file:
                for name in sorted(name for name in wanted if self.files[name] == path):
                    source, parameter = file.get_slice(name), wanted[name]
                    if tuple(source.get_shape()) != tuple(parameter.shape):
                        raise ConfigError(
                            f"{name} in {path} has the shape {tuple(source.get_shape())}, hf.config's model's is "
                            f"{tuple(parameter.shape)}"
                        )
                    block = local_block(parameter)
                    if block.numel:
                        local_tensor(parameter).copy_(source[block.slices])

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        """All tensors, by name."""
        for name in sorted(self.files):
            with _opened(self.files[name]) as file:
                yield name, file.get_tensor(name)


def _digest(name: str, tensor: Tensor) -> bytes:
    described = f"{name} {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
    return digest(described.encode(), tensor.contiguous().reshape(-1).view(torch.uint8).numpy())


def _opened(path: Path) -> Any:
    """A safetensors file, whose header is sound. Raises `ConfigError`."""
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, "pt")
    except (OSError, SafetensorError) as error:
        reason = "it is not there" if isinstance(error, FileNotFoundError) else str(error)
        raise ConfigError(f"cannot read the weights in {path}: {reason}") from None


def _briefly(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except AtollError as error:
        sys.exit(f"atoll: {error}")
