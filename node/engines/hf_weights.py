"""Frozen weights of a run that trains LoRA adapters: where a node has them, whether they are the run's, and how
they come into the model.

    python -m atoll.node.engines.hf_weights digest FOLDER|hf://org/name

prints what the run's config has as `hf.digest`. It is of the tensors, by name, type, shape and bytes, not of the
files: the same weights in one file or in several have one digest. Nothing is read but safetensors files.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from atoll.comm.config.hf import HfConfig
from atoll.comm.config.model_source import HUB
from atoll.comm.digest import digest, root
from atoll.comm.errors import AtollError, ConfigError
from atoll.comm.extras import demand
from atoll.node.config import NodeConfig
from atoll.node.engines.hub_weights import INDEX, WEIGHTS, NotFetched, fetch_weights, newest_cached
from atoll.node.participant.flat_vector import local_block, local_tensor

LARGEST_ELEMENT_BYTES = 4  # of a tensor in a file
SPARE_SHARE, SPARE_BYTES = 1.01, 1 << 26  # of a model's files beyond its tensors
SPARE = ".rotary_emb.inv_freq"  # in some files: computed, not read


def main(arguments: list[str]) -> None:
    """Print a digest, as the command line says. Raises `AtollError`."""
    parser = argparse.ArgumentParser(prog="atoll.node.engines.hf_weights")
    parser.add_argument("what", choices=["digest"])
    parser.add_argument("source", help="a folder, or hf://org/name")
    source = parser.parse_args(arguments).source
    demand("a digest of a model's weights", "safetensors")
    folder = fetch_weights(source) if source.startswith(HUB) else Path(source).expanduser()
    print(BaseWeights.open(folder).digest())


def locate(
    hf: HfConfig, node: NodeConfig, largest: int | None = None, tell: Callable[[str], None] = lambda sentence: None
) -> Path:
    """The folder with the run's frozen weights on this machine; those of the hub are fetched, `largest` bytes at
    most, and `tell` takes sentences on how far that is. Raises `ConfigError` where the volunteer has to say it, or
    the files are larger, `ResourceError` where they cannot be fetched."""
    if node.base:
        return Path(node.base).expanduser()
    if hf.base.startswith(HUB):
        try:
            return fetch_weights(hf.base, largest, tell)
        except NotFetched:  # whether an earlier life's are the run's, their digest says
            if (cached := newest_cached(hf.base)) is None:
                raise
            return cached
    if not node.files:
        raise ConfigError(
            f"the run's frozen weights are in the folder {hf.base} of each machine: say where this one has them, "
            "base=FOLDER, or let the run say it, files=true"
        )
    return Path(hf.base).expanduser()


def largest_size(model: nn.Module) -> int:
    """The bytes that files with the model's frozen tensors have at most: of fp32, tied ones under each of their
    names, and a little more."""
    every = model.named_parameters(remove_duplicate=False)
    exact = LARGEST_ELEMENT_BYTES * sum(p.numel() for _, p in every if not p.requires_grad)
    return int(SPARE_SHARE * exact) + SPARE_BYTES


@dataclass(frozen=True)
class BaseWeights:
    """The tensors of a model's folder."""

    folder: Path
    files: Mapping[str, Path]  # by tensor

    @classmethod
    def open(cls, folder: Path) -> "BaseWeights":
        """The tensors of `model.safetensors`, or of the files that its index names. Raises `ConfigError` where
        they are not there, or damaged."""
        if not folder.is_dir():
            raise ConfigError(
                f"there is no folder {folder} with the run's frozen weights: give the one where this machine has "
                "them, base=FOLDER"
            )
        names = [WEIGHTS]
        if (folder / INDEX).exists():
            try:
                named = json.loads((folder / INDEX).read_text())["weight_map"].values()
                names = sorted({Path(name).name for name in named})
            except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError):
                raise ConfigError(f"{folder / INDEX} is damaged") from None
        files: dict[str, Path] = {}
        for name in names:
            path = folder / name
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
                f"hf.digest {expected}: get the run's own, or leave base= out to have them fetched"
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
